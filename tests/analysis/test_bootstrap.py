"""The intervals against plain slow references, and their coverage on data whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from depthprobe.analysis import bootstrap


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (99, 1.98422)]
)
def test_t_quantile(df: int, quantile: float) -> None:
    assert bootstrap.t_quantile(0.975, df) == pytest.approx(quantile, rel=2e-3)


def test_mean_interval_equals_a_slow_bootstrap() -> None:
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(12), rng.integers(1, 5, 12))
    values = rng.normal(size=(len(clusters), 2)) + clusters[:, None] / 4
    mean, low, high = bootstrap.mean_interval(values, clusters, resamples=4000, seed=3)
    slow = np.empty((4000, 2))
    for draw in range(4000):
        chosen = rng.integers(0, 12, 12)
        slow[draw] = np.concatenate([values[clusters == c] for c in chosen]).mean(axis=0)
    slow_low, slow_high = bootstrap.within(slow, 12)
    assert mean == pytest.approx(values.mean(axis=0))
    assert low == pytest.approx(slow_low, abs=0.08)  # two bootstraps of 4000 draws differ by that much
    assert high == pytest.approx(slow_high, abs=0.08)
    again = bootstrap.mean_interval(values, clusters, resamples=4000, seed=3)
    assert np.array_equal(low, again[1])
    assert np.array_equal(high, again[2])


def test_totals_do_not_depend_on_how_the_draws_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.random.default_rng(0).normal(size=(50, 3))
    monkeypatch.setattr(bootstrap, "_CELLS", 999)  # 19 draws at a time
    draws = bootstrap.ratio_draws(sums, resamples=1000, seed=5)
    assert draws.shape == (1000, 3)
    assert len(np.unique(draws[:, 0])) > 990  # chunks are not copies of each other
    assert draws.mean(axis=0) == pytest.approx(sums.sum(axis=0), abs=4 * math.sqrt(50 / 1000))


@pytest.mark.parametrize("n_clusters", [6, 40])
def test_mean_interval_covers_a_clustered_mean(n_clusters: int) -> None:
    rng = np.random.default_rng(n_clusters)
    clusters = np.repeat(np.arange(n_clusters), 5)
    hits = 0
    for trial in range(400):
        shared = rng.normal(size=n_clusters)
        values = shared[clusters] + rng.normal(size=len(clusters))
        _, low, high = bootstrap.mean_interval(values, clusters, resamples=400, seed=trial)
        hits += bool(low <= 0 <= high)
    assert (
        0.915 <= hits / 400 <= 0.985
    )  # 95 % less or more three standard errors; unclustered would cover 75 %


@pytest.mark.parametrize(("truth", "spread"), [(0.5, 0.0), (0.9, 0.0), (0.98, 0.0), (0.7, 0.35)])
def test_proportion_covers(truth: float, spread: float) -> None:
    rng = np.random.default_rng(7)
    clusters = np.repeat(np.arange(50), 4)
    hits = 0
    for _ in range(400):
        own = truth + rng.choice([-1, 1], 50) * min(spread, 1 - truth)
        flags = rng.random(len(clusters)) < own[clusters]
        _, low, high = bootstrap.proportion(flags, clusters)
        hits += bool(low <= truth <= high)
    assert 0.91 <= hits / 400 <= 0.995


def test_proportion_of_single_answers_is_wilson() -> None:
    flags = np.arange(40) < 30
    share, low, high = bootstrap.proportion(flags, np.arange(40))
    t = bootstrap.t_quantile(0.975, 39)
    # unbiased variance 39/40 of binomial: the design effect is 40/39 and Wilson's n is 39
    n = 39.0
    centre = (0.75 + t * t / 2 / n) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(0.75 * 0.25 / n + t * t / 4 / n / n)
    assert share == 0.75
    assert (low, high) == (pytest.approx(centre - half), pytest.approx(centre + half))


def test_all_right_is_not_certain() -> None:
    share, low, high = bootstrap.proportion(np.ones((100, 1), dtype=bool), np.arange(100) // 2)
    assert (share, high) == (1.0, 1.0)
    assert low[0] == pytest.approx(0.925, abs=0.005)  # fifty stories, not a hundred answers
    _, low, _ = bootstrap.proportion(np.zeros(100, dtype=bool), np.arange(100) // 2)
    assert low == 0.0


def test_one_cluster_has_no_interval() -> None:
    _, low, high = bootstrap.proportion(np.array([True, False]), np.array([3, 3]))
    assert np.isnan([low, high]).all()
    _, low, high = bootstrap.mean_interval(np.array([1.0, 2.0]), np.array([3, 3]), resamples=10, seed=0)
    assert np.isnan([low, high]).all()
