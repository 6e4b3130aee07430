"""Items → the tables `donors`, `patching` and `knockout`, one part an item, for a run that may be stopped.

    work = prepare_patching(model, prepared.targets, n_stories=10)
    for number, frames in patching_rows(work):
        frames["patching"]                        # a polars frame with the columns of tables.SCHEMAS["patching"]

A part depends on the model and on the whole set of items alone, so a run that was killed ends with the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from depthprobe import tables
from depthprobe.depth import Cell, Coordinate, Cut, DepthModel, Edit
from depthprobe.depth.coordinates import layer_points
from depthprobe.depth.resume import MAX_BYTES
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.lens.table import check_context
from depthprobe.lens.targets import Target
from depthprobe.patching.means import RoleMeans
from depthprobe.patching.pairs import Subject, Subjects, subjects
from depthprobe.patching.probe import Base, Plan, bases, pair_roles, probe
from depthprobe.patching.scores import Tally
from depthprobe.patching.sites import offered_sites
from depthprobe.patching.sweep import Means, Spec, cell_of, engine_bytes, fitting

TABLES = ("donors", "patching", "knockout")
#: Share of all layers that a knock-out cuts together.
_CUT = 5


@dataclass(frozen=True, slots=True)
class Work:
    """A prepared sweep.

    Attributes:
        model, plan: what is run.
        subjects: items with donors, one part each, and the ids of those without.
        means: of all subjects, for mean ablation.
        by_token: items that are also patched at every token by itself, as `plan.tokens` says.
    """

    model: TappedModel
    plan: Plan
    subjects: Subjects
    means: Callable[[Subject], Means] | None = None
    by_token: frozenset[str] = frozenset()

    @property
    def n_parts(self) -> int:
        return len(self.subjects.found)

    def plan_of(self, subject: Subject) -> Plan:
        """What is asked of one subject."""
        return self.plan if subject.item.id in self.by_token else replace(self.plan, tokens=())


@dataclass(frozen=True, slots=True)
class Cost:
    """What a part takes: cells, floating-point operations (as the engine counts them), bytes beyond the model."""

    cells: int
    flops: float
    bytes: int


def tapped_model(model: DepthModel) -> TappedModel:
    """The same model, if it can be resumed. Raises UserError if not."""
    if not isinstance(model, DepthModel):
        remedy = "open it with depthprobe.load or depthprobe.wrap"
        raise UserError(f"a {type(model).__name__} has no depth axis", remedy=remedy)
    if not isinstance(model, TappedModel):
        what = f"{model.name} cannot be patched by the {model.route} route"
        raise UserError(what, where="patching", remedy="open it without a route")
    return model


def cut_window(model: TappedModel) -> int:
    """Layers that a knock-out cuts together by default: a fifth of all, at least one."""
    return max(1, round(len(layer_points(model)) / _CUT))


def prepare_patching(
    model: DepthModel,
    targets: Sequence[Target],
    *,
    n_stories: int | None = None,
    sites: Sequence[str] = ("resid_post",),
    by_token: int = 0,
    max_bytes: int = MAX_BYTES,
    seed: int = 0,
    bos: str = "tokenizer",
    chat: bool = False,
    remark: Callable[[str], None] | None = None,
) -> Work:
    """Choose stories, find their donors, check that the model can do what is asked.

    Args:
        targets: of all items; the first `n_stories` of each task are patched at every hop count (None: all).
        sites: of `SITES`; every disjoint role is patched at each, with the donor's states. In a model with loops what
            its layers read is patched as well, in each and all later loops: a loop that reads the embedding again has
            the item's own word back, and this alone keeps it away.
        by_token: the first so many items of each task and hop count are also patched at every token by itself, at the
            first of the sites: what a map over one story's tokens is drawn from.
        remark: is called with a line about anything that is left out.

    Raises:
        UserError: a site that the model lacks, no item with a donor, a model that cannot be patched.
    """
    opened, say = tapped_model(model), remark or (lambda line: None)
    chosen = first_stories(targets, n_stories)
    found = subjects(opened.tokenizer, chosen, seed=seed, bos=bos, chat=chat)
    fit_context(opened, found)
    if found.without:
        say(f"{len(found.without)} of {len(chosen)} items have no donor whose tokens fit, and are not patched")
    plan = Plan.of(opened, sites=sites, knockout=cut_window(opened), max_bytes=max_bytes)
    if opened.loop_ends and "resid_pre" in offered_sites(opened):
        plan = replace(plan, patches=plan.patches + Plan.of(opened, sites="resid_pre", span="later").patches)
    if by_token:
        plan = replace(plan, tokens=Plan.of(opened, sites=sites[0]).patches)
    if (why := cannot_cut(opened, found.found[0].target)) is not None:
        say(f"no attention knock-out: {why}; for what its layers do see the patched residuals, or --probes effective")
        plan = replace(plan, cuts=())
    return Work(opened, plan, found, by_token=_first_items(found.found, by_token))


def _first_items(found: Sequence[Subject], n: int) -> frozenset[str]:
    """The first n items of each task and hop count."""
    of: dict[tuple[str, int], list[str]] = {}
    for subject in found:
        of.setdefault((subject.item.task, subject.item.hops), []).append(subject.item.id)
    return frozenset(item for items in of.values() for item in items[:n])


def first_stories(targets: Sequence[Target], n_stories: int | None) -> list[Target]:
    """The items of the first stories of each task, in order."""
    stories: dict[str, dict[str, None]] = {}
    for target in targets:
        stories.setdefault(target.item.task, {})[target.item.story_id] = None
    kept = {(task, story) for task, of in stories.items() for story in list(of)[:n_stories]}
    return [target for target in targets if (target.item.task, target.item.story_id) in kept]


def cannot_cut(model: TappedModel, target: Target) -> str | None:
    """Why attention edges of this model cannot be cut; None if they can."""
    layers = layer_points(model)
    end = len(target.prompt_ids) - 1
    cell = Cell((), tuple(Cut(Coordinate(layer.loop, layer.layer), (end,), (0,)) for layer in layers))
    try:
        model.resume(torch.tensor(target.prompt_ids), [cell])
    except UserError as error:
        return error.what
    return None


def fit_context(model: TappedModel, found: Subjects) -> None:
    """Raises UserError, which names the item, for a story that is longer than the context with its answers."""
    limit = model.context_length
    for subject in found.found if limit is not None else ():
        answers = {subject.item.answer, *(pair.against for pair in subject.pairs)}
        for target, name in (
            (subject.target, f"item {subject.item.id}"),
            *((pair.target, f"donor {pair.donor.item.id} of item {subject.item.id}") for pair in subject.pairs),
        ):
            behind = [len(target.paths[target.words.index(word)]) - 1 for word in answers]
            check_context(model, max(target.n_positions, len(target.prompt_ids) + max(behind)), name)


def role_means(model: TappedModel, plan: Plan, found: Subjects) -> Callable[[Subject], Means] | None:
    """The means that kind "mean" needs; None without it."""
    if "mean" not in plan.kinds:
        return None
    roles = [pair_roles(model, subject, subject.pairs[0])[0] for subject in found.found]
    return RoleMeans(model, found.found, roles, plan.coordinates).without


def patching_rows(work: Work, *, done: Collection[int] = ()) -> Iterator[tuple[int, dict[str, pl.DataFrame]]]:
    """(number of the part, its tables) for every part that is not in `done`."""
    for number, subject in enumerate(work.subjects.found):
        if number not in done:
            frames = probe(work.model, work.plan_of(subject), subject, work.means).frames
            yield number, {name: frames.get(name, tables.empty(name)) for name in TABLES}


def part_cost(work: Work, number: int) -> Cost:
    """What a part takes, by `DepthModel.plan_resume`; runs that are made only if an answer needs them are left out."""
    subject = work.subjects.found[number]
    model, plan = work.model, work.plan_of(subject)
    asked, _ = bases(model, plan, subject)
    nothing = torch.zeros(1, dtype=model.dtype, device=model.device)

    def value(_spec: Spec, _coordinate: Coordinate, tokens: tuple[int, ...]) -> Tensor:
        return nothing.expand(len(tokens), model.width)

    def forward(length: int) -> float:
        return length * model.flops_per_token(length)

    # what tells the tokens at which a pair differs apart
    cells, flops, held = 0, 2.0 * len(subject.pairs) * forward(len(subject.target.prompt_ids)), 0
    for base in asked:
        specs, end, tally = base.specs, len(base.target.prompt_ids), Tally(base.target, base.numbers, 1)
        cells += len(specs)
        whole: list[Spec | None] = [None, *specs]
        for run in tally.first_runs:
            ids, contexts = torch.tensor((*base.target.prompt_ids, *run)), tally.contexts(run)
            at = [end - 1 + len(context) for context in contexts]
            for part in fitting(
                model, whole, base.sources, end, len(run), len(at), plan.max_bytes, oracles=run == tally.first_runs[0]
            ):
                made = [cell_of(whole[n], end, len(run), base.sources, value) for n in part.numbers]
                checked = len(base.sources) if part.oracles else 0
                made += _oracles(base, model, nothing) if checked else []
                planned = model.plan_resume(ids, made, at, engine=plan.engine, max_bytes=engine_bytes(plan.max_bytes))
                # a clean run and one of each source that is needed, to check the oracles one more; then the readouts
                forwards = 1 + len(part.needed) + checked
                readouts = len(part.numbers) * len(contexts) + 3 * checked
                flops += planned.flops + forwards * forward(len(ids)) + readouts * model.head_flops
                held = max(held, planned.nbytes + part.nbytes)
    return Cost(cells, flops, held)


def _oracles(base: Base, model: TappedModel, nothing: Tensor) -> list[Cell]:
    """Those of `sweep`, without their values."""
    first, last, end = model.axis[0], model.axis[-1], len(base.target.prompt_ids) - 1
    made = []
    for source in base.sources:
        for point, tokens in ((first, source.changed), (last, (end,))):
            made.append(Cell((Edit(point, tokens, nothing.expand(len(tokens), model.width)),)))
    return made


def describe(work: Work) -> dict[str, Any]:
    """Counts for a manifest."""
    pairs = [pair for subject in work.subjects.found for pair in subject.pairs]
    return {
        "patched_items": work.n_parts,
        "patched_by_token": len(work.by_token),
        "without_donor": len(work.subjects.without),
        "pairs": sum(not pair.control for pair in pairs),
        "controls": sum(pair.control for pair in pairs),
    }
