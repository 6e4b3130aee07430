"""Rules on the exit gate: its CDF, its hazard, or a draw from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.halting.distribution import check_q, reached
from depthprobe.halting.rules.base import ExitRule, LoopSignal, check_threshold
from depthprobe.halting.uniforms import for_loop


@dataclass(frozen=True, slots=True)
class QExit(ExitRule):
    """Leave at the first depth, not below the least one, whose CDF reaches q (Ouro, arXiv 2510.25741)."""

    q: float
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "q"
    needs_gate = True

    def __post_init__(self) -> None:
        check_q(self.q)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The CDF at this depth."""
        assert signal.log_survival is not None
        return -torch.expm1(signal.log_survival)

    def met(self, signal: LoopSignal) -> Tensor:
        assert signal.log_survival is not None
        return reached(signal.log_survival, self.q)

    def _value(self) -> str:
        return repr(self.q)


@dataclass(frozen=True, slots=True)
class HazardThreshold(ExitRule):
    """Leave at the first depth with λ_d ≥ τ, whatever the loops before said: not the Q-exit, which compares the CDF.

    The comparison is made on logits: λ that round to 1 are still told apart, and τ = 1 lets nobody leave.
    """

    tau: float
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "hazard"
    needs_gate = True

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, 1.0)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """λ at this depth."""
        assert signal.gate_logit is not None
        return torch.sigmoid(_wide(signal.gate_logit))

    def met(self, signal: LoopSignal) -> Tensor:
        assert signal.gate_logit is not None
        bound = math.inf if self.tau == 1.0 else math.log(self.tau) - math.log1p(-self.tau)
        return _wide(signal.gate_logit) >= bound

    def _value(self) -> str:
        return repr(self.tau)


@dataclass(frozen=True, slots=True, eq=False)
class SampledExit(ExitRule):
    """Leave after loop d with probability λ_d, as PonderNet (arXiv 2107.05407) does at inference.

    The depths are samples of the stopping distribution, which is also what ragged-aware training draws (Ragged KV,
    arXiv 2610.09013). Below the least depth nobody leaves, which moves that mass to later loops.

    With `uniform` in the signal, a token's exit depends on that number and on its gate alone; every loop has a draw of
    its own, made of it. Without it the draws come from `generator`, or from torch's own.
    """

    min_depth: int = 1
    generator: torch.Generator | None = None
    min_depth_prompt: int | None = None
    name = "ponder"
    needs_gate = True
    sampled = True

    def __post_init__(self) -> None:
        self._check_least()

    @property
    def needs_uniform(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.generator is None

    def criterion(self, signal: LoopSignal) -> Tensor:
        """λ at this depth."""
        assert signal.gate_logit is not None
        return torch.sigmoid(_wide(signal.gate_logit.detach()))

    def met(self, signal: LoopSignal) -> Tensor:
        stop = self.criterion(signal)
        if signal.uniform is not None:
            return for_loop(signal.uniform, signal.depth) < stop
        return torch.rand(stop.shape, generator=self.generator, device=stop.device) < stop


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
