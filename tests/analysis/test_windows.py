"""Windows of curves drawn by hand, and their slopes, means and sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from depthprobe import tables
from depthprobe.analysis.summary import _moves, _window_rows, _windows
from depthprobe.analysis.windows import (
    crossing,
    knockout_by_depth_table,
    patching_by_role_table,
    patching_tables,
    window_slopes_table,
    windows_table,
)

#: embedding, one prelude layer, two loops of two layers, one coda layer
AXIS = pl.DataFrame(
    {
        "depth": range(7),
        "loop": [0, 0, 1, 1, 2, 2, 3],
        "layer": [0, 1, 1, 2, 1, 2, 1],
        "is_loop_end": [False, False, False, True, False, True, False],
    }
)
#: embedding and six loops of one layer
LOOPS = pl.DataFrame(
    {"depth": range(7), "loop": range(7), "layer": [0, *[1] * 6], "is_loop_end": [False, *[True] * 6]}
)
PLAIN = AXIS.with_columns(loop=pl.lit(1), is_loop_end=pl.lit(False))


def rows(effects: list[float], role: str = "last", axis: pl.DataFrame = AXIS, **about: Any) -> list[dict[str, Any]]:
    """Rows of `patching` for one curve."""
    base: dict[str, Any] = {
        "item": "i", "story": "s", "cluster": "c", "task": "kinship", "hops": 1, "donor_kind": "relation",
        "control": False, "direction": "donor_to_item", "kind": "set", "span": "one", "site": "resid_post",
        "role": role, "hop": 1, "window": 1, "position": None, "n_positions": 1, "both_right": True, "ld_clean": 2.0,
        "ld_donor": -2.0, "p_answer": 0.5, "p_donor": 0.5,
    }  # fmt: skip
    return [
        base
        | {"depth": d, "loop": loop, "layer": layer, "effect": e, "ld_patched": 2 - 4 * e, "flip": e > 0.5}
        | about
        for d, loop, layer, e in zip(axis["depth"], axis["loop"], axis["layer"], effects, strict=True)
    ]


def window(effects: list[float], role: str = "last", axis: pl.DataFrame = AXIS) -> dict[str, Any]:
    (found,) = windows_table(tables.conform("patching", rows(effects, role, axis)), axis).to_dicts()
    return found


def test_a_destination() -> None:
    found = window([0, 0, 0, 0.25, 0.75, 1, 1])
    assert (found["end"], found["site"]) == ("destination", "resid_post")
    assert not found["censored"] and found["monotone"]
    assert found["depth_crossed"] == pytest.approx(3.5)
    assert found["relative"] == pytest.approx(3.5 / 6)
    assert found["loop_crossed"] == pytest.approx(1 + 0.25 / 0.75)  # .25 at the end of loop 1, 1 at that of loop 2
    assert found["area"] == pytest.approx((0.125 + 0.5 + 0.875 + 1) / 6)
    assert (found["effect_first"], found["effect_last"]) == (0, 1)


def test_a_source() -> None:
    found = window([1, 1, 0.8, 0.2, 0.1, 0, 0], "changed_word")
    assert found["end"] == "source" and found["depth_crossed"] == pytest.approx(2.5)
    assert found["loop_crossed"] == pytest.approx(0.5 / 0.8)
    assert window([1, 0.4, 0, 0, 0, 0, 0], "changed_word")["loop_crossed"] == 0  # gone before the first loop
    assert window([1, 1, 0, 0, 0, 0, 0], "changed_word", PLAIN)["loop_crossed"] is None


def test_censored() -> None:
    for effects in ([0, 0, 0.1, 0.2, 0.3, 0.4, 0.45], [0.6, 0.7, 0.8, 0.9, 1, 1, 1]):
        found = window(effects)
        assert found["censored"] and found["depth_crossed"] is found["relative"] is found["loop_crossed"] is None
    assert window([1, 1, 1, 1, 1, 1, 0.8], "changed_word")["area"] == pytest.approx(5.9 / 6)
    assert crossing(np.array([0.0, 2.0]), np.array([0.5, 1.0]), True) is None  # across at once
    assert crossing(np.array([0.0, 2.0]), np.array([0.25, 0.75]), True) == 1.0


def test_non_monotone_curves_count_and_keep_their_first_crossing() -> None:
    found = window([0, 0, 0.6, 0.3, 0.9, 1, 1])
    assert not found["monotone"] and found["depth_crossed"] == pytest.approx(1 + 5 / 6)
    assert window([0, 0.05, 0, 0.5, 0.45, 1, 1])["monotone"]  # by less than a tenth: noise
    assert window([0, -3, 0, 5, 4.99, 5, 5])["area"] <= 1  # clipped


def test_what_enters() -> None:
    up, down = [0, 0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]
    table = [
        *rows(up),
        *rows(up, item="wrong", both_right=False),
        *rows(up, item="control", control=True, donor_kind="distractor"),
        *rows(up, item="mean", kind="mean"),
        *rows(up, item="back", direction="item_to_donor"),
        *rows(up, item="single", position=5),
        *rows(down, "changed_word", span="one"),
        *rows([1, 1, 0.9, 0, 0.8, 0, 0], "changed_word", span="later"),
        *rows([0, 0, 0, 0, 0, 0, 1], donor_kind="name"),  # a second donor: averaged, depth by depth
    ]
    found = windows_table(tables.conform("patching", table), AXIS)
    assert found["item"].unique().to_list() == ["i"] and found.height == 2
    by = {row["end"]: row for row in found.to_dicts()}
    # of the later loops, by the first layer of each: 1, 1, .9, .8, 0 at depths 0, 1, 2, 4, 6
    assert by["source"]["depth_crossed"] == pytest.approx(4 + 2 * 0.3 / 0.8) and by["source"]["monotone"]
    assert by["destination"]["depth_crossed"] == pytest.approx(4.0)


def test_what_layers_read_lies_before_them() -> None:
    """A source at resid_pre: its depths are one less, and the sweep of residuals gives its end."""
    read = AXIS.filter(pl.col("depth") > 0)
    table = [
        *rows([1, 0.1, 0, 0, 0, 0, 0], "changed_word"),
        *rows([1, 1, 0.9, 0.8, 0.7, 0], "changed_word", axis=read, span="later", site="resid_pre"),
    ]
    found = {row["site"]: row for row in windows_table(tables.conform("patching", table), AXIS).to_dicts()}
    row = found["resid_pre"]  # depths 0 (before the prelude), 1 and 3 (the loops' first layers), 5 (the coda), 6
    assert row["depth_crossed"] == pytest.approx(3 + 2 * 0.3 / 0.8) and row["effect_last"] == 0
    assert row["loop_crossed"] is not None and not row["censored"] and row["monotone"]
    assert found["resid_post"]["depth_crossed"] == pytest.approx(0.5 / 0.9)


def ladder(n_stories: int, slope: float) -> pl.DataFrame:
    """Stories at three hop counts whose destination moves by `slope` depths a hop."""
    table: list[dict[str, Any]] = []
    rng = np.random.default_rng(0)
    for story in range(n_stories):
        shift = rng.normal(0, 0.3)
        for hops in (1, 2, 3):
            at = 1.5 + slope * hops + shift
            about = {"item": f"{story}/{hops}", "story": str(story), "cluster": str(story), "hops": hops}
            effects = [float(np.clip(d - at + 0.5, 0, 1)) for d in range(7)]
            table += rows(effects, **about) + rows([1 - e for e in effects], "changed_word", **about)
    return tables.conform("patching", table)


def test_slopes_are_paired_and_refused_from_few() -> None:
    patching = ladder(60, 0.8)
    found = {row["quantity"]: row for row in window_slopes_table(windows_table(patching, AXIS), patching).to_dicts()}
    assert set(found) == {f"{e}_{q}" for e in ("source", "destination")
                          for q in ("crossed", "crossed_relative", "crossed_loop", "area")}  # fmt: skip
    row = found["destination_crossed"]
    assert row["low"] < 0.8 < row["high"] and row["slope"] == pytest.approx(0.8, abs=0.02) and row["reason"] is None
    assert (row["n_pairs"], row["n_clusters"], row["share_censored"], row["share_nonmonotone"]) == (180, 60, 0, 0)
    assert found["destination_crossed_relative"]["slope"] == pytest.approx(0.8 / 6, abs=0.01)
    assert found["destination_area"]["slope"] == pytest.approx(-0.8 / 6, abs=0.02)
    assert found["source_area"]["slope"] == pytest.approx(0.8 / 6, abs=0.02)
    few = ladder(10, 0.8)
    slopes = window_slopes_table(windows_table(few, AXIS), few)
    (row,) = slopes.filter(pl.col("quantity") == "source_area").to_dicts()
    assert row["slope"] is None and row["reason"] == "too few clusters (10 of 50)" and row["n_pairs"] == 30


def test_the_sentence_says_how_sure() -> None:
    def said(patching: pl.DataFrame) -> str:
        windows = windows_table(patching, AXIS)
        own = {"windows": windows, "window_slopes": window_slopes_table(windows, patching)}
        return _windows("m", _window_rows(own))

    assert "reaches the last token later the more hops are asked (+13" in said(ladder(60, 0.8))
    assert "stops mattering later" in said(ladder(60, 0.8)) and "180 pairs" in said(ladder(60, 0.8))
    assert "earlier, not later" in said(ladder(60, -0.3))
    assert "hardly changes with hops" in said(ladder(60, 0.0)) and "; on average at " in said(ladder(60, 0.0))
    noisy = ladder(60, 0.0).with_columns(
        effect=pl.col("effect") * (1 + 0.3 * (pl.int_range(pl.len()) * 7919 % 13 - 6) / 6).cast(pl.Float32)
    )
    assert "no change with hops was measured of when" in said(noisy) and "includes 0" in said(noisy)
    few = "too few clusters (10 of 50): ask for more stories with --probe-items, and as many with --n."
    assert few in said(ladder(10, 0.8))
    alone = said(ladder(10, 0.8).filter(pl.col("hops") == 2))
    assert "at two hop counts: ask at two hop counts or more with --hops." in alone and "--probe-items" not in alone
    wrong = ladder(3, 0.8).with_columns(both_right=pl.lit(False))
    assert said(wrong) == (
        "By patching nothing is told of m's depth "
        "(no windows: the model answers none of 9 pairs right on both stories)."
    )


@pytest.mark.parametrize(
    ("slope", "low", "high", "words"),
    [
        (0.0001, -0.001, 0.0012, "hardly changes with hops (+0.01 % of the depth per hop, 95 % interval -0.10 to"),
        (-0.0004, -0.0007, -0.0001, "hardly changes with hops (-0.04 %"),  # sure, and nearly nothing
        (0.0001, -0.08, 0.08, "no change with hops was measured"),  # a wide interval says nothing of the kind
        (0.0001, -0.001, 0.02, "no change with hops was measured"),
        (0.004, 0.001, 0.009, "later the more hops are asked"),
        (-0.004, -0.009, -0.001, "earlier, not later, the more hops are asked"),
    ],
)
def test_hardly_means_that_both_bounds_are_small(slope: float, low: float, high: float, words: str) -> None:
    row = {"slope": slope, "low": low, "high": high, "mean": None, "share_censored": 0.0}
    assert words in _moves(row, "it")


@pytest.mark.parametrize(("more", "words"), [(0.5, "needed for more of the depth"), (-0.5, "needed for less of")])
def test_a_word_that_is_needed_in_more_loops_is_patched_earlier(more: float, words: str) -> None:
    """Patched in this and all later loops a word that the last n loops read decides until loop R − n: it crosses the
    earlier the more loops need it, and that is more depth used."""
    last, table = 6, list[dict[str, Any]]()
    for story in range(60):
        for hops in (1, 2, 3):
            needed = 2 + more * (hops - 2) + 0.2 * np.sin(story)
            about = {"item": f"{story}/{hops}", "story": str(story), "cluster": str(story), "hops": hops}
            # the effect of patching loops r … R: that share of the needed loops which it covers
            effects = [float(np.clip((last - depth + 1) / needed - 0.5, 0, 1)) for depth in range(1, last + 1)]
            before = LOOPS.filter(pl.col("depth") > 0)
            table += rows(effects, "changed_word", before, site="resid_pre", span="later", **about)
            arrives = [float(np.clip(d - 3.2, 0, 1)) for d in range(7)]
            table += rows(arrives, axis=LOOPS, **about)
            table += rows([1 - e for e in arrives], "changed_word", LOOPS, **about)
    patching = tables.conform("patching", table)
    windows = windows_table(patching, LOOPS)
    slopes = window_slopes_table(windows, patching, resamples=200)
    found = {row["quantity"]: row for row in slopes.to_dicts()}
    loop, needs = found["source_crossed_loop"], found["source_needed_loop"]
    assert (needs["slope"], needs["low"], needs["high"]) == (-loop["slope"], -loop["high"], -loop["low"])
    assert (needs["low"] > 0) == (more > 0) and abs(needs["slope"]) == pytest.approx(0.5, abs=0.1)
    sentence = _windows("m", _window_rows({"windows": windows, "window_slopes": slopes}))
    assert words in sentence and "stops mattering" not in sentence and "hardly changes" in sentence


@pytest.mark.filterwarnings("error")
def test_a_task_without_windows_says_so_beside_one_that_has_them() -> None:
    """No comparison with nothing, and no word of hop counts where the reason is another."""
    right = ladder(60, 0.8)
    wrong = ladder(4, 0.8).with_columns(both_right=pl.lit(False), task=pl.lit("follow"))
    control = wrong.with_columns(control=pl.lit(True), both_right=pl.lit(True))
    patching = pl.concat([right, wrong, control])
    found = patching_tables({"patching": patching}, AXIS, resamples=50)["window_slopes"]
    own = found.filter(pl.col("task") == "follow")
    assert own.height == 6 and set(own["n_pairs"]) == {0} and own["slope"].null_count() == own.height
    assert set(own["reason"]) == {"no windows: the model answers none of 12 pairs right on both stories"}
    assert found.filter(pl.col("task") == right["task"][0])["reason"].null_count() == 8
    alone = patching.filter(pl.col("item") == "0/1", pl.col("task") == "follow")
    reasons = set(window_slopes_table(windows_table(alone, AXIS), alone)["reason"])
    assert reasons == {"no windows: the model answers none of 1 pair right on both stories"}
    flat = right.with_columns(effect=pl.lit(None, pl.Float32))  # right, and answers too near to have an effect
    assert set(window_slopes_table(windows_table(flat, AXIS), flat)["reason"]) == {"no story has it at two hop counts"}


def test_means_by_role_and_hops() -> None:
    patching = ladder(8, 0.0)
    found = patching_by_role_table(patching, resamples=200)
    assert found.height == 2 * 7 * 4  # roles, depths, three hop counts and all of them
    cell = found.filter((pl.col("role") == "last") & (pl.col("depth") == 1) & (pl.col("hops") == 2)).to_dicts()[0]
    own = patching.filter((pl.col("role") == "last") & (pl.col("depth") == 1) & (pl.col("hops") == 2))
    assert cell["effect"] == pytest.approx(own["effect"].mean()) and cell["flip"] == own["flip"].mean()
    assert (cell["n_items"], cell["n_clusters"]) == (8, 8) and cell["low"] <= cell["effect"] <= cell["high"]
    whole = found.filter(pl.col("hops").is_null())
    assert set(whole["n_items"]) == {24} and set(whole["n_clusters"]) == {8}
    holes = patching.filter((pl.col("depth") != 3) | (pl.col("hops") == 1))
    assert set(patching_by_role_table(holes, resamples=200)["n_items"]) == {8, 24}
    assert patching_by_role_table(patching.with_columns(both_right=False)).is_empty()


def test_knockout_and_rows_in_any_order() -> None:
    patching = ladder(6, 0.5)
    knockout = tables.conform(
        "knockout",
        [
            {
                **{k: row[k] for k in ("item", "story", "cluster", "task", "hops", "loop", "layer", "depth")},
                "role": "changed_word", "window": 2, "ld_clean": 2.0, "ld_cut": 1.0, "logprob_clean": -0.1,
                "logprob_cut": -0.1 - row["depth"], "p_answer": 0.5, "correct": row["depth"] < 3,
                "flip": row["depth"] >= 3,
            }
            for row in patching.filter(pl.col("role") == "last").to_dicts()
        ],
    )  # fmt: skip
    found = knockout_by_depth_table(knockout, resamples=200)
    assert found.filter(pl.col("depth") == 2)["drop"].to_list() == pytest.approx([2.0] * 4)
    assert found.filter(pl.col("depth") == 4)["accuracy"].to_list() == [0.0] * 4
    both = {"patching": patching, "knockout": knockout}
    mixed = {name: table.sample(fraction=1.0, shuffle=True, seed=1) for name, table in both.items()}
    for name, table in patching_tables(both, AXIS, resamples=200).items():
        again = patching_tables(mixed, AXIS, resamples=200)[name]
        assert table.equals(again), name
    nothing = patching_tables({"patching": tables.empty("patching")}, AXIS)
    assert all(table.is_empty() for table in nothing.values())
