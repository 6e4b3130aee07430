"""Effective depth by hops: on tables written by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from depthprobe import tables
from depthprobe.analysis import (
    EFFECTIVE_MEASURES,
    analyse_effective,
    effective_by_hops,
    effective_depths,
    effective_sentence,
    effective_slopes,
    item_depths,
)
from depthprobe.errors import UserError

L = 4


def table(
    kl: Callable[[int, int], list[float]], stories: int = 60, hops: tuple[int, ...] = (1, 2, 3), loops: int = 0
) -> pl.DataFrame:
    """One row an item and layer, skip_kl from `kl(story, hops)`; the last has nothing later."""
    rows = []
    for story in range(stories):
        for k in hops:
            effects = kl(story, k)
            for layer, effect in enumerate(effects, 1):
                row = dict.fromkeys(EFFECTIVE_MEASURES, 0.5) | {
                    "item": f"s{story:02}/k{k}", "story": f"s{story:02}", "cluster": f"s{story:02}", "task": "kinship",
                    "hops": k, "depth": layer, "loop": 1, "layer": layer, "site": "resid_post", "skip_kl": effect,
                    "skip_correct": (story + layer) % 2 == 0, "contribution": float(story),
                }  # fmt: skip
                if layer == len(effects):
                    row |= {"later_same": None, "later_others": None}
                rows.append(row)
                if layer == len(effects) and loops:
                    rows.append(row | {"site": "loop", "skip_kl": 99.0})
    return tables.conform("effective", rows)


def test_half_of_the_effect_and_the_share_that_counts() -> None:
    found = item_depths(table(lambda story, k: [0.0, 3.0, 0.05, 1.0] if k == 1 else [1.0, 0.0, 0.0, 3.0], stories=1))
    first, second, _ = found.to_dicts()
    # 4.05 / 2 = 2.025 of the second layer's 3; 2 of 4 lies a third into the last layer
    assert first["half_depth"] == pytest.approx((1 + 2.025 / 3) / L)
    assert second["half_depth"] == pytest.approx((3 + 1 / 3) / L)
    assert first["used_share"] == 0.5 and second["used_share"] == 0.5
    assert first["half_later"] == pytest.approx(1.5 / L)  # three equal ones, and none behind the last


def test_whole_loops_do_not_count_as_layers() -> None:
    rows = table(lambda story, k: [1.0, 1.0, 1.0, 3.0], stories=2)
    assert item_depths(rows).equals(item_depths(table(lambda story, k: [1.0, 1.0, 1.0, 3.0], stories=2, loops=1)))


def test_layers_that_all_do_the_same_have_no_place() -> None:
    # to some of them it makes no difference, up to rounding
    rows = table(lambda story, k: [k * 1.0, k * 1.0001, k * 1.0, k * 1.0] if story % 2 else [1e-8, 2e-8, 0.0, 1e-8])
    found = analyse_effective(rows)
    assert found["effective_depths"]["quantity"].unique().to_list() == ["half_later"]
    reasons = dict(found["effective_slopes"].select("quantity", "reason").iter_rows())
    assert reasons["half_depth"] == reasons["used_share"] == "skipping any of its layers does the same"
    said = effective_sentence(found, "kinship", "ouro")
    assert said.startswith("On kinship, leaving out any one layer of ouro is the same, so skips do not say where depth")
    assert "half of what later layers at the answer owe to earlier tokens lies before 38 % (at 1 hop) and 38 %" in said


def test_nothing_is_lost_anywhere() -> None:
    found = analyse_effective(table(lambda story, k: [0.0] * L))
    assert "half_depth" not in found["effective_depths"]["quantity"].to_list()
    said = effective_sentence(found, "kinship", "it")
    assert said.startswith("On kinship, 0 % (at 1 hop) and 0 % (at 3 hops) of it's layers move its output when skipped")
    assert "half of the effect" not in said
    used = found["effective_slopes"].filter(pl.col("quantity") == "used_share").to_dicts()[0]
    assert used["slope"] == 0.0 and used["reason"] is None


def test_profiles_are_means_over_the_items_that_have_it() -> None:
    rows = table(lambda story, k: [1.0, 2.0, 3.0, story * 1.0], stories=20)
    found = effective_by_hops(rows)
    slow = rows.group_by("hops", "depth").agg(pl.col(EFFECTIVE_MEASURES).cast(pl.Float64).mean())
    for row in found.to_dicts():
        mean = slow.filter(pl.col("hops") == row["hops"], pl.col("depth") == row["depth"])[row["quantity"]][0]
        assert row["mean"] == pytest.approx(mean) and row["n"] == 20
        assert row["low"] <= row["mean"] <= row["high"]
    missing = set(EFFECTIVE_MEASURES) - set(found.filter(pl.col("depth") == L)["quantity"])
    assert missing == {"later_same", "later_others"}
    some = rows.with_columns(
        later_same=pl.when(pl.col("story") == "s00").then(None).otherwise("later_same").cast(pl.Float32)
    )
    partly = effective_by_hops(some).filter(pl.col("quantity") == "later_same")
    assert partly["n"].unique().to_list() == [19]
    shuffled = effective_by_hops(rows.sample(fraction=1.0, shuffle=True, seed=1))
    assert shuffled.equals(found)


def test_slope_is_paired_and_refused_from_few_clusters() -> None:
    def deeper(story: int, k: int) -> list[float]:
        """Stories differ in level; with each hop a quarter of a layer moves from the first to the last."""
        return [5.0 - k - 0.02 * story, 0.0, 0.0, 5.0 + k + 0.02 * story]

    rows = table(deeper)
    half = item_depths(rows)
    fits = [np.polyfit(own["hops"], own["half_depth"], 1)[0] for _, own in half.group_by("story", maintain_order=True)]
    row = effective_slopes(rows).filter(pl.col("quantity") == "half_depth").to_dicts()[0]
    assert row["slope"] == pytest.approx(np.mean(fits)) and row["low"] > 0 and row["reason"] is None
    assert (row["n_clusters"], row["n_stories"], row["n_items"]) == (60, 60, 180)
    said = effective_sentence(analyse_effective(rows), "kinship", "it")
    assert "(at 1 hop) and" in said and "(at 3 hops) of the depth, deeper the more hops are asked (+" in said
    assert "50 % (at 1 hop) and 50 % (at 3 hops) of it's layers move its output when skipped (by a KL above 0.1" in said
    few = effective_slopes(table(deeper, stories=49)).filter(pl.col("quantity") == "half_depth").to_dicts()[0]
    assert few["slope"] is None and few["reason"] == "too few clusters (49 of 50)"
    said = effective_sentence(analyse_effective(table(deeper, stories=3)), "kinship", "it")
    assert "nats); whether that changes with hops is not told: too few clusters" in said and ", whether" not in said
    single = effective_slopes(table(deeper, hops=(2,)))
    assert single["reason"].to_list() == ["no story has it at two hop counts"] * 3


def test_sentence_follows_the_interval() -> None:
    flat = analyse_effective(table(lambda story, k: [3.0 + 0.1 * k * (-1) ** story, 0.0, 0.0, 3.0]))
    assert "of the depth, with no change by hops measured" in effective_sentence(flat, "kinship", "it")
    more = analyse_effective(table(lambda story, k: [4.0 - k, 0.0, 1.0 if k > 1 else 0.0, 3.0]))
    said = effective_sentence(more, "kinship", "it")
    assert "move its output when skipped (by a KL above 0.1 nats), more of them the more hops are asked (+12.5" in said
    fewer = analyse_effective(table(lambda story, k: [1.0 / k**4, 1.0, 1.0, 6.0 - k]))
    said = effective_sentence(fewer, "kinship", "it")
    assert "nats), fewer of them the more hops are asked (-12.5" in said and "95 % interval -" in said


def test_bad_tables() -> None:
    rows = table(lambda story, k: [1.0, 2.0], stories=2)
    with pytest.raises(UserError, match=r"holds 11 rows for 6 items of 2 layers and loops \(table effective, task"):
        effective_depths(rows[1:])
    with pytest.raises(UserError, match="the table has no rows"):
        effective_by_hops(tables.empty("effective"))
    with pytest.raises(UserError, match="there are no rows of the task 'follow'"):
        effective_sentence(analyse_effective(rows), "follow", "it")
