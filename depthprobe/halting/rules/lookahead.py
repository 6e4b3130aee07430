"""Lookahead: the decision after loop d is about loop d + 1 (Continuous Depth Batching, arXiv 2608.09444)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting.head import LookaheadHead
from depthprobe.halting.rules.base import ExitRule, LoopSignal

_TAKEN_OVER = (
    "needs_gate", "needs_previous", "needs_second_previous", "needs_output", "needs_previous_output", "needs_uniform",
    "needs_given", "sampled", "planned", "min_depth", "min_depth_prompt",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Lookahead(ExitRule):
    """Another rule, decided one loop ahead: tokens marked after loop d run loop d + 1 and leave then.

    * A rule on the gate is asked about depth d + 1 with what `head` predicts of λ there: the gate's own survival up to
      d times 1 − λ̂. Where the head is right, the exits are those of the rule, from depth 2 on.
    * A rule on states or outputs is only late by one loop: its answer after d counts after d + 1, so that its first
      depth is one more than by itself.
    * A planned rule knows anyway.

    Least depths are of the depth at which a token leaves.

    Raises:
        UserError: a gate rule without a head, a rule that looks ahead already, or ACT.
    """

    rule: ExitRule
    head: LookaheadHead | None = None
    name = "lookahead"
    horizon = 1

    def __post_init__(self) -> None:
        where = f"exit rule lookahead:{self.rule.name}"
        if self.rule.horizon:
            raise UserError("the rule looks ahead already", where=where)
        if self.rule.reprojects:
            what = "ACT weighs the last state by what is left, so it cannot learn of its exit later"
            raise UserError(what, where=where, remedy="take act without lookahead")
        if self.rule.needs_gate and self.head is None:
            remedy = "train one with `depthprobe train lookahead MODEL`"
            raise UserError("a rule on the gate needs a lookahead head", where=where, remedy=remedy)
        for attribute in _TAKEN_OVER:
            object.__setattr__(self, attribute, getattr(self.rule, attribute))
        object.__setattr__(self, "needs_lookahead", self.rule.needs_gate)
        predicts = self.rule.needs_gate or self.rule.planned
        object.__setattr__(self, "first_depth", 2 if predicts else self.rule.first_depth + 1)

    def criterion(self, signal: LoopSignal) -> Tensor:
        """The rule's own number, of depth d + 1 where it is predicted or planned, else of d."""
        return self.rule.criterion(self._asked(signal))

    def met(self, signal: LoopSignal) -> Tensor:
        return self.rule.met(self._asked(signal))

    def past_least(self, signal: LoopSignal) -> Tensor:
        return self.rule.past_least(replace(signal, depth=signal.depth + 1))

    def least_depth(self, prompt: bool = False) -> int:
        return max(self.rule.least_depth(prompt), self.first_depth)

    def check(self, n_loops: int) -> None:
        self.rule.check(n_loops)

    def _asked(self, signal: LoopSignal) -> LoopSignal:
        if self.needs_lookahead:
            predicted, survived = signal.next_gate_logit, signal.log_survival
            assert predicted is not None and survived is not None
            survival = survived + F.logsigmoid(-predicted.to(survived.dtype))
            return replace(signal, depth=signal.depth + 1, gate_logit=predicted, log_survival=survival)
        return replace(signal, depth=signal.depth + 1) if self.planned else signal

    def spec(self) -> str:
        return f"{self.name}:{self.rule.spec()}"
