"""Stories of like chains are drawn together: intervals count clusters, slopes stay paired by story."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from synthetic_lens import lens_table

from depthprobe.analysis import analyse, summarise
from depthprobe.analysis.grid import with_clusters


def triple(story: int, k: int) -> str:
    """Thirty stories of six chains of three relations, two of one."""
    chain = story % 6
    return f"r{chain % 2}" if k == 1 else f"r{chain % 2} s{chain}"


def test_a_story_is_in_the_cluster_of_its_longest_question() -> None:
    rows = pl.DataFrame(
        {
            "item": ["a1", "a3", "b1", "b3", "c1", "c1x"],
            "story": ["a", "a", "b", "b", "c", "c"],
            "cluster": ["x", "x y z", "x", "x y w", "x", "u"],
            "hops": [1, 3, 1, 3, 1, 1],
        }
    )
    found = with_clusters(rows)
    assert found["whole"].to_list() == ["x y z", "x y z", "x y w", "x y w", "u", "u"]
    # one story is asked twice at one hop, so there the stories' own clusters hold
    assert found["cell"].to_list() == ["x y z", "x y z", "x y w", "x y w", "u", "u"]
    assert with_clusters(rows.head(4))["cell"].to_list() == ["x", "x y z", "x", "x y w"]


def test_copies_of_a_chain_add_no_certainty() -> None:
    """What is the same in all stories of a chain is known no better from five of them than from one."""

    def settle(rng: np.random.Generator, story: int, k: int) -> int:
        return 1 + (story % 6) * (k > 1)

    def right(rng: np.random.Generator, story: int, k: int) -> bool:
        return k == 1 or story % 6 < 4

    kw = {"right": right, "gate": lambda k, r: 0.5 + 0.1 * k}
    few = analyse(lens_table(settle, n_stories=6, cluster=triple, **kw), exit_q=0.5)
    many = analyse(lens_table(settle, n_stories=30, cluster=triple, **kw), exit_q=0.5)
    for name, value in (("differences", "difference"), ("exits_by_hops", "mean_exit")):
        for column in (value, "low", "high"):
            assert many[name][column].to_list() == pytest.approx(few[name][column].to_list()), (name, column)
    slope = many["slopes"].to_dicts()[0]
    assert (slope["n_clusters"], slope["n_stories"], slope["n_items"]) == (6, 30, 120)
    assert slope["slope"] is None and slope["reason"] == "too few clusters (6 of 50)"
    at = (pl.col("hops") == 3) & (pl.col("depth") == 6)
    wide = many["accuracy"].filter(at).to_dicts()[0]
    narrow = analyse(lens_table(settle, n_stories=30, **kw))["accuracy"].filter(at).to_dicts()[0]
    assert wide["accuracy"] == narrow["accuracy"] == pytest.approx(2 / 3)
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])
    # all right at one hop: two chains of one relation are two answers
    one = many["accuracy"].filter(hops=1, depth=6).to_dicts()[0]
    assert one["accuracy"] == 1.0 and one["low"] < 0.3
    assert "too few clusters (6 of 50)" in summarise(many, name="toy")["headline"]


def test_the_headline_counts_clusters() -> None:
    lens = lens_table(lambda rng, story, k: k, n_stories=100, cluster=lambda story, k: f"c{story // 2}")
    said = summarise(analyse(lens), name="toy")["headline"]
    assert "100 stories, each asked at 1–4 hops, in 50 clusters of like chains" in said
