"""Which fact of a story a token stands in, from the tokens' texts alone: a run keeps no offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["roles_of_tokens", "spans"]

#: how far behind the last token the next one may begin: room for a character of several tokens, which reads as "�"
_REACH = 8
#: what tokenizers write for a space or a line break at a word's beginning
_SPACES = " \t\r\n\u0120\u010a\u2581"


def spans(text: str, tokens: Sequence[str], start: int = 0) -> list[tuple[int, int] | None]:
    """Half-open character spans of tokens in their text; None for a token that is not found (a lone space).

    start: the first token of the text; those before it (BOS, a chat template) are not looked for.
    """
    found: list[tuple[int, int] | None] = [None] * min(start, len(tokens))
    at = 0
    for token in tokens[start:]:
        word = token.strip(_SPACES)
        place = text.find(word, at, at + _REACH + len(word)) if word else -1
        if place < 0:
            found.append(None)
            continue
        at = place + len(word)
        found.append((place, at))
    return found


def roles_of_tokens(
    text: str, tokens: Sequence[str], facts: Sequence[Sequence[Any]], start: int = 0
) -> list[int]:
    """The index of the fact that each token begins in, −1 for none. A fact is (start, end, …); start as in `spans`."""

    def fact(span: tuple[int, int] | None) -> int:
        if span is None:
            return -1
        return next((i for i, (start, end, *_) in enumerate(facts) if start <= span[0] < end), -1)

    return [fact(span) for span in spans(text, tokens, start)]
