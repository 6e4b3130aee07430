"""A subject's rows: which cells are asked of an item and its donors, and what their answers amount to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch

from depthprobe import tables
from depthprobe.depth import Coordinate
from depthprobe.depth.arguments import listed, memory, names, one_of, whole
from depthprobe.depth.resume import ENGINES, MAX_BYTES
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.lens.targets import Target
from depthprobe.patching.pairs import Pair, Subject
from depthprobe.patching.roles import ROLES, roles_of, single
from depthprobe.patching.rows import Side, cut_table, donor_table, item_keys, patch_rows
from depthprobe.patching.sites import SITES, SPANS, Patch, places, together
from depthprobe.patching.sweep import Means, Source, Spec, footprint, sweep

DIRECTIONS = ("donor_to_item", "item_to_donor")
PATCHES = ("set", "zero", "mean")
POSITIONS = ("role", "each")

#: Roles that are swept by default: all disjoint ones.
DEFAULT_ROLES = ROLES[:-1]
DEFAULT_SITES = ("resid_post",)
#: Roles that the last token is cut from.
CUT_ROLES = ("changed_word", "changed_fact", "other_facts", "question_names")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of every subject; `Plan.of` checks it.

    Attributes:
        patches: what is patched together, of all sites and spans.
        asked: roles, or single positions.
        position: "role": all tokens of a role at once; "each": one at a time.
        directions, kinds: of `DIRECTIONS`, `PATCHES`.
        cuts: windows of layers in which attention from the last token is cut; empty: no knock-out.
        tokens: what is patched at every token by itself, with the states of an item's first donor.
        engine, max_bytes: as `DepthModel.resume` takes them.
    """

    patches: tuple[Patch, ...]
    asked: tuple[str | int, ...]
    position: str
    directions: tuple[str, ...]
    kinds: tuple[str, ...]
    cuts: tuple[Patch, ...]
    engine: str = "auto"
    max_bytes: int = MAX_BYTES
    tokens: tuple[Patch, ...] = ()

    @classmethod
    def of(
        cls,
        model: TappedModel,
        *,
        sites: Sequence[str] | str | None = DEFAULT_SITES,
        positions: Sequence[str | int] | str | int | None = DEFAULT_ROLES,
        position: str = "role",
        directions: Sequence[str] | str | None = DIRECTIONS[:1],
        kinds: Sequence[str] | str | None = PATCHES[:1],
        at: Sequence[tuple[int, int]] | tuple[int, int] | None = None,
        span: Sequence[str] | str | None = "one",
        window: int = 1,
        knockout: int | None = None,
        engine: str = "auto",
        max_bytes: int = MAX_BYTES,
    ) -> Plan:
        """Arguments as in `causal_patch`; knockout: layers in a window, None: no knock-out.

        Raises:
            UserError: anything that there is not, that the model lacks, or that says nothing.
        """
        asked = _positions(positions)
        chosen = names(sites, "sites", SITES, DEFAULT_SITES, "site")
        ways = names(directions, "directions", DIRECTIONS, DIRECTIONS[:1])
        done = names(kinds, "kinds", PATCHES, PATCHES[:1])
        spans = names(span, "span", SPANS, SPANS[:1])
        one_of(position, "position", POSITIONS)
        one_of(engine, "engine", ENGINES, "engine")
        window, max_bytes = whole(window, "window", 1), memory(max_bytes)
        if window != 1 and "window" not in spans:
            what = f"a window of {window} says nothing without span 'window'"
            raise UserError(what, where="window", remedy="ask for span 'window', or leave it out")
        along = [(places(model, site), places(model, site, at)) for site in chosen]
        patches = [
            patch for every, starts in along for how in spans
            for patch in together(model, every, how, window, starts=None if at is None else starts)
        ]  # fmt: skip
        cuts: tuple[Patch, ...] = ()
        if knockout is not None:
            layers = tuple(p for p in places(model, "resid_post") if p.coordinate.site == "resid_post")
            size = whole(knockout, "knockout", 1, remedy="give how many layers are cut together, or leave it out")
            cuts = together(model, layers, "window", size, "knockout")
        return cls(tuple(patches), asked, position, ways, done, cuts, engine, max_bytes)

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """Every coordinate that is patched, once."""
        return tuple(dict.fromkeys(c for patch in (*self.patches, *self.tokens) for c in patch.coordinates))


def _positions(given: Any) -> tuple[str | int, ...]:
    """Roles and single positions, each once; None: the default."""
    if given is None:
        return DEFAULT_ROLES
    remedy = f"one of {', '.join(ROLES)}, or a position"
    return tuple(
        dict.fromkeys(
            one_of(one, "positions", ROLES, "role") if isinstance(one, str) else whole(one, "a position", remedy=remedy)
            for one in listed(given, "positions", remedy)
        )
    )


@dataclass(slots=True)
class Found:
    """The rows of some subjects, and what they took."""

    frames: dict[str, pl.DataFrame]
    n_cells: int = 0
    n_run: int = 0
    n_filled: int = 0
    flops: float = 0.0
    engines: frozenset[str] = frozenset()


def pair_roles(model: TappedModel, subject: Subject, pair: Pair) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """(roles of a pair's tokens, the tokens at which their embeddings differ)."""
    first = model.axis[0]
    ours, theirs = (
        model.capture(torch.tensor([prompt]), positions="all", coordinates=(first,), logits=False).states[first][0]
        for prompt in (subject.target.prompt_ids, pair.target.prompt_ids)
    )
    changed = footprint(ours, theirs)
    if not changed:
        what = f"the embeddings of item {subject.item.id} and donor {pair.donor.item.id} are the same"
        raise UserError(what, where=model.name, remedy="this model does not tell the two words apart")
    word = tuple(sorted({*pair.word, *changed}))
    return roles_of(subject.item, subject.where, pair.donor.fact, word), changed


