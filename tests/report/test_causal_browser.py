"""Interventions in headless Chromium: the selectors, the patches of one question, keyboard, themes, saved files."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from chromium import open_page, rgb

from depthprobe.report import write_report
from depthprobe.report.palette import tokens

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(causal_run: Path, deep_causal_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = {"causal": causal_run, "deep": deep_causal_run}
    return {name: write_report(run, folder / f"{name}.html") for name, run in runs.items()}


_SHOWN = """(id) => document.getElementById("plot-" + id).data
    .filter((trace) => trace.visible !== false && trace.z).map((trace) => trace.z)"""


def _row(folder: Path, name: str, **when: Any) -> pl.DataFrame:
    df = pl.read_parquet(folder / "tables" / f"{name}.parquet")
    return df.filter(*(pl.col(column) == value for column, value in when.items()))


def _saved(page: Any, place: str, kind: str) -> tuple[str, bytes]:
    with page.expect_download(timeout=180_000) as caught:
        page.locator(f"{place} [data-save={kind}]").first.click()
    return caught.value.suggested_filename, Path(caught.value.path()).read_bytes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["causal", "deep"])
def test_all_is_drawn_without_complaints(browser: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    page, watch = open_page(browser, pages[name], scheme=scheme)
    assert watch.complaints == [] and watch.requests == [pages[name].as_uri()]
    plots = page.locator(".plot").count()
    assert plots > 20 and page.locator(".plot .main-svg").count() >= plots
    page.context.close()


def test_the_hop_selector_picks_for_figure_and_table(browser: Any, pages: dict[str, Path], causal_run: Path) -> None:
    page, watch = open_page(browser, pages["causal"])
    block = page.locator(".block", has=page.locator("#follow-patching"))
    wanted = {"task": "follow", "site": "resid_post", "role": "last", "donor_kind": "relation"}

    def shown() -> list[float]:
        (z,) = page.evaluate(_SHOWN, "follow-patching")
        return z[4]

    table = _row(causal_run, "patching_by_role", **wanted).sort("depth")
    assert shown() == pytest.approx(table.filter(pl.col("hops").is_null())["effect"].to_list(), abs=6e-5)
    buttons = block.locator(".pickers button")
    assert buttons.all_inner_texts() == ["all", "1", "2", "3"]
    buttons.nth(2).click()
    assert buttons.nth(2).get_attribute("aria-pressed") == "true"
    assert shown() == pytest.approx(table.filter(pl.col("hops") == 2)["effect"].to_list(), abs=6e-5)
    # the arrows walk the group, and the table follows
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.value") == "3"
    assert shown() == pytest.approx(table.filter(pl.col("hops") == 3)["effect"].to_list(), abs=6e-5)
    block.locator("summary").click()
    assert set(block.locator("tbody tr:visible th").all_inner_texts()) == {"3"}
    block.locator("select[data-choice=site]").select_option("attn_out")
    other = _row(causal_run, "patching_by_role", **wanted | {"site": "attn_out", "hops": 3}).sort("depth")
    assert shown() == pytest.approx(other["effect"].to_list(), abs=6e-5)
    # another block keeps its own choice, and a change of theme keeps them all
    (alone,) = page.locator(".block", has=page.locator("#follow-knockout")).locator("[aria-pressed=true]").all()
    assert alone.inner_text() == "all"
    page.locator("#theme").click()
    assert shown() == pytest.approx(other["effect"].to_list(), abs=6e-5)
    svg = _saved(page, "#follow-patching", "svg")[1].decode()
    assert "hops k: 3" in svg and "site: attention output" in svg and "var(--" not in svg
    assert watch.complaints == []
    page.context.close()


def test_chips_and_choices_work_together(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = open_page(browser, pages["deep"])
    count = """() => document.getElementById("plot-follow-skip-kl").data
        .filter((trace) => trace.visible !== false && trace.marker)
        .map((trace) => [trace.meta.hop, trace.meta.when.unit])"""
    assert page.evaluate(count) == [[1, "layer"], [3, "layer"]]
    block = page.locator(".block", has=page.locator("#follow-skip-kl"))
    block.locator("select[data-choice=unit]").select_option("loop")
    block.locator(".chip[data-hop='1']").click()
    assert page.evaluate(count) == [[3, "loop"]]
    page.context.close()


def test_every_figure_saves_its_numbers(browser: Any, pages: dict[str, Path], causal_run: Path) -> None:
    page, _ = open_page(browser, pages["causal"])
    for name, columns in (
        ("follow-patching", {"role", "effect", "low", "high", "flip", "n_items"}),
        ("follow-window", {"end", "hops", "depth_crossed", "censored", "nonmonotone"}),
        ("follow-knockout", {"role", "drop", "low", "high"}),
        ("follow-skip-kl", {"quantity", "mean", "n"}),
    ):
        file, data = _saved(page, f"#{name}", "csv")
        rows = list(csv.DictReader(io.StringIO(data.decode())))
        assert file == f"{causal_run.name}-{name}.csv" and rows and rows[0].keys() >= columns
    assert _saved(page, "#follow-window", "png")[1].startswith(b"\x89PNG")
    page.context.close()


@pytest.mark.parametrize("name", ["causal", "deep"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    page, _ = open_page(browser, pages[name], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overlaps = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
          const clash = (selector, side, far) => {
            const boxes = [...plot.querySelectorAll(selector)].map((e) => e.getBoundingClientRect());
            boxes.sort((a, b) => a[side] - b[side]);
            return boxes.some((b, i) => i && b[side] < boxes[i - 1][far] - 0.5);
          };
          const outside = [...plot.querySelectorAll(".xtick text, .ytick text, .xtitle, .ytitle")].some((e) => {
            const [a, b] = [e.getBoundingClientRect(), plot.getBoundingClientRect()];
            return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
          });
          const touching = clash(".xtick text", "left", "right") || clash(".ytick text", "top", "bottom");
          return touching || outside ? [plot.id] : [];
        })"""
    )
    assert overlaps == []
    page.context.close()


