"""The frontier on tables written by hand: mixtures, pairing, averages over permutations, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthprobe import tables
from depthprobe.analysis.frontier import frontier_tables, interpolated
from depthprobe.errors import UserError

N = 60  # stories, each asked at 1 and 2 hops
LOOPS = 2
PROMPT = 4


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(-1, 8))
def test_a_mixture_is_the_line_between_fixed_depths(heights: list[float], x: float) -> None:
    xs = np.arange(1, len(heights) + 1, dtype=float)
    found = interpolated(np.array([x]), xs[None], np.array(heights)[None])
    assert found[0] == pytest.approx(np.interp(x, xs, heights), abs=1e-12)


def setting(
    name: str, kind: str, exits: Any, correct: Any, seed: int = 0, beside: str | None = None, n: int = N
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """exits, correct: (story, hops) → depth, right."""
    same = {"setting": name, "kind": kind, "kv": "ragged", "rule": name, "beside": beside, "seed": seed}
    rows = []
    for story in range(n):
        for hops in (1, 2):
            depth = exits(story, hops)
            rows.append(same | {
                "item": f"s{story}/k{hops}", "story": f"s{story}", "cluster": f"s{story}", "task": "follow",
                "hops": hops, "correct": correct(story, hops), "tokens": 1, "mean_exit": float(depth),
                "decode_rows": depth, "prompt_rows": PROMPT * LOOPS, "latency": 0.5 + story, "predicted": [1],
                "exits": [depth], "prompt_exits": None,
            })  # fmt: skip
    decode = sum(row["decode_rows"] for row in rows)
    served = same | {
        "task": "follow", "n_loops": LOOPS, "questions": len(rows), "tokens": len(rows), "decode_rows": decode,
        "all_rows": decode + PROMPT * LOOPS * len(rows) + 3, "read_rows": 0, "seconds": 2.0, "peak_kv_bytes": 7,
        "target": None, "calibrated": None, "n_calibration": None,
    }  # fmt: skip
    return tables.conform("frontier_answers", rows), tables.conform("frontier_served", [served])


def joined(*settings: tuple[pl.DataFrame, pl.DataFrame]) -> tuple[pl.DataFrame, pl.DataFrame]:
    answers, served = zip(*settings, strict=True)
    return pl.concat(answers), pl.concat(served)


def fixed(n: int = N) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """One loop answers one hop, two answer both."""
    return [
        setting("fixed:1", "fixed", lambda s, k: 1, lambda s, k: k == 1, n=n),
        setting("fixed:2", "fixed", lambda s, k: 2, lambda s, k: True, n=n),
    ]


RULE = setting("q:0.5", "rule", lambda s, k: k, lambda s, k: True)  # goes deep where it has to
PERMUTED = [
    setting("permuted q:0.5", "permuted", lambda s, k: 1 + s % 2, lambda s, k: k == 1 or s % 2 == 1, 1, "q:0.5"),
    setting("permuted q:0.5", "permuted", lambda s, k: 2 - s % 2, lambda s, k: k == 1 or s % 2 == 0, 2, "q:0.5"),
]


def test_a_rule_that_goes_deep_where_it_has_to_gains_over_the_mixture() -> None:
    found = frontier_tables(*joined(*fixed(), RULE, *PERMUTED), resamples=200)
    whole = {row["setting"]: row for row in found["frontier"].filter(pl.col("hops").is_null()).iter_rows(named=True)}
    rule = whole["q:0.5"]
    assert rule["n"] == 2 * N and rule["n_clusters"] == N and rule["reason"] is None
    assert (rule["accuracy"], rule["mean_exit"], rule["mixture_accuracy"]) == (1.0, 1.5, 0.75)
    # every story has one question of each kind, so resampling stories changes nothing
    assert (rule["gain"], rule["gain_low"], rule["gain_high"]) == pytest.approx((0.25, 0.25, 0.25))
    assert rule["gain_all"] == pytest.approx(0.25)  # prompts ran alike
    assert rule["accuracy_low"] < 1.0  # 120 of 120 are not certainty
    assert rule["decode_share"] == pytest.approx(0.75)
    assert rule["all_rows"] == N * (1 + 2) + 2 * N * PROMPT * LOOPS + 3
    assert rule["all_share"] == pytest.approx(rule["all_rows"] / (LOOPS * 2 * N * (1 + PROMPT)))
    assert (rule["seconds"], rule["tokens_per_s"], rule["peak_kv_bytes"]) == (2.0, N, 7)
    assert whole["fixed:1"]["gain"] is None and whole["fixed:1"]["mixture_accuracy"] == 0.5


def test_permutations_are_averaged_question_by_question() -> None:
    found = frontier_tables(*joined(*fixed(), RULE, *PERMUTED), resamples=200)
    rows = found["frontier"].filter((pl.col("kind") == "permuted") & pl.col("hops").is_null())
    assert rows.height == 1
    assert rows["accuracy"][0] == 0.75 and rows["gain"][0] == pytest.approx(0.0)
    assert rows["gain_low"][0] == pytest.approx(0.0)  # each question is half right under the two seeds
    differences = found["frontier_differences"].filter(pl.col("hops").is_null())
    assert differences["against"].to_list() == ["full", "permuted"]
    assert differences["accuracy"].to_list() == pytest.approx([0.0, 0.25])
    assert differences["mean_exit"].to_list() == pytest.approx([-0.5, 0.0])
    assert differences["accuracy_low"].to_list() == pytest.approx([0.0, 0.25])


def test_hops_have_rows_of_their_own_without_what_holds_of_a_whole_serving() -> None:
    found = frontier_tables(*joined(*fixed(), RULE), resamples=100)["frontier"]
    assert sorted(found["hops"].drop_nulls().unique()) == [1, 2]
    two = found.filter((pl.col("setting") == "q:0.5") & (pl.col("hops") == 2)).row(0, named=True)
    assert (two["n"], two["mean_exit"], two["mixture_accuracy"]) == (N, 2.0, 1.0)
    assert two["seconds"] is None and two["peak_kv_bytes"] is None and two["latency_p50"] == 30.0


def test_few_clusters_have_no_interval() -> None:
    rule = setting("q:0.5", "rule", lambda s, k: k, lambda s, k: s != 3, n=10)
    row = frontier_tables(*joined(*fixed(10), rule))["frontier"].filter(pl.col("kind") == "rule").row(0, named=True)
    assert row["reason"] == "too few clusters (10 of 50)" and row["gain"] == pytest.approx(0.15)
    assert all(row[f"{name}_low"] is None for name in ("accuracy", "mean_exit", "gain", "gain_all"))


def test_the_interval_of_the_gain_is_paired() -> None:
    # wrong together: the rule and the fixed depths miss the same stories, so their difference is sure
    lost = lambda s: s % 3 == 0  # noqa: E731
    settings = [
        setting("fixed:1", "fixed", lambda s, k: 1, lambda s, k: k == 1 and not lost(s)),
        setting("fixed:2", "fixed", lambda s, k: 2, lambda s, k: not lost(s)),
        setting("q:0.5", "rule", lambda s, k: k, lambda s, k: not lost(s)),
    ]
    found = frontier_tables(*joined(*settings))
    row = found["frontier"].filter((pl.col("kind") == "rule") & pl.col("hops").is_null()).row(0, named=True)
    against = found["frontier_differences"].filter(pl.col("hops").is_null()).row(0, named=True)
    assert row["accuracy_high"] - row["accuracy_low"] > 0.2
    assert (against["accuracy_low"], against["accuracy_high"]) == (0.0, 0.0)
    assert row["gain_high"] - row["gain_low"] < 0.1


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(UserError, match="fixed:2 was not served"):
        frontier_tables(*joined(fixed()[0], RULE))
    with pytest.raises(UserError, match=r"q:0\.5 was not asked"):
        frontier_tables(*joined(*fixed(), setting("q:0.5", "rule", lambda s, k: 1, lambda s, k: True, n=9)))
