"""Exit rules: asked loop by loop they give what the distribution gives; rows at mixed depths too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from depthprobe.errors import UserError
from depthprobe.halting import ExitRule, FixedDepth, GivenExits, LoopSignal, QExit, SampledExit, q_exit

N, U = 50, 5
GATES = torch.randn(N, U, generator=torch.Generator().manual_seed(1))
STATE = torch.zeros(N, 3)


def depths(rule: ExitRule) -> torch.Tensor:
    """Depth at which each of N tokens leaves when the rule is asked after every loop."""
    left = torch.zeros(N, dtype=torch.int64)
    survival = torch.zeros(N)
    for d in range(1, U + 1):
        survival = survival + F.logsigmoid(-GATES[:, d - 1])
        answer = rule(LoopSignal(d, U, STATE, None, GATES[:, d - 1], survival))
        assert answer.shape == (N,) and answer.dtype == torch.bool
        left = torch.where((left == 0) & (answer | (d == U)), d, left)
    return left


@pytest.mark.parametrize("q", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_depth", [1, 3])
def test_q_exit_online_equals_q_exit_of_the_distribution(q: float, min_depth: int) -> None:
    assert torch.equal(depths(QExit(q, min_depth)), q_exit(gate_logits=GATES, q=q, min_depth=min_depth))


def test_fixed_and_given() -> None:
    assert torch.equal(depths(FixedDepth(3)), torch.full((N,), 3))
    exits = torch.randint(1, U + 1, (N,))
    assert torch.equal(depths(GivenExits(exits)), exits)


def test_sampled_exits_respect_the_least_depth() -> None:
    assert int(depths(SampledExit(min_depth=2, generator=torch.Generator().manual_seed(0))).min()) == 2


def test_rows_at_mixed_depths() -> None:
    at = torch.randint(1, U + 1, (N,))
    survival = F.logsigmoid(-GATES).cumsum(-1).gather(1, at[:, None] - 1)[:, 0]
    mixed = QExit(0.5, 2)(LoopSignal(at, U, STATE, None, None, survival))
    exits = q_exit(gate_logits=GATES, q=0.5, min_depth=2)
    inner = at < U  # the last loop is the caller's to end
    assert torch.equal(mixed[inner], (exits <= at)[inner])


@pytest.mark.parametrize(
    "rule", [QExit(0.5), FixedDepth(2), SampledExit(), GivenExits(torch.ones(3, dtype=torch.int64))]
)
def test_rules_have_the_interface(rule: object) -> None:
    assert isinstance(rule, ExitRule)
    assert rule.horizon == 0


def test_impossible_rules_are_refused() -> None:
    for make in (lambda: QExit(0.0), lambda: QExit(0.5, 0), lambda: FixedDepth(0), lambda: SampledExit(0)):
        with pytest.raises(UserError):
            make()
    for rule in (
        QExit(0.5, 6),
        FixedDepth(6),
        SampledExit(6),
        GivenExits(torch.tensor([6])),
        GivenExits(torch.ones(2)),
    ):
        with pytest.raises(UserError):
            rule.check(U)
