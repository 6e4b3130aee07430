"""Gate mathematics: the worked example, sums, and logits where probabilities round away."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.halting import (
    cdf,
    entropy,
    expected_depth,
    log_stopping_distribution,
    log_survival,
    q_exit,
    stopping_distribution,
)

EXAMPLE = torch.tensor([0.2, 0.5, 0.123])  # the last value must not matter
LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=8).map(torch.tensor)


def test_worked_example() -> None:
    p = stopping_distribution(EXAMPLE)
    assert torch.allclose(p, torch.tensor([0.2, 0.4, 0.4]))
    assert torch.allclose(cdf(p), torch.tensor([0.2, 0.6, 1.0]))
    assert expected_depth(p).item() == pytest.approx(2.2)
    assert [int(q_exit(EXAMPLE, q)) for q in (0.1, 0.5, 0.9)] == [1, 2, 3]
    assert entropy(p).item() == pytest.approx(1.0549, abs=1e-4)


def test_the_three_ways_into_q_exit_agree() -> None:
    lambdas = torch.rand(200, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for q in (0.05, 0.3, 0.7, 0.99):
        depth = q_exit(lambdas, q)
        assert torch.equal(depth, q_exit(cdf=cdf(stopping_distribution(lambdas)), q=q))
        assert torch.equal(depth, q_exit(gate_logits=torch.logit(lambdas), q=q))
        assert depth.dtype == torch.int64
        at_least = q_exit(lambdas, q, min_depth=3)
        assert torch.equal(at_least, depth.clamp_min(3))


@given(LOGITS)
def test_a_distribution_whatever_the_logits(logits: torch.Tensor) -> None:
    p = stopping_distribution(torch.sigmoid(logits.double()))
    log_p = log_stopping_distribution(logits.double())
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert log_p.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert torch.allclose(log_p.exp(), p, atol=1e-12)
    assert log_stopping_distribution(logits).isfinite().all()
    assert 1.0 <= expected_depth(p).item() <= len(logits) + 1e-9
    assert cdf(p)[-1] == 1.0


def test_logits_tell_apart_what_probabilities_round_to_one() -> None:
    logits = torch.tensor(
        [30.0, 40.0, 0.0]
    )  # σ rounds to 1 in float32: the second λ is lost from the product
    assert stopping_distribution(torch.sigmoid(logits))[1] == 0.0
    assert log_stopping_distribution(logits)[1].item() == pytest.approx(-30.0, abs=1e-4)
    assert log_survival(logits)[1].item() == pytest.approx(-70.0, abs=1e-4)


def test_half_precision_gates_are_widened() -> None:
    logits = torch.tensor([-3.0, 0.5, 1.0], dtype=torch.bfloat16)
    assert log_survival(logits).dtype == torch.float32
    assert stopping_distribution(torch.sigmoid(logits)).sum().item() == pytest.approx(1.0, abs=1e-6)


def test_gradients_are_finite_at_the_ends() -> None:
    logits = torch.tensor([-200.0, 0.0, 200.0, 1.0], requires_grad=True)
    log_stopping_distribution(logits).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"q": 0.0}, "q is 0.0"),
        ({"q": 1.1}, "q is 1.1"),
        ({"q": 0.5, "min_depth": 4}, "least depth is 4"),
        ({"q": 0.5, "min_depth": 0}, "least depth is 0"),
        ({"q": 0.5, "cdf": EXAMPLE}, "exactly one"),
    ],
)
def test_impossible_requests_are_refused(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        q_exit(EXAMPLE, **options)
