"""The block about served tokens: its numbers are the tables', and a run without a trace has none."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from synthetic import looped_axis, write_run

from depthprobe import report, tables
from depthprobe.analysis.agreement import TERMS, agreement_by_hops_table
from depthprobe.errors import UserError
from depthprobe.report import Task, read_run, render
from depthprobe.report.served import served_blocks

#: of each trace: the chance of each term to be 1 at a token
WAYS = {"q:0.5": {"gate": 0.5, "cache_prompt": 0.3}, "lookahead:q:0.5": {"delay": 0.6, "lookahead": 0.2}}


def add_served(run: Path, task: str = "follow", seed: int = 0) -> Path:
    """Two traces of the run's questions, two tokens each, and one with planned exits."""
    rng = np.random.default_rng(seed)
    items = pl.read_parquet(run / "tables" / "items.parquet").filter(task=task)
    rows = []
    for rule in (*WAYS, "fixed:3"):
        for item in items.select("item", "story", "cluster", "task", "hops").iter_rows(named=True):
            for index in (0, 1):
                terms = {t: int(rng.random() < WAYS.get(rule, {}).get(t, 0)) for t in TERMS}
                terms["gate"] -= int(rng.random() < 0.3)
                settles = 2
                planned = rule == "fixed:3"
                left = 3 if planned else settles + sum(terms.values())
                rows.append({
                    **item, "rule": rule, "layout": "ragged", "prefill": "dense", "request": item["item"],
                    "index": index, "token": 1, "prompt_token": index == 0, "s_full": settles, "s_served": settles,
                    "exit": left, "top1_full": 1, "top1_served": 1, "changed": False, "margin": 1.0,
                    **({} if planned else terms),
                })  # fmt: skip
    found = tables.conform("agreement", [{**dict.fromkeys(tables.SCHEMAS["agreement"]), **row} for row in rows])
    found.write_parquet(run / "tables" / "agreement.parquet")
    agreement_by_hops_table(found, resamples=50).write_parquet(run / "tables" / "agreement_by_hops.parquet")
    return run


@pytest.fixture(scope="module")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("served"), looped_axis(6), tasks=("follow",), hops=(1, 2, 3), n_stories=14)
    return add_served(run)


@pytest.fixture(scope="module")
def task(served_run: Path) -> Task:
    return read_run(served_run).task("follow")


def test_bars_are_the_means_of_the_table(task: Task) -> None:
    figure = report.served_terms(task)
    assert figure is not None
    ways = [value for value, _ in figure.choices[0].options]
    assert ways == ["q:0.5/dense/ragged", "lookahead:q:0.5/dense/ragged"]  # planned exits have no causes
    assert [name for _, name in figure.choices[0].options] == ["q:0.5, dense prefill", "lookahead:q:0.5, dense prefill"]
    assert figure.spec["layout"]["barmode"] == "relative"
    shown = [key.name for key in figure.keys]
    assert shown[-1].startswith("their sum") and len(shown) == 5  # terms that are always 0 are not drawn
    for rule in WAYS:
        own = task.agreement_by_hops.filter(pl.col("hops").is_not_null(), rule=rule)
        traces = [t for t in figure.spec["data"] if t["meta"]["when"]["served"].startswith(f"{rule}/")]
        assert [t["visible"] for t in traces] == [rule == "q:0.5"] * 5
        bars = np.array([t["y"] for t in traces if t["type"] == "bar"])
        (total,) = [t for t in traces if t["type"] == "scatter"]
        assert bars.sum(axis=0) == pytest.approx(total["y"]) == own.filter(term="total").sort("hops")["mean"].to_list()
    assert len(figure.grid.rows) == 6 and figure.grid.rows[0][0] == "k = 1"
    assert figure.plotly("dark").layout.title.text == figure.title


def test_the_spread_counts_every_token(task: Task) -> None:
    figure = report.exit_minus_settling(task)
    assert figure is not None
    chosen = figure.choose(served="q:0.5/dense/ragged", hops=2)
    (trace,) = chosen.spec["data"]
    own = task.agreement.filter(rule="q:0.5", hops=2).with_columns(total=pl.col("exit") - pl.col("s_full"))
    wanted = [own.filter(pl.col("total") == x).height / own.height for x in trace["x"]]
    assert trace["y"] == pytest.approx(wanted) and sum(trace["y"]) == pytest.approx(1)
    assert figure.sheet["tokens"].sum() == 2 * task.agreement.height  # once over all hops, once by hops


def test_the_page_has_the_block_where_there_is_a_trace(served_run: Path, looped_run: Path, tmp_path: Path) -> None:
    run = read_run(served_run)
    (block,) = served_blocks(run.task("follow"))
    assert "28 tokens were planned" not in block.after and "84 tokens were planned" in block.after
    assert block.table is not None and len(block.table.rows) == 12  # three ways, three hop counts and all
    page = render(run)
    assert "Served depth: where did tokens really leave" in page and "follow-served-terms" in page
    assert served_blocks(read_run(looped_run).task("follow")) == ()
    assert report.served_terms(read_run(looped_run).task("follow")) is None
    assert report.exit_minus_settling(read_run(looped_run).task("follow")) is None
    wrong = tmp_path / "wrong"
    shutil.copytree(served_run, wrong)
    table = run.task("follow").agreement
    table.with_columns(delay=pl.col("delay") + 1).write_parquet(wrong / "tables" / "agreement.parquet")
    with pytest.raises(UserError, match="the terms add up to"):
        render(read_run(wrong))
