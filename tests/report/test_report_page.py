"""The page's structure, without a browser, and the errors of `write_report`."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from plotly.graph_objects import Figure as PlotlyFigure
from plotly.offline import get_plotlyjs
from synthetic import looped_axis, write_run

from depthprobe.errors import UserError
from depthprobe.report import (
    Figure,
    accuracy_markdown,
    compare_accuracy,
    probability_curves,
    read_run,
    render,
    use_theme,
    write_report,
)
from depthprobe.report.palette import THEMES
from depthprobe.report.sections import section
from depthprobe.report.text import percent

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Page(HTMLParser):
    """Ids, links, tags that carry addresses, texts by tag; checks that tags close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.plots: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in _VOID:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.anchors.append(str(found["href"]))
        elif found.get("src") or found.get("href"):
            self.loads.append(str(found.get("src") or found.get("href")))
        if found.get("role") == "img":
            assert found.get("aria-label")
            self.plots.append(str(found["id"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words)).replace("\u202f", " ")


@cache
def _html(run_folder: Path) -> str:
    return render(read_run(run_folder))


@cache
def _page(run_folder: Path) -> _Page:
    """Without plotly.js, which takes a parser long and has its own tests."""
    return _Page(_html(run_folder).replace(get_plotlyjs().replace("</script", "<\\/script"), ""))


@cache
def _figures(run_folder: Path) -> list[Figure]:
    run = read_run(run_folder)
    return [
        figure
        for task in run.tasks
        for block in section(run, task, "Said.", 0.9).blocks
        for figure in block.figures
    ]


def _spec(run_folder: Path, name: str) -> dict[str, Any]:
    return next(figure.spec for figure in _figures(run_folder) if figure.id == name)


@pytest.fixture(scope="module", params=["looped_run", "layers_run", "deep_run", "small_run"])
def run_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_page_is_whole_and_alone(run_folder: Path) -> None:
    html, page = _html(run_folder), _page(run_folder)
    assert len(page.ids) == len(set(page.ids))
    assert {a[1:] for a in page.anchors} <= set(page.ids)  # every link leads to a place on the page
    assert page.loads == ["data:,"]
    assert html.count("* plotly.js v") == 1
    assert "Content-Security-Policy" in html
    assert "nan" not in page.text.split() and "None" not in page.text


def test_each_figure_has_a_plot_a_table_and_words(run_folder: Path) -> None:
    html, page, figures = _html(run_folder), _page(run_folder), _figures(run_folder)
    assert page.plots == [f"plot-{figure.id}" for figure in figures]
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.S)
    assert found and json.loads(found[1]).keys() == {figure.id for figure in figures}
    for figure in figures:
        assert figure.alt and figure.title
        assert figure.grid.rows and {len(row) for row in figure.grid.rows} == {len(figure.grid.head)}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_are_valid_plotly_with_titled_axes(run_folder: Path, theme: str) -> None:
    for figure in _figures(run_folder):
        drawn = figure.plotly(theme, n_hops=6)  # plotly refuses unknown properties and colours that are none
        assert isinstance(drawn, PlotlyFigure)
        assert drawn.layout.xaxis.title.text and drawn.layout.yaxis.title.text
        assert "var(--" not in drawn.to_json()


def test_looped_model_is_told_in_loops(looped_run: Path) -> None:
    text = _page(looped_run).text
    assert "A looped transformer, 8 loops of one layer, with an exit gate" in text
    assert "too few clusters (17 of 50): ask for more stories with --n" in text  # 40 stories, of like chains
    for words in (
        "Kinship",
        "Follow",
        "Best shortcut",
        "Selected depth is not executed depth",
        "Q-exit at q = 0.9",
    ):
        assert words in text
    axis = _spec(looped_run, "kinship-accuracy")["layout"]["xaxis"]
    assert axis["ticktext"] == ["e", "1", "2", "3", "4", "5", "6", "7", "8"]
    assert axis["title"]["text"].startswith("loop r")


