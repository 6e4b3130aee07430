"""Pairs of stories for patching: an item, and donors whose prompts have every token in the same place.

A donor differs from its item in one word (`tasks.donors`). A pair is used only if both prompts have equally many tokens
and differ nowhere but in that word: then a position means the same in both. Of the donors found for an item the first
that does is taken.

A control changes a word on which the answer does not depend. There is no other answer that its states could bring, so
it is measured against that of the item's first real donor: what the real word moves, a control should not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from depthprobe.depth.arguments import listed, one_of
from depthprobe.errors import UserError
from depthprobe.lens.targets import Target, resolve
from depthprobe.patching.roles import Offsets, offsets, tokens_of
from depthprobe.tasks.donors import CONTROLS, KINDS, Donor, Kind, donors_of, find_donors
from depthprobe.tasks.items import Item

#: What is patched by default, for each task: the donors that most items have, and one control.
DEFAULT_KINDS: dict[str, tuple[Kind, ...]] = {
    "kinship": ("relation", "distractor"),
    "follow": ("name", "distractor_name"),
}
#: Further donors that are tried where the first does not fit the tokenizer.
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """An item's donor.

    Attributes:
        donor: what differs.
        target: the donor's item as token ids.
        word: tokens of the changed word, the same in both prompts.
        against: the answer that the item's own is measured against.
    """

    donor: Donor
    target: Target
    word: tuple[int, ...]
    against: str

    @property
    def control(self) -> bool:
        return self.donor.kind in CONTROLS


@dataclass(frozen=True, slots=True)
class Subject:
    """An item and its pairs, the real donors first.

    Attributes:
        target: the item as token ids.
        where: characters of its tokens.
        pairs: one or more; the first is no control.
    """

    target: Target
    where: Offsets
    pairs: tuple[Pair, ...]

    @property
    def item(self) -> Item:
        return self.target.item


@dataclass(frozen=True, slots=True)
class Subjects:
    """Items with donors, and the ids of those without."""

    found: tuple[Subject, ...]
    without: tuple[str, ...]


def subjects(
    tokenizer: Any,
    targets: Sequence[Target],
    donors: Sequence[Kind] | Sequence[Donor] | Kind | Donor | None = None,
    *,
    controls: bool = True,
    seed: int = 0,
    bos: str = "tokenizer",
    chat: bool = False,
) -> Subjects:
    """Find the donors of items, or check those that are given.

    Args:
        targets: the items.
        donors: kinds to look for (default `DEFAULT_KINDS` of each task), or the donors themselves.
        controls: whether control donors are wanted.
        seed: with the item's id it decides which donor is taken.
        bos, chat: as the targets were resolved.

    Raises:
        UserError: an unknown kind; a given donor that belongs to none of the items or does not fit, or stands there
            twice; no pair at all.
    """
    kinds, given = _asked(donors)
    by_item = _given(targets, given) if given else _sought(tokenizer, targets, kinds or None, seed)
    found: list[Subject] = []
    without: list[str] = []
    for target in targets:
        where = offsets(tokenizer, target, chat=chat)
        pairs: list[Pair] = []
        for candidates in by_item.get(target.item.id, ()):
            pair = _first_fitting(tokenizer, target, where, candidates, bos, chat, strict=bool(given))
            if pair is not None and (controls or not pair.control):
                pairs.append(pair)
        real = [pair for pair in pairs if not pair.control]
        if not real:
            without.append(target.item.id)
            continue
        against = real[0].against
        beside = [Pair(p.donor, p.target, p.word, against) for p in pairs if p.control and against in p.target.words]
        found.append(Subject(target, where, (*real, *beside)))
    if not found:
        what = f"none of {len(targets)} items has a donor that fits the tokenizer"
        remedy = "give stories with facts of the kinship vocabulary, or other kinds of donors"
        raise UserError(what, where="patching", remedy=remedy)
    return Subjects(tuple(found), tuple(without))


def _asked(donors: Any) -> tuple[list[Any], list[Donor]]:
    """(kinds to look for, donors that are given); both empty: the default."""
    if donors is None:
        return [], []
    known = tuple(dict.fromkeys(kind for of_task in KINDS.values() for kind in of_task))
    remedy = f"of {', '.join(known)}, or a Donor of depthprobe.tasks.donors"
    several = [donors] if isinstance(donors, Donor) else listed(donors, "donors", remedy)
    given = [donor for donor in several if isinstance(donor, Donor)]
    kinds = [kind for kind in several if not isinstance(kind, Donor)]
    for kind in kinds:
        if not isinstance(kind, str):
            raise UserError(f"a {type(kind).__name__} is no donor", where="donors", remedy=remedy)
        one_of(kind, "donors", known, "donor of kind")
    if given and kinds:
        raise UserError("donors are partly kinds and partly donors", where="donors", remedy="give either")
    twice = [key for key, n in Counter((donor.base_id, donor.item.id) for donor in given).items() if n > 1]
    if twice:
        what = f"donor {twice[0][1]} of item {twice[0][0]} is given twice"
        raise UserError(what, where="donors", remedy="give it once")
    return list(dict.fromkeys(kinds)), given


def _given(targets: Sequence[Target], donors: Sequence[Donor]) -> dict[str, list[Iterable[Donor]]]:
    ids = {target.item.id for target in targets}
    found: dict[str, list[Iterable[Donor]]] = {}
    for donor in donors:
        if donor.base_id not in ids:
            what = f"donor {donor.item.id} belongs to item {donor.base_id}, which is not among the items"
            raise UserError(what, where="donors", remedy="give its item too, or leave it out")
        found.setdefault(donor.base_id, []).append([donor])
    return found


def _sought(
    tokenizer: Any, targets: Sequence[Target], kinds: Sequence[Kind] | None, seed: int
) -> dict[str, list[Iterable[Donor]]]:
    """Item → for each kind its donors, the best first; further ones are looked for only where that does not fit."""
    lengths: dict[str, int] = {}

    def length_of(word: str) -> int:
        if word not in lengths:
            lengths[word] = len(tokenizer(f" {word}", add_special_tokens=False, verbose=False)["input_ids"])
        return lengths[word]

    found: dict[str, list[Iterable[Donor]]] = {}
    for task in dict.fromkeys(target.item.task for target in targets):
        items = {target.item.id: target.item for target in targets if target.item.task == task}
        wanted = DEFAULT_KINDS[task] if kinds is None else kinds
        for donor in find_donors(items.values(), wanted, length_of=length_of, seed=seed).donors:
            more = donors_of(items[donor.base_id], donor.kind, length_of=length_of, seed=seed)
            found.setdefault(donor.base_id, []).append(_first_and_more(donor, more))
    return found


def _first_and_more(donor: Donor, more: Iterator[Donor]) -> Iterator[Donor]:
    yield donor
    yield from (other for other in islice(more, _TRIES) if other.item.id != donor.item.id)


def _first_fitting(
    tokenizer: Any, target: Target, where: Offsets, donors: Iterable[Donor], bos: str, chat: bool, *, strict: bool
) -> Pair | None:
    for donor in donors:
        (other,) = resolve(tokenizer, [donor.item], bos=bos, chat=chat)
        word, why = fits(tokenizer, target, where, donor, other, chat=chat)
        if why is None:
            return Pair(donor, other, tuple(sorted(word)), donor.item.answer)
        if strict:
            what = f"item {target.item.id} and its donor {donor.item.id} {why}"
            remedy = "give a donor whose changed word has as many tokens as the item's"
            raise UserError(what, where="donors", remedy=remedy)
    return None


def fits(
    tokenizer: Any, target: Target, where: Offsets, donor: Donor, other: Target, *, chat: bool = False
) -> tuple[Collection[int], str | None]:
    """(tokens of the changed word, why the pair cannot be patched or None)."""
    ours, theirs = target.prompt_ids, other.prompt_ids
    if len(ours) != len(theirs):
        return (), f"have {len(ours)} and {len(theirs)} tokens"
    apart = {position for position, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b}
    if not apart:
        return (), "have the same tokens"
    word = tokens_of(where, [donor.base_span])
    if word != tokens_of(offsets(tokenizer, other, chat=chat), [donor.donor_span]) or not apart <= set(word):
        return (), "differ in tokens outside the changed word"
    if donor.item.answer not in target.words or target.item.answer not in other.words:
        return (), f"do not share their answers, {target.item.answer} and {donor.item.answer}"
    return word, None
