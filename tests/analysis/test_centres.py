"""The mean depth of a curve, its slope and its means, on rows written by hand."""

from __future__ import annotations

import polars as pl
import pytest

from depthprobe.analysis import MIN_CLUSTERS, centres, means_by_hops, slope_of


def _rows(n_stories: int) -> pl.DataFrame:
    """At k hops all of the weight lies at depth k + 1, in part negative or missing elsewhere."""
    rows = [
        {"item": f"s{s}-k{k}", "story": f"s{s}", "cluster": f"s{s}", "task": "t", "hops": k, "depth": depth}
        | {"weight": 2.0 if depth == k + 1 else None if depth == 0 else -1.0}
        for s in range(n_stories)
        for k in (1, 2, 3)
        for depth in range(6)
    ]
    return pl.DataFrame(rows)


def test_the_centre_is_the_mean_depth_of_the_weight() -> None:
    rows = _rows(2)
    assert centres(rows, "weight")["centre"].to_list() == [2.0, 3.0, 4.0] * 2
    both = rows.with_columns(weight=pl.when(pl.col("depth") == 5).then(2.0).otherwise("weight"))
    assert centres(both, "weight")["centre"].to_list() == [3.5, 4.0, 4.5] * 2


def test_too_little_weight_has_no_centre() -> None:
    assert centres(_rows(1), "weight", least=2.0)["centre"].null_count() == 3
    assert centres(_rows(1).with_columns(weight=pl.lit(float("nan"))), "weight")["centre"].null_count() == 3


def test_slope_is_paired_and_refused_as_in_slopes() -> None:
    found = slope_of(centres(_rows(MIN_CLUSTERS), "weight"), "centre", resamples=50)
    assert (found["slope"], found["low"], found["high"]) == pytest.approx((1.0, 1.0, 1.0))
    few = slope_of(centres(_rows(3), "weight"), "centre")
    assert few["slope"] is None and few["reason"] == f"too few clusters (3 of {MIN_CLUSTERS})"


def test_means_count_items_with_and_without() -> None:
    rows = centres(_rows(8), "weight").with_columns(
        centre=pl.when((pl.col("story") == "s0") & (pl.col("hops") == 2)).then(None).otherwise("centre")
    )
    one, two, _ = means_by_hops(rows, "centre", resamples=50)
    assert (one["mean"], one["n"], one["n_items"]) == (2.0, 8, 8)
    assert (two["mean"], two["n"], two["n_items"]) == (3.0, 7, 8)
    nothing = means_by_hops(rows.with_columns(centre=pl.lit(None, pl.Float64)), "centre")
    assert [(row["mean"], row["n"]) for row in nothing] == [(None, 0)] * 3
