"""What one item's row of sweeps takes, without running it: the same calls as in `table`, each asked for its plan.

    part_cost(model, target, spared=1).flops

Counted are matrix products: changed forwards as `DepthModel.plan_resume` plans them, the unchanged ones that their
states come from, and the readouts. A cell that turns out to change nothing counts as one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth import Coordinate
from depthprobe.depth.resume import MAX_BYTES
from depthprobe.depth.tapped import TappedModel
from depthprobe.effective.later import sweeps
from depthprobe.effective.parts import STATE_BYTES, Part, cell_bytes, chunks, n_captures, parts_of
from depthprobe.effective.skips import leaves, wanted_suffixes
from depthprobe.lens.targets import Target

__all__ = ["Cost", "part_cost"]


@dataclass(slots=True)
class Cost:
    """Cells, floating-point operations, bytes beyond the model."""

    cells: int = 0
    flops: float = 0.0
    bytes: int = 0


@torch.inference_mode()
def part_cost(
    model: TappedModel,
    target: Target,
    *,
    spared: int,
    engine: str = "auto",
    max_bytes: int = MAX_BYTES,
    state_bytes: int = STATE_BYTES,
) -> Cost:
    """What `effective_batch` takes for one item; arguments as there."""
    parts, cost = parts_of(model), Cost()
    ids, suffixes = torch.tensor(target.prompt_ids, device=model.device), wanted_suffixes(target)
    end = len(ids) - 1
    # the lens reads every part and the output behind every suffix, each run behind the prompt's cache where that can be
    again = 0 if model.can_continue else end + 1
    tokens = end + 1 + sum(again + len(suffix) for suffix in suffixes if suffix)
    cost.flops += tokens * model.flops_per_token(end + 1)
    # the output without each part, behind every suffix; what is read is held to the model's own logits, too
    cost.flops += model.head_flops * (len(parts) + 1 + len(suffixes) * (len(parts) + 3))
    cost.flops += n_captures(model, end + 1, len(parts), state_bytes) * _forward(model, end + 1)

    def swept(
        ids: Tensor, some: Sequence[Part], positions: tuple[int, ...], read: Sequence[int] | None,
        coordinates: Sequence[Coordinate] | None,
    ) -> None:  # fmt: skip
        blank = torch.zeros(1, 1, dtype=model.dtype, device=model.device).expand(len(ids), model.width)
        cells = [part.skipped(positions, blank, blank + 1) for part in some]
        planned = model.plan_resume(ids, cells, read, coordinates, engine=engine, max_bytes=max_bytes)
        clean = 1 + n_captures(model, len(ids), len(some), state_bytes)
        cost.cells += len(cells)
        cost.flops += planned.flops + clean * _forward(model, len(ids))
        cost.bytes = max(cost.bytes, min(planned.nbytes, max_bytes) + state_bytes_of(model, ids, some, state_bytes))

    for leaf in leaves(suffixes):
        run = torch.tensor((*target.prompt_ids, *leaf), device=model.device)
        here = [suffix for suffix in suffixes if leaf[: len(suffix)] == suffix]
        at = [end + len(suffix) for suffix in here]
        for some in chunks(parts, state_bytes // cell_bytes(model, run, parts)):
            swept(run, some, tuple(range(spared, len(run))), at, None)
    for positions in ((end,), tuple(range(spared, end))):
        for read, _, numbers in sweeps(model, ids, parts, state_bytes) if positions else ():
            swept(ids, [parts[n] for n in numbers], positions, None, read)
    return cost


def _forward(model: TappedModel, length: int) -> float:
    return length * model.flops_per_token(length)


def state_bytes_of(model: TappedModel, ids: Tensor, some: Sequence[Part], state_bytes: int) -> int:
    """Of the clean states that a chunk of parts begins and ends with."""
    return min(2 * len(some) * len(ids) * model.width * model.dtype.itemsize, state_bytes)
