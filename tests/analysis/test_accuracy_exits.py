"""Accuracy by hops and depth, gate exits, and Q-exit beside fixed depths and the mixture."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from synthetic_lens import lens_table

from depthprobe.analysis import analyse
from depthprobe.analysis.exits import mixture


def test_accuracy_counts() -> None:
    lens = lens_table(
        lambda rng, story, k: int(rng.integers(1, 7)), right=lambda rng, story, k: rng.random() < 0.8
    )
    table = analyse(lens)["accuracy"]
    assert table.height == 4 * 7
    slow = lens.group_by("hops", "depth").agg(
        pl.col("candidate_correct", "p_plausible").mean(),
        p=(pl.col("candidate_prob") * pl.col("p_candidates")).mean(),
        len=pl.len(),
    )
    both = table.join(slow, on=["hops", "depth"], suffix="_slow")
    assert both.height == table.height
    assert both["accuracy"].to_numpy() == pytest.approx(both["candidate_correct"].to_numpy())
    assert both["p_correct"].to_numpy() == pytest.approx(both["p"].to_numpy(), rel=1e-5)
    assert both["p_plausible"].to_numpy() == pytest.approx(both["p_plausible_slow"].to_numpy(), rel=1e-5)
    assert both["n"].to_list() == both["len"].to_list()
    for low, middle, high in (
        ("low", "accuracy", "high"),
        ("p_correct_low", "p_correct", "p_correct_high"),
        ("p_plausible_low", "p_plausible", "p_plausible_high"),
    ):
        assert ((table[low] <= table[middle] + 1e-9) & (table[middle] <= table[high] + 1e-9)).all()


def test_mixture_lies_between_its_two_loops() -> None:
    fixed = np.array([0.2, 0.6, 0.8])
    assert mixture(np.array([1.0, 1.5, 2.25, 3.0]), fixed) == pytest.approx([0.2, 0.4, 0.65, 0.8])


def test_a_gate_that_knows_beats_the_mixture() -> None:
    """Half the questions need loop 1, half loop 5; the gate leaves exactly there."""
    lens = lens_table(
        lambda rng, story, k: 1 if k <= 2 else 5,
        gate=lambda k, r: 0.99 if r >= (1 if k <= 2 else 5) else 0.001,
    )
    found = analyse(lens, exit_q=0.5)
    at = found["exits"].filter(pl.col("q") == 0.5).to_dicts()[0]
    assert at["mean_exit"] == 3.0
    assert at["accuracy"] == 1.0
    assert at["mixture_accuracy"] == 0.5
    assert at["gain_low"] == pytest.approx(0.5)  # every story is the same
    assert found["fixed_exits"]["accuracy"].to_list() == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    hops = found["exits_by_hops"]
    assert hops["mean_exit"].to_list() == [1.0, 1.0, 5.0, 5.0]
    assert hops["expected_depth"].to_list()[0] == pytest.approx(1.01, abs=0.01)


def test_a_blind_gate_gains_nothing() -> None:
    rng = np.random.default_rng(4)
    draws = {(k, r): 0.5 * rng.random() for k in range(1, 5) for r in range(1, 7)}
    lens = lens_table(
        lambda rng, story, k: int(rng.integers(1, 7)), gate=lambda k, r: draws[k, r], n_stories=60
    )
    table = analyse(lens, exit_q=0.7)["exits"]
    assert 0.7 in table["q"].to_list()
    inside = (table["gain_low"] <= 0.02) & (table["gain_high"] >= -0.02)
    assert inside.mean() > 0.9
    assert table["mean_exit"].is_sorted()


def test_gate_tables_are_empty_without_a_gate() -> None:
    found = analyse(lens_table(lambda rng, story, k: k))
    assert found["exits"].height == found["exits_by_hops"].height == 0
    assert found["fixed_exits"].height == 6
    found = analyse(lens_table(lambda rng, story, k: k, loops=1, layers=6))
    assert found["fixed_exits"].height == found["differences"].height == 0


def test_one_story_has_accuracy_and_no_interval() -> None:
    found = analyse(lens_table(lambda rng, story, k: k, n_stories=1, gate=lambda k, r: 0.5), exit_q=0.5)
    assert found["accuracy"]["low"].null_count() == found["accuracy"].height
    assert found["exits"]["gain_low"].null_count() == found["exits"].height
    slope = found["slopes"].filter(quantity="settling_loop", group="all").to_dicts()[0]
    assert slope["slope"] is None and slope["reason"] == "too few clusters (1 of 50)"
