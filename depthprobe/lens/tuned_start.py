"""Where the training of a tuned lens begins: translators that least squares find, without the head.

The KL of an early depth falls slowly from the identity, and each step of it costs the head once for every depth and
position. The affine map that takes a state nearest to the state that the model ends in costs one solve a depth (Yom
Din et al. 2023, 2303.09435, "Jump to Conclusions"), and is close already. The ridge draws to the identity, so that
with little text the start is the logit lens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthprobe.depth import DepthModel

#: Ridge, as a share of the mean square of the inputs, times d / positions.
_RIDGE = 0.1
#: States are the same for a readout if they differ, once normed, by so little of their largest value.
_SAME = 1e-5


class Start:
    """Sums over states that are added bit by bit, and the translators that follow from them.

    Args:
        first: float32 [T + 1, N, d], states of all depths at some positions; the last depth stands last.
        inner, outer: s [T, d] and σ [T, 1] of the trainer: what is found are A' and b' of x + σ·(A'·(x / s) + b').
    """

    def __init__(self, model: DepthModel, first: Tensor, inner: Tensor, outer: Tensor) -> None:
        self._inner, self._outer = inner, outer
        places, d = inner.shape
        self.exact = same_readout(model, first)
        normed = [model.is_normed(c) for c in model.axis]
        self._goals = [_goal(normed, self.exact, place) for place in range(places)]
        self._gram = inner.new_zeros(places, d + 1, d + 1)
        self._cross = inner.new_zeros(places, d + 1, d)
        self._mass = inner.new_zeros(places)
        self.count = 0

    def add(self, states: Tensor) -> None:
        """Take in states [T + 1, N, d]."""
        self.count += states.shape[1]
        for place, goal in enumerate(self._goals):
            if goal is None:
                continue
            # a norm forgets the length of a state, so that the error is counted as a share of it
            weight = states[goal].square().mean(-1, keepdim=True).clamp(min=1e-24).rsqrt()
            ones = weight.new_ones(len(weight), 1)
            inputs = torch.cat([states[place] / self._inner[place], ones], dim=1) * weight
            gap = (states[goal] - states[place]) / self._outer[place] * weight
            self._gram[place].addmm_(inputs.T, inputs)
            self._cross[place].addmm_(inputs.T, gap)
            self._mass[place] += weight.square().sum()

    def solve(self) -> tuple[Tensor, Tensor]:
        """A' [T, d, d] and b' [T, d]; zero where a depth says what the model says, or where nothing was added."""
        places, d = self._inner.shape
        weight, bias = self._inner.new_zeros(places, d, d), self._inner.new_zeros(places, d)
        for place, goal in enumerate(self._goals):
            if goal is None or not self.count:
                continue
            gram = self._gram[place].double()
            ridge = torch.full((d + 1,), _RIDGE * d / self.count, dtype=torch.float64, device=gram.device)
            ridge[-1] = 1e-9  # the offset is free
            gram.diagonal().add_(ridge * self._mass[place])
            found = torch.linalg.solve(gram, self._cross[place].double()).float()  # [d + 1, d]
            weight[place], bias[place] = found[:-1].T, found[-1]
        return weight, bias


def same_readout(model: DepthModel, states: Tensor) -> list[bool]:
    """For each depth but the last, whether its readout is the last one's, as that of a residual before its loop's norm.

    states: float32 [T + 1, N, d].
    """
    last = model.normed(states[-1], model.axis[-1])
    limit = _SAME * float(last.abs().max().clamp(min=1e-12))
    return [
        float((model.normed(state, c) - last).abs().max()) <= limit
        for state, c in zip(states[:-1], model.axis[:-1], strict=True)
    ]


def _goal(normed: Sequence[bool], exact: Sequence[bool], place: int) -> int | None:
    """The depth whose state another one is to become: the last, or one that reads alike, of those normed as it is."""
    if exact[place]:
        return None
    ends = [len(exact), *(other for other in reversed(range(len(exact))) if exact[other])]
    return next((end for end in ends if normed[end] == normed[place]), None)
