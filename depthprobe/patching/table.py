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
from depthprobe.depth import Cell, Coordinate, Cut, DepthModel
from depthprobe.depth.resume import MAX_BYTES
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.lens.targets import Target
from depthprobe.patching.means import RoleMeans
from depthprobe.patching.pairs import Subject, Subjects, subjects
from depthprobe.patching.probe import Plan, bases, pair_roles, probe
from depthprobe.patching.scores import Tally
from depthprobe.patching.sites import offered_sites
from depthprobe.patching.sweep import Means, Spec, cell_of, engine_bytes, parts_of

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
    """

    model: TappedModel
    plan: Plan
    subjects: Subjects
    means: Callable[[Subject], Means] | None = None

    @property
    def n_parts(self) -> int:
        return len(self.subjects.found)


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
    return max(1, round(sum(point.site == "resid_post" for point in model.axis) / _CUT))


def prepare_patching(
    model: DepthModel,
    targets: Sequence[Target],
    *,
    n_stories: int | None = None,
    sites: Sequence[str] = ("resid_post",),
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
        remark: is called with a line about anything that is left out.

    Raises:
        UserError: a site that the model lacks, no item with a donor, a model that cannot be patched.
    """
    opened, say = tapped_model(model), remark or (lambda line: None)
    chosen = first_stories(targets, n_stories)
    found = subjects(opened.tokenizer, chosen, seed=seed, bos=bos, chat=chat)
    if found.without:
        say(f"{len(found.without)} of {len(chosen)} items have no donor whose tokens fit, and are not patched")
    plan = Plan.of(opened, sites=sites, knockout=cut_window(opened), max_bytes=max_bytes)
    if opened.loop_ends and "resid_pre" in offered_sites(opened):
        plan = replace(plan, patches=plan.patches + Plan.of(opened, sites="resid_pre", span="later").patches)
    if (why := cannot_cut(opened, found.found[0].target)) is not None:
        say(f"no attention knock-out: {why}")
        plan = replace(plan, cuts=())
    return Work(opened, plan, found)


def first_stories(targets: Sequence[Target], n_stories: int | None) -> list[Target]:
    """The items of the first stories of each task, in order."""
    stories: dict[str, dict[str, None]] = {}
    for target in targets:
        stories.setdefault(target.item.task, {})[target.item.story_id] = None
    kept = {(task, story) for task, of in stories.items() for story in list(of)[:n_stories]}
    return [target for target in targets if (target.item.task, target.item.story_id) in kept]


def cannot_cut(model: TappedModel, target: Target) -> str | None:
    """Why attention edges of this model cannot be cut; None if they can."""
    layers = [point for point in model.axis if point.site == "resid_post"]
    end = len(target.prompt_ids) - 1
    cell = Cell((), tuple(Cut(Coordinate(layer.loop, layer.layer), (end,), (0,)) for layer in layers))
    try:
        model.resume(torch.tensor(target.prompt_ids), [cell])
    except UserError as error:
        return error.what
    return None


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
            frames = probe(work.model, work.plan, subject, work.means).frames
            yield number, {name: frames.get(name, tables.empty(name)) for name in TABLES}


def part_cost(work: Work, number: int) -> Cost:
    """What a part takes, by `DepthModel.plan_resume`; runs that are made only if an answer needs them are left out."""
    model, plan = work.model, work.plan
    asked, _ = bases(model, plan, work.subjects.found[number])
    nothing = torch.zeros(1, dtype=model.dtype, device=model.device)

    def value(_spec: Spec, _coordinate: Coordinate, tokens: tuple[int, ...]) -> Tensor:
        return nothing.expand(len(tokens), model.width)

    cells, flops, held = 0, 0.0, 0
    for base in asked:
        specs, end = base.specs, len(base.target.prompt_ids)
        cells += len(specs)
        tally = Tally(base.target, base.numbers, 1)
        for run in tally.first_runs:
            ids = torch.tensor((*base.target.prompt_ids, *run))
            for part in parts_of(model, specs, end, len(tally.contexts(run)), plan.max_bytes):
                own = [specs[n] for n in part]
                made = [cell_of(spec, end, len(run), base.sources, value) for spec in own]
                with engine_bytes(model, plan.max_bytes) as allowed:
                    planned = model.plan_resume(ids, made, engine=plan.engine, max_bytes=allowed)
                states = len(base.sources) * len(plan.coordinates) * end
                values = sum(len(spec.tokens) * len(spec.patch.coordinates) for spec in own if spec.kind != "cut")
                flops += planned.flops
                held = max(held, planned.nbytes + (states + values) * model.width * model.dtype.itemsize)
    return Cost(cells, flops, min(held, plan.max_bytes))


def describe(work: Work) -> dict[str, Any]:
    """Counts for a manifest."""
    pairs = [pair for subject in work.subjects.found for pair in subject.pairs]
    return {
        "patched_items": work.n_parts,
        "without_donor": len(work.subjects.without),
        "pairs": sum(not pair.control for pair in pairs),
        "controls": sum(pair.control for pair in pairs),
    }
