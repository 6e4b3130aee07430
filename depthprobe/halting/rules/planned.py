"""Rules whose exits are known before the first loop: all loops, a fixed depth, recorded depths, drawn depths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting.distribution import check_min_depth
from depthprobe.halting.rules.base import ExitRule, LoopSignal

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True, slots=True)
class FullDepth(ExitRule):
    """Nobody leaves before the last loop."""

    name = "full"
    planned = True

    def criterion(self, signal: LoopSignal) -> Tensor:
        """U."""
        return torch.full(signal.shape, float(signal.max_depth), device=signal.state.device)

    def met(self, signal: LoopSignal) -> Tensor:
        return signal.at_least(signal.max_depth)


@dataclass(frozen=True, slots=True)
class FixedDepth(ExitRule):
    """Every token leaves after loop `depth`."""

    depth: int
    name = "fixed"
    planned = True

    def __post_init__(self) -> None:
        check_min_depth(self.depth)

    def criterion(self, signal: LoopSignal) -> Tensor:
        """`depth`."""
        return torch.full(signal.shape, float(self.depth), device=signal.state.device)

    def met(self, signal: LoopSignal) -> Tensor:
        return signal.at_least(self.depth)

    def least_depth(self, prompt: bool = False) -> int:
        return self.depth

    def check(self, n_loops: int) -> None:
        check_min_depth(self.depth, n_loops)

    def _value(self) -> str:
        return str(self.depth)


@dataclass(frozen=True, slots=True, eq=False)
class GivenExits(ExitRule):
    """Each token leaves at a known depth: recorded exits played back. `exits` is integer, of the tokens' shape."""

    exits: Tensor
    name = "given"
    planned = True

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The depth of each token."""
        return self.exits.to(signal.state.device, torch.float32).expand(signal.shape)

    def met(self, signal: LoopSignal) -> Tensor:
        return self.exits <= signal.depth

    def check(self, n_loops: int) -> None:
        if self.exits.dtype not in _INTEGERS:
            raise UserError(f"exit depths are {self.exits.dtype}, not integers", where="exits")
        low, high = (int(x) for x in self.exits.aminmax()) if self.exits.numel() else (1, 1)
        if low < 1 or high > n_loops:
            raise UserError(f"exit depths go from {low} to {high}, not within 1 to {n_loops}", where="exits")


@dataclass(frozen=True, slots=True)
class Replay(ExitRule):
    """Each token leaves at the depth that the signal gives: recorded exits played back where rows come and go."""

    name = "replay"
    planned = True
    needs_given = True

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The depth of each token."""
        assert signal.given is not None
        return signal.given.to(torch.float32)

    def met(self, signal: LoopSignal) -> Tensor:
        assert signal.given is not None
        return signal.given <= signal.depth


@dataclass(frozen=True, slots=True)
class RandomExit(ExitRule):
    """Depths drawn from one distribution for all tokens, independently of what they are.

    A token's depth is the inverse of the distribution at the signal's `uniform`; who would leave before the least
    depth leaves there.

    Args:
        probabilities: of depths 1…U; they sum to 1.
    """

    probabilities: tuple[float, ...]
    min_depth: int = 1
    min_depth_prompt: int | None = None
    name = "random"
    planned = True
    needs_uniform = True
    sampled = True

    def __post_init__(self) -> None:
        if not self.probabilities or not all(0.0 <= p <= 1.0 for p in self.probabilities):
            raise UserError("a probability is not in [0, 1]", where="exit rule random")
        if abs(math.fsum(self.probabilities) - 1.0) > 1e-6:
            total = math.fsum(self.probabilities)
            raise UserError(f"the probabilities sum to {total:g}, not to 1", where="exit rule random")
        self._check_least()

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The depth that was drawn, before the least depth."""
        uniform = signal.uniform
        if uniform is None:
            raise UserError(
                "random exits need a number for every token", where="exit rule random", remedy="give exit_seed"
            )
        below = torch.tensor(self.probabilities, dtype=torch.float64, device=uniform.device).cumsum(0)
        last = max(d for d, p in enumerate(self.probabilities, 1) if p > 0.0)  # the sum may round to less than 1
        drawn = torch.searchsorted(below, uniform.to(torch.float64).contiguous(), right=True) + 1
        return drawn.clamp_max(last).to(torch.float32)

    def met(self, signal: LoopSignal) -> Tensor:
        return self.criterion(signal) <= signal.depth

    def check(self, n_loops: int) -> None:
        if len(self.probabilities) != n_loops:
            what = f"there are {len(self.probabilities)} probabilities and {n_loops} loops"
            raise UserError(what, where="exit rule random", remedy="give one for each loop")
        ExitRule.check(self, n_loops)

    def _value(self) -> str:
        return "/".join(repr(p) for p in self.probabilities)
