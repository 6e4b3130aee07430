"""Layer-within-loop heat maps, and what figures export."""

from __future__ import annotations

import io
from pathlib import Path

import polars as pl
import pytest

from depthprobe.report import Figure, read_run
from depthprobe.report.panels import layers_within_loops
from depthprobe.report.sections import section


def test_a_cell_is_the_accuracy_of_its_coordinate(deep_run: Path) -> None:
    run = read_run(deep_run)
    task = run.tasks[0]
    accuracy, probability = layers_within_loops(task)
    columns = accuracy.spec["layout"]["xaxis"]["ticktext"]
    rows = accuracy.spec["layout"]["yaxis"]["ticktext"]
    loop_of = {"p": 0, **{str(r): r for r in range(1, 5)}, "c": 5}
    assert columns == ["p", "1", "2", "3", "4", "c"] and rows == ["1", "2", "3", "4", "end"]
    for figure, column in ((accuracy, "accuracy"), (probability, "p_correct")):
        assert len(figure.spec["data"]) == len(task.hops)
        for k, trace in zip(task.hops, figure.spec["data"], strict=True):
            table = {row["depth"]: row[column] for row in task.accuracy_of[k].iter_rows(named=True)}
            for i, name in enumerate(rows):
                for j, loop in enumerate(columns):
                    site = "loop_state" if name == "end" else "resid_post"
                    layer = 4 if name == "end" else int(name)
                    here = [
                        depth
                        for depth, c in enumerate(run.axis.coordinates)
                        if (c.loop, c.layer, c.site) == (loop_of[loop], layer, site)
                    ]
                    assert trace["z"][i][j] == (table[here[0]] if here else None)
                    assert bool(trace["hovertext"][i][j]) == bool(here)


def test_a_loop_of_one_layer_and_an_ordinary_stack_have_none(looped_run: Path, layers_run: Path) -> None:
    for folder in (looped_run, layers_run):
        assert layers_within_loops(read_run(folder).tasks[0]) == ()


@pytest.mark.parametrize("name", ["looped_run", "layers_run", "deep_run", "small_run"])
def test_every_figure_has_numbers_to_export(name: str, request: pytest.FixtureRequest) -> None:
    run = read_run(request.getfixturevalue(name))
    figures: list[Figure] = [
        figure for task in run.tasks for block in section(run, task, "Said.", 0.9).blocks for figure in block.figures
    ]
    for figure in figures:
        sheet = pl.read_csv(io.StringIO(figure.csv()))
        assert sheet.height == figure.sheet.height > 0 and sheet.columns == figure.sheet.columns
        assert any(kind.is_float() for kind in sheet.dtypes)


def test_the_exported_numbers_are_those_drawn(looped_run: Path) -> None:
    run = read_run(looped_run)
    task = run.tasks[1]
    by_id = {f.id: f for block in section(run, task, "Said.", 0.9).blocks for f in block.figures}
    figure = by_id["follow-accuracy"]
    sheet = pl.read_csv(io.StringIO(figure.csv()))
    z = figure.spec["data"][0]["z"]
    for row in sheet.iter_rows(named=True):
        assert row["accuracy"] == pytest.approx(z[task.hops.index(row["hops"])][row["depth"]], abs=1e-6)
    shares = pl.read_csv(io.StringIO(by_id["follow-settling-depth"].csv()))
    assert shares.group_by("hops").agg(pl.col("share").sum())["share"].to_list() == pytest.approx([1] * 6, abs=1e-5)
