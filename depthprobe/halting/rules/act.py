"""Adaptive computation time: halting scores are added up, and the output is the weighted mean of the states.

Graves (arXiv 1603.08983), per token as in the Universal Transformer (arXiv 1807.03819). h_n = σ(gate), N = min{n:
Σ_{k≤n} h_k ≥ 1 − ε}, remainder R = 1 − Σ_{k<N} h_k; weights p_n = h_n for n < N and p_N = R; the output is Σ p_n s_n.
h is added up as it stands: it is no hazard, and 1 − ∏(1 − h) plays no part.

A halted token's *state* is copied forward, and its keys and values are projected from it anew at every later loop.
That is not ragged KV, where they stay as they were, and no forward that runs all positions at once by the latter's
rule equals it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.halting.distribution import check_min_depth
from depthprobe.halting.rules.base import ExitRule, LoopSignal, check_threshold


@dataclass(frozen=True, slots=True)
class ACT(ExitRule):
    """Leave at the first depth with Σ_{k≤d} λ_k ≥ 1 − ε; see this module for what becomes of the state.

    Where a least depth keeps a token that has used up its mass, the loops that it is made to run weigh nothing.
    """

    epsilon: float = 0.01
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "act"
    needs_gate = True
    needs_halting_sum = True
    reprojects = True

    def __post_init__(self) -> None:
        check_threshold(self.name, self.epsilon, 0.0, 1.0, low_too=True)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """Σ_{k≤d} λ_k."""
        assert signal.halting_sum is not None
        return signal.halting_sum

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) >= 1.0 - self.epsilon

    def weight(self, signal: LoopSignal, leaves: Tensor) -> Tensor:
        """Weight of the state after this loop, float `[...]`: λ_d of a token that stays, the remainder of one that
        leaves (bool `[...]`, the last loop included). Over a token's loops they sum to 1."""
        assert signal.gate_logit is not None and signal.halting_sum is not None
        score = torch.sigmoid(signal.gate_logit.to(signal.halting_sum.dtype))
        left = (1.0 - (signal.halting_sum - score)).clamp_min(0.0)
        return torch.where(leaves, left, torch.minimum(score, left))

    def _value(self) -> str:
        return repr(self.epsilon)


def act_weights(lambdas: Tensor, epsilon: float = 0.01, min_depth: int = 1) -> tuple[Tensor, Tensor]:
    """Weights and depths of ACT in closed form.

    Args:
        lambdas: float `[..., U]`, the halting scores h in [0, 1].
        epsilon: in [0, 1].

    Returns:
        p, float `[..., U]`, 0 after the exit, sums to 1; and N, int64 `[...]`. The ponder cost is N + R, where R is p
        at depth N. With h = (0.3, 0.5, 0.4), ε = 0.01: p = (0.3, 0.5, 0.2), N = 3, cost 3.2.
    """
    check_threshold("act", epsilon, 0.0, 1.0, low_too=True)
    n_loops = lambdas.shape[-1]
    check_min_depth(min_depth, n_loops)
    total = lambdas.cumsum(-1)
    done = total >= 1.0 - epsilon
    done[..., : min_depth - 1] = False
    done[..., -1] = True
    exits = done.to(torch.uint8).argmax(-1) + 1
    left = (1.0 - F.pad(total[..., :-1], (1, 0))).clamp_min(0.0)  # mass before each loop
    depth = torch.arange(1, n_loops + 1, device=lambdas.device)
    last = depth == exits.unsqueeze(-1)
    weights = torch.where(last, left, torch.minimum(lambdas, left))
    return weights.masked_fill(depth > exits.unsqueeze(-1), 0.0), exits
