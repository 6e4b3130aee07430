"""Settling against a slow loop over items, and the definitions on rows written by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from synthetic_lens import lens_table

from depthprobe.analysis.grid import DepthGrid
from depthprobe.analysis.settling import expected_loops, first_true, q_exit, settling_table, stays_true
from depthprobe.errors import UserError


def test_definitions_on_hand_written_rows() -> None:
    flags = np.array([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]], dtype=bool)
    assert stays_true(flags).tolist() == [3, 0, 5, 5]
    assert first_true(flags).tolist() == [1, 0, 5, 0]


def test_gate_worked_example() -> None:
    cdf = np.array([[0.2, 0.6, 1.0]], dtype=np.float32)  # λ = (0.2, 0.5, ·)
    assert expected_loops(cdf) == pytest.approx([2.2])
    assert [q_exit(cdf, q).tolist() for q in (0.2, 0.5, 0.9)] == [[1], [2], [3]]


def noisy(n_stories: int = 15, **kw: int) -> pl.DataFrame:
    """A lens table whose flags are drawn at random, so that answers come and go."""
    lens = lens_table(lambda rng, story, k: 0, n_stories=n_stories, gate=lambda k, r: 0.3, **kw)
    rng = np.random.default_rng(5)
    last = pl.col("depth") == pl.col("depth").max()
    for name in ("equals_final", "candidate_correct", "candidate_plausible"):
        lens = lens.with_columns(pl.Series(name, rng.random(lens.height) < 0.7))
    return lens.with_columns(equals_final=pl.col("equals_final") | last)


def slow_stays(depths: list[int], flags: list[bool]) -> int | None:
    for at in range(len(flags)):
        if all(flags[at:]):
            return depths[at]
    return None


@pytest.mark.parametrize("layers", [1, 2])
def test_equals_a_slow_reference(layers: int) -> None:
    lens = noisy(layers=layers)
    table = settling_table(DepthGrid.by_task(lens.sample(fraction=1, shuffle=True, seed=1)), exit_q=0.5)
    assert table.height == 60
    for row in table.iter_rows(named=True):
        own = lens.filter(pl.col("item") == row["item"]).sort("depth")
        ends = own.filter("is_loop_end")
        for name, flag in (
            ("settling", "equals_final"),
            ("correct", "candidate_correct"),
            ("plausible", "candidate_plausible"),
        ):
            assert row[f"{name}_depth"] == slow_stays(own["depth"].to_list(), own[flag].to_list())
            assert row[f"{name}_loop"] == slow_stays(ends["loop"].to_list(), ends[flag].to_list())
        assert row["earliest_equal_depth"] == own.filter("equals_final")["depth"].min()
        assert row["earliest_equal_loop"] == ends.filter("equals_final")["loop"].min()
        assert row["final_correct"] == own["candidate_correct"][-1]
        assert row["gate_exit"] == ends.filter(pl.col("gate_cdf") >= 0.5)["loop"].min()
        lambdas = ends["gate_lambda"].to_list()
        left, mean = 1.0, 0.0
        for loop, value in enumerate(lambdas, 1):
            p = left if loop == len(lambdas) else left * value
            mean, left = mean + loop * p, left - p
        assert row["expected_depth"] == pytest.approx(mean, rel=1e-5)


def test_a_model_without_loops_has_no_loop_columns() -> None:
    lens = lens_table(lambda rng, story, k: k, loops=1, layers=8)
    table = settling_table(DepthGrid.by_task(lens), exit_q=None)
    assert table["settling_depth"].to_list() == table["hops"].to_list()
    for name in ("settling_loop", "correct_loop", "plausible_loop", "earliest_equal_loop", "gate_exit"):
        assert table[name].null_count() == table.height


def test_never_correct_is_null() -> None:
    lens = lens_table(lambda rng, story, k: 2, right=lambda rng, story, k: k != 3)
    table = settling_table(DepthGrid.by_task(lens))
    assert table.filter(pl.col("correct_depth").is_null())["hops"].unique().to_list() == [3]
    assert table["settling_depth"].unique().to_list() == [2]
    assert table["expected_depth"].null_count() == table.height


def test_a_missing_depth_is_refused() -> None:
    lens = lens_table(lambda rng, story, k: 2)
    with pytest.raises(UserError, match="80 items at 7 depths"):
        settling_table(DepthGrid.by_task(lens[:-1]))
    with pytest.raises(UserError, match="560 rows for 80 items"):
        settling_table(DepthGrid.by_task(pl.concat([lens[:-1], lens[:1]])))
    with pytest.raises(UserError, match="no rows"):
        DepthGrid.by_task(lens.clear())
