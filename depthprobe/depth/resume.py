"""`DepthModel.resume`: many changed forwards of one prompt, exactly, for as little as they cost.

The sweep is checked, cells that provably change nothing are filled from the clean run, and the others are run by
one of two engines: "suffix" recomputes only what a cell can change (`suffix`), "hooks" runs whole rows (`hooked`).
`plan_resume` says beforehand what that will take.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthprobe.depth.cells import Cell, Reach, Resumed, changes_nothing, check_cells, layer_of
from depthprobe.depth.coordinates import Coordinate, layer_points
from depthprobe.depth.cut_check import check_cuts
from depthprobe.depth.hooked import edited
from depthprobe.depth.reading import token_tensor
from depthprobe.depth.suffix import Climb
from depthprobe.depth.suffix_check import Support, support_of
from depthprobe.depth.suffix_memory import Fixed, Room, hooked_rows, row_bytes
from depthprobe.depth.suffix_plan import Row, end_of, row_of, work_of
from depthprobe.depth.suffix_record import Record, recorded
from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: Largest difference of an unpatched row from the clean run, as a share of the largest |state|, that another shape of
#: the batch explains: rounding in every layer, not in the head alone.
DRIFT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Bytes that a sweep may take beyond the loaded model unless it is told otherwise.
MAX_BYTES = 1 << 30
ENGINES = ("auto", "suffix", "hooks")


class _NotReproducedError(UserError):
    """An unpatched row did not reproduce the clean run."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked call of `resume`.

    Attributes:
        ids: int64 [S].
        cells: all of them.
        read: the tokens that are read; coordinates: where.
        reach: how far down that is.
        max_bytes: what a batch may take.
        support: how the suffix engine runs the model; None: by hooks.
    """

    ids: Tensor
    cells: tuple[Cell, ...]
    read: tuple[int, ...]
    coordinates: tuple[Coordinate, ...]
    reach: Reach
    max_bytes: int
    support: Support | None

    def fixed(self, model: TappedModel) -> Fixed:
        """What it holds all the time."""
        return Fixed.of(model, len(self.ids), self.cells, self.coordinates, len(self.read), self.support)


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What a sweep will take.

    Attributes:
        engine: "suffix" or "hooks".
        n_run: cells that run, at most: one whose values turn out to be those that stand there does not.
        n_filled: cells that cannot change what is read, wherever they are.
        n_batches: batches into which memory splits them, each with an unpatched row.
        token_layers, flops: as in `Resumed`, if all of n_run run.
        nbytes: memory at its highest, beyond the model and the cells; of which the result.
    """

    engine: str
    n_run: int
    n_filled: int
    n_batches: int
    token_layers: int
    flops: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """What an engine did; fields as in `Resumed`."""

    token_layers: int
    flops: float
    drift: float


def _checked(
    model: TappedModel, input_ids: Tensor, cells: Sequence[Cell], read: Sequence[int] | None,
    coordinates: Sequence[Coordinate] | None, engine: str, max_bytes: int,
) -> Sweep:  # fmt: skip
    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}'", remedy=f"one of {', '.join(ENGINES)}")
    if isinstance(input_ids, Tensor) and (input_ids.dim() != 1 or not len(input_ids)):
        raise UserError(f"input_ids have shape {tuple(input_ids.shape)}", remedy="give the tokens of one prompt")
    ids = token_tensor(input_ids[None] if isinstance(input_ids, Tensor) else input_ids, "input_ids")[0].to(model.device)
    length = len(ids)
    at = (length - 1,) if read is None else tuple(read)
    if not at or not all(0 <= p < length for p in at):
        raise UserError(f"the tokens to read are {at}", remedy=f"give some of 0 … {length - 1}")
    wanted = (model.axis[-1],) if coordinates is None else tuple(coordinates)
    if not wanted or not set(wanted) <= set(model.points):
        strange = next((point for point in wanted if point not in set(model.points)), None)
        what = "no coordinate is to be read" if strange is None else f"{model.name} has no depth {strange}"
        raise UserError(what, where="coordinates", remedy=f"it has {model.axis[0]} … {model.axis[-1]}")
    layers = map(layer_of, layer_points(model))
    check_cells(cells, model.points, layers, length, model.width, model.dtype, model.name)
    support = "hooks are asked for" if engine == "hooks" else support_of(model)
    if engine == "suffix" and isinstance(support, str):
        what = f"the suffix engine does not run {model.name}: {support}"
        raise UserError(what, remedy="take engine='hooks', or 'auto'")
    reach = Reach.of(model.taps, wanted)
    return Sweep(ids, tuple(cells), at, wanted, reach, max_bytes, None if isinstance(support, str) else support)


