"""The page of a frontier: figures, tables, refusals, and no complaint in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from chromium import open_page

from depthprobe import report, tables
from depthprobe.errors import UserError
from depthprobe.report.palette import resolve

LOOPS = 3


def row(
    setting: str, kind: str, kv: str, hops: int | None, depth: float, accuracy: float, **more: Any
) -> dict[str, Any]:
    whole = hops is None
    found: dict[str, Any] = dict.fromkeys(tables.SCHEMAS["frontier"])
    found |= {
        "setting": setting, "kind": kind, "kv": kv, "rule": setting, "task": "</script>", "hops": hops, "n": 120,
        "n_clusters": 60, "accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy,
        "mean_exit": depth, "mean_exit_low": depth, "mean_exit_high": depth, "decode_rows": 120 * depth,
        "all_rows": 999.0, "decode_share": depth / LOOPS, "all_share": 0.9, "read_rows": 0.0 if whole else None,
        "seconds": 2.0 if whole else None, "tokens_per_s": 60.0 if whole else None, "latency_p50": 0.1,
        "latency_p90": 0.2, "peak_kv_bytes": (1 << 20) * len(kv) if whole else None, "mixture_accuracy": 0.6,
        "mixture_all_accuracy": 0.6,
    }  # fmt: skip
    if kind != "fixed":
        found |= {"gain": accuracy - 0.6, "gain_low": -0.01, "gain_high": 0.2, "gain_all": accuracy - 0.6}
    return found | more


def frontier(reason: str | None = None) -> pl.DataFrame:
    rows = [
        one
        for kv in ("ragged", "shared")
        for hops in (None, 1, 2)
        for one in (
            *(row(f"fixed:{d}", "fixed", kv, hops, d, 0.3 * d) for d in (1, 2, 3)),
            row("q:0.5", "rule", kv, hops, 1.5, 0.7), row("settling oracle", "settling", kv, hops, 1.2, 0.9),
            row("permuted q:0.5", "permuted", kv, hops, 1.5, 0.5, beside="q:0.5"),
        )
    ]  # fmt: skip
    if reason is not None:
        nothing = {name: None for name in rows[0] if name.endswith(("_low", "_high"))}
        rows = [one | nothing | {"reason": reason} for one in rows]
    return tables.conform("frontier", rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tables").mkdir()
    frontier().write_parquet(tmp_path / "tables" / "frontier.parquet")
    differences: dict[str, Any] = dict.fromkeys(tables.SCHEMAS["frontier_differences"])
    differences |= {
        "setting": "q:0.5", "kind": "rule", "kv": "ragged", "rule": "q:0.5", "against": "permuted", "task": "</script>",
        "n": 120, "n_clusters": 60, "accuracy": 0.2, "accuracy_low": 0.1, "accuracy_high": 0.3, "mean_exit": 0.0,
    }  # fmt: skip
    tables.conform("frontier_differences", [differences]).write_parquet(
        tmp_path / "tables" / "frontier_differences.parquet"
    )
    manifest = {
        "schema_version": 1, "status": "finished", "model": {"name": "m<b>"}, "config": {"task": ["follow"]},
        "versions": {"depthprobe": "9.9"}, "counts": {"questions": 120},
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_a_mark_for_each_setting_and_choices_of_layout_and_hops() -> None:
    figure = report.frontier_depth(frontier())
    assert [choice.key for choice in figure.choices] == ["kv", "hops"]
    shown = [trace for trace in figure.spec["data"] if trace["visible"]]
    assert len(shown) == 4 and len(figure.spec["data"]) == 4 * 2 * 3
    line = next(trace for trace in shown if "lines" in trace["mode"])
    assert line["x"] == [1, 2, 3] and line["y"] == pytest.approx([0.3, 0.6, 0.9])
    mark = next(trace for trace in shown if "(exit rule)" in trace["hovertext"][0])
    assert mark["error_y"]["arrayminus"] == pytest.approx([0.1])
    assert "q:0.5 70" in figure.alt and len(figure.grid.rows) == len(figure.grid.when) == 6 * 6
    only = figure.choose(kv="shared", hops=2)
    assert len(only.spec["data"]) == 4 and len(only.grid.rows) == 6
    for theme in ("light", "dark"):
        assert "var(" not in json.dumps(resolve(figure.spec, theme, 1))
        report.frontier_memory(frontier()).plotly(theme)
    bare = report.frontier_depth(frontier("too few clusters (3 of 50)"))
    assert "no interval" in bare.grid.rows[0][2]


def test_memory_is_beside_accuracy_for_every_layout() -> None:
    figure = report.frontier_memory(frontier())
    assert {x for trace in figure.spec["data"] for x in trace["x"]} == {len("ragged"), len("shared")}
    assert [key.name for key in figure.keys] == ["ragged", "shared"]
    with pytest.raises(UserError, match="no task 'kin'"):
        report.frontier_memory(frontier(), "kin")


def test_the_page_says_it_all_and_escapes(folder: Path) -> None:
    page = report.write_frontier(folder)
    html = page.read_text()
    assert page == folder / "frontier.html" and "m&lt;b&gt;" in html and "<b>m" not in html
    assert html.count("</script>") == html.count("<script")
    assert "points, \u22121.0 to 20.0" in html and "its exits permuted" in html


def test_what_is_no_finished_frontier_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="no frontier"):
        report.write_frontier(folder / "nothing")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"status": "running"}))
    with pytest.raises(UserError, match="not finished"):
        report.write_frontier(folder)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_without_complaint(browser: Any, folder: Path, scheme: str) -> None:
    path = report.write_frontier(folder)
    page, watch = open_page(browser, path, scheme=scheme, items=False)
    assert watch.complaints == [] and watch.requests == [path.as_uri()]
    assert page.locator(".plot .main-svg").count() >= page.locator(".plot").count() == 2
    page.locator("select[data-choice=kv]").select_option("shared")
    page.get_by_role("button", name="2", exact=True).click()
    assert page.locator("tr[data-when]:not([hidden])").count() == 6
    page.context.close()
