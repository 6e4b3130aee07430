"""What the engine keeps on the host for a request in flight: its tokens, its text so far, why it ends."""

from __future__ import annotations

from typing import Any, Protocol

from depthprobe.runtime.jobs import Job
from depthprobe.runtime.requests import Completion, Request


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class Live:
    """A request in flight.

    Attributes:
        tokens: prompt and generated ids; the row at position p reads tokens[p].
        done: the completion as it grows.
        job: the scheduler's view of it.
    """

    __slots__ = ("done", "job", "request", "text", "tokens")

    def __init__(self, request: Request, job: Job, tokenizer: Decodes | None) -> None:
        self.request, self.job = request, job
        self.tokens = list(request.prompt)
        keep = request.sampling.logprobs is not None
        self.done = Completion(
            request.id, request.prompt, arrival=job.arrival, logprobs=[] if keep else None, top=[] if keep else None
        )
        self.text = None if tokenizer is None else Text(tokenizer, request.sampling.stop)

    def previous(self, position: int, back: int) -> list[int]:
        """Ids of the `back` tokens before a position, nearest first; −1 where there is none."""
        return [self.tokens[position - step] if position >= step else -1 for step in range(1, back + 1)]

    def given(self) -> int:
        """The depth at which its current token is to leave, of a request that replays."""
        assert self.request.replay is not None
        return self.request.replay[len(self.done.tokens)]

    def take(self, token: int, eos: frozenset[int]) -> tuple[str, str | None]:
        """Add a generated token. Returns the text that it adds, and why the request ends with it, or None."""
        sampling = self.request.sampling
        self.tokens.append(token)
        self.done.tokens.append(token)
        added, reason = "", None
        ends = token in eos and not sampling.ignore_eos
        if ends:
            reason = "eos"
        elif token in sampling.stop_tokens:
            reason = "stop"
        if self.text is not None:
            # the token that ends a request is in `tokens`, not in the text
            added, stopped = ("", False) if reason else self.text.add(token)
            if stopped:
                reason = "stop"
        if reason is None and len(self.done.tokens) >= sampling.max_new_tokens:
            reason = "length"
        if reason is not None and self.text is not None:
            added += self.text.rest()
            self.done.text = self.text.whole
        return added, reason


class Text:
    """Text of growing tokens, without halves of characters, and the search for stop strings.

    Args:
        stop: strings at which the text ends; what may be the beginning of one is held back.
    """

    def __init__(self, tokenizer: Decodes, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._tokens: list[int] = []
        self._decoded = 0  # tokens whose text is in `_all`
        self._all = ""
        self._given = 0
        self._ended = False

    @property
    def whole(self) -> str:
        """All the text, up to a stop string."""
        return self._all

    def add(self, token: int) -> tuple[str, bool]:
        """The text that may now be given out, and whether a stop string has come."""
        self._tokens.append(token)
        # the text of a token may depend on the one before it, so the last one that is out is decoded again
        start = max(0, self._decoded - 4)
        before = self._tokenizer.decode(self._tokens[start : self._decoded])
        new = self._tokenizer.decode(self._tokens[start:])
        if new.endswith("�"):
            return "", False  # the rest of the character is in the tokens to come
        searched = max(0, len(self._all) - self._hold)
        self._all += new[len(before) :]
        self._decoded = len(self._tokens)
        found = [at for text in self._stop if (at := self._all.find(text, searched)) >= 0]
        if found:
            self._all, self._ended = self._all[: min(found)], True
        return self._out(0 if self._ended else self._held()), self._ended

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        if not self._ended and self._decoded < len(self._tokens):
            start = max(0, self._decoded - 4)
            before = self._tokenizer.decode(self._tokens[start : self._decoded])
            self._all += self._tokenizer.decode(self._tokens[start:])[len(before) :]
            self._decoded = len(self._tokens)
        return self._out(0)

    def _held(self) -> int:
        """How many characters at the end may begin a stop string."""
        for size in range(min(self._hold, len(self._all)), 0, -1):
            if any(text.startswith(self._all[-size:]) for text in self._stop):
                return size
        return 0

    def _out(self, held: int) -> str:
        end = max(self._given, len(self._all) - held)
        out = self._all[self._given : end]
        self._given = end
        return out


__all__ = ["Decodes", "Live", "Text"]