def test_a_long_tick_label_moves_its_title(browser: Any, pages: dict[str, Path]) -> None:
    """ "0.0006" is wider than the margin of the others."""
    page, _ = open_page(browser, pages["causal"])
    left, right = page.evaluate(
        """async () => {
          const plot = document.getElementById("plot-follow-skip-kl");
          await Plotly.relayout(plot, {"yaxis.range": [0, 0.0008]});
          const boxes = [...plot.querySelectorAll(".ytick text")].map((e) => e.getBoundingClientRect().left);
          return [Math.min(...boxes), plot.querySelector(".ytitle").getBoundingClientRect().right];
        }"""
    )
    assert right <= left
    page.context.close()


@pytest.mark.parametrize("width", [700, 1280])
def test_the_measures_of_the_verdict_have_room(browser: Any, pages: dict[str, Path], width: int) -> None:
    page, _ = open_page(browser, pages["causal"], width=width)
    heads = page.locator("#depth tbody th")
    assert min(heads.nth(i).bounding_box()["width"] for i in range(heads.count())) > 150
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.context.close()


def _patched(browser: Any, pages: dict[str, Path], item: str, **options: Any) -> tuple[Any, Any]:
    page, watch = open_page(browser, pages["causal"], fragment=f"#item={item}", **options)
    page.locator("#item-views [value=patching]").click()
    return page, watch


def test_one_question_token_by_token(browser: Any, pages: dict[str, Path], causal_run: Path) -> None:
    page, watch = _patched(browser, pages, "follow-0-k2")
    table = _row(causal_run, "patching", item="follow-0-k2", donor_kind="relation").filter(
        pl.col("position").is_not_null()
    )
    tokens_of = _row(causal_run, "donors", item="follow-0-k2")["tokens"][0].to_list()
    assert page.locator("#item-title").inner_text() == "Effect of a patch, token by loop"
    assert page.locator("#cells tbody tr").count() == len(tokens_of)
    assert "“nephew” for “son”; its answer is uncle" in page.locator("#item-note").inner_text()
    for position, depth in ((4, 0), (10, 3), (23, 6)):
        cell = table.row(by_predicate=(pl.col("position") == position) & (pl.col("depth") == depth), named=True)
        shown = page.locator(f"#cells tr[data-row='{position}'] td[data-column='{depth}']")
        assert float(shown.inner_text().replace("−", "-")) == pytest.approx(cell["effect"], abs=0.0051)
        assert ("leads" in shown.get_attribute("class")) == cell["flip"]
        shown.hover()
        tip = page.locator("#tip").inner_text()
        assert f"{100 * cell['p_answer']:.0f}" in tip and "uncle, the donor's" in tip
    assert page.locator("#cells tr[data-row='2'] td.unrun").count() == 7
    assert page.locator(".words .keys:visible").count() == 1
    # another kind of donor
    page.locator("#item-ways").select_option(label="another name on the chain, residual after a block")
    name = _row(causal_run, "patching", item="follow-0-k2", donor_kind="name", position=4, depth=3)
    shown = page.locator("#cells tr[data-row='4'] td[data-column='3']").inner_text().replace("−", "-")
    assert float(shown) == pytest.approx(name["effect"][0], abs=0.0051)
    # back to the lens
    page.locator("#item-views [value=lens]").click()
    assert page.locator("#item-title").inner_text().startswith("Leading words")
    assert page.locator("#item-note").inner_text() == ""
    assert watch.complaints == []
    page.context.close()


