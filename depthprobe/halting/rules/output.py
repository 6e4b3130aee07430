"""Rules on what the model would answer now: they cost an output, with the coda where there is one, at every loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.halting.rules.base import ExitRule, LoopSignal, check_threshold


@dataclass(frozen=True, slots=True)
class OutputKL(ExitRule):
    """Leave at the first depth with KL(p_{d−1} ‖ p_d) < τ nats between successive outputs.

    Huginn's test (arXiv 2502.05171, τ = 5e-4), in the direction of its published code; that compares the first output
    with the uniform distribution, here there is nothing to compare it with, and the first depth is 2.
    """

    tau: float = 5e-4
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "kl"
    needs_output = True
    needs_previous_output = True
    first_depth = 2

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, math.inf)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The divergence in nats; infinite at depth 1."""
        if signal.previous_output_logits is None:
            return _infinite(signal)
        before, now = _log_probs(signal.previous_output_logits), _log_probs(signal.output_logits)
        # rounding can make the sum a little less than nothing
        divergence = (before.exp() * _where_any(before, before - now)).sum(-1).clamp_min(0.0)
        return torch.where(signal.at_least(self.first_depth), divergence, math.inf)

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) < self.tau

    def _value(self) -> str:
        return repr(self.tau)


@dataclass(frozen=True, slots=True)
class EntropyChange(ExitRule):
    """Leave at the first depth with |H(p_d) − H(p_{d−1})| < τ nats (Huginn, arXiv 2502.05171, there with τ = 1e-3)."""

    tau: float = 1e-3
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "entropy-change"
    needs_output = True
    needs_previous_output = True
    first_depth = 2

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, math.inf)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The change of the entropy in nats; infinite at depth 1."""
        if signal.previous_output_logits is None:
            return _infinite(signal)
        change = (_entropy(signal.output_logits) - _entropy(signal.previous_output_logits)).abs()
        return torch.where(signal.at_least(self.first_depth), change, math.inf)

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) < self.tau

    def _value(self) -> str:
        return repr(self.tau)


@dataclass(frozen=True, slots=True)
class OutputEntropy(ExitRule):
    """Leave at the first depth at which the output's entropy is below τ nats."""

    tau: float
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "entropy"
    needs_output = True

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, math.inf)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The entropy in nats."""
        return _entropy(signal.output_logits)

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) < self.tau

    def _value(self) -> str:
        return repr(self.tau)


@dataclass(frozen=True, slots=True)
class Confidence(ExitRule):
    """Leave at the first depth at which the most likely token has probability τ or more."""

    tau: float
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "confidence"
    needs_output = True

    def __post_init__(self) -> None:
        check_threshold(self.name, self.tau, 0.0, 1.0)
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The largest probability."""
        return _log_probs(signal.output_logits).amax(-1).exp()

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) >= self.tau

    def _value(self) -> str:
        return repr(self.tau)


def _log_probs(logits: Tensor | None) -> Tensor:
    assert logits is not None
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return wide.log_softmax(-1)


def _entropy(logits: Tensor | None) -> Tensor:
    log_p = _log_probs(logits)
    return -(log_p.exp() * _where_any(log_p, log_p)).sum(-1)


def _where_any(log_p: Tensor, value: Tensor) -> Tensor:
    """`value`, and 0 where the probability is none at all: 0 · (−∞) counts as 0."""
    return torch.where(log_p == -math.inf, 0.0, value)


def _infinite(signal: LoopSignal) -> Tensor:
    return torch.full(signal.shape, math.inf, device=signal.state.device)
