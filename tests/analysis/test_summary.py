"""The words of the headline follow the intervals."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from synthetic_lens import lens_table

from depthprobe import tables
from depthprobe.analysis import analyse, summarise


def summary(
    shortcut: float | None = None, exit_q: float | None = 0.5, n_stories: int = 60, **kw: Any
) -> dict[str, Any]:
    found = analyse(lens_table(n_stories=n_stories, **kw), exit_q=exit_q)
    if shortcut is not None:
        tasks_hops = found["accuracy"].select("task", "hops").unique().iter_rows()
        rows = [
            {
                "task": t,
                "hops": k,
                "shortcut": "last two",
                "accuracy": shortcut,
                "low": 0.0,
                "high": 1.0,
                "n": 9,
            }
            for t, k in tasks_hops
        ]
        found["shortcuts"] = tables.conform("shortcuts", rows)
    whole = summarise(found, name="toy", exit_q=exit_q)
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    return whole["tasks"][0]


def test_later_with_hops() -> None:
    task = summary(
        settle=lambda rng, story, k: k + story % 2, gate=lambda k, r: 0.9 if r >= k else 0.0, shortcut=0.4
    )
    assert (
        "settles on its answer later the more hops are asked (+1.00 loops per hop, 95 % interval +1.00"
        in task["headline"]
    )
    assert "60 stories, each asked at 1–4 hops" in task["headline"]
    assert "Its gate leaves later with more hops (+1.00 loops per hop" in task["headline"]
    assert "One loop alone is less accurate than all of them at 3–4 hops (-100 points" in task["headline"]
    assert "above the strongest shortcut at every k from 2–4 hops" in task["headline"]
    assert task["hops"][0]["shortcut"] == "last two"
    assert task["exit"]["mean_exit"] == 2.5
    assert [row["settling"] for row in task["hops"]] == [1.5, 2.5, 3.5, 4.5]


def test_no_change_is_said_plainly() -> None:
    task = summary(settle=lambda rng, story, k: int(rng.integers(1, 6)), gate=lambda k, r: 0.9)
    assert "no change of toy's settling depth with hops was measured" in task["headline"]
    assert "which includes 0" in task["headline"]
    assert "Its gate shows no change of exit depth with hops" in task["headline"]


def test_earlier_and_shortcuts() -> None:
    task = summary(
        settle=lambda rng, story, k: 8 - k,
        loops=1,
        layers=9,
        shortcut=0.7,
        right=lambda rng, story, k: story % 2 == 0,
        exit_q=None,
    )
    assert "earlier, not later" in task["headline"]
    assert "layers per hop" in task["headline"]
    assert "nowhere above the strongest shortcut" in task["headline"]
    assert "no evidence of step-by-step composition" in task["headline"]
    task = summary(
        settle=lambda rng, story, k: k, shortcut=0.7, right=lambda rng, story, k: k != 3 or story < 24
    )
    assert "only at k = 2, 4; at k = 3 depth may serve a shortcut" in task["headline"]


@pytest.mark.parametrize(
    ("n", "hops", "words"),
    [
        (5, (3,), "no paired slope"),
        (1, (1, 2), "is not told: too few clusters (1 of 50): ask for more stories with --n"),
        (5, (1, 2), "is not told: too few clusters (5 of 50): ask for more stories with --n"),
    ],
)
def test_too_little_to_say(n: int, hops: tuple[int, ...], words: str) -> None:
    assert words in summary(settle=lambda rng, story, k: k, n_stories=n, hops=hops)["headline"]


def test_a_coda_that_changes_the_answer_is_told_in_readouts() -> None:
    # the last of five runs stands for a coda: no loop end settles where it has the last word
    lens = lens_table(lambda rng, story, k: k + story % 2, loops=5, n_stories=60)
    found = analyse(lens.with_columns(is_loop_end=pl.col("is_loop_end") & (pl.col("loop") < 5)))
    task = summarise(found, name="toy")["tasks"][0]
    assert task["settling_column"] == "settling_depth" and task["unit"] == "readouts"
    assert "+1.00 readouts per hop" in task["headline"]


def test_two_tasks_kinship_first() -> None:
    lens = pl.concat([lens_table(lambda rng, story, k: k, task=task) for task in ("follow", "kinship")])
    whole = summarise(analyse(lens), name="toy")
    assert [task["task"] for task in whole["tasks"]] == ["kinship", "follow"]
    assert whole["headline"].startswith("On kinship")
    assert "On follow" in whole["headline"]