def test_patches_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    page, watch = open_page(browser, pages["causal"], fragment="#item=follow-0-k1")
    page.locator("#item-views [value=patching]").focus()
    page.keyboard.press("Enter")
    assert page.locator("#item-views [value=patching]").get_attribute("aria-pressed") == "true"
    assert page.locator("#cells td[tabindex='0']").count() == 1
    page.locator("#cells td[tabindex='0']").focus()
    at = "[document.activeElement.parentNode.dataset.row, document.activeElement.dataset.column].map(Number)"
    page.keyboard.press("Control+Home")
    assert page.evaluate(at) == [0, 0] and "Nothing was patched here" in page.locator("#tip").inner_text()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(at) == [4, 1] and "effect" in page.locator("#tip").inner_text()
    assert page.locator("#item-story mark.lit").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    assert watch.complaints == []
    page.context.close()


def test_a_question_without_patches_shows_the_lens(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = _patched(browser, pages, "follow-0-k1")
    page.evaluate("location.hash = '#item=follow-9-k2'")
    page.wait_for_function("document.querySelector('#item-head code').textContent === 'follow-9-k2'")
    assert page.locator("#item-views [value=patching]").is_disabled()
    assert page.locator("#item-title").inner_text().startswith("Leading words")
    page.evaluate("location.hash = '#item=follow-1-k1'")  # and comes back to the patches
    page.wait_for_function("document.querySelector('#item-title').textContent.startsWith('Effect')")
    page.context.close()
    page, _ = open_page(browser, pages["deep"])  # no single positions: no switch
    assert page.locator("#item-views").count() == 0
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_patched_cells_have_the_colours_of_the_theme(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    page, _ = _patched(browser, pages, "follow-0-k1", scheme=scheme)
    colours = "(cell) => [getComputedStyle(cell).backgroundColor, getComputedStyle(cell).color]"
    found, seen = tokens(scheme, 3), 0
    for kind, name, steps in (("h", "heat", 9), ("c", "cold", 5)):
        for i in range(steps):
            cell = page.locator(f"#cells td.{kind}{i}")
            if cell.count():
                assert cell.first.evaluate(colours) == [rgb(found[f"{name}-{i}"]), rgb(found[f"on-{name}-{i}"])]
                seen += 1
    assert seen >= 4
    page.context.close()


def test_a_patched_question_is_saved(browser: Any, pages: dict[str, Path], causal_run: Path) -> None:
    page, watch = _patched(browser, pages, "follow-1-k1")
    table = _row(causal_run, "patching", item="follow-1-k1", donor_kind="relation").filter(
        pl.col("position").is_not_null()
    )
    file, data = _saved(page, "#item-figure", "csv")
    assert file == f"{causal_run.name}-follow-1-k1-patching-relation-resid_post.csv"
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    wanted = table.sort("position", "depth")
    assert len(rows) == wanted.height
    assert [float(row["effect"]) for row in rows] == pytest.approx(wanted["effect"].to_list(), abs=3e-4)
    assert [row["flip"] == "true" for row in rows] == wanted["flip"].to_list()
    svg = _saved(page, "#item-figure", "svg")[1].decode()
    assert svg.startswith("<svg") and "effect of another relation" in svg and "var(--" not in svg
    assert watch.complaints == []
    page.context.close()