def specs_of(plan: Plan, roles: Mapping[str, tuple[int, ...]], length: int, source: int, where: str) -> list[Spec]:
    """The cells of one pair in one direction."""
    sets = single(dict(roles), plan.asked, plan.position == "each", length, where)
    specs = [
        Spec(source, kind, patch, role, position, tokens)
        for kind in plan.kinds
        for patch in plan.patches
        for role, position, tokens in sets
    ]
    if source or not plan.tokens:  # of the first donor alone: tokens are many
        return specs
    alone = single(dict(roles), ROLES, True, length, where)
    return specs + [Spec(0, "set", patch, *one) for patch in plan.tokens for one in alone]


def cut_specs(plan: Plan, roles: Mapping[str, tuple[int, ...]]) -> list[Spec]:
    """The knock-outs of one item."""
    return [
        Spec(None, "cut", patch, role, None, roles[role]) for role in CUT_ROLES if role in roles for patch in plan.cuts
    ]


@dataclass(frozen=True, slots=True)
class Base:
    """A run that is patched.

    Attributes:
        target: its prompt.
        words: the answers that are scored.
        sources: where states come from.
        parts: specs of each source, in order.
        cuts: knock-outs, behind them.
    """

    target: Target
    words: tuple[str, ...]
    sources: tuple[Source, ...]
    parts: tuple[tuple[Spec, ...], ...]
    cuts: tuple[Spec, ...] = ()

    @property
    def specs(self) -> list[Spec]:
        return [spec for part in self.parts for spec in part] + list(self.cuts)

    @property
    def numbers(self) -> list[int]:
        """Of the words, in the target's."""
        return [self.target.words.index(word) for word in dict.fromkeys(self.words)]


#: (roles of a pair's tokens, the tokens at which their embeddings differ)
About = tuple[dict[str, tuple[int, ...]], tuple[int, ...]]


def bases(model: TappedModel, plan: Plan, subject: Subject) -> tuple[list[Base], list[About]]:
    """The item's run, then each donor's; and the roles of every pair."""
    about = [pair_roles(model, subject, pair) for pair in subject.pairs]
    item, length = subject.target, len(subject.target.prompt_ids)
    answer, into, back = subject.item.answer, *(way in plan.directions for way in DIRECTIONS)
    names = [f"item {subject.item.id} and donor {pair.donor.item.id}" for pair in subject.pairs]
    three = list(zip(subject.pairs, about, names, strict=True))
    first = Base(
        item,
        (answer, *(pair.against for pair in subject.pairs)),
        tuple(Source(pair.target.prompt_ids, changed, name) for pair, (_, changed), name in three if into),
        tuple(tuple(specs_of(plan, roles, length, n, name)) for n, (_, (roles, _), name) in enumerate(three) if into),
        tuple(cut_specs(plan, about[0][0])),
    )
    others = [
        Base(
            pair.target,
            (answer, pair.against),
            (Source(item.prompt_ids, changed, name),) if back else (),
            (tuple(specs_of(plan, roles, length, 0, name)),) if back else (),
        )
        for pair, (roles, changed), name in three
    ]
    return [first, *others], about


def probe(model: TappedModel, plan: Plan, subject: Subject, means: Callable[[Subject], Means] | None = None) -> Found:
    """The tables `donors`, `patching` and, with cuts, `knockout` of one subject.

    Args:
        means: of the other subjects; needed for kind "mean".
    """
    mean = means(subject) if means is not None and "mean" in plan.kinds else None
    found = Found({})
    asked, about = bases(model, plan, subject)
    sides: list[Side] = []
    for base in asked:
        specs = base.specs
        done = sweep(
            model, base.target, base.numbers, base.sources, specs, mean, engine=plan.engine, max_bytes=plan.max_bytes
        )
        found.n_cells += len(specs)
        found.n_run += done.n_run
        found.n_filled += done.n_filled
        found.flops += done.flops
        found.engines |= done.engines
        sides.append(Side(base.target, done.tally))
    ours, theirs = sides[0], sides[1:]
    answer, real = subject.item.answer, theirs[0]
    keys = item_keys(subject.target)
    rows: list[dict[str, Any]] = []
    start = 1  # cell 0 is the clean run
    for number, pair in enumerate(subject.pairs):
        both = ours.right and theirs[number].right and (not pair.control or real.right)
        about_pair = keys | {
            "donor_kind": pair.donor.kind, "control": pair.control, "hop": pair.donor.hop, "both_right": both,
        }  # fmt: skip
        if asked[0].parts:
            other = real if pair.control else theirs[number]
            specs = asked[0].parts[number]
            part = slice(start, start + len(specs))
            start += len(specs)
            ends = (answer, pair.against, other.contrast(answer, pair.against))
            way = about_pair | {"direction": "donor_to_item"}
            rows += patch_rows(way, specs, ours, part, ends, model.dtype)
        if asked[1 + number].parts:
            own, foreign = (answer, pair.against) if pair.control else (pair.against, answer)
            reference = real.contrast(own, foreign) if pair.control else ours.contrast(own, foreign)
            specs, ends = asked[1 + number].parts[0], (own, foreign, reference)
            part = slice(1, 1 + len(specs))
            way = about_pair | {"direction": "item_to_donor"}
            rows += patch_rows(way, specs, theirs[number], part, ends, model.dtype)
    found.frames["donors"] = donor_table(model, subject, keys, about, ours, theirs)
    found.frames["patching"] = tables.conform("patching", rows)
    if plan.cuts:
        found.frames["knockout"] = cut_table(keys, asked[0].cuts, ours, start, answer, subject.pairs[0].against)
    return found
