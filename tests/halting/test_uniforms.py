"""Numbers from (seed, position, purpose): uniform, independent, the same in any company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.halting import Purpose, uniforms
from depthprobe.halting.uniforms import for_loop

N = 4096
MASK = (1 << 64) - 1
INT64 = st.integers(-(2**63), 2**63 - 1)


def plain(seed: int, position: int, purpose: int) -> float:
    """The same hash in Python's own integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    state = 0
    for word in (seed, position, purpose):
        state = mix(((state ^ (word & MASK)) + 0x9E3779B97F4A7C15) & MASK)
    return ((state >> 12) + 0.5) / 2**52


@settings(deadline=None)
@given(INT64, INT64, INT64)
def test_equal_to_the_hash_in_plain_integers(seed: int, position: int, purpose: int) -> None:
    expected = plain(seed, position, purpose)
    assert 0.0 < expected < 1.0
    found = uniforms(torch.tensor([seed]), torch.tensor([position]), purpose)
    assert found.dtype == torch.float64 and found.item() == expected
    assert uniforms(seed, position, purpose).item() == expected


def distance(u: np.ndarray) -> float:
    """Kolmogorov and Smirnov's statistic against the uniform distribution, times √n."""
    ordered, n = np.sort(u.ravel()), u.size
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_over_positions_and_over_seeds(purpose: Purpose) -> None:
    span = torch.arange(N)
    for u in (uniforms(7, span, purpose), uniforms(span, 7, purpose), uniforms(span[:64, None], span[:64], purpose)):
        assert distance(u.numpy()) < 1.95  # p = 0.001
        assert abs(np.histogram(u.numpy(), 64, (0, 1))[0] / N * 64 - 1).max() < 5 * math.sqrt(64 / N)


def test_neighbours_are_not_correlated() -> None:
    span, near = torch.arange(N), 4.5 / math.sqrt(N)
    over = {p: uniforms(3, span, p) for p in Purpose}
    pairs = [
        (over[Purpose.TOKEN][:-1], over[Purpose.TOKEN][1:]),  # positions side by side
        (uniforms(span, 5), uniforms(span + 1, 5)),  # seeds side by side
        (uniforms(span, 5), uniforms(span, 6)),
        (uniforms(3, span), uniforms(4, span)),
        (uniforms(span, 5), uniforms(5, span)),  # seed and position change places
        (over[Purpose.TOKEN], over[Purpose.EXIT]),
        (over[Purpose.EXIT], over[Purpose.LOOP]),
        (over[Purpose.EXIT], for_loop(over[Purpose.EXIT], 1)),
        (for_loop(over[Purpose.EXIT], 1), for_loop(over[Purpose.EXIT], 2)),
    ]
    for a, b in pairs:
        assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < near
        square = np.histogram2d(a.numpy(), b.numpy(), 8, [[0, 1], [0, 1]])[0]
        expected = a.numel() / 64
        assert ((square - expected) ** 2 / expected).sum() < 120  # chi-squared, 63 degrees: p < 1e-5


def test_a_number_does_not_depend_on_company_or_shape() -> None:
    seeds, positions = torch.randint(0, 99, (5, 1)), torch.arange(7)
    table = uniforms(seeds, positions, Purpose.EXIT)
    assert table.shape == (5, 7)
    for i in range(5):
        for j in range(7):
            assert uniforms(int(seeds[i]), int(positions[j]), Purpose.EXIT).item() == table[i, j].item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_same_on_cuda() -> None:
    seeds, positions = torch.randint(-(2**62), 2**62, (64, 1)), torch.arange(257)
    here = uniforms(seeds, positions, Purpose.EXIT)
    there = uniforms(seeds.cuda(), positions.cuda(), Purpose.EXIT)
    assert torch.equal(here, there.cpu())
    assert torch.equal(for_loop(here, 3), for_loop(there, 3).cpu())
