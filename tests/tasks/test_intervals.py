"""Intervals over clusters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from depthprobe.tasks.generate import generate_items
from depthprobe.tasks.intervals import cluster_of, clustered_interval, wilson_interval


def test_wilson_matches_a_worked_example() -> None:
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3)
    assert high == pytest.approx(0.9433, abs=1e-3)


def test_independent_items_have_the_textbook_width() -> None:
    scores = np.r_[np.ones(300), np.zeros(100)]
    mean, low, high = clustered_interval(scores, range(400))
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert mean == 0.75
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


def test_equal_items_of_a_cluster_count_once() -> None:
    scores = np.repeat(np.r_[np.ones(30), np.zeros(10)], 10)
    _, low, high = clustered_interval(scores, np.repeat(np.arange(40), 10).tolist())
    _, naive_low, naive_high = clustered_interval(scores, range(400))
    assert high - low > 2.5 * (naive_high - naive_low)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_still_has_a_width(value: float) -> None:
    mean, low, high = clustered_interval([value] * 20, [n // 2 for n in range(20)])
    assert mean == value
    assert (low, high) == wilson_interval(10 * value, 10)
    assert 0.2 < high - low < 0.4


def test_nothing_measured() -> None:
    mean, low, high = clustered_interval([], [])
    assert np.isnan(mean)
    assert (low, high) == (0.0, 1.0)


def test_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="clusters"):
        clustered_interval([1.0], [])


def test_kinship_is_clustered_by_the_start_of_its_chain_and_follow_by_story() -> None:
    for item in generate_items("kinship", 3, hops=(1, 2, 3, 5), seed=1):
        assert cluster_of(item) == " ".join(item.chain_relations[:3])
        assert cluster_of(replace(item, chain_relations=())) == item.story_id
    assert {cluster_of(item) for item in generate_items("follow", 2, hops=(1, 3), seed=1)} == {
        "follow-1-0", "follow-1-1",
    }  # fmt: skip
