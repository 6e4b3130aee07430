"""Figures of interventions: their numbers are the tables', choices pick them, and what is missing is not drawn."""

from __future__ import annotations

import io
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from plotly.graph_objects import Figure as PlotlyFigure
from synthetic import layers_axis, looped_axis, write_run
from synthetic_causal import CUTS, EFFECTS, SKIPS, add_causal

from depthprobe import analysis, report
from depthprobe.analysis.windows import patching_tables
from depthprobe.errors import UserError
from depthprobe.report import Figure, Task, read_run, render
from depthprobe.report.causal import causal_blocks
from depthprobe.report.data import Run
from depthprobe.report.figures import agrees


@cache
def _run(folder: Path) -> Run:
    return read_run(folder)


def _task(folder: Path) -> Task:
    return _run(folder).task("follow")


def _table(folder: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(folder / "tables" / f"{name}.parquet")


def _all(folder: Path) -> list[Figure]:
    run = _run(folder)
    return [f for task in run.tasks for block in causal_blocks(run, task) for f in block.figures]


def _traces(figure: Figure, **when: str) -> list[dict[str, Any]]:
    return [t for t in figure.spec["data"] if agrees(t.get("meta", {}).get("when", {}), when)]


def test_the_map_holds_the_table(causal_run: Path) -> None:
    figure = report.patching_map(_task(causal_run))
    assert figure is not None
    table = _table(causal_run, "patching_by_role").filter(~pl.col("control"))
    assert [choice.key for choice in figure.choices] == ["hops", "donors", "site", "patch"]
    assert [value for value, _ in figure.choices[0].options] == ["all", "1", "2", "3"]
    seen = 0
    for trace in figure.spec["data"]:
        when = trace["meta"]["when"]
        hops = pl.col("hops").is_null() if when["hops"] == "all" else pl.col("hops") == int(when["hops"])
        own = table.filter(hops, pl.col("donor_kind") == when["donors"], pl.col("site") == when["site"])
        roles = ["changed_word", "changed_fact", "other_facts", "question_names", "last"]
        for role, row in zip(roles, trace["z"], strict=True):
            wanted = own.filter(pl.col("role") == role).sort("depth")["effect"].to_list()
            assert row == pytest.approx(wanted, abs=6e-5)
            seen += len(row)
    assert seen == table.height == figure.sheet.height
    shown = [trace["meta"]["when"] for trace in figure.spec["data"] if trace["visible"]]
    assert shown == [{"hops": "all", "donors": "relation", "site": "resid_post", "patch": "donor_to_item.set.one"}]


def test_a_choice_narrows_figure_and_table(causal_run: Path) -> None:
    figure = report.patching_map(_task(causal_run))
    assert figure is not None
    picked = figure.choose(hops=3, donors="name", site="attn_out")
    assert [choice.key for choice in picked.choices] == ["patch"]
    assert len(picked.spec["data"]) == 1 and "hops k 3" in picked.title and "attention output" in picked.title
    row = next(row for row in picked.grid.rows if "loop 2" in row)
    cell = _table(causal_run, "patching_by_role").row(
        by_predicate=(pl.col("hops") == 3) & (pl.col("donor_kind") == "name") & (pl.col("site") == "attn_out")
        & (pl.col("role") == "last") & (pl.col("depth") == 2),
        named=True,
    )  # fmt: skip
    assert row[-1].replace("−", "-").startswith(f"{cell['effect']:.2f} ")
    assert figure.choose().spec["data"] == figure.spec["data"]
    with pytest.raises(UserError, match="no choice 'layer'"):
        figure.choose(layer=1)
    with pytest.raises(UserError, match="no hops '9'"):
        figure.choose(hops=9)


def test_controls_stand_beside_donors(causal_run: Path) -> None:
    effect, flips = report.controls_beside_donors(_task(causal_run))
    table = _table(causal_run, "patching_by_role").filter(
        (pl.col("role") == "last") & (pl.col("hops") == 2) & (pl.col("site") == "resid_post")
    )
    lines = [t for t in _traces(effect, hops="2", role="last") if "marker" in t]
    assert [line["line"]["dash"] for line in lines] == ["solid", "solid", "dash"]  # relation, name, the control
    for line, kind in zip(lines, ("relation", "name", "distractor_name"), strict=True):
        wanted = table.filter(pl.col("donor_kind") == kind).sort("depth")["effect"].to_list()
        assert line["y"] == pytest.approx(wanted, abs=1e-4)
    shares = [t for t in _traces(flips, hops="2", role="last") if "marker" in t]
    assert [share["y"][-1] for share in shares] == [1, 1, 0]


def test_windows_are_means_over_items(causal_run: Path) -> None:
    crossing, area, shares = report.windows_by_hops(_task(causal_run))
    windows = _table(causal_run, "windows").filter(pl.col("site") == "resid_post")
    for figure, column in ((crossing, "depth_crossed"), (area, "area")):
        for trace, end in zip(_traces(figure, site="resid_post"), ("source", "destination"), strict=True):
            means = windows.filter(pl.col("end") == end).group_by("hops").agg(pl.col(column).mean()).sort("hops")
            assert trace["y"] == pytest.approx(means[column].to_list())
            assert min(trace["error_y"]["array"]) > 0 and min(trace["error_y"]["arrayminus"]) > 0
    never, bent, *_ = _traces(shares, site="resid_post")
    own = windows.filter(pl.col("end") == "source").group_by("hops").agg(pl.col("censored", "monotone").mean())
    assert never["y"] == pytest.approx(own.sort("hops")["censored"].to_list())
    assert bent["y"] == pytest.approx([1 - value for value in own.sort("hops")["monotone"]])


def test_knockout_is_the_table(causal_run: Path) -> None:
    drop, accuracy = report.knockout_curves(_task(causal_run))
    table = _table(causal_run, "knockout_by_depth").filter(pl.col("hops") == 2).sort("depth")
    for figure, column in ((drop, "drop"), (accuracy, "accuracy")):
        lines = [t for t in _traces(figure, hops="2") if "marker" in t]
        roles = ("changed_word", "changed_fact", "other_facts", "question_names")
        for line, role in zip(lines, roles, strict=True):
            assert line["y"] == pytest.approx(table.filter(pl.col("role") == role)[column].to_list(), abs=1e-4)
            assert line["x"] == list(range(1, 7))  # a layer can be cut, the embedding cannot


def test_effective_depth_by_hops(deep_causal_run: Path) -> None:
    task = _task(deep_causal_run)
    table = _table(deep_causal_run, "effective_by_hops").filter((pl.col("task") == "follow") & (pl.col("hops") == 3))
    kl, top5, _ = report.skips(task)
    contribution, cosine = report.contributions(task)
    for figure, unit, at, quantity in (
        (kl, "layer", None, "skip_kl"), (top5, "loop", None, "skip_top5"),
        (contribution, "layer", "others", "contribution_all"), (cosine, "loop", "answer", "cosine"),
    ):  # fmt: skip
        when = {"unit": unit} | ({} if at is None else {"at": at})
        (line,) = [t for t in _traces(figure, **when) if "marker" in t and t["meta"]["hop"] == 3]
        site = pl.col("site") == "loop" if unit == "loop" else pl.col("site") != "loop"
        own = table.filter((pl.col("quantity") == quantity) & site).sort("depth")
        assert line["x"] == own["depth"].to_list() and line["y"] == pytest.approx(own["mean"].to_list(), abs=1e-4)
    same, others = report.later_layers(task)
    assert same.spec["data"] and others.spec["data"]
    assert len(report.output_reached(task)) == 2


def test_loops_of_one_layer_are_not_told_twice(causal_run: Path) -> None:
    assert all("unit" not in {c.key for c in f.choices} for f in report.skips(_task(causal_run)))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("fixture", ["causal_run", "deep_causal_run"])
def test_every_figure_is_valid_and_told(fixture: str, theme: str, request: pytest.FixtureRequest) -> None:
    figures = _all(request.getfixturevalue(fixture))
    assert len({figure.id for figure in figures}) == len(figures) >= 15
    for figure in figures:
        drawn = figure.plotly(theme, n_hops=3)
        assert isinstance(drawn, PlotlyFigure) and "var(--" not in drawn.to_json()
        assert any(trace.visible is not False for trace in drawn.data)
        menus = drawn.layout.updatemenus
        open_ = figure.choices[0] if figure.choices else None
        assert len(menus) == (1 if open_ and len(open_.options) > 1 else 0)
        if menus:
            assert [len(b["args"][1]) for b in menus[0].buttons] == [len(drawn.data)] * len(open_.options)
        assert figure.alt and figure.grid.rows
        assert {len(row) for row in figure.grid.rows} == {len(figure.grid.head)}
        assert len(figure.grid.when) in (0, len(figure.grid.rows))
        sheet = pl.read_csv(io.StringIO(figure.csv()))
        assert sheet.height == figure.sheet.height and "nan" not in figure.csv().lower().split(",")
        assert "nan" not in str(figure.spec) and "None" not in str(figure.grid.rows)


def test_tables_without_rows_leave_no_block(small_run: Path, looped_run: Path) -> None:
    for folder in (small_run, looped_run):
        run = _run(folder)
        assert all(causal_blocks(run, task) == () for task in run.tasks)
        html = render(run)
        assert 'id="depth"' not in html and "Patching" not in html.split("<script")[0]
        assert "which this report does not contain" in html


@pytest.mark.parametrize(
    ("names", "ids"),
    [(EFFECTS, "patching"), (CUTS, "knockout"), (SKIPS, "contribution")],
    ids=["patches", "cuts", "skips"],
)
def test_each_probe_stands_alone(names: tuple[str, ...], ids: str, small_run: Path, tmp_path: Path) -> None:
    """One item at one hop count, with a model name that is markup, and one probe's tables alone."""
    folder = add_causal(Path(shutil.copytree(small_run, tmp_path / "run")), names=names, sites=("resid_post",))
    run = read_run(folder)
    html = render(run)
    figures = [f for block in causal_blocks(run, run.tasks[0]) for f in block.figures]
    assert any(figure.id.endswith(ids) for figure in figures)
    assert "no measure that changes the model tells whether" in html and "no story" in html
    assert "<b>x</b>" not in html
    for figure in figures:
        figure.plotly()


def test_effects_that_are_not_told(small_run: Path, tmp_path: Path) -> None:
    """Answer and donor's answer alike: no effect anywhere, and nothing is made of it."""
    folder = add_causal(Path(shutil.copytree(small_run, tmp_path / "run")), names=EFFECTS, nothing=True)
    run = read_run(folder)
    assert report.patching_map(run.tasks[0]) is None and report.windows_by_hops(run.tasks[0]) == ()
    render(run)


@pytest.mark.filterwarnings("error")
def test_a_task_without_windows_says_so(tmp_path: Path) -> None:
    """Beside a task that has them: in the block, in the words on top, in Markdown."""
    folder = add_causal(
        write_run(tmp_path / "run", looped_axis(4), hops=(1, 2), n_stories=3, gate=False), names=(*EFFECTS, *CUTS),
        n_positioned=0,
    )  # fmt: skip
    patching = _table(folder, "patching").with_columns(both_right=pl.col("task") == "follow")
    knockout = _table(folder, "knockout")
    for name, table in patching_tables({"patching": patching, "knockout": knockout}, _axis(folder)).items():
        table.write_parquet(folder / "tables" / f"{name}.parquet")
    run = read_run(folder)
    n = patching.filter(pl.col("task") == "kinship", ~pl.col("control")).select("item", "donor_kind").n_unique()
    why = f"No windows: the model answers none of {n} pairs right on both stories"
    own, other = (
        next(b for b in causal_blocks(run, run.task(name)) if b.title.startswith("When has the information moved"))
        for name in ("kinship", "follow")
    )
    assert own.after == f"{why}." and own.table is None and not own.figures
    assert other.table is not None and other.figures and "No windows" not in other.after
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", render(run).split("<script")[0]))
    assert f"{why}, so this is not told: the patching window&#39;s destination and the" in words
    assert f"kinship**: {why}." in report.causal_markdown(run)


def test_a_wide_map_leaves_out_the_rarer_options(tmp_path: Path) -> None:
    sites = ("resid_post", "attn_out", "mlp_out", "resid_pre", "loop_state")
    axis = layers_axis(70)
    run = add_causal(
        write_run(tmp_path / "run", axis, tasks=("follow",), hops=(1, 2, 3), n_stories=2, gate=False),
        names=EFFECTS, sites=sites, n_positioned=0,
    )  # fmt: skip
    figure = report.patching_map(read_run(run).task("follow"))
    assert figure is not None
    assert figure.sheet.height <= report.panels.patching.MOST_PATCHED < _table(run, "patching_by_role").height
    assert "Left out to keep the page small: loop state" in figure.grid.note


def test_the_page_says_by_which_measure(causal_run: Path, deep_causal_run: Path) -> None:
    words = re.sub(r"<[^>]+>", " ", render(_run(causal_run)).split("<script")[0]).replace("\u202f", " ")
    words = re.sub(r"\s+", " ", words)
    assert "Does it use more depth on harder questions?" in words
    assert "On follow, family-demo uses more depth on harder questions by" in words
    for measure in ("Settling of the answer", "Exit of the gate", "Patching: last token decides from", "Knock-out"):
        assert measure in words
    row = next(r for r in _table(causal_run, "window_slopes").to_dicts() if r["quantity"] == "destination_crossed")
    assert f"+{row['slope']:.2f} loops {row['low']:.2f} to {row['high']:.2f} later with more hops" in words
    assert f"{row['n_pairs']} pairs, right on both stories" in words
    few = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", render(_run(deep_causal_run)).split("<script")[0]))
    assert "no measure that changes the model tells whether" in few and "too few clusters (8 of 50)" in few


def test_windows_say_where_each_end_is_patched(causal_run: Path, tmp_path: Path) -> None:
    """A sweep that has what blocks read tells the source there, first of all, and says so."""
    run = shutil.copytree(causal_run, tmp_path / "run")
    windows = _table(run, "windows")
    post = (pl.col("site") == "resid_post") & (pl.col("end") == "source")
    pre = windows.filter(post).with_columns(site=pl.lit("resid_pre"), depth_crossed=pl.col("depth_crossed") + 1)
    pl.concat([windows, pre]).write_parquet(run / "tables" / "windows.parquet")
    task = _task(run)
    for figure in report.windows_by_hops(task):
        name = figure.choices[0].options[0][1]
        assert name == "source: residual before a block; destination: residual after a block"
        shown = [row for row, when in zip(figure.grid.rows, figure.grid.when, strict=True) if when["site"] == "own"]
        assert {row[1:3] for row in shown} == {
            ("source: changed word", "residual before a block"), ("destination: last token", "residual after a block"),
        }  # fmt: skip
        assert "patched" in figure.sheet.columns
    crossing = report.windows_by_hops(task)[0]
    for end, frame in (("source", pre), ("destination", windows.filter(pl.col("site") == "resid_post"))):
        means = frame.filter(pl.col("end") == end).group_by("hops").agg(pl.col("depth_crossed").mean()).sort("hops")
        line = next(t for t in _traces(crossing, site="own") if t["visible"] and end in t["hovertext"][0])
        assert line["y"] == pytest.approx(means["depth_crossed"].to_list(), rel=1e-5)
    page = render(_run(run))
    assert "paired by story (source: residual before a block; destination: residual after a block)" in page
    assert "would have the old word back" in page
    assert "source at resid_pre, destination at resid_post" in report.causal_markdown(_run(run))


def test_markdown_has_windows_and_knockout(causal_run: Path, looped_run: Path) -> None:
    assert report.causal_markdown(_run(looped_run)) == ""
    text = report.causal_markdown(_run(causal_run))
    windows, knockout = text.split("\n\n**family-demo, follow: what")
    own = _table(causal_run, "windows").filter((pl.col("site") == "resid_post") & (pl.col("hops") == 2))
    mean = own.filter(pl.col("end") == "source")["depth_crossed"].mean()
    assert f"| 2 | source | {mean:.2f} |" in windows and "Per hop – source" in windows
    assert "| hops | changed word | rest of its fact |" in knockout
    peak = _table(causal_run, "knockout_by_depth").filter((pl.col("hops") == 1) & (pl.col("role") == "changed_word"))
    assert f"| 1 | {peak['drop'].max():.2f} (" in knockout


def test_a_sweep_without_a_run_folder(causal_run: Path) -> None:
    patching, knockout = _table(causal_run, "patching"), _table(causal_run, "knockout")
    axis = _run(causal_run).axis.coordinates
    ends = [c for c in axis if c.is_loop_end]
    task = report.patched_task(patching, knockout, axis=axis, loop_ends=ends, resamples=100)
    assert task.name == "follow" and task.hops == (1, 2, 3) and task.axis.n_loops == 6
    wanted = analysis.windows_table(patching, _axis(causal_run))
    assert task.windows.height == wanted.height
    assert report.patching_map(task) is not None and len(report.windows_by_hops(task)) == 3
    assert len(report.knockout_curves(task)) == 2 and task.is_causal
    one = patching.filter((pl.col("item") == "follow-0-k2") & (pl.col("donor_kind") == "relation"))
    tokens = _table(causal_run, "donors").filter(pl.col("item") == "follow-0-k2")["tokens"][0].to_list()
    figure = report.patched_tokens(task.axis, one, tokens)
    cell = one.row(by_predicate=(pl.col("position") == 9) & (pl.col("depth") == 3), named=True)
    assert figure.spec["data"][0]["z"][9][3] == pytest.approx(cell["effect"], abs=6e-5)
    assert figure.spec["data"][0]["z"][2] == [None] * 7 and isinstance(figure.plotly("dark"), PlotlyFigure)
    for bad, words in (
        (one.filter(pl.col("position").is_null()), "no row has a position"),
        (patching, "in column item"),
    ):
        with pytest.raises(UserError, match=words):
            report.patched_tokens(task.axis, bad, tokens)
    with pytest.raises(UserError, match="a position beyond"):
        report.patched_tokens(task.axis, one, tokens[:3])
    with pytest.raises(UserError, match="no 'kinship'"):
        report.patched_task(patching, axis=axis, name="kinship")


def _axis(folder: Path) -> pl.DataFrame:
    lens = _table(folder, "lens")
    return lens.select("depth", "loop", "layer", "is_loop_end").unique().sort("depth")


def test_looped_axis_of_one_hop(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", looped_axis(2), tasks=("follow",), hops=(4,), n_stories=3, gate=False)
    run = read_run(add_causal(folder, n_positioned=3))
    for figure in (f for block in causal_blocks(run, run.tasks[0]) for f in block.figures):
        figure.plotly()
    assert "no measure that changes the model tells whether" in render(run)
