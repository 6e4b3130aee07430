"""What each part adds to the residual: ‖Δ‖ / ‖h‖ and the cosine of Δ and h, h being what it got.

As in "Do Language Models Use Their Depth Efficiently?" (Csordás, Manning and Potts 2025, 2505.13898), of whole blocks.
A ratio near 0 is a layer that does little; a cosine below 0 one that erases, above 0 one that amplifies what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth import DepthModel
from depthprobe.effective.parts import STATE_BYTES, Part, around


@dataclass(frozen=True, slots=True)
class Contribution:
    """Of one part.

    Attributes:
        norm, cosine: ‖Δ‖ / ‖h‖ and cos(Δ, h) at the last token; the cosine is 0 where either has no length.
        norm_all, cosine_all: averaged over the tokens that are counted.
    """

    norm: float
    cosine: float
    norm_all: float
    cosine_all: float


def contributions(
    model: DepthModel, ids: Tensor, parts: Sequence[Part], spared: int, state_bytes: int = STATE_BYTES
) -> list[Contribution]:
    """One a part, at the tokens of one prompt, in float32.

    Args:
        ids: int64 [S], without padding.
        spared: so many tokens at the front are not averaged over.
        state_bytes: of states that are held at once.
    """
    return [_of(before, behind, spared) for _, before, behind in around(model, ids, parts, state_bytes)]


def _of(before: Tensor, behind: Tensor, spared: int) -> Contribution:
    h = before.float()
    delta = behind.float() - h
    size, base = delta.norm(dim=-1), h.norm(dim=-1)
    tiny = torch.finfo(torch.float32).tiny
    ratio, cosine = size / base.clamp(min=tiny), torch.linalg.vecdot(delta, h) / (size * base).clamp(min=tiny)
    return Contribution(
        float(ratio[-1]), float(cosine[-1]), float(ratio[spared:].mean()), float(cosine[spared:].mean())
    )
