"""Rules on the loop state itself, for models without a gate: leave when it hardly moves any more."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.halting.rules.base import ExitRule, LoopSignal, check_threshold


@dataclass(frozen=True, slots=True)
class RelativeL2(ExitRule):
    """Leave at the first depth with ‖s_d − s_{d−1}‖ / ‖s_d‖ < τ (Huginn, arXiv 2502.05171, there with τ = 0.03).

    The denominator is that of the published code. The first depth with a step is 2.
    """

    tau: float = 0.03
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "l2"
    needs_previous = True
    first_depth = 2

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, math.inf)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The length of the last step over that of the state, float32 or better; infinite at depth 1."""
        if signal.previous is None:
            return _infinite(signal)
        state = _wide(signal.state)
        return _from(signal, self.first_depth, _ratio(state - _wide(signal.previous), state))

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) < self.tau

    def _value(self) -> str:
        return repr(self.tau)


@dataclass(frozen=True, slots=True)
class SecondOrder(ExitRule):
    """Leave at the first depth with ‖Δ_d − Δ_{d−1}‖ / ‖s_d‖ < τ, Δ_d = s_d − s_{d−1}: the step stops changing.

    The acceleration is that of Two-Scale Latent Dynamics (arXiv 2509.23314). It is taken relative to the state, so
    that one τ serves models of any scale; that paper also waits for two loops in a row, which is not done here.
    The first depth with two steps is 3.
    """

    tau: float
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "second"
    needs_previous = True
    needs_second_previous = True
    first_depth = 3

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, math.inf)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The change of the step over the length of the state, float32 or better; infinite up to depth 2."""
        if signal.previous is None or signal.second_previous is None:
            return _infinite(signal)
        state, previous = _wide(signal.state), _wide(signal.previous)
        change = (state - previous) - (previous - _wide(signal.second_previous))
        return _from(signal, self.first_depth, _ratio(change, state))

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) < self.tau

    def _value(self) -> str:
        return repr(self.tau)


def _ratio(step: Tensor, state: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(state, dim=-1)
    return torch.linalg.vector_norm(step, dim=-1) / size.clamp_min(torch.finfo(size.dtype).tiny)


def _from(signal: LoopSignal, depth: int, value: Tensor) -> Tensor:
    # what rows at smaller depths hold in place of the states before is not theirs
    return torch.where(signal.at_least(depth), value, math.inf)


def _infinite(signal: LoopSignal) -> Tensor:
    return torch.full(signal.shape, math.inf, device=signal.state.device)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
