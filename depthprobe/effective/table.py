"""Items → the table `effective`.

    prepared = prepare_items(model, items)               # of depthprobe.lens
    for number, rows in effective_rows(model, prepared.targets, batch_size=8):
        ...                                              # a frame with the columns of tables.SCHEMAS["effective"]

A batch's rows depend on the model and on the batch alone, as those of the lens do, so that a run resumes. An item is
run by itself, without padding: its skips are the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from depthprobe import tables
from depthprobe.depth import DepthModel
from depthprobe.depth.resume import MAX_BYTES
from depthprobe.depth.tapped import TappedModel
from depthprobe.effective.contributions import Contribution, contributions
from depthprobe.effective.later import later_changes
from depthprobe.effective.parts import STATE_BYTES, Part, parts_of
from depthprobe.effective.skips import Skipped, skip_effects
from depthprobe.errors import UserError
from depthprobe.lens.reads import run_batch
from depthprobe.lens.scores import TOP
from depthprobe.lens.table import n_batches
from depthprobe.lens.targets import Target
from depthprobe.lens.vocabulary import read
from depthprobe.tasks.intervals import cluster_of

__all__ = ["effective_batch", "effective_rows", "n_batches", "spared_of"]


def effective_rows(
    model: DepthModel,
    targets: Sequence[Target],
    batch_size: int = 8,
    *,
    done: Collection[int] = (),
    spared: int | None = None,
    engine: str = "auto",
    max_bytes: int = MAX_BYTES,
) -> Iterator[tuple[int, pl.DataFrame]]:
    """(number of the batch, its rows) for every batch that is not in `done`; see `effective_batch`."""
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} is not positive", remedy="give at least 1")
    spared = spared_of(model, targets, spared)
    for number in range(n_batches(len(targets), batch_size)):
        if number not in done:
            batch = targets[number * batch_size : (number + 1) * batch_size]
            yield number, effective_batch(model, batch, spared=spared, engine=engine, max_bytes=max_bytes)


@torch.inference_mode()
def effective_batch(
    model: DepthModel,
    targets: Sequence[Target],
    *,
    spared: int | None = None,
    engine: str = "auto",
    max_bytes: int = MAX_BYTES,
    state_bytes: int | None = None,
) -> pl.DataFrame:
    """The rows of one batch: items in order, and for each its layers and loops in the order in which they end.

    Args:
        spared: so many tokens at the front of a prompt are never skipped (and not averaged over); see `spared_of`.
        engine: of `DepthModel.resume`; max_bytes: what its sweeps may take.
        state_bytes: of states that are held at once beside them; None: `STATE_BYTES`, at most a quarter of max_bytes.

    Raises:
        UserError: a model whose states cannot be changed; `spared` that leaves no token; NaN logits or lens (names the
            item); the readout identity fails.
    """
    if not isinstance(model, TappedModel):
        raise UserError(f"{model.name} shows states but takes none back", remedy="open it by the native route")
    if state_bytes is None:
        state_bytes = min(STATE_BYTES, max_bytes // 4)
    spared = spared_of(model, targets, spared)
    parts = parts_of(model)
    lens = _lens(model, targets, parts)
    rows: list[dict[str, Any]] = []
    for number, target in enumerate(targets):
        ids = torch.tensor(target.prompt_ids, device=model.device)
        end = len(ids) - 1
        run: dict[str, Any] = {"engine": engine, "max_bytes": max_bytes, "state_bytes": state_bytes}
        added = contributions(model, ids, parts, spared, state_bytes)
        skipped = skip_effects(model, target, parts, spared=spared, **run)
        same = later_changes(model, ids, parts, (end,), **run)
        others = later_changes(model, ids, parts, tuple(range(spared, end)), **run)
        rows += _rows(target, parts, added, skipped, same, others, [part[number] for part in lens])
    return tables.conform("effective", rows)


def spared_of(model: DepthModel, targets: Sequence[Target], asked: int | None) -> int:
    """How many tokens at the front of every prompt are spared.

    Args:
        asked: so many; None: one, as in the paper, or none in a model with loops or where a prompt is one token.

    Many models park attention on their first token, and without the layer that makes it fit for that nothing works: a
    skip then measures the sink, not what the layer does for the answer. In SmolLM2-135M three layers show it
    (docs/architecture.md). In the embedded models with loops sparing it changed next to nothing, and unspared, a model
    without one of its loops is the model with one loop less (`effective.parts`).

    Raises:
        UserError: below 0, or so many that a prompt has none left.
    """
    if asked is None:
        return int(not model.loop_ends and min((len(target.prompt_ids) for target in targets), default=0) > 1)
    spared = asked
    if spared < 0:
        raise UserError(f"spared is {spared}, below 0")
    for target in targets:
        if spared >= len(target.prompt_ids):
            what = f"its {len(target.prompt_ids)} tokens leave none to skip when {spared} are spared"
            raise UserError(what, where=f"item {target.item.id}", remedy="spare fewer (--spare-first)")
    return spared


def _lens(model: DepthModel, targets: Sequence[Target], parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """(KL, share of the best tokens in common) of the plain lens behind each part with the output, [B, parts] each."""
    reads = run_batch(model, targets)
    last = model.axis[-1]
    depths = [(part.coordinate, reads.root.states[part.coordinate]) for part in parts]
    depths.append((last, reads.root.states[last]))
    said = read(model, depths, top_k=TOP, name=lambda row: f"item {targets[row].item.id}")
    assert said.kl_final is not None
    best, final = said.top_ids[:, :-1], said.top_ids[:, -1]
    common = (best[..., None] == final[:, None, None]).any(-1).float().mean(-1)
    return said.kl_final[:, :-1].cpu(), common.cpu()


def _rows(
    target: Target,
    parts: Sequence[Part],
    added: Sequence[Contribution],
    skipped: Skipped,
    same: Sequence[float | None],
    others: Sequence[float | None],
    lens: Sequence[Tensor],
) -> list[dict[str, Any]]:
    item = target.item
    keys = {
        "item": item.id, "story": item.story_id, "cluster": cluster_of(item), "task": item.task, "hops": item.hops,
    }  # fmt: skip
    columns: dict[str, Sequence[Any]] = {
        "skip_kl": skipped.kl.tolist(),
        "skip_top5": skipped.top.tolist(),
        "skip_logprob": skipped.logprob.tolist(),
        "skip_correct": skipped.correct.tolist(),
        "later_same": same,
        "later_others": others,
        "lens_kl": lens[0].tolist(),
        "lens_top5": lens[1].tolist(),
    }
    return [
        {
            **keys,
            "depth": part.depth,
            "loop": part.coordinate.loop,
            "layer": part.coordinate.layer,
            "site": part.site,
            "contribution": added[number].norm,
            "cosine": added[number].cosine,
            "contribution_all": added[number].norm_all,
            "cosine_all": added[number].cosine_all,
            **{name: values[number] for name, values in columns.items()},
        }
        for number, part in enumerate(parts)
    ]
