"""From the spans of an item to tokens in context: what part each token of a prompt plays.

| role           | its tokens                                                                               |
|----------------|------------------------------------------------------------------------------------------|
| changed_word   | the word in which item and donor differ, and every token whose embedding it reaches      |
| changed_fact   | the rest of that word's fact                                                             |
| other_facts    | all other facts                                                                          |
| question_names | the people whom the question names                                                       |
| last           | the token that predicts the answer; behind it also the answer itself, when it is scored  |
| all            | every token                                                                              |

All but "all" are disjoint: a token that could be two of them is the first of changed_word, last, question_names,
changed_fact and other_facts. In a model that mixes the previous tokens into an embedding the changed word is there in
the tokens behind it, before any layer has run: they belong to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from depthprobe.errors import UserError
from depthprobe.lens.targets import Target, chat_prompt
from depthprobe.tasks.items import Item, Span

ROLES = ("changed_word", "changed_fact", "other_facts", "question_names", "last", "all")

#: Half-open character ranges in `Item.text`; an empty one for a token that is not of the text.
Offsets = tuple[tuple[int, int], ...]


def offsets(tokenizer: Any, target: Target, *, chat: bool = False) -> Offsets:
    """Where each token of a prompt stands in `Item.text`.

    Raises:
        UserError: a tokenizer without offsets, or a prompt that is not the text's tokens with something before it.
    """
    item = target.item
    where = f"item {item.id}"
    if not getattr(tokenizer, "is_fast", False):
        what = "the tokenizer does not say which characters a token stands for, so roles cannot be found"
        raise UserError(what, where=where, remedy="take the fast tokenizer of this model")
    text = chat_prompt(tokenizer, item.text, where) if chat else item.text
    begin = text.find(item.text)
    if begin < 0:
        raise UserError("the chat template changes the question's text", where=where, remedy="ask without it")
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, pairs = tuple(out["input_ids"]), out["offset_mapping"]
    front = len(target.prompt_ids) - len(ids)
    if front < 0:  # a BOS that the template wrote was taken away
        ids, pairs, front = ids[-front:], pairs[-front:], 0
    if target.prompt_ids[front:] != ids:
        what = "the prompt's tokens are not those of its text"
        raise UserError(what, where=where, remedy="ask without special tokens inside the text")
    ends = (begin, begin + len(item.text))
    clipped = [(min(max(a, begin), ends[1]) - begin, min(max(b, begin), ends[1]) - begin) for a, b in pairs]
    return ((0, 0),) * front + tuple(clipped)


def tokens_of(where: Offsets, spans: Iterable[Span]) -> tuple[int, ...]:
    """The tokens that share a character with any of the spans, ascending."""
    listed = list(spans)
    return tuple(
        token
        for token, (start, end) in enumerate(where)
        if any(max(start, span.start) < min(end, span.end) for span in listed)
    )


def roles_of(item: Item, where: Offsets, fact: int, changed: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Role → its tokens, ascending; a role without tokens is absent.

    Args:
        where: of `offsets`.
        fact: number of the changed fact.
        changed: tokens of the changed word.
    """
    facts = item.facts
    claims: tuple[tuple[str, Collection[int]], ...] = (
        ("changed_word", changed),
        ("last", (len(where) - 1,)),
        ("question_names", tokens_of(where, item.question_people_spans)),
        ("changed_fact", tokens_of(where, [facts[fact].span])),
        ("other_facts", tokens_of(where, [f.span for number, f in enumerate(facts) if number != fact])),
    )
    taken: dict[int, str] = {}
    for role, tokens in claims:
        for token in tokens:
            taken.setdefault(token, role)
    found = {role: tuple(sorted(t for t, owner in taken.items() if owner == role)) for role in ROLES[:-1]}
    return {role: tokens for role, tokens in found.items() if tokens} | {"all": tuple(range(len(where)))}


def role_of(roles: dict[str, tuple[int, ...]], position: int) -> str:
    """The role of one token; "all" if it has no other."""
    return next((role for role in ROLES if position in roles.get(role, ())), "all")


def single(
    roles: dict[str, tuple[int, ...]], asked: Sequence[str | int], each: bool, length: int, where: str
) -> list[tuple[str, int | None, tuple[int, ...]]]:
    """(role, single position or None, tokens) of every set of tokens that is to be patched at once.

    Args:
        asked: roles, or single positions.
        each: roles one token at a time; a token that several roles have comes once, and "all" adds those that no
            other role has.
        length: of the prompt.

    Raises:
        UserError: an unknown role, a position outside the prompt.
    """
    found: list[tuple[str, int | None, tuple[int, ...]]] = []
    seen: set[int] = set()
    for one in asked:
        if isinstance(one, int):
            if not -length <= one < length:
                what = f"position {one} is outside the prompt of {length} tokens"
                raise UserError(what, where=where, remedy=f"give {-length} … {length - 1}")
            tokens, alone = (one % length,), True
        elif one not in ROLES:
            raise UserError(f"there is no role '{one}'", where="positions", remedy=f"one of {', '.join(ROLES)}")
        else:
            tokens, alone = roles.get(one, ()), each
        if not alone:
            if tokens:
                found.append((one if isinstance(one, str) else "all", None, tokens))
            continue
        for token in tokens:
            if token not in seen:
                seen.add(token)
                found.append((role_of(roles, token), token, (token,)))
    return found