def test_enough_clusters_have_slopes_in_three_groups(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", looped_axis(), tasks=("follow",), n_stories=80)
    text = _page(run).text
    assert "family-demo settles on its answer later the more hops are asked" in text
    assert "loops per hop, 95 % interval" in text
    assert "answered right (selected)" in text and "every rung right (selected)" in text
    assert "Is it the same for questions answered right?" in text and "% of the model's depth" in text
    words = accuracy_markdown(read_run(run))
    assert "Settling, loops per hop – all questions: +" in words and "selected by the outcome" in words


def test_curves_over_relative_depth(looped_run: Path, layers_run: Path) -> None:
    tasks = {"loops": read_run(looped_run).task("follow"), "layers": read_run(layers_run).task("follow")}
    for task in tasks.values():
        for figure in probability_curves(task, relative=True):
            lines = [trace for trace in figure.spec["data"] if "marker" in trace]
            assert all(trace["x"][0] == 0 and trace["x"][-1] == 1 for trace in lines)
            assert isinstance(figure.plotly(), PlotlyFigure)
    both = compare_accuracy(tasks, 3)
    assert [trace["name"] for trace in both.spec["data"]] == ["loops", "layers"]
    assert [trace["x"][1] for trace in both.spec["data"]] == pytest.approx([1 / 8, 1 / 30])
    with pytest.raises(UserError, match="was not asked at 7 hops"):
        compare_accuracy(tasks, 7)


def test_figures_in_a_notebook_follow_plotlys_theme(looped_run: Path) -> None:
    import plotly.io as pio

    figure = probability_curves(read_run(looped_run).task("follow"))[0]
    before = pio.templates.default
    try:
        cards = []
        for theme in ("light", "dark"):
            use_theme(theme)
            drawn = figure.plotly()
            cards.append(drawn.layout.paper_bgcolor)
            assert drawn.layout.title.text == figure.title
            assert [trace.name for trace in drawn.data if trace.showlegend] == [f"k = {k}" for k in range(1, 7)]
        assert cards == [THEMES["light"]["card"], THEMES["dark"]["card"]]
        assert figure._repr_mimebundle_()
        with pytest.raises(UserError, match="no theme 'blue'"):
            use_theme("blue")
    finally:
        pio.templates.default = before


def test_transformer_is_told_in_layers_and_has_no_gate(layers_run: Path) -> None:
    page = _page(layers_run)
    assert "An ordinary transformer of 30 layers" in page.text
    assert "no loops and no gate: there are no exits to show" in page.text
    assert "settling depth, layers" in page.text and "Q-exit" not in page.text
    assert not [name for name in page.ids if "exits" in name or "trade-off" in name]
    axis = _spec(layers_run, "follow-accuracy")["layout"]["xaxis"]
    assert axis["ticktext"] == ["0", "5", "10", "15", "20", "25", "30"]


def test_layers_within_loops_are_labelled(deep_run: Path) -> None:
    run = read_run(deep_run)
    assert run.axis.n_loops == 4 and run.axis.layers_per_loop == 4 and run.axis.steps_per_loop == 5
    assert [run.axis.long(d) for d in (0, 1, 2, 6, len(run.axis.coordinates) - 1)] == [
        "embedding", "prelude layer 1", "loop 1, layer 1", "loop 1, end", "coda layer 1",
    ]  # fmt: skip
    text = _page(deep_run).text
    assert "4 loops of 4 layers" in text and "This model has a coda" in text


def test_smallest_run_says_what_it_cannot_say(small_run: Path) -> None:
    html, text = _html(small_run), _page(small_run).text
    assert "no story is asked at two" in text.lower()
    assert "This run has no shortcut baselines" in text
    assert "This looped model has no exit gate" in text
    assert "<b>x</b>" not in html and "<i>data</i>" not in html  # a user's text is never markup


def test_accuracy_map_holds_the_table(looped_run: Path) -> None:
    table = pl.read_parquet(looped_run / "tables" / "accuracy.parquet")
    cell = table.filter((pl.col("task") == "follow") & (pl.col("hops") == 3) & (pl.col("depth") == 4))
    trace = _spec(looped_run, "follow-accuracy")["data"][0]
    assert trace["z"][2][4] == cell["accuracy"][0]


def test_settling_strips_add_up_to_all_questions(looped_run: Path) -> None:
    data = _spec(looped_run, "follow-correct-depth")["data"]
    for depths, never in zip(data[0]["z"], data[1]["z"], strict=True):
        assert sum(depths) + sum(never) == pytest.approx(1)


def test_best_shortcut_of_each_hops_is_starred(looped_run: Path) -> None:
    grid = next(figure.grid for figure in _figures(looped_run) if figure.id == "kinship-shortcuts")
    stars = [sum("★" in row[column] for row in grid.rows) for column in range(1, len(grid.head))]
    assert stars == [1] * 6


def test_chance_stands_beside_accuracy(looped_run: Path, small_run: Path) -> None:
    for folder, name in ((looped_run, "kinship-accuracy"), (looped_run, "kinship-shortcuts")):
        figure = next(figure for figure in _figures(folder) if figure.id == name)
        (row,) = (row for row in figure.grid.rows if row[0].startswith("chance"))
        items = pl.read_parquet(folder / "tables" / "items.parquet").filter(pl.col("task") == "kinship")
        share = 1 / len(items["candidates"][0])
        assert row[1:] == (percent(share),) * 6 and f"Chance: {percent(share)}" in figure.alt
    rings = next(t for t in _spec(looped_run, "kinship-shortcuts")["data"] if t["marker"]["symbol"] == "circle-open")
    assert rings["x"] == pytest.approx([share] * 6)
    assert "chance" in next(figure for figure in _figures(looped_run) if figure.id == name).csv()
    bare = next(figure for figure in _figures(small_run) if figure.id.endswith("-accuracy"))
    assert bare.grid.rows[-1][0].startswith("chance")


def test_rungs_keep_their_colours_over_tasks(looped_run: Path) -> None:
    def colours(name: str) -> dict[int, str]:
        lines = [t for t in _spec(looped_run, name)["data"] if "markers" in t["mode"]]
        return {t["meta"]["hop"]: t["line"]["color"] for t in lines}

    assert colours("kinship-p-correct") == colours("follow-p-plausible")
    assert colours("kinship-p-correct")[3] == "var(--hop-3)"


def test_the_page_says_through_what_a_depth_is_read(deep_run: Path, tmp_path: Path) -> None:
    plain = render(read_run(deep_run))
    assert "own final norm and head (the logit lens)" in plain and "--lens coda reads that" in plain
    run = _copy(deep_run, tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"]["lens"] = "coda"
    (run / "manifest.json").write_text(json.dumps(manifest))
    coda = render(read_run(run))
    assert "the coda lens" in coda and "all tokens stop there" in coda and "--lens coda reads that" not in coda


def test_write_report_leaves_one_file(looped_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert write_report(looped_run, out) == out
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]


def _copy(run_folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(run_folder, to / "run"))


def test_errors_are_one_line_with_a_remedy(small_run: Path, tmp_path: Path) -> None:
    run = _copy(small_run, tmp_path)
    cases: list[tuple[str, Any]] = [
        ("no such run folder", lambda: run / "nowhere"),
        ("damaged", lambda: (run / "tables" / "slopes.parquet").write_bytes(b"PAR1")),
        ("is missing", lambda: (run / "tables" / "slopes.parquet").unlink()),
        ("schema version 99", lambda: (run / "manifest.json").write_text('{"schema_version": 99}')),
        ("cannot be read", lambda: (run / "manifest.json").write_text("{")),
        ("no manifest.json", lambda: (run / "manifest.json").unlink()),
    ]
    for words, damage in cases:
        made = damage()
        with pytest.raises(UserError) as caught:
            write_report(made if isinstance(made, Path) else run)
        line = str(caught.value)
        assert words in line or (words == "damaged" and "cannot be read" in line)
        assert "\n" not in line and caught.value.remedy and caught.value.where
    assert not (run / "report.html").exists()


def test_a_table_of_another_schema_is_refused(small_run: Path, tmp_path: Path) -> None:
    run = _copy(small_run, tmp_path)
    path = run / "tables" / "settling.parquet"
    pl.read_parquet(path).drop("final_correct").write_parquet(path)
    with pytest.raises(UserError, match="lacks column final_correct"):
        write_report(run)


def test_a_place_that_cannot_be_written(small_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report(small_run, tmp_path / "file" / "report.html")
