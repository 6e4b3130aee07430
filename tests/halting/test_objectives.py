"""What the gate learns, by hand and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthprobe.halting.objectives import future_gain_labels, gate_loss

nats = st.floats(0, 8, width=32)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_labels_by_hand() -> None:
    labels = future_gain_labels(torch.tensor([[1.0, 0.5, 0.8], [0.8, 0.5, 1.0]]), margin=0.1, sharpness=1.0)
    expected = [[sigmoid(0.4), sigmoid(-0.4), 0.0], [sigmoid(0.2), sigmoid(-0.6), 0.0]]
    torch.testing.assert_close(labels, torch.tensor(expected))


def test_a_gain_that_comes_late_is_waited_for_and_a_small_one_is_not() -> None:
    late = future_gain_labels(torch.tensor([3.0, 3.0, 3.0, 0.1, 0.1]), margin=0.05)
    torch.testing.assert_close(late, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), atol=0.08, rtol=0)
    small = future_gain_labels(torch.tensor([0.14, 0.12, 0.10]), margin=0.15)
    assert small.max() < 0.01
    assert future_gain_labels(torch.tensor([[2.0]]), margin=0.1).tolist() == [[0.0]]  # one loop: nothing to wait for


@given(losses=st.lists(nats, min_size=1, max_size=6), margin=st.floats(0, 1), sharpness=st.floats(0.1, 50))
def test_labels_against_a_plain_loop(losses: list[float], margin: float, sharpness: float) -> None:
    expected = [sigmoid(sharpness * (x - min(losses[d + 1 :]) - margin)) for d, x in enumerate(losses[:-1])] + [0.0]
    labels = future_gain_labels(torch.tensor([losses], dtype=torch.float64), margin, sharpness)
    assert labels[0].tolist() == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 4), st.integers(2, 5), st.booleans(), st.integers(0, 99))
def test_gate_loss_against_plain_loops(n: int, loops: int, weighted: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, loops, generator=generator, dtype=torch.float64)
    waiting = torch.rand(n, loops, generator=generator, dtype=torch.float64)
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 if weighted else torch.ones(n)
    total = 0.0
    for token in range(n):
        own = 0.0
        for d in range(loops - 1):
            stop, wait = sigmoid(float(logits[token, d])), float(waiting[token, d])
            own -= wait * math.log(1 - stop) + (1 - wait) * math.log(stop)
        total += float(weights[token]) * own / (loops - 1)
    loss = gate_loss(logits, waiting, weights if weighted else None)
    assert float(loss) == pytest.approx(total / float(weights.sum()))


def test_the_last_loop_has_no_say_and_weights_are_relative() -> None:
    logits, waiting = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.full((3, 4), 0.25)
    other_logits, other_waiting = logits.clone(), waiting.clone()
    other_logits[:, -1], other_waiting[:, -1] = 50.0, 1.0
    assert torch.equal(gate_loss(logits, waiting), gate_loss(other_logits, other_waiting))
    weights = torch.tensor([1.0, 0.0, 3.0])
    torch.testing.assert_close(gate_loss(logits, waiting, weights), gate_loss(logits, waiting, 10 * weights))
    torch.testing.assert_close(
        gate_loss(logits, waiting, torch.tensor([0.0, 0.0, 2.0])), gate_loss(logits[2:], waiting[2:])
    )


def test_the_best_gate_stops_as_often_as_it_is_not_worth_waiting() -> None:
    waiting = torch.tensor([[0.9, 0.2, 0.5]])
    best = torch.logit(1 - waiting).requires_grad_()
    (gradient,) = torch.autograd.grad(gate_loss(best, waiting), best)
    assert gradient.abs().max() < 1e-6
    assert gate_loss(best, waiting) < gate_loss(torch.zeros(1, 3), waiting)
