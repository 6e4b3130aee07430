"""Asks a rule loop by loop, as a forward does, over states, gates and outputs that are given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.halting import ExitRule, LoopSignal


def signal(
    depth: int | Tensor,
    *,
    states: Tensor,
    gates: Tensor | None = None,
    outputs: Tensor | None = None,
    uniform: Tensor | None = None,
    given: Tensor | None = None,
    is_prompt: Tensor | bool | None = None,
    predicted: Tensor | None = None,
) -> LoopSignal:
    """The signal after loop `depth`: one for all, or int64 [n]. states [n, U, d], gates and predicted [n, U] (the
    latter at d: of λ at d + 1), outputs [n, U, V]. Where a row has no loop before, it holds NaN."""
    at = torch.full((len(states),), depth) if isinstance(depth, int) else depth

    def take(x: Tensor | None, back: int = 0) -> Tensor | None:
        if x is None or (isinstance(depth, int) and depth - back < 1):
            return None
        place = (at - 1 - back).clamp_min(0).view(-1, *[1] * (x.dim() - 1))
        taken = x.gather(1, place.expand(-1, 1, *x.shape[2:]))[:, 0]
        missing = (at - back < 1).view(-1, *[1] * (taken.dim() - 1))
        return torch.where(missing, float("nan"), taken)

    state = take(states)
    assert state is not None
    return LoopSignal(
        depth=depth, max_depth=states.shape[1], state=state, previous=take(states, 1), gate_logit=take(gates),
        log_survival=None if gates is None else take(F.logsigmoid(-gates).cumsum(-1)),
        second_previous=take(states, 2), given=given, uniform=uniform, is_prompt=is_prompt, output_logits=take(outputs),
        previous_output_logits=take(outputs, 1), next_gate_logit=take(predicted),
        halting_sum=None if gates is None else take(gates.sigmoid().cumsum(-1)),
    )  # fmt: skip


def exits(rule: ExitRule, states: Tensor, **more: Tensor | bool | None) -> Tensor:
    """int64 [n], the depth at which each token leaves."""
    n, n_loops = states.shape[:2]
    rule.check(n_loops)
    left, due = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool)
    for d in range(1, n_loops + 1):
        answer = rule(signal(d, states=states, **more))  # pyright: ignore[reportArgumentType]
        assert answer.shape == (n,) and answer.dtype == torch.bool
        now = due if rule.horizon else answer
        left = torch.where((left == 0) & (now | (d == n_loops)), d, left)
        due = due | answer if rule.horizon else due
    return left
