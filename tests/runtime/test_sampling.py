"""Sampling: right in distribution, the same in any company, cut where the nucleus ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.runtime import sampling
from depthprobe.runtime.sampling import sample


def test_temperature_zero_is_the_argmax_with_its_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]], dtype=torch.bfloat16)
    out = sample(logits, [0.0, 0.0], [1.0, 0.5], [1, 2], [0, 0], top_logprobs=2)
    assert out.tokens.tolist() == [1, 0]
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(out.logprobs, torch.stack([expected[0, 1], expected[1, 0]]))
    assert out.top_ids[1].tolist() == [0, 1]
    torch.testing.assert_close(out.top_logprobs[1], expected[1, :2])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_draws_follow_the_distribution(temperature: float, top_p: float) -> None:
    torch.manual_seed(0)
    logits, n = torch.randn(600) * 2.0, 40_000
    out = sample(logits.expand(n, -1), [temperature] * n, [top_p] * n, [3] * n, range(n))
    p = (logits.double() / temperature).softmax(-1)
    if top_p < 1.0:
        order = p.argsort(descending=True)
        kept = order[: int((p[order].cumsum(0) < top_p).sum()) + 1]
        p = torch.zeros_like(p).index_copy(0, kept, p[kept])
        p /= p.sum()
    count = torch.bincount(out.tokens, minlength=600).double()
    assert count[p == 0].sum() == 0
    often = p * n > 10
    chi = ((count - p * n) ** 2 / (p * n))[often].sum()
    dof = int(often.sum())
    assert abs(float(chi) - dof) < 5 * math.sqrt(2 * dof)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**40), size=st.integers(1, 700), rows=st.integers(1, 6), hot=st.floats(0.1, 3.0),
    top_p=st.floats(0.01, 1.0),
)  # fmt: skip
def test_a_token_depends_on_its_row_alone(seed: int, size: int, rows: int, hot: float, top_p: float) -> None:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3.0
    settings_ = [[hot, 0.0, 1.0, hot, hot, 2.0][:rows], [top_p, 1.0, 1.0, 0.3, top_p, 0.9][:rows]]
    seeds, positions = [seed + r for r in range(rows)], [7 * r for r in range(rows)]
    together = sample(logits, *settings_, seeds, positions).tokens.tolist()
    alone = []
    for r in range(rows):
        own = slice(r, r + 1)
        alone.append(sample(logits[own], settings_[0][own], settings_[1][own], seeds[own], positions[own]))
    assert together == [one.tokens.item() for one in alone]


def test_a_wide_nucleus_is_found_by_sorting_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits = torch.randn(50, 300)
    args = ([1.0] * 50, [0.9] * 50, range(50), range(50))
    first = sample(logits, *args).tokens
    monkeypatch.setattr(sampling, "_NUCLEUS", 4)
    assert torch.equal(first, sample(logits, *args).tokens)


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.full((500, 513), -torch.inf)
    logits[:, [3, 300]] = 0.0
    drawn = set(sample(logits, [1.0] * 500, [1.0] * 500, range(500), [0] * 500).tokens.tolist())
    assert drawn == {3, 300}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**40), size=st.integers(1, 1100), few=st.booleans())
def test_the_most_probable_token_and_its_lead_by_blocks(seed: int, size: int, few: bool) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    if few:  # equals: the first counts, and nobody leads
        logits = logits.round()
    out = sample(logits, [0.0] * 4, [1.0] * 4, [0] * 4, [0] * 4, top_logprobs=None)
    assert out.tokens.tolist() == logits.argmax(-1).tolist()
    assert out.logprobs.numel() == out.top_ids.numel() == out.top_logprobs.numel() == out.leads.numel() == 0
    best = logits.topk(min(2, size), -1).values
    assert torch.equal(
        sample(logits, [0.0] * 4, [1.0] * 4, [0] * 4, [0] * 4, leads=True).leads, best[:, 0] - best[:, -1]
    )


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_however_cold_the_best_token_is_drawn(temperature, dtype, top_p) -> None:
    logits = torch.tensor([[-3.0, 1.0, 7.0, 6.0], [1e4, -1e4, 2e4, -torch.inf], [-9.0, -8.0, -7.5, -7.0]], dtype=dtype)
    drawn = sample(logits, [temperature] * 3, [top_p] * 3, [0, 1, 2], [5, 6, 7])
    assert drawn.tokens.tolist() == [2, 2, 3]
