"""Paired slopes and differences: a slow reference, coverage, and what the groups hold."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from synthetic_lens import lens_table

from depthprobe.analysis import analyse
from depthprobe.analysis.bootstrap import mean_interval
from depthprobe.analysis.slopes import story_slopes


def row(table: pl.DataFrame, quantity: str, group: str = "all") -> dict[str, float]:
    return table.filter(pl.col("quantity") == quantity, pl.col("group") == group).to_dicts()[0]


def test_story_slopes_equal_polyfit() -> None:
    rng = np.random.default_rng(2)
    stories = rng.permutation(np.repeat(np.arange(30), 5))[:120]
    hops = rng.integers(1, 7, len(stories))
    values = rng.normal(size=len(stories)) + 0.3 * hops
    slopes, used = story_slopes(values, hops, stories)
    slow, members = [], 0
    for story in np.unique(stories):
        own = stories == story
        if len(np.unique(hops[own])) > 1:
            slow.append(np.polyfit(hops[own], values[own], 1)[0])
            members += int(own.sum())
    assert slopes == pytest.approx(slow)
    assert used.sum() == members


def test_pairing_removes_what_a_story_shares() -> None:
    """Stories differ in level, not in slope: the slope is exact and its interval a point."""
    lens = lens_table(lambda rng, story, k: 2 * (story % 3) + k, loops=12, n_stories=30)
    slope = row(analyse(lens)["slopes"], "settling_loop")
    assert slope["slope"] == pytest.approx(1.0)
    assert slope["high"] - slope["low"] < 1e-9
    assert (slope["n_clusters"], slope["n_items"]) == (30, 120)


def test_slope_interval_covers() -> None:
    rng = np.random.default_rng(0)
    hops = np.tile(np.arange(1, 7), 25)
    stories = np.repeat(np.arange(25), 6)
    hits = 0
    for trial in range(400):
        own = rng.normal(size=(2, 25))
        values = own[0][stories] * 3 + (0.2 + 0.3 * own[1][stories]) * hops + rng.normal(size=len(hops))
        slopes, _ = story_slopes(np.round(values), hops, stories)  # depths are whole numbers
        _, low, high = mean_interval(slopes, np.arange(25), resamples=400, seed=trial)
        hits += bool(low <= 0.2 <= high)
    assert 0.915 <= hits / 400 <= 0.985


def test_correct_only_is_a_selection_and_says_so() -> None:
    """Deep items fail: over all items depth rises by one loop a hop, over the correct ones hardly."""
    lens = lens_table(
        lambda rng, story, k: k + story % 2,
        loops=8,
        hops=(1, 2, 3, 4),
        right=lambda rng, story, k: k + story % 2 <= 3,
    )
    found = analyse(lens)
    everything, correct = (
        row(found["slopes"], "settling_loop"),
        row(found["slopes"], "settling_loop", "correct"),
    )
    assert everything["n_items"] == 80
    assert correct["n_items"] == 50  # ten stories lose k = 4, ten lose k = 3 and 4
    depth = row(found["slopes"], "correct_depth")
    assert depth["n_items"] == 50  # a correct depth exists for items that end correct


def test_no_ladder_no_slope() -> None:
    lens = lens_table(lambda rng, story, k: k, hops=(2,))
    slope = row(analyse(lens)["slopes"], "settling_loop")
    assert slope["slope"] is None
    assert slope["low"] is None
    assert slope["n_clusters"] == 0


def test_loop_one_against_full_depth() -> None:
    lens = lens_table(lambda rng, story, k: 1 if k < 3 or story % 2 else 3, gate=lambda k, r: 0.5)
    found = analyse(lens, exit_q=0.5)["differences"]
    first = found.filter(pl.col("quantity") == "accuracy: loop 1 - full depth").to_dicts()[0]
    assert (first["min_hops"], first["max_hops"], first["n_items"], first["n_clusters"]) == (3, 4, 40, 20)
    assert first["difference"] == pytest.approx(-0.5)
    assert first["low"] < -0.5 < first["high"] < 0
    gate = found.filter(pl.col("quantity") == "accuracy: gate exit - full depth").to_dicts()[0]
    assert gate["difference"] == pytest.approx(-0.25)  # λ = .5 leaves after loop 1 at q = .5


def test_row_order_and_seed() -> None:
    lens = lens_table(lambda rng, story, k: int(rng.integers(1, 6)), gate=lambda k, r: 0.2)
    found = analyse(lens, exit_q=0.5)
    shuffled = analyse(lens.sample(fraction=1, shuffle=True, seed=3), exit_q=0.5)
    other = analyse(lens, exit_q=0.5, seed=1)
    for name, table in found.items():
        assert table.equals(shuffled[name]), name
    assert not found["slopes"].equals(other["slopes"])
    assert found["slopes"]["slope"].equals(other["slopes"]["slope"])
