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
    lens = lens_table(lambda rng, story, k: 2 * (story % 3) + k, loops=12, n_stories=60)
    slope = row(analyse(lens)["slopes"], "settling_loop")
    assert slope["slope"] == pytest.approx(1.0)
    assert slope["high"] - slope["low"] < 1e-9
    assert (slope["n_clusters"], slope["n_items"]) == (60, 240)


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
        n_stories=60,
    )
    found = analyse(lens)
    everything, correct = (
        row(found["slopes"], "settling_loop"),
        row(found["slopes"], "settling_loop", "correct"),
    )
    assert everything["n_items"] == 240
    assert correct["n_items"] == 150  # thirty stories lose k = 4, thirty lose k = 3 and 4
    depth = row(found["slopes"], "correct_depth")
    assert depth["n_items"] == 150  # a correct depth exists for items that end correct
    rungs = row(found["slopes"], "settling_loop", "all_rungs")
    assert (rungs["n_items"], rungs["slope"], rungs["reason"]) == (0, None, "no story has it at two hop counts")


def test_all_rungs_holds_the_same_stories_at_every_k() -> None:
    """Every fifth story fails at one rung and leaves the group with all its items."""
    lens = lens_table(
        lambda rng, story, k: k if story % 5 else 1, n_stories=70, right=lambda rng, story, k: story % 5 > 0 or k < 4
    )
    lens = lens.filter(pl.col("item") != "kinship-1/k4")  # grew too long: right where asked, but not on every rung
    found = analyse(lens)
    settling = found["settling"]
    kept = settling.filter("all_rungs")
    assert kept["story"].n_unique() == 70 - 14 - 1
    assert kept.height == 4 * 55
    slope = row(found["slopes"], "settling_loop", "all_rungs")
    assert (slope["n_stories"], slope["n_items"], slope["slope"]) == (55, 220, pytest.approx(1.0))
    assert row(found["slopes"], "settling_loop", "all")["slope"] < 1
    means = found["settling_by_hops"].filter(quantity="settling_loop", group="all_rungs").sort("hops")
    assert means["mean"].to_list() == [1, 2, 3, 4]
    assert means["n_items"].to_list() == [55] * 4
    never = found["settling_by_hops"].filter(quantity="correct_loop", group="all", hops=4)
    assert never["never"].to_list() == pytest.approx([14 / 69])


@pytest.mark.parametrize("n", [49, 50])
def test_few_clusters_are_refused(n: int) -> None:
    """Counted are clusters, not stories: two stories share each."""
    lens = lens_table(lambda rng, story, k: k, n_stories=2 * n, cluster=lambda story, k: f"c{story // 2}")
    slope = row(analyse(lens)["slopes"], "settling_loop")
    assert (slope["n_clusters"], slope["n_stories"]) == (n, 2 * n)
    if n < 50:
        assert (slope["slope"], slope["low"], slope["high"]) == (None, None, None)
        assert slope["reason"] == "too few clusters (49 of 50)"
    else:
        assert slope["slope"] == pytest.approx(1.0) and slope["reason"] is None


@pytest.mark.parametrize(("loops", "layers", "last"), [(6, 1, 6), (3, 2, 3), (1, 8, 8)])
def test_relative_depth_is_a_share_of_loops_or_layers(loops: int, layers: int, last: int) -> None:
    """An item that settles at k loops (of several layers each) or k layers settles at k/R or k/L of the depth."""
    per = layers if loops > 1 else 1
    lens = lens_table(lambda rng, story, k: k * per, hops=(1, 2), loops=loops, layers=layers, n_stories=50)
    found = analyse(lens)
    for k, mean in found["settling"].group_by("hops").agg(pl.col("settling_relative").mean()).iter_rows():
        assert mean == pytest.approx(k / last)
    assert row(found["slopes"], "settling_relative")["slope"] == pytest.approx(1 / last)
    places = found["accuracy"].filter(hops=1).sort("depth")["relative_depth"].to_list()
    assert places[0] == 0 and places[-1] == 1 and places == sorted(places)


def test_relative_depth_behind_the_loops() -> None:
    """The last of five runs stands for a coda that changes the answer: loop ends never settle, the depth does."""
    lens = lens_table(lambda rng, story, k: 5, loops=5, n_stories=50)
    found = analyse(lens.with_columns(is_loop_end=pl.col("is_loop_end") & (pl.col("loop") < 5)))["settling"]
    assert found["settling_loop"].null_count() == found.height
    assert found["settling_relative"].unique().to_list() == [1.0]


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
    lens = lens_table(lambda rng, story, k: int(rng.integers(1, 6)), gate=lambda k, r: 0.2, n_stories=50)
    found = analyse(lens, exit_q=0.5)
    shuffled = analyse(lens.sample(fraction=1, shuffle=True, seed=3), exit_q=0.5)
    other = analyse(lens, exit_q=0.5, seed=1)
    for name, table in found.items():
        assert table.equals(shuffled[name]), name
    assert not found["slopes"].equals(other["slopes"])
    assert found["slopes"]["slope"].equals(other["slopes"]["slope"])
