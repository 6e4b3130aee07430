"""Whether the suffix engine can run a model, tried once: perturbed rows against the same by hooks.

They are read at all tokens, and again at the last alone: only then is the last block narrowed to what is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthprobe.depth.cells import Cell, Edit
from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.hooked import edited
from depthprobe.depth.suffix import Climb
from depthprobe.depth.suffix_plan import Row, Size, end_of, row_of
from depthprobe.depth.suffix_program import Program, program_of
from depthprobe.depth.suffix_record import recorded
from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: Tokens of the prompt that the engine is tried on, and those that its rows change: two rows of one start, one alone.
_LENGTH, _CHANGED = 9, (3, 3, 6)
#: Largest difference, as a share of the largest |state|, that is put down to rounding: some models amplify it.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Support:
    """What the suffix engine knows about a model.

    Attributes:
        program: its steps; sizes: step → what each block weighs.
    """

    program: Program
    sizes: dict[int, Size]


def support_of(model: TappedModel) -> Support | str:
    """How the engine runs a model, or why it does not; found once a model."""
    if model._suffix is None:
        model._suffix = _tried(model)
    return model._suffix


@torch.inference_mode()
def _tried(model: TappedModel) -> Support | str:
    if model.route == "transformer-lens":
        return "TransformerLens' bridge computes its attention itself"
    known = model._embedded or model.vocab_size
    ids = torch.arange(1, _LENGTH + 1, device=model.device) % known
    program = program_of(model, ids)
    if isinstance(program, str):
        return program
    points = tuple(point for point in model.points if point.site != "final_state")
    with recorded(model, program, _LENGTH, weigh=True) as record:
        clean = model.capture(ids[None], positions="all", coordinates=points, logits=False)
    if record.why is not None:
        return record.why
    cells = [_perturbed(points[0], clean.states[points[0]][0], token, n) for n, token in enumerate(_CHANGED)]
    with edited(model.model, model.taps, cells, _LENGTH, model.name):
        whole = model.capture(ids.expand(len(cells), -1), positions="all", coordinates=points, logits=False)
    end = end_of(program, points)
    rows: list[Row] = []
    for number, cell in enumerate(cells):
        row = row_of(cell, number, program, end, _LENGTH - 1)
        assert row is not None
        rows.append(row)
    allowed = _ROUNDING.get(model.dtype, 1e-3)
    for read in (range(_LENGTH), (_LENGTH - 1,)):
        found = {point: clean.states[point][:, list(read)].repeat(len(cells), 1, 1) for point in points}

        def take(point: Coordinate, numbers: list[int], which: int, states: Tensor, found=found) -> None:
            found[point][numbers, which] = states

        try:
            Climb(model, program, record, rows, end, read, points, 1 << 20, take).run()
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, UserError) as error:
            # whatever the code of an architecture trips over when it is given a part of a row
            why = str(error).splitlines()[0][:120]
            return f"its layers do not run on a part of a row: {type(error).__name__}: {why}"
        for point in points:
            theirs = whole.states[point][:, list(read)].float()
            apart = float((found[point].float() - theirs).abs().max())
            if not apart <= allowed * float(whole.states[point].float().abs().max().clamp(min=1e-6)):
                return f"a part of a row gives another state at {point} than the whole row"
    return Support(program, record.sizes)


def _perturbed(point: Coordinate, states: Tensor, token: int, seed: int) -> Cell:
    noise = torch.randn(1, states.shape[-1], generator=torch.Generator().manual_seed(seed))
    scale = states.float().std().cpu().clamp(min=1e-3)
    return Cell((Edit(point, (token,), (noise * scale).to(states.device, states.dtype)),))
