"""The item browser's data: read back number by number, chosen as said, refused where it does not fit the run."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthprobe.cli.main import main
from depthprobe.errors import UserError
from depthprobe.report import browser as browser_module
from depthprobe.report import read_run, render
from depthprobe.report.align import roles_of_tokens, spans
from depthprobe.report.browser import Browser, Limit, build

STEP = 1 / 65535


@cache
def _built(run_folder: Path, limit: Limit = None) -> Browser:
    return build(read_run(run_folder), limit)


class _Unpacked:
    """A reader of its own, cell by cell, as the page's script has to be one."""

    def __init__(self, payload: str) -> None:
        whole = gzip.decompress(base64.b64decode(payload))
        length = int.from_bytes(whole[:4], "little")
        self.header: dict[str, Any] = json.loads(whole[4 : 4 + length])
        self.planes: list[np.ndarray] = []
        at = 4 + length
        for kind, count in self.header["planes"]:
            at += -at % 4
            self.planes.append(np.frombuffer(whole, kind, count, at))
            at += self.planes[-1].nbytes
        assert len(whole) == at + -at % 4

    def rows(self, item: dict[str, Any]) -> dict[tuple[int, int], tuple[list[str], list[float], list[float | None]]]:
        """(position, depth) -> five words, their probabilities, λ and CDF."""
        axis = self.header["axes"][item["axis"]]
        found = {}
        for row, position in enumerate(item["positions"]):
            for column, depth in enumerate(axis):
                cell = item["cell"] + row * len(axis) + column
                ids, probs, gate = self.planes[:5], self.planes[5:10], self.planes[10:]
                found[position, depth] = (
                    [self.header["words"][plane[cell]] for plane in ids],
                    [plane[cell] * STEP for plane in probs],
                    [None if plane[cell] == 65535 else plane[cell] / 65534 for plane in gate],
                )
        return found


def _same(got: tuple[list[str], list[float], list[float | None]], row: dict[str, Any]) -> None:
    words, probs, gate = got
    n = len(row["top5"])
    assert words == [*row["top5"], *[""] * (5 - n)]
    assert probs == pytest.approx([*row["top5_probs"], *[0.0] * (5 - n)], abs=0.51 * STEP)
    if gate:
        assert gate == [pytest.approx(row[name], abs=STEP) for name in ("gate_lambda", "gate_cdf")]


@pytest.mark.parametrize("name", ["looped_run", "layers_run"])
def test_every_cell_is_the_tables(name: str, request: pytest.FixtureRequest) -> None:
    run_folder: Path = request.getfixturevalue(name)
    unpacked = _Unpacked(_built(run_folder).payload)
    tokens = pl.read_parquet(run_folder / "tables" / "tokens.parquet")
    lens = pl.read_parquet(run_folder / "tables" / "lens.parquet")
    full = {item["id"]: item for item in unpacked.header["items"] if item["full"]}
    assert full.keys() == set(tokens["item"])
    seen = 0
    for item_id, item in full.items():
        rows = unpacked.rows(item)
        own = tokens.filter(pl.col("item") == item_id)
        assert len(rows) == own.height
        for row in own.iter_rows(named=True):
            _same(rows[row["position"], row["depth"]], row)
            assert unpacked.header["words"][item["tokens"][row["position"]]] == row["token"]
            seen += 1
    assert seen == tokens.height
    # the others: the answer position at every depth, from the lens
    item = next(item for item in unpacked.header["items"] if not item["full"])
    rows = unpacked.rows(item)
    own = lens.filter(pl.col("item") == item["id"])
    assert len(rows) == own.height and len(item["positions"]) == 1
    for row in own.iter_rows(named=True):
        _same(rows[item["positions"][0], row["depth"]], row)


def test_an_item_says_what_the_tables_say(looped_run: Path) -> None:
    unpacked = _Unpacked(_built(looped_run).payload)
    lens = pl.read_parquet(looped_run / "tables" / "lens.parquet")
    settling = pl.read_parquet(looped_run / "tables" / "settling.parquet")
    for item in unpacked.header["items"][::37]:
        own = lens.filter(pl.col("item") == item["id"]).sort("depth")
        settled = settling.row(by_predicate=pl.col("item") == item["id"], named=True)
        assert item["right"] == own["candidate_correct"][-1]
        assert item["p"] == pytest.approx(own["target_prob"].to_list(), abs=1e-5)
        assert item["rank"] == own["target_rank"].to_list()
        # loop r of one layer is depth r
        assert (item["settled"], item["exit"]) == (settled["settling_loop"], settled["gate_exit"])


