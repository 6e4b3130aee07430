"""The page in headless Chromium: no errors, no requests, both themes, toggle, narrow screens, paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import open_page, rgb

from depthprobe.report import write_report
from depthprobe.report.palette import THEMES, tokens

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(
    looped_run: Path,
    layers_run: Path,
    deep_run: Path,
    small_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    runs = {"looped": looped_run, "layers": layers_run, "deep": deep_run, "small": small_run}
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_report(run, folder / f"{name}.html") for name, run in runs.items()}


def _line_colour(page: Any) -> str:
    """Of the first rung's curve, as drawn."""
    line = '#plot-kinship-p-correct .js-line[style*="stroke-width: 2"]'
    return page.evaluate("(line) => getComputedStyle(document.querySelector(line)).stroke", line)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["looped", "layers", "deep", "small"])
def test_no_errors_no_requests_all_drawn(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    page, watch = open_page(browser, pages[name], scheme=scheme)
    assert watch.complaints == []
    assert watch.requests == [pages[name].as_uri()]
    plots = page.locator(".plot").count()
    assert plots and page.locator(".plot .main-svg").count() >= plots
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == rgb(THEMES[scheme]["page"])
    page.context.close()


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_toggle_restyles_page_and_figures(
    browser: Any, pages: dict[str, Path], scheme: str, other: str
) -> None:
    page, watch = open_page(browser, pages["looped"], scheme=scheme)
    button = page.locator("#theme")
    assert _line_colour(page) == rgb(tokens(scheme, 6)["hop-1"])
    assert button.inner_text().strip().lower() == other
    button.click()
    assert _line_colour(page) == rgb(tokens(other, 6)["hop-1"])
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == rgb(THEMES[other]["page"])
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert _line_colour(page) == rgb(tokens(other, 6)["hop-1"])  # the choice is kept
    page.locator("#theme").click()
    assert _line_colour(page) == rgb(tokens(scheme, 6)["hop-1"])
    assert watch.complaints == []
    page.context.close()


def test_figures_follow_a_change_of_the_preference(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = open_page(browser, pages["looped"])
    page.emulate_media(color_scheme="dark")
    page.locator("#theme .word", has_text="Light").wait_for()
    assert _line_colour(page) == rgb(tokens("dark", 6)["hop-1"])
    page.context.close()


def test_a_chip_hides_its_rung_in_its_own_section(browser: Any, pages: dict[str, Path]) -> None:
    page, _ = open_page(browser, pages["looped"])
    visible = """(id) => document.getElementById(id).data
        .filter((trace) => trace.meta?.hop === 3 && trace.visible !== false).length"""
    chip = page.locator("#kinship .chip[data-hop='3']")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert (
        page.evaluate(visible, "plot-kinship-p-correct")
        == page.evaluate(visible, "plot-kinship-p-plausible")
        == 0
    )
    assert page.evaluate(visible, "plot-follow-p-correct") == 2
    chip.click()
    assert page.evaluate(visible, "plot-kinship-p-correct") == 2
    page.context.close()


@pytest.mark.parametrize("name", ["looped", "layers", "deep"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(
    browser: Any, pages: dict[str, Path], name: str, width: int
) -> None:
    page, _ = open_page(browser, pages[name], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overlaps = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
          const clash = (selector, side, far) => {
            const boxes = [...plot.querySelectorAll(selector)].map((e) => e.getBoundingClientRect());
            boxes.sort((a, b) => a[side] - b[side]);
            return boxes.some((b, i) => i && b[side] < boxes[i - 1][far] - 0.5);
          };
          const labels = ".xtick text, .ytick text, .xtitle, .ytitle";
          const outside = [...plot.querySelectorAll(labels)].some((e) => {
            const [a, b] = [e.getBoundingClientRect(), plot.getBoundingClientRect()];
            return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
          });
          const touching = clash(".xtick text", "left", "right") || clash(".ytick text", "top", "bottom");
          return touching || outside ? [plot.id] : [];
        })"""
    )
    assert overlaps == []  # tick labels neither touch one another nor leave their figure
    page.context.close()


def test_paper_is_light_and_the_screen_comes_back(browser: Any, pages: dict[str, Path]) -> None:
    page, watch = open_page(browser, pages["looped"], scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert _line_colour(page) == rgb(tokens("light", 6)["hop-1"])
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert _line_colour(page) == rgb(tokens("dark", 6)["hop-1"])
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert watch.complaints == []
    page.context.close()


def test_tables_speak_without_scripts(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["looped"].as_uri())
    assert page.locator("noscript").count() or page.get_by_text("switched off").count()
    assert page.locator("figure table").count() == page.locator("figure").count()
    context.close()
