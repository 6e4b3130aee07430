"""`depthprobe.analyze` end to end on a tiny model: what a run holds, and that stopping it changes nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tiny_saved import save_model

import depthprobe
from depthprobe import files
from depthprobe.errors import UserError
from depthprobe.pipeline import AnalyzeResult, questions

SMALL: dict[str, Any] = {"hops": "1-3", "n": 5, "batch_size": 6, "resamples": 100}


@pytest.fixture(autouse=True)
def quick_and_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few stories for the baselines; and a checkout that nobody edits while the tests run."""
    steady(monkeypatch)


def steady(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(questions, "TRAINING_STORIES", 30)
    patch.setattr("depthprobe.runs.folder.git_commit", lambda: "c0ffee")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AnalyzeResult:
    """A run that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        steady(patch)
        return depthprobe.analyze(str(tiny), out=tmp_path_factory.mktemp("runs") / "whole", **SMALL)


def final_tables(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "tables").glob("*.parquet"))}


def test_another_route_writes_the_same_table(tmp_path: Path, tiny: Path) -> None:
    pytest.importorskip("nnsight")
    runs = [
        depthprobe.analyze(str(tiny), out=tmp_path / route, route=route, browse=0, **SMALL).table("lens")
        for route in ("native", "nnsight")
    ]
    assert runs[0].columns == runs[1].columns
    for column in ("item", "depth", "site", "top1", "target_rank"):
        assert runs[0][column].to_list() == runs[1][column].to_list()
    for column in ("target_logit", "kl_final", "entropy", "gate_cdf"):
        one, other = (run[column].fill_null(0).to_numpy() for run in runs)
        assert one == pytest.approx(other, abs=1e-4)


def test_a_run_holds_all_tables(whole: AnalyzeResult) -> None:
    names = {"items", "lens", "tokens", "shortcuts", "settling", "settling_by_hops", "accuracy", "slopes"}
    names |= {"differences", "exits", "fixed_exits", "exits_by_hops"}
    assert {name.removesuffix(".parquet") for name in final_tables(whole.folder)} == names
    assert sorted(os.listdir(whole.folder)) == ["manifest.json", "report.html", "tables"]
    assert sorted(os.listdir(whole.folder / "tables")) == sorted(f"{name}.parquet" for name in names)
    for name in names:
        assert whole.table(name).height > 0, name
    items = whole.table("items")
    assert items.height == 2 * 5 * 3
    assert whole.table("lens").height == items.height * whole.manifest["model"]["n_depths"]
    assert set(items["split"]) == {"heldout", "train"}  # rungs of one and two hops are never held out
    assert items.filter(pl.col("hops") == 3)["split"].unique().to_list() == ["heldout"]


def test_the_manifest_says_what_was_run(whole: AnalyzeResult, tiny: Path) -> None:
    manifest = json.loads((whole.folder / "manifest.json").read_text())
    assert manifest == whole.manifest
    assert manifest["schema_version"] == 1
    assert manifest["status"] == "finished"
    assert manifest["config"]["model"] == str(tiny)
    assert manifest["counts"] == {"items": 30, "stories": 10, "too_long": 0, "lens_rows": 30 * 7, "browsed": 30}
    assert len(manifest["model"]["fingerprint"]) == 64
    assert manifest["summary"]["headline"] == whole.summary["headline"]
    assert manifest["started"] <= manifest["finished"]
    assert whole.report == whole.folder / "report.html"
    assert "<html" in whole.report.read_text(encoding="utf-8")[:500].lower()


def test_the_same_options_give_the_same_bytes(whole: AnalyzeResult, tiny: Path, tmp_path: Path) -> None:
    again = depthprobe.analyze(str(tiny), out=tmp_path / "again", **SMALL)
    assert final_tables(again.folder) == final_tables(whole.folder)


def test_a_finished_run_is_not_computed_again(
    whole: AnalyzeResult, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthprobe.lens.lens_rows", None)
    said: list[str] = []
    again = depthprobe.analyze(str(tiny), out=whole.folder, remark=said.append, **SMALL)
    assert again.manifest == whole.manifest
    assert any("finished already" in line for line in said)


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


def killed_at(monkeypatch: pytest.MonkeyPatch, nth: int, before: bool) -> None:
    """Die at the nth file of the run, before or after it appears; a dead process tidies nothing up."""
    count = 0
    replace = os.replace

    def dying(*paths: Any) -> None:
        nonlocal count
        count += 1
        if count == nth and before:
            raise Killed
        replace(*paths)
        if count == nth:
            raise Killed

    monkeypatch.setattr(files.os, "replace", dying)
    monkeypatch.setattr("depthprobe.runs.RunFolder.remove_if_empty", lambda run: None)


@pytest.mark.parametrize(
    ("nth", "before"),
    [(1, True), (1, False), (4, True), (6, False), (9, True), (12, False), (14, False), (25, True), (25, False)],
)
def test_killed_at_any_file_and_resumed(
    whole: AnalyzeResult, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, before: bool
) -> None:
    """1: manifest, 2–6: parts of lens, 7–11: of tokens, 12–24: final tables (12: tokens, 14: lens), 25: finished."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, nth, before)
        with pytest.raises(Killed):
            depthprobe.analyze(str(tiny), out=out, **SMALL)
    resumed = depthprobe.analyze(str(tiny), out=out, resume=(out / "manifest.json").exists(), **SMALL)
    assert final_tables(resumed.folder) == final_tables(whole.folder)
    assert sorted(os.listdir(out)) == ["manifest.json", "report.html", "tables"]
    assert resumed.summary == whole.summary


def stopped(tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, 4, before=False)
        with pytest.raises(Killed):
            depthprobe.analyze(str(tiny), out=out, **{**SMALL, **options})


def test_two_configurations_are_not_mixed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    stopped(tiny, out, monkeypatch)
    before = final_tables(out), sorted(os.listdir(out / "tables/lens"))
    monkeypatch.setattr("depthprobe.depth.load", None)  # told before the model is loaded
    for change, words in (
        ({"seed": 7}, "another seed: 1000 there, 7 here"),
        ({"hops": "1-4"}, r"another hops: \[1, 2, 3\] there, \[1, 2, 3, 4\] here"),
        ({"batch_size": 5}, "another batch_size: 6 there, 5 here"),
        ({"task": "follow"}, "another task"),
        ({"dtype": "float32"}, "another dtype"),
    ):
        with pytest.raises(UserError, match=words):
            depthprobe.analyze(str(tiny), out=out, resume=True, **{**SMALL, **change})
    with pytest.raises(UserError, match="another model"):
        depthprobe.analyze("other", out=out, resume=True, **SMALL)
    assert (final_tables(out), sorted(os.listdir(out / "tables/lens"))) == before


def test_other_weights_under_the_same_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", "looped-plain")
    stopped(model, tmp_path / "run", monkeypatch)
    save_model(tmp_path / "model", "looped-ouro")
    with pytest.raises(UserError, match=r"another model\.fingerprint"):
        depthprobe.analyze(str(model), out=tmp_path / "run", resume=True, **SMALL)


def test_an_unfinished_run_is_not_continued_unasked(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tiny, tmp_path / "run", monkeypatch)
    with pytest.raises(UserError, match="unfinished run in this folder"):
        depthprobe.analyze(str(tiny), out=tmp_path / "run", **SMALL)
    with pytest.raises(UserError, match="no run to resume"):
        depthprobe.analyze(str(tiny), out=tmp_path / "other", resume=True, **SMALL)


def test_the_default_folder_and_its_resumption(
    whole: AnalyzeResult, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no run to resume \(runs/tiny-looped-\*"):
        depthprobe.analyze(str(tiny), resume=True, **SMALL)
    with monkeypatch.context() as patch:
        killed_at(patch, 3, before=False)
        with pytest.raises(Killed):
            depthprobe.analyze(str(tiny), **SMALL)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-looped-2")
    resumed = depthprobe.analyze(str(tiny), resume=True, **SMALL)
    assert resumed.folder.resolve() == folder
    assert final_tables(folder) == final_tables(whole.folder)
    other = depthprobe.analyze(str(tiny), **SMALL)
    assert other.folder.resolve() != folder


@pytest.mark.parametrize("nth", [1, 3, 9])
def test_a_full_disk_is_one_line_and_resumable(
    whole: AnalyzeResult, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    count = 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        patch.setattr(files, "_sync_folder", lambda folder: None)
        with pytest.raises(UserError, match="the disk is full") as caught:
            depthprobe.analyze(str(tiny), out=out, **SMALL)
    assert "\n" not in str(caught.value)
    assert list(out.rglob(".partial-*")) == []
    for file in out.rglob("*.parquet"):
        pl.read_parquet(file)
    resumed = depthprobe.analyze(str(tiny), out=out, resume=nth > 1, **SMALL)
    assert final_tables(resumed.folder) == final_tables(whole.folder)


def lines(*rows: dict[str, Any]) -> Callable[[Path], Path]:
    def write(file: Path) -> Path:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


def test_it_shows_itself_in_a_notebook(whole: AnalyzeResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.folder.parent)
    html = whole._repr_html_()
    assert html.count("<table>") == len(whole.summary["tasks"])
    assert f'href="{whole.folder.name}/report.html"' in html
    assert "too few clusters (5 of 50): ask for more stories with --n" in html
    assert len(repr(whole)) < 3000 and whole.summary["headline"] in repr(whole)


def test_own_data(tiny: Path, tmp_path: Path) -> None:
    from depthprobe.tasks.generate import Generator
    from depthprobe.tasks.io import write_items

    file = tmp_path / "mine.jsonl"
    write_items(file, Generator("kinship", hops=(1, 2, 3), seed=5).items(4))
    result = depthprobe.analyze(
        str(tiny), data=str(file), hops="2-3", n=3, resamples=100, out=tmp_path / "run"
    )
    items = result.table("items")
    assert sorted(items["hops"].unique()) == [2, 3]
    assert items["story"].n_unique() == 3
    assert set(result.table("shortcuts")["shortcut"]) >= {"majority", "multiset_last", "bag_of_words"}
    write_items(file, Generator("kinship", hops=(1, 2, 3), seed=6).items(4))
    with pytest.raises(UserError, match=r"another items\.digest"):
        depthprobe.analyze(str(tiny), data=str(file), hops="2-3", n=3, resamples=100, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"no item has the hops asked for.*it has 1, 2, 3"):
        depthprobe.analyze(str(tiny), data=str(file), hops="7", out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_an_ordinary_transformer(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny-llama", "llama")
    result = depthprobe.analyze(str(model), task="kinship", out=tmp_path / "run", **SMALL)
    (task,) = result.summary["tasks"]
    assert task["unit"] == "layers"
    assert task["exit"] is None
    assert "tiny-llama" in result.summary["headline"]
    assert result.table("exits").height == result.table("exits_by_hops").height == 0


def test_short_chains_are_of_any_split_and_said_to_be(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    result = depthprobe.analyze(
        str(tiny), out=tmp_path / "run", remark=said.append, **{**SMALL, "hops": "1-2", "n": 2}
    )
    assert result.manifest["config"]["split"] == "any"
    assert any("held out" in line for line in said)


def test_progress_ends_where_it_should(tiny: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    depthprobe.analyze(
        str(tiny), out=tmp_path / "run", progress=lambda *step: told.append(step), command="x", **SMALL
    )
    assert [step[1:] for step in told if step[0] == "lens"] == [(done, 30) for done in (0, 6, 12, 18, 24, 30)]
    assert list(dict.fromkeys(step[0] for step in told)) == [
        "questions", "model", "tokens", "lens", "words", "shortcuts", "analysis", "report",
    ]  # fmt: skip