def test_cells_that_the_table_lacks_are_empty(looped_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(looped_run, tmp_path / "run"))
    path = run / "tables" / "tokens.parquet"
    tokens = pl.read_parquet(path)
    first = tokens.row(0, named=True)
    gone = (pl.col("item") == first["item"]) & (pl.col("position") == 3) & (pl.col("depth") == 4)
    tokens.filter(~gone).sample(fraction=1.0, shuffle=True, seed=1).write_parquet(path)  # rows may come in any order
    unpacked = _Unpacked(build(read_run(run)).payload)
    item = next(item for item in unpacked.header["items"] if item["id"] == first["item"])
    rows = unpacked.rows(item)
    assert rows[3, 4] == ([""] * 5, [0.0] * 5, [None, None])
    _same(rows[0, 0], first)


def test_the_cap_is_said_and_can_be_raised(looped_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(looped_run)
    total = sum(task.items.height for task in run.tasks)
    assert build(run, "all").shown == build(run, 10_000).shown == total
    assert not build(run, 30).capped
    monkeypatch.setattr(browser_module, "MAX_ITEMS", 40)
    capped = build(run)
    assert (capped.shown, capped.total, capped.with_tokens, capped.capped) == (40, total, 24, True)
    shown = {item["id"] for item in _Unpacked(capped.payload).header["items"]}
    assert {item.split("-")[0] for item in shown} == {"kinship", "follow"}  # the tasks take turns
    html = render(run)
    assert f"40 of the run's {total} questions" in html and "--items all" in html
    assert "24 of them have every token" in html
    monkeypatch.setattr(browser_module, "MAX_CELLS", 1000)
    assert 1 <= build(run).shown < 24
    assert "All 480 questions" in render(run, "all")


def test_a_run_without_tokens_says_so(small_run: Path) -> None:
    assert _built(small_run).with_tokens == 0
    html = render(read_run(small_run))
    assert "has no table “tokens”" in html


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"item": pl.lit("nobody")}, "unknown item, 'nobody'"),
        ({"depth": pl.lit(99, pl.Int32)}, "depth 99, the axis has 9 depths"),
        ({"position": pl.lit(None, pl.Int32)}, "column 'position' has"),
    ],
)
def test_tokens_of_another_run_are_refused(looped_run: Path, tmp_path: Path, change: Any, words: str) -> None:
    run = Path(shutil.copytree(looped_run, tmp_path / "run"))
    path = run / "tables" / "tokens.parquet"
    pl.read_parquet(path).with_columns(**change).write_parquet(path)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        build(read_run(run))
    assert caught.value.remedy and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_number_that_is_none_is_refused(small_run: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(small_run), f"--items={value}"]) == 2
    assert "is no number of questions (--items)" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be shown"):
        build(read_run(small_run), 0)


def test_items_is_passed_on(looped_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(looped_run), "--items", "7", "--out", str(out)]) == 0
    assert "7 of the run's 480 questions" in out.read_text()
    capsys.readouterr()
    assert main(["report", str(looped_run), "--items", "7", "--markdown"]) == 2
    assert "--markdown prints" in capsys.readouterr().err


# -- tokens and facts --------------------------------------------------------------------------------------


@given(st.text(alphabet="ab .'\n", max_size=30), st.lists(st.integers(1, 4), max_size=30))
def test_spans_find_any_cut_of_a_text(text: str, cuts: list[int]) -> None:
    tokens, at = [], 0
    for cut in cuts:
        tokens.append((at, text[at : at + cut]))
        at += cut
    for (start, token), span in zip(tokens, spans(text, [token for _, token in tokens]), strict=True):
        if not token.strip():
            assert span is None
        elif span is not None:
            assert text[slice(*span)] == token.strip() and span[0] == start + token.index(token.strip())


def test_spans_pass_over_what_is_not_in_the_text() -> None:
    text = "Zoë is Ann's"
    assert spans(text, ["<s>", "▁Zo", "�", "�", "▁is", "Ġ", "ĠAnn", "'s"]) == [
        None, (0, 2), None, None, (4, 6), None, (7, 10), (10, 12),
    ]  # fmt: skip


def test_a_token_has_the_fact_that_it_begins_in() -> None:
    text = "Ann is the wife of Bob. Bob is the son of Cy. Ann is"
    facts = [(24, 45, "chain", 1), (0, 23, "decoy", None)]
    chat = ["user", ":", " a", " helpful"]
    behind = roles_of_tokens("Ann is a", [*chat, "Ann", " is", " a"], [(0, 8)], 4)
    assert behind == [-1] * 4 + [0] * 3
    assert roles_of_tokens(text, text.replace(".", " .").split(), facts) == [1] * 7 + [0] * 7 + [-1] * 2