@torch.inference_mode()
def resume(
    model: TappedModel, input_ids: Tensor, cells: Sequence[Cell], read: Sequence[int] | None,
    coordinates: Sequence[Coordinate] | None, engine: str, max_bytes: int,
) -> Resumed:  # fmt: skip
    """See `DepthModel.resume`."""
    sweep = _checked(model, input_ids, cells, read, coordinates, engine, max_bytes)
    if sweep.fixed(model).nbytes > max_bytes:  # what is refused is refused before it takes the memory
        plan_resume(model, input_ids, cells, read, coordinates, engine, max_bytes)
    needed = {edit.coordinate for cell in cells for edit in cell.edits}
    record: Record | None = None
    with ExitStack() as stack:
        if sweep.support is not None:
            record = stack.enter_context(recorded(model, sweep.support.program, len(sweep.ids)))
        capture = model.capture(
            sweep.ids[None], positions="all", coordinates=tuple(needed.union(sweep.coordinates)), logits=False
        )
    stood = {point: state[0] for point, state in capture.states.items()}
    clean = {point: stood[point][list(sweep.read)] for point in sweep.coordinates}
    run = [n for n, cell in enumerate(cells) if not changes_nothing(cell, sweep.read, sweep.reach, stood)]
    states = {point: state.expand(len(cells), *state.shape).clone() for point, state in clean.items()}
    done, used = None, "suffix"
    if sweep.support is not None and record is not None:
        try:
            done = _by_suffix(model, sweep, sweep.support, run, record, clean, states)
        except _NotReproducedError:
            # an architecture that amplifies rounding, or a prompt that is masked in a way of its own
            if engine == "suffix":
                raise
    if done is None:
        done, used = _by_hooks(model, sweep, run, clean, states), "hooks"
    filled = len(cells) - len(run)
    return Resumed(states, clean, used, len(run), filled, done.token_layers, done.flops, done.drift)


