"""What each part adds to the residual: ‖Δ‖ / ‖h‖ and the cosine of Δ and h, h being what it got.

As in "Do Language Models Use Their Depth Efficiently?" (Csordás, Manning and Potts 2025, 2505.13898), section 3.1. A
ratio near 0 is a layer that does little; a cosine below 0 one that erases, above 0 one that amplifies what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from depthprobe.depth import DepthModel
from depthprobe.effective.parts import Part

T = TypeVar("T")
#: Bytes of states that are held at once; what needs more is run again for the rest.
STATE_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class Contribution:
    """Of one part; floats, natural ratios.

    Attributes:
        norm, cosine: at the last token.
        norm_all, cosine_all: averaged over the tokens that are counted.
        idle_last, idle_before: skipping it changes nothing, bit for bit, at the last token; at those before it.
    """

    norm: float
    cosine: float
    norm_all: float
    cosine_all: float
    idle_last: bool
    idle_before: bool


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Runs of at most `size` (at least 1)."""
    size = max(1, size)
    for start in range(0, len(items), size):
        yield items[start : start + size]


@torch.inference_mode()
def contributions(
    model: DepthModel, ids: Tensor, parts: Sequence[Part], spared: int, state_bytes: int = STATE_BYTES
) -> list[Contribution]:
    """One a part, at the tokens of one prompt.

    Args:
        ids: int64 [S], without padding.
        spared: so many tokens at the front are not averaged over.
    """
    each = 2 * len(ids) * model.width * model.dtype.itemsize
    found: list[Contribution] = []
    for some in chunks(parts, state_bytes // each):
        points = tuple({point for part in some for point in (part.entered, part.left)})
        states = model.capture(ids[None], positions="all", coordinates=points, logits=False).states
        found += [_contribution(part, states[part.entered][0], states[part.left][0], spared) for part in some]
    return found


def _contribution(part: Part, entered: Tensor, left: Tensor, spared: int) -> Contribution:
    same = (part.skipped_state(entered) == left).all(-1).tolist()  # [S]
    h = entered.float()
    delta = left.float() - h
    size, base = delta.norm(dim=-1), h.norm(dim=-1)
    ratio = size / base.clamp(min=torch.finfo(torch.float32).tiny)
    cosine = torch.linalg.vecdot(delta, h) / (size * base).clamp(min=torch.finfo(torch.float32).tiny)
    counted = slice(min(spared, len(h) - 1), None)
    return Contribution(
        float(ratio[-1]), float(cosine[-1]), float(ratio[counted].mean()), float(cosine[counted].mean()),
        same[-1], all(same[:-1]),
    )  # fmt: skip
