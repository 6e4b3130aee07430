"""`DepthModel.resume`: many changed forwards of one prompt, exactly, for as little as they cost.

The sweep is checked, cells that provably change nothing are filled from the clean run, and the others are run by
one of two engines: "suffix" recomputes only what a cell can change (`suffix`), "hooks" runs whole rows (`hooked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthprobe.depth.cells import Cell, Resumed, changes_nothing, check_cells, layer_of
from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.hooked import edited
from depthprobe.depth.identity import IDENTITY_TOLERANCE
from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: Bytes that a sweep may take beyond the loaded model unless it is told otherwise.
MAX_BYTES = 1 << 30
ENGINES = ("auto", "suffix", "hooks")


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked call of `resume`.

    Attributes:
        ids: int64 [S].
        cells: those that are to run, and `order`, their numbers among all cells.
        read: the tokens that are read; coordinates: where.
        max_bytes: what a batch may take.
    """

    ids: Tensor
    cells: tuple[Cell, ...]
    order: tuple[int, ...]
    read: tuple[int, ...]
    coordinates: tuple[Coordinate, ...]
    max_bytes: int


@torch.inference_mode()
def resume(
    model: TappedModel,
    input_ids: Tensor,
    cells: Sequence[Cell],
    read: Sequence[int] | None,
    coordinates: Sequence[Coordinate] | None,
    engine: str,
    max_bytes: int,
) -> Resumed:
    """See `DepthModel.resume`."""
    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}'", remedy=f"one of {', '.join(ENGINES)}")
    ids = input_ids.to(model.device)
    if ids.dim() != 1 or not len(ids):
        raise UserError(f"input_ids have shape {tuple(ids.shape)}", remedy="give the tokens of one prompt")
    length = len(ids)
    at = (length - 1,) if read is None else tuple(read)
    if not at or not all(0 <= p < length for p in at):
        raise UserError(f"the tokens to read are {at}", remedy=f"give some of 0 … {length - 1}")
    wanted = (model.axis[-1],) if coordinates is None else tuple(coordinates)
    layers = [layer_of(point) for point in model.axis if point.site == "resid_post"]
    check_cells(cells, model.points, layers, length, model.width, model.name)
    needed = {edit.coordinate for cell in cells for edit in cell.edits}
    capture = model.capture(ids[None], positions="all", coordinates=tuple(needed.union(wanted)), logits=False)
    stood = {point: state[0] for point, state in capture.states.items()}
    clean = {point: stood[point][list(at)] for point in wanted}
    run = tuple(n for n, cell in enumerate(cells) if not changes_nothing(cell, at, layers[-1], stood))
    states = {point: state.expand(len(cells), *state.shape).clone() for point, state in clean.items()}
    sweep = Sweep(ids, tuple(cells[n] for n in run), run, at, wanted, max_bytes)
    done = _by_hooks(model, sweep, clean, states)
    filled = len(cells) - len(run)
    return Resumed(states, clean, done.engine, len(run), filled, done.token_layers, done.flops, done.drift)


@dataclass(frozen=True, slots=True)
class Done:
    """What an engine did; fields as in `Resumed`."""

    engine: str
    token_layers: int
    flops: float
    drift: float


def _by_hooks(
    model: TappedModel, sweep: Sweep, clean: dict[Coordinate, Tensor], states: dict[Coordinate, Tensor]
) -> Done:
    length, drift, rows_run = len(sweep.ids), 0.0, 0
    rows = max(1, int(sweep.max_bytes // row_bytes(model, length)) - 1)
    layers = sum(1 for point in model.axis if point.site == "resid_post")
    index = torch.tensor(sweep.read, device=model.device)
    for start in range(0, len(sweep.cells), rows):
        part = [None, *sweep.cells[start : start + rows]]  # the unpatched row first
        batch = sweep.ids.expand(len(part), -1)
        with edited(model.model, model.taps, part, length, model.name):
            capture = model.capture(
                batch, positions=index.expand(len(part), -1), coordinates=sweep.coordinates, logits=False
            )
        for point, state in capture.states.items():
            drift = max(drift, drift_of(model, state[0], clean[point]))
            states[point][list(sweep.order[start : start + rows])] = state[1:]
        rows_run += len(part)
    tokens = rows_run * length
    return Done("hooks", tokens * layers, tokens * model.flops_per_token(length), drift)


def drift_of(model: TappedModel, row: Tensor, clean: Tensor) -> float:
    """How far an unpatched row is from the clean run, as a share of the largest |state|.

    Raises:
        UserError: farther than rounding in the model's dtype explains: then no cell of the batch can be trusted.
    """
    apart = float((row.float() - clean.float()).abs().max() / clean.float().abs().max().clamp(min=1e-6))
    if not apart <= IDENTITY_TOLERANCE.get(model.dtype, 1e-4):
        what = f"an unpatched row of a batch of {model.name} differs from the run alone by {apart:.2g}"
        raise UserError(what, where=str(model.dtype), remedy="use --dtype float32")
    return apart


def row_bytes(model: TappedModel, length: int) -> int:
    """Bytes that a row of S tokens takes while it runs: its residuals, the widest inner layer, its attention."""
    config = model.config
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    inner = max(int(getattr(config, "intermediate_size", 0) or 0), 4 * model.width)
    return model.dtype.itemsize * length * (6 * model.width + 3 * inner + 3 * heads * length)
