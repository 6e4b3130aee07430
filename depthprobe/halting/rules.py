"""Exit rules: objects that are asked after each loop which tokens leave.

A rule sees a `LoopSignal` and answers with a bool tensor, True where a token leaves now. It keeps no state of
its own: what has to be carried from loop to loop (the log-survival of the gate) is in the signal, so that the
same object serves a forward over whole sequences, where all tokens are at one depth, and a batch whose rows
are at different depths. Whoever asks lets every token that is still there leave after the last loop, and
ignores answers for those that left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting.distribution import check_min_depth, check_q, reached


@dataclass(frozen=True, slots=True)
class LoopSignal:
    """What a rule may look at after a loop. `[...]` is the shape of the tokens, e.g. `[B, S]` or `[rows]`.

    Fields:
        depth: the loop just finished, 1…U: an int where all tokens share it, else int64 `[...]`.
        max_depth: U.
        state: float `[..., d]`, the loop state (normed where the model norms after every loop).
        previous: float `[..., d]`, the state before this loop; None at the first.
        gate_logit: float `[...]`, logit of λ at this depth; None unless some rule asked for it.
        log_survival: float32 `[...]`, log ∏_{j≤depth}(1 − λ_j); None unless some rule asked for it.
    """

    depth: int | Tensor
    max_depth: int
    state: Tensor
    previous: Tensor | None = None
    gate_logit: Tensor | None = None
    log_survival: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens."""
        return self.state.shape[:-1]

    def at_least(self, depth: int) -> Tensor:
        """bool `[...]`: whether each token has run at least `depth` loops."""
        if isinstance(self.depth, Tensor):
            return self.depth >= depth
        return torch.full(self.shape, self.depth >= depth, dtype=torch.bool, device=self.state.device)


@runtime_checkable
class ExitRule(Protocol):
    """The interface of a rule.

    Attributes:
        needs_gate: whether the signal must carry `gate_logit` and `log_survival`.
        horizon: 0 where the answer after loop d decides about loop d + 1.
    """

    @property
    def needs_gate(self) -> bool: ...

    @property
    def horizon(self) -> int: ...

    def __call__(self, signal: LoopSignal) -> Tensor:
        """bool `[...]`, True where a token leaves after this loop."""
        ...

    def check(self, n_loops: int) -> None:
        """Raise `UserError` if the rule cannot serve a model of `n_loops` loops."""
        ...


@dataclass(frozen=True, slots=True)
class QExit:
    """Leave at the first depth, not below `min_depth`, whose CDF reaches q (Ouro, arXiv 2510.25741)."""

    q: float
    min_depth: int = 1
    needs_gate = True
    horizon = 0

    def __post_init__(self) -> None:
        check_q(self.q)
        check_min_depth(self.min_depth)

    def __call__(self, signal: LoopSignal) -> Tensor:
        assert signal.log_survival is not None
        return reached(signal.log_survival, self.q) & signal.at_least(self.min_depth)

    def check(self, n_loops: int) -> None:
        check_min_depth(self.min_depth, n_loops)


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Every token leaves after loop `depth`."""

    depth: int
    needs_gate = False
    horizon = 0

    def __post_init__(self) -> None:
        check_min_depth(self.depth)

    def __call__(self, signal: LoopSignal) -> Tensor:
        return signal.at_least(self.depth)

    def check(self, n_loops: int) -> None:
        check_min_depth(self.depth, n_loops)


@dataclass(frozen=True, slots=True, eq=False)
class SampledExit:
    """Leave after loop d with probability λ_d, as PonderNet (arXiv 2107.05407) does at inference.

    The depths are samples of the stopping distribution, which is also what ragged-aware training draws
    (Ragged KV, arXiv 2610.09013). Below `min_depth` nobody leaves, which moves that mass to later loops.
    """

    min_depth: int = 1
    generator: torch.Generator | None = None
    needs_gate = True
    horizon = 0

    def __post_init__(self) -> None:
        check_min_depth(self.min_depth)

    def __call__(self, signal: LoopSignal) -> Tensor:
        assert signal.gate_logit is not None
        stop = torch.sigmoid(signal.gate_logit.detach().float())
        drawn = torch.rand(stop.shape, generator=self.generator, device=stop.device)
        return (drawn < stop) & signal.at_least(self.min_depth)

    def check(self, n_loops: int) -> None:
        check_min_depth(self.min_depth, n_loops)


@dataclass(frozen=True, slots=True, eq=False)
class GivenExits:
    """Each token leaves at a known depth: recorded exits played back. `exits` is integer `[...]`."""

    exits: Tensor
    needs_gate = False
    horizon = 0

    def __call__(self, signal: LoopSignal) -> Tensor:
        return self.exits <= signal.depth

    def check(self, n_loops: int) -> None:
        if self.exits.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
            raise UserError(f"exit depths are {self.exits.dtype}, not integers", where="exits")
        low, high = (int(x) for x in self.exits.aminmax()) if self.exits.numel() else (1, 1)
        if low < 1 or high > n_loops:
            raise UserError(f"exit depths go from {low} to {high}, not within 1 to {n_loops}", where="exits")
