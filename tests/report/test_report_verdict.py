"""What the top of a page says: words that follow the intervals, and measures that each say what they measure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import polars as pl

from depthprobe import tables
from depthprobe.analysis import knockout_slopes_table
from depthprobe.report import Task, read_run
from depthprobe.report.causal import window_quantities
from depthprobe.report.verdict import measures, verdict


def _task(folder: Path) -> Task:
    return read_run(folder).task("follow")


def _table(folder: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(folder / "tables" / f"{name}.parquet")


def _with_slopes(task: Task, table: str, **slopes: tuple[float, float, float]) -> Task:
    """Rows of a table of slopes, changed or added."""
    df = getattr(task, table)
    one = df.row(0, named=True)
    bounds = ({"quantity": q, "slope": s, "low": a, "high": b, "reason": None} for q, (s, a, b) in slopes.items())
    rows = tables.conform(table, [one | row for row in bounds])
    return replace(task, **{table: pl.concat([df.filter(~pl.col("quantity").is_in(list(slopes))), rows])})


def _lead(task: Task) -> str:
    found = verdict(task, "m", ("settling_loop", "loops"))
    assert found is not None
    return found.lead


def test_a_word_needed_in_more_loops_is_more_depth(causal_run: Path) -> None:
    """Patched in all later loops it crosses earlier, and nowhere is that called less of the depth."""
    slopes = {
        "source_crossed_loop": (-0.55, -0.62, -0.48), "source_needed_loop": (0.55, 0.48, 0.62),
        "destination_crossed_loop": (-0.003, -0.006, -0.001),
    }  # fmt: skip
    task = _with_slopes(_task(causal_run), "window_slopes", **slopes)
    lead = _lead(task)
    assert "uses less" not in lead and "hardly any change by the patching window's destination" in lead
    assert re.search(r"uses more depth on harder questions by [^;]*loops that need the word", lead)
    rows = {row.name: row for row in verdict(task, "m", ("settling_loop", "loops")).rows}  # type: ignore[union-attr]
    assert rows["Patching: loops that need the changed word"].says == "more with more hops"
    arrives = rows["Patching: last token decides from"]
    assert (arrives.says, arrives.change, arrives.interval) == ("hardly any change", "−0.003 loops", "−0.006 to −0.001")
    earlier = _with_slopes(task, "window_slopes", destination_crossed_loop=(-0.3, -0.4, -0.2))
    assert "earlier with more hops by the patching window's destination" in _lead(earlier)
    wide = _with_slopes(task, "window_slopes", destination_crossed_loop=(0.001, -0.4, 0.4))
    assert "no change was measured by the patching window's destination" in _lead(wide)


def test_where_skips_tell_is_not_how_much(causal_run: Path) -> None:
    task = _with_slopes(
        _task(causal_run), "effective_slopes",
        half_depth=(-0.05, -0.06, -0.04), half_later=(0.05, 0.04, 0.06), used_share=(-0.02, -0.03, -0.01),
    )  # fmt: skip
    lead = _lead(task)
    assert "moves with more hops: " in lead
    assert "earlier by skipped layers" in lead and "later by layers that others build on" in lead
    first = lead.split(". Where")[0]
    assert "skipped layers" not in first and "build on" not in first
    assert "less with more hops by the share of layers in use" in first


def test_one_change_in_two_units_is_one_row(causal_run: Path) -> None:
    """In loops of one layer a step of the axis is a loop."""
    task = _task(causal_run)
    both = dict.fromkeys(("source_crossed", "source_crossed_loop"), (0.5, 0.4, 0.6))
    names = [row["quantity"] for row in window_quantities(_with_slopes(task, "window_slopes", **both))]
    assert "source_crossed_loop" in names and "source_crossed" not in names and "destination_crossed" in names


def test_the_slope_of_the_harm_is_a_table_of_the_run(causal_run: Path) -> None:
    (row,) = _table(causal_run, "knockout_slopes").to_dicts()
    (own,) = (one for one in measures(_task(causal_run), ("settling_loop", "loops")) if one.how == "cutting attention")
    assert own.source == "knockout_slopes" and own.row["slope"] == row["slope"]
    cuts = _table(causal_run, "knockout")
    again = knockout_slopes_table(cuts.sample(fraction=1.0, shuffle=True, seed=1), resamples=200)
    assert again.to_dicts() == [row] and row["low"] < row["slope"] < row["high"]
    assert row["n_harmed"] <= row["n_asked"] == cuts["item"].n_unique()
    other = knockout_slopes_table(cuts, seed=7, resamples=200)
    assert other["slope"].to_list() == [row["slope"]] and other["low"].to_list() != [row["low"]]
