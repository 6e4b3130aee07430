"""What is asked of the engine and what it answers: requests, sampling, completions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from depthprobe.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen and when it ends.

    Fields:
        max_new_tokens: at most so many tokens, ≥ 1.
        temperature: 0 takes the most probable token; above 0 logits are divided by it.
        top_p: the smallest set of tokens whose probabilities reach it is drawn from, (0, 1].
        seed: of the request; None: one made of the request's id, so that requests draw independently. A token depends
            on (seed, its position) alone, never on the batch it is in.
        stop_tokens: ids that end the request; the id is the last token.
        stop: strings that end it, as soon as the text holds one; the text ends before it.
        ignore_eos: do not end at the model's end-of-sequence token.
        logprobs: None, or how many alternatives to give beside the log-probability of the token, ≥ 0.

    Raises:
        UserError: a value out of range, naming the field.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(_whole(self.max_new_tokens) and self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens,
                 "not a whole number of 1 or more")  # fmt: skip
        _require(_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "not 0 or more")
        _require(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "not in (0, 1]")
        _require(self.seed is None or (_whole(self.seed) and -(2**63) <= self.seed < 2**63), "seed", self.seed,
                 "not a whole number of 64 bits")  # fmt: skip
        _require(_listing(self.stop_tokens) and all(_whole(token) for token in self.stop_tokens), "stop_tokens",
                 self.stop_tokens, "not a list of token ids")  # fmt: skip
        _require(_listing(self.stop) and all(isinstance(text, str) and text for text in self.stop), "stop",
                 self.stop, "not a list of strings of which none is empty")  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "not True or False")
        _require(self.logprobs is None or (_whole(self.logprobs) and self.logprobs >= 0), "logprobs", self.logprobs,
                 "neither None nor a whole number of 0 or more")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued.

    Fields:
        prompt: token ids, at least one. All but the last are prefilled; the last is decoded like any other token.
        sampling: see `Sampling`.
        id: the caller's name for it; the engine gives one if it is empty.
        replay: exit depths to be played back, one for each token that may be generated, 1…U; for an engine whose rule
            is replay, which needs them.
        prompt_replay: exit depths of prompt[:-1], 1…U; needs ragged prefill.
        about: more for the record, JSON values: the item that it asks, for example.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    id: str = ""
    replay: tuple[int, ...] | None = None
    prompt_replay: tuple[int, ...] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """The seed that its draws are made with, 64 bits: its own, or one made of its id."""
        if self.sampling.seed is not None:
            return self.sampling.seed
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "little", signed=True)

    def check(self, vocab_size: int, n_loops: int, max_len: int) -> None:
        """Refuse what cannot be served (`UserError`, naming the request)."""
        where = f"request {self.id}" if self.id else "request"
        for name, value, fits, kind in (
            ("id", self.id, isinstance(self.id, str), "text"),
            ("prompt", self.prompt, _listing(self.prompt), "a list of token ids"),
            ("sampling", self.sampling, isinstance(self.sampling, Sampling), "a Sampling"),
            ("replay", self.replay, self.replay is None or _listing(self.replay), "a list of depths"),
            ("prompt_replay", self.prompt_replay, self.prompt_replay is None or _listing(self.prompt_replay),
             "a list of depths"), ("about", self.about, isinstance(self.about, dict), "a dict"),
        ):  # fmt: skip
            if not fits:
                raise UserError(f"{name} is {value!r}, not {kind}", where=where)
        if not self.prompt:
            raise UserError("the prompt is empty", where=where, remedy="give at least one token")
        for token in self.prompt:
            if not _whole(token) or not 0 <= token < vocab_size:
                what = f"the prompt holds token {token!r}, outside a vocabulary of {vocab_size}"
                raise UserError(what, where=where)
        length = len(self.prompt) + self.sampling.max_new_tokens - 1  # the last token is never fed back
        if length > max_len:
            what = f"{len(self.prompt)} prompt tokens and {self.sampling.max_new_tokens} new ones need {length} places"
            raise UserError(f"{what}, the engine has {max_len}", where=where, remedy="ask for fewer, or raise max_len")
        self._check_replay("replay", self.replay, self.sampling.max_new_tokens, n_loops, where)
        self._check_replay("prompt_replay", self.prompt_replay, len(self.prompt) - 1, n_loops, where)

    @staticmethod
    def _check_replay(name: str, depths: Sequence[int] | None, needed: int, n_loops: int, where: str) -> None:
        if depths is None:
            return
        if len(depths) < needed:
            raise UserError(f"{name} has {len(depths)} depths for {needed} tokens", where=where)
        for depth in depths:
            if not _whole(depth) or not 1 <= depth <= n_loops:
                raise UserError(f"{name} holds {depth!r}, not a depth from 1 to {n_loops}", where=where)


@dataclass(slots=True)
class TokenEvent:
    """One generated token, with what was decided for it.

    Fields:
        request: id of the request.
        index: 0 for the first generated token.
        token: its id.
        text: what it adds to the text, with a tokenizer; text that may be the beginning of a stop string is held back.
        logprob: natural log of its probability under the model at temperature 1; None unless asked for.
        top: alternatives, (token, logprob), most probable first.
        exit_depth: loops that its row ran, 1…U.
        finish_reason: None while the request goes on; "eos", "stop" or "length" with its last token; "error" with
            token −1 where the model broke.
        record: the row of the record, as in `record.py`.
    """

    request: str
    index: int
    token: int
    exit_depth: int
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Completion:
    """What became of a request.

    Fields:
        tokens: generated ids; text: their text with a tokenizer, else "".
        exit_depths: loops run for each of them, of the row that predicted it.
        prompt_exit_depths: of prompt[:-1].
        finish_reason: "eos", "stop", "length", "aborted", "refused" or "error".
        error: the line that says why it was refused or broke; None otherwise.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    exit_depths: list[int] = field(default_factory=list)
    prompt_exit_depths: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top: list[tuple[tuple[int, float], ...]] | None = None
    finish_reason: str = ""
    error: str | None = None
    arrival: float = 0.0
    first_token: float | None = None
    finished: float | None = None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listing(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, name: str, value: object, why: str) -> None:
    if not condition:
        raise UserError(f"{name} is {value!r}, {why}", where=name)