@torch.inference_mode()
def plan_resume(
    model: TappedModel, input_ids: Tensor, cells: Sequence[Cell], read: Sequence[int] | None,
    coordinates: Sequence[Coordinate] | None, engine: str, max_bytes: int,
) -> ResumePlan:  # fmt: skip
    """See `DepthModel.plan_resume`."""
    sweep = _checked(model, input_ids, cells, read, coordinates, engine, max_bytes)
    run = [n for n, cell in enumerate(cells) if not changes_nothing(cell, sweep.read, sweep.reach, None)]
    filled, length, fixed = len(cells) - len(run), len(sweep.ids), sweep.fixed(model)
    layers = len(layer_points(model))
    if sweep.support is None:
        check_cuts(model, sweep.cells)
        rows = hooked_rows(model, length, fixed, max_bytes) if run else 1
        batches = -(-len(run) // rows)
        tokens = (len(run) + batches) * length
        nbytes = fixed.nbytes + (min(rows, len(run)) + bool(run)) * row_bytes(model, length)
        return ResumePlan(
            "hooks", len(run), filled, batches, tokens * layers, tokens * model.flops_per_token(length), nbytes
        )
    room, split = _split(model, sweep, sweep.support, run)
    program, sizes, latest, n_read = sweep.support.program, sweep.support.sizes, max(sweep.read), len(set(sweep.read))
    works = [work_of(rows, program, sizes, end_of(program, sweep.coordinates), sweep.read) for rows in split]
    token_layers, flops = sum(work.token_layers for work in works), sum(work.flops for work in works)
    nbytes = fixed.nbytes + max((room.nbytes(rows, latest, n_read) for rows in split), default=0)
    return ResumePlan("suffix", len(run), filled, len(split), token_layers, flops, nbytes)


def _split(
    model: TappedModel, sweep: Sweep, support: Support, run: Sequence[int]
) -> tuple[Room, list[tuple[Row, ...]]]:
    """The climbs, and the room that each has."""
    program, latest, length, n_read = support.program, max(sweep.read), len(sweep.ids), len(set(sweep.read))
    end = end_of(program, sweep.coordinates)
    found = [row_of(sweep.cells[n], n, program, end, latest) for n in run]
    rows = [row for row in found if row is not None]
    room = Room.of(model, support, length, sweep.fixed(model), rows, latest, n_read, sweep.max_bytes)
    return room, list(room.climbs(rows, latest, n_read))


def _by_suffix(
    model: TappedModel, sweep: Sweep, support: Support, run: Sequence[int], record: Record,
    clean: dict[Coordinate, Tensor], states: dict[Coordinate, Tensor],
) -> Done:  # fmt: skip
    if record.why is not None:
        what = f"the suffix engine cannot run this prompt: {record.why}"
        raise _NotReproducedError(what, remedy="take engine='hooks'")
    token_layers, flops, drift = 0, 0.0, 0.0
    end = end_of(support.program, sweep.coordinates)
    room, split = _split(model, sweep, support, run)
    for rows in split:
        unpatched: dict[Coordinate, Tensor] = {point: state.clone() for point, state in clean.items()}

        def take(point: Coordinate, numbers: list[int], which: int, read: Tensor, own=unpatched) -> None:
            if -1 in numbers:
                at = numbers.index(-1)
                own[point][which] = read[at]
                numbers, read = numbers[:at] + numbers[at + 1 :], torch.cat((read[:at], read[at + 1 :]))
            states[point][numbers, which] = read

        Climb(model, support.program, record, rows, end, sweep.read, sweep.coordinates, room.chunk, take).run()
        for point, state in unpatched.items():
            drift = max(drift, drift_of(model, state, clean[point]))
        work = work_of(rows, support.program, support.sizes, end, sweep.read)
        token_layers, flops = token_layers + work.token_layers, flops + work.flops
    return Done(token_layers, flops, drift)


def _by_hooks(
    model: TappedModel, sweep: Sweep, run: Sequence[int], clean: dict[Coordinate, Tensor],
    states: dict[Coordinate, Tensor],
) -> Done:  # fmt: skip
    check_cuts(model, [sweep.cells[n] for n in run])
    length, drift, rows_run = len(sweep.ids), 0.0, 0
    rows = hooked_rows(model, length, sweep.fixed(model), sweep.max_bytes) if run else 1
    layers = len(layer_points(model))
    index = torch.tensor(sweep.read, device=model.device)
    for start in range(0, len(run), rows):
        numbers = list(run[start : start + rows])
        part = [None, *(sweep.cells[n] for n in numbers)]  # the unpatched row first
        batch = sweep.ids.expand(len(part), -1)
        with edited(model.model, model.taps, part, length, model.name):
            capture = model.capture(
                batch, positions=index.expand(len(part), -1), coordinates=sweep.coordinates, logits=False
            )
        for point, state in capture.states.items():
            drift = max(drift, drift_of(model, state[0], clean[point]))
            states[point][numbers] = state[1:]
        rows_run += len(part)
    tokens = rows_run * length
    return Done(tokens * layers, tokens * model.flops_per_token(length), drift)


def drift_of(model: TappedModel, row: Tensor, clean: Tensor) -> float:
    """How far an unpatched row is from the clean run, as a share of the largest |state|.

    Raises:
        UserError: farther than rounding in the model's dtype explains: then no cell of the batch can be trusted.
    """
    apart = float((row.float() - clean.float()).abs().max() / clean.float().abs().max().clamp(min=1e-6))
    if not apart <= DRIFT_TOLERANCE.get(model.dtype, 1e-4):
        what = f"an unpatched row of a batch of {model.name} differs from the run alone by {apart:.2g}"
        remedy = "the model does not give the same twice: look for dropout, noise or a state that it keeps"
        if model.dtype in (torch.float16, torch.bfloat16):
            remedy = "use --dtype float32"
        raise _NotReproducedError(what, where=str(model.dtype).removeprefix("torch."), remedy=remedy)
    return apart
