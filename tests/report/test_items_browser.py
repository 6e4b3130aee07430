"""The item browser in headless Chromium: search, pick, hover, keyboard, themes, links, saved files, many questions."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from chromium import open_page, rgb

from depthprobe.report import write_report
from depthprobe.report.palette import THEMES, tokens

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(
    looped_run: Path, layers_run: Path, deep_run: Path, small_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = {"looped": looped_run, "layers": layers_run, "deep": deep_run, "small": small_run}
    return {name: write_report(run, folder / f"{name}.html") for name, run in runs.items()}


def _picked(page: Any) -> str:
    return page.locator("#item-head .of code").inner_text()


def _found(page: Any) -> int:
    return int(page.locator("#said").inner_text().split(" of ")[0])


def test_search_finds_by_text_answer_hops_and_verdict(browser: Any, pages: dict[str, Path], looped_run: Path) -> None:
    page, watch = open_page(browser, pages["looped"])
    items = pl.read_parquet(looped_run / "tables" / "items.parquet")
    last = pl.read_parquet(looped_run / "tables" / "lens.parquet").filter(pl.col("depth") == 8)
    right = set(last.filter("candidate_correct")["item"])
    find = page.locator("#find")
    for asked, count in (
        ("", items.height),
        ("k=3", items.filter(pl.col("hops") == 3).height),
        ("Wrong", items.height - len(right)),
        ("right k2", items.filter((pl.col("hops") == 2) & pl.col("item").is_in(list(right))).height),
        ("kinship-7-", 6),
        ("NEPHEW", items.height),  # the answer of all
    ):
        find.fill(asked)
        assert _found(page) == count, asked
    find.fill("no such words")
    assert page.locator("#said").inner_text() == "Nothing found."
    assert page.locator(".hit").count() == 0
    find.fill("")
    page.locator("#by-task").select_option("follow")
    page.locator("#by-hops").select_option("6")
    assert _found(page) == 40
    page.locator("#by-verdict").select_option("right")
    assert 0 < _found(page) < 40
    assert watch.complaints == []
    page.context.close()


def test_pick_shows_story_roles_and_grid(browser: Any, pages: dict[str, Path], looped_run: Path) -> None:
    page, _ = open_page(browser, pages["looped"])
    page.locator("#find").fill("kinship-2-k2")
    page.locator(".hit").first.click()
    assert _picked(page) == "kinship-2-k2"
    assert page.url.endswith("#item=kinship-2-k2")
    item = pl.read_parquet(looped_run / "tables" / "items.parquet").row(
        by_predicate=pl.col("item") == "kinship-2-k2", named=True
    )
    story = page.locator("#item-story")
    assert "".join(story.inner_text().split()).startswith("".join(item["text"].split())[:20])
    assert story.locator("mark.chain").count() == 2 and story.locator("mark.offchain").count() == 4
    assert page.locator(".item > .keys b").all_inner_texts() == ["chain", "offchain"]
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        line = story.locator("mark.chain").first.evaluate("(mark) => getComputedStyle(mark).borderBottomColor")
        assert line == rgb(THEMES[theme]["role-chain"])
    table = pl.read_parquet(looped_run / "tables" / "tokens.parquet").filter(pl.col("item") == "kinship-2-k2")
    cells = page.locator("#cells td[data-column]").all_inner_texts()
    assert cells == table.sort("position", "depth")["top1"].to_list()
    assert page.locator("#cells thead th").all_inner_texts() == ["token", "e", *map(str, range(1, 9))]
    # its ladder: the same story at other hops
    page.locator("#item-head .rungs button", has_text="5").click()
    assert _picked(page) == "kinship-2-k5"
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.context.close()


def test_hover_and_focus_show_the_five_first_words(browser: Any, pages: dict[str, Path], looped_run: Path) -> None:
    page, _ = open_page(browser, pages["looped"], fragment="#item=kinship-0-k1")
    table = pl.read_parquet(looped_run / "tables" / "tokens.parquet")
    row = table.row(
        by_predicate=(pl.col("item") == "kinship-0-k1") & (pl.col("position") == 2) & (pl.col("depth") == 5),
        named=True,
    )
    tip = page.locator("#tip")
    assert tip.is_hidden()
    cell = page.locator("#cells tr[data-row='2'] td").nth(5)
    for show in (cell.hover, cell.focus):
        show()
        assert tip.is_visible()
        assert tip.locator("li span").all_inner_texts() == row["top5"]
        shown = [float(text.rstrip("\u202f%")) for text in tip.locator("li b").all_inner_texts()]
        assert shown == pytest.approx([100 * p for p in row["top5_probs"]], abs=0.51)
        assert cell.get_attribute("aria-describedby") == "tip"
        assert f"λ {row['gate_lambda']:.2f}" in tip.inner_text()
        # the gate beside the grid is that of the row
        gate = page.locator("[data-track=lambda] td").nth(5)
        assert gate.inner_text() == f"{row['gate_lambda']:.2f}"
        assert page.locator("#item-story mark.lit").count() == 1
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.context.close()


def test_everything_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    page, watch = open_page(browser, pages["looped"])
    active = "document.activeElement.id"
    page.keyboard.press("/")
    assert page.evaluate(active) == "find" and page.locator("#find").input_value() == ""
    page.keyboard.type("follow k=4")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.locator(".hit.active").get_attribute("id") == "hit-1"
    assert page.locator("#find").get_attribute("aria-activedescendant") == "hit-1"
    before = page.locator(".hit.active code").inner_text()
    page.keyboard.press("Enter")
    assert _picked(page) == before
    assert page.locator(".hit[aria-selected=true]").get_attribute("id") == "hit-1"
    page.keyboard.press("Escape")
    assert page.locator("#find").input_value() == "" and _found(page) == 480
    page.keyboard.press("/")  # in a field it is a letter
    assert page.locator("#find").input_value() == "/"
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.evaluate(active) != "find"
    # the grid is one stop of the Tab key, then arrows
    assert page.locator("#cells td[tabindex='0']").count() == 1
    page.locator("#find").fill("kinship-0-k3")
    page.keyboard.press("Enter")
    page.locator("#cells td[tabindex='0']").focus()
    at = "[document.activeElement.parentNode.dataset.row, document.activeElement.dataset.column].map(Number)"
    row, column = page.evaluate(at)
    assert column == 8
    steps = {"ArrowUp": (-1, 0), "ArrowLeft": (-1, -1), "ArrowDown": (0, -1), "Home": (0, -8)}
    for key, (down, right) in steps.items():
        page.keyboard.press(key)
        assert page.evaluate(at) == [row + down, column + right]
    page.keyboard.press("Control+Home")
    assert page.evaluate(at) == [0, 0]
    page.keyboard.press("ArrowUp")
    assert page.evaluate(at) == [0, 0] and page.locator("#tip").is_visible()
    # what is walked to is seen, not under the head or the foot of the table
    for _ in range(3):
        page.keyboard.press("PageDown")
    page.wait_for_function("""() => {
        const cell = document.activeElement.getBoundingClientRect();
        const [x, y] = [cell.left + cell.width / 2, cell.top + cell.height / 2];
        return document.activeElement.dataset.column && document.elementFromPoint(x, y) === document.activeElement;
    }""")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid" and page.locator("#tip").is_visible()
    assert watch.complaints == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_have_the_colours_of_the_theme(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    page, _ = open_page(browser, pages["looped"], scheme=scheme)
    colours = "(cell) => [getComputedStyle(cell).backgroundColor, getComputedStyle(cell).color]"
    for theme in (scheme, "dark" if scheme == "light" else "light"):
        found = tokens(theme, 6)
        for i in range(9):
            cell = page.locator(f"#cells td.h{i}")
            if cell.count():
                assert cell.first.evaluate(colours) == [rgb(found[f"heat-{i}"]), rgb(found[f"on-heat-{i}"])]
        page.locator("#theme").click()
    page.context.close()


def test_a_link_leads_to_its_question(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = open_page(browser, pages["looped"], fragment="#item=follow-3-k6")
    assert _picked(page) == "follow-3-k6"
    page.evaluate("location.hash = '#item=kinship-1-k1'")
    page.wait_for_function("document.querySelector('#item-head code').textContent === 'kinship-1-k1'")
    page.evaluate("location.hash = '#item=nobody'")
    page.wait_for_function("document.querySelector('#said').textContent.includes('no question “nobody”')")
    assert _picked(page) == "kinship-1-k1"
    page.context.close()


def test_a_run_without_tokens_shows_the_answer_position(browser: Any, pages: dict[str, Path]) -> None:
    for name, depths in (("deep", 23), ("small", 4)):
        page, watch = open_page(browser, pages[name])
        assert page.locator("#cells tbody tr").count() == 1
        assert page.locator("#cells td[data-column]").count() == depths
        assert watch.complaints == []
        page.context.close()
    page, _ = open_page(browser, pages["layers"], fragment="#item=kinship-0-k1")
    assert page.locator("#cells thead th").all_inner_texts() == ["token", "0", "30"]  # the depths of the table
    page.context.close()


def test_many_questions_stay_fluent(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = open_page(browser, pages["looped"])
    times = page.evaluate("""() => {
        const [find, found] = ["find", "found"].map((id) => document.getElementById(id));
        const timed = (act) => {
            const from = performance.now();
            act();
            document.body.offsetHeight;
            return performance.now() - from;
        };
        const drawn = [];
        for (const k of [1, 2, 3, 4, 5, 6]) {
            find.value = `k=${k} kinship-0-`;
            drawn.push(timed(() => find.dispatchEvent(new Event("input"))));
            drawn.push(timed(() => found.querySelector(".hit").click()));
        }
        find.value = "";
        find.dispatchEvent(new Event("input"));
        return drawn;
    }""")
    assert sorted(times)[len(times) // 2] < 500  # milliseconds; some 10 on an idle machine
    assert page.locator("[role=option]").count() < 40  # of 480: only those in view
    page.locator("#found").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    page.locator("#hit-479").wait_for()
    assert page.locator("[role=option]").count() < 40
    page.context.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_the_card_stays_on_the_screen(browser: Any, pages: dict[str, Path], width: int) -> None:
    page, _ = open_page(browser, pages["looped"], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for column in (0, 8):
        page.locator("#cells tr.asks td").nth(column).focus()
        page.wait_for_timeout(50)
        box = page.locator("#tip").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] >= 0 and box["y"] + box["height"] <= 900
    page.context.close()


def _saved(page: Any, place: str, kind: str) -> tuple[str, bytes]:
    with page.expect_download(timeout=180_000) as caught:
        page.locator(f"{place} [data-save={kind}]").focus()
        page.keyboard.press("Enter")
    return caught.value.suggested_filename, Path(caught.value.path()).read_bytes()


def test_figures_are_saved_as_pictures_and_numbers(
    browser: Any, pages: dict[str, Path], looped_run: Path, deep_run: Path
) -> None:
    for name, run, figure in (("looped", looped_run, "kinship-accuracy"), ("deep", deep_run, "follow-layer-accuracy")):
        page, watch = open_page(browser, pages[name])
        assert page.locator("figure .save").count() == page.locator("figure").count()
        file, png = _saved(page, f"#{figure}", "png")
        assert file == f"{run.name}-{figure}.png" and png.startswith(b"\x89PNG") and len(png) > 5000
        file, svg = _saved(page, f"#{figure}", "svg")
        assert file == f"{run.name}-{figure}.svg" and svg.startswith(b"<svg")
        text = svg.decode()
        assert "100 % right" in text.replace("\u202f", " ") and "var(--" not in text
        file, data = _saved(page, f"#{figure}", "csv")
        rows = list(csv.DictReader(io.StringIO(data.decode())))
        assert file == f"{run.name}-{figure}.csv" and rows[0].keys() >= {"hops", "depth", "accuracy"}
        assert watch.complaints == []
        page.context.close()


def test_a_question_is_saved(browser: Any, pages: dict[str, Path], looped_run: Path) -> None:
    page, watch = open_page(browser, pages["looped"], fragment="#item=kinship-1-k2")
    table = pl.read_parquet(looped_run / "tables" / "tokens.parquet").filter(pl.col("item") == "kinship-1-k2")
    file, data = _saved(page, "#item-figure", "csv")
    assert file == f"{looped_run.name}-kinship-1-k2.csv"
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    assert len(rows) == table.height
    for row, wanted in zip(rows, table.sort("position", "depth").iter_rows(named=True), strict=True):
        assert [row[f"top{i}"] for i in range(1, 6)] == wanted["top5"]
        assert float(row["p1"]) == pytest.approx(wanted["top1_prob"], abs=2e-5)
    assert _saved(page, "#item-figure", "png")[1].startswith(b"\x89PNG")
    svg = _saved(page, "#item-figure", "svg")[1].decode()
    assert svg.startswith("<svg") and "nephew" in svg
    assert watch.complaints == []
    page.context.close()
