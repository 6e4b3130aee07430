"""The map over one story's tokens in the page of a run as `analyze` makes it, in headless Chromium."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from chromium import open_page
from tiny_saved import save_model

import depthprobe
from depthprobe.pipeline import AnalyzeResult, questions

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> AnalyzeResult:
    folder = tmp_path_factory.mktemp("analyzed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "TRAINING_STORIES", 30)
        return depthprobe.analyze(
            str(save_model(folder / "model")), out=folder / "run", task="follow", hops="1-2", n=2, resamples=100,
            probes="lens,patching",
        )  # fmt: skip


def test_a_run_draws_a_story_token_by_token(browser: Any, run: AnalyzeResult) -> None:
    table = run.table("patching").filter(pl.col("position").is_not_null())
    item = table["item"][0]
    rows = table.filter(pl.col("item") == item)
    donors = run.table("donors").filter((pl.col("item") == item) & ~pl.col("control"))
    tokens = donors["tokens"][0].to_list()
    page, watch = open_page(browser, run.report, fragment=f"#item={item}")
    page.locator("#item-views [value=patching]").click()
    assert page.locator("#item-title").inner_text().startswith("Effect of a patch")
    assert page.locator("#cells tbody tr").count() == len(tokens) == rows["position"].n_unique()
    assert page.locator("#cells td.unrun").count() == 0
    assert f"“{donors['after'][0]}” for “{donors['before'][0]}”" in page.locator("#item-note").inner_text()
    columns = sorted(rows["depth"].unique().to_list())
    for row in rows.sample(6, seed=1).iter_rows(named=True):
        place = f"#cells tr[data-row='{row['position']}'] td[data-column='{columns.index(row['depth'])}']"
        assert float(page.locator(place).inner_text().replace("−", "-")) == pytest.approx(row["effect"], abs=0.0051)
    # every hop count has one, and a question without says so
    shown = set(table["item"])
    assert table["hops"].n_unique() == 2 and len(shown) == 2
    other = next(one for one in run.table("items")["item"] if one not in shown)
    page.evaluate(f"location.hash = '#item={other}'")
    page.wait_for_function(f"document.querySelector('#item-head code').textContent === '{other}'")
    assert page.locator("#item-views [value=patching]").is_disabled()
    assert watch.complaints == []
    page.context.close()
