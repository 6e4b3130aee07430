"""`depthprobe analyze`: what it prints, and every bad input as one line, exit code 2, nothing half-done."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from depthprobe.cli import analyze as cli_analyze
from depthprobe.cli.main import main
from depthprobe.pipeline import questions
from depthprobe.tasks.names import NAMES

QUICK = ["--task", "kinship", "--hops", "1-3", "--n", "4", "--batch-size", "4"]
A, B = NAMES[:2]
FACT, QUESTION = f"{B} is the son of {A}. ", f"{B} is {A}'s"
ROW = {"text": FACT + QUESTION, "answer": "son", "candidates": ["son", "brother"]}


@pytest.fixture(autouse=True)
def quick_and_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few stories for the baselines; and a checkout that nobody edits while the tests run."""
    monkeypatch.setattr(questions, "TRAINING_STORIES", 30)
    monkeypatch.setattr("depthprobe.runs.folder.git_commit", lambda: "c0ffee")


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is 5 MB and not what most tests here are about."""
    monkeypatch.setattr("depthprobe.report.write_report", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("no_report")
def test_prints_a_table_the_headline_and_the_report(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(tiny), *QUICK, "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert "tiny-looped on kinship: 4 stories" in out
    assert "best shortcut" in out
    assert "gate exit (q 0.5)" in out
    assert "On kinship, " in out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert err == ""  # no bar where nobody looks


@pytest.mark.usefixtures("no_report")
def test_json_is_all_that_goes_to_stdout(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {tiny}\ntask: kinship\nhops: 1-2\nn: 50\nout: {tmp_path / 'run'}\n")
    assert main(["analyze", "--config", str(config), "--n", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == str(tmp_path / "run")
    assert told["counts"]["items"] == 6  # the command line wins over the file
    assert [row["hops"] for row in told["tasks"][0]["hops"]] == [1, 2]
    assert told["headline"].startswith("On kinship")


def test_a_terminal_sees_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", partial(Console, file=seen, force_terminal=True, width=100))
    with cli_analyze._progress() as progress:
        assert progress is not None
        progress("model", 0, 1)
        for done in range(0, 101, 10):
            progress("lens", done, 100)
            time.sleep(0.02)
    assert "model" in seen.getvalue()
    assert re.search(r"100/100  [\d.]+ questions/s", seen.getvalue())
    assert "0:00:00" in seen.getvalue()


def data(*rows: Any) -> Callable[[Path, Path], list[str]]:
    def arguments(tiny: Path, folder: Path) -> list[str]:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        (folder / "data.jsonl").write_text(text)
        return [str(tiny), "--data", str(folder / "data.jsonl")]

    return arguments


def copied(change: Callable[[Path], None]) -> Callable[[Path, Path], list[str]]:
    def arguments(tiny: Path, folder: Path) -> list[str]:
        shutil.copytree(tiny, folder / "model")
        change(folder / "model")
        return [str(folder / "model"), *QUICK]

    return arguments


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def as_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def with_nan(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["norm.weight"] = weights["norm.weight"] * float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def plain(*arguments: str) -> Callable[[Path, Path], list[str]]:
    return lambda tiny, folder: [*arguments]


def on_tiny(*arguments: str) -> Callable[[Path, Path], list[str]]:
    return lambda tiny, folder: [str(tiny), *arguments]


LONG = {**ROW, "text": FACT * 60 + QUESTION, "id": "long"}
BAD: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "unknown model": (plain("no such model!"), "there is no folder 'no such model!'"),
    "no network": (plain("somebody/some-model", *QUICK), "somebody/some-model"),
    "folder without weights": (copied(without_weights), "has no weights"),
    "pickle checkpoint": (copied(as_pickle), "pickle"),
    "no data file": (on_tiny("--data", "nowhere.jsonl"), "no such file (nowhere.jsonl)"),
    "empty data": (data(), "no items"),
    "malformed data": (data(ROW, "{'text': 1"), "data.jsonl, line 2"),
    "a field too few": (data(ROW, {"text": QUESTION}), "line 2"),
    "too long": (data(ROW, LONG), "item long"),
    "all too long": (lambda t, f: [*data(LONG)(t, f), "--skip-too-long"], "all 1 items exceed the context"),
    "inexpressible answer": (
        data({**ROW, "answer": "xylophone", "candidates": ["son", "xylophone"]}),
        "xylophone",
    ),
    "NaN logits": (copied(with_nan), "NaN logits (item "),
    "bad hops": (on_tiny("--hops", "6-1"), "runs backwards"),
    "hops in words": (on_tiny("--hops", "many"), "'many' is no range of hops"),
    "n of 0": (on_tiny("--n", "0"), "at least 1, got 0"),
    "n in words": (on_tiny("--n", "few"), "Invalid value for '--n'"),
    "unknown task": (on_tiny("--task", "maths"), "there is no 'maths'"),
    "unknown form": (on_tiny("--task", "kinship", "--form", "sonnet"), "sonnet"),
    "unknown order": (on_tiny("--order", "sideways"), "sideways"),
    "unknown device": (on_tiny(*QUICK, "--device", "abacus"), "abacus"),
    "unknown dtype": (on_tiny(*QUICK, "--dtype", "int1"), "unknown dtype 'int1'"),
    "unknown option": (on_tiny("--hop", "3"), "--hop"),
    "data and task": (lambda t, f: [*data(ROW)(t, f), "--task", "follow"], "give --data or --task, not both"),
    "no config file": (on_tiny("--config", "no.yaml"), "no such configuration file"),
    "nothing to resume": (on_tiny(*QUICK, "--resume"), "there is no run to resume"),
}


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, words = BAD[case]
    arguments = make(tiny, tmp_path)
    out = tmp_path / "out"
    assert main(["analyze", *arguments, "--out", str(out)]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert words in stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert not out.exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_report")
def test_too_long_stories_are_counted(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**ROW, "id": f"r{k}"} for k in range(3)]
    arguments = data(*rows, LONG)(tiny, tmp_path)
    assert main(["analyze", *arguments, "--skip-too-long", "--out", str(tmp_path / "run"), "--json"]) == 0
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout)["counts"]["too_long"] == 1
    assert stderr == "1 items exceed the model's context and are left out\n"


@pytest.mark.usefixtures("no_report")
def test_bad_run_folders(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = ["analyze", str(tiny), *QUICK, "--out", str(run)]
    assert main(arguments) == 0
    assert main(arguments) == 0  # asked again, answered from what is there
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert main([*arguments, "--resume", "--seed", "5"]) == 2
    assert "another seed: 1000 there, 5 here" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    manifest = run / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}))
    assert main([*arguments, "--resume"]) == 2
    stderr = capsys.readouterr().err
    assert "schema version 99" in stderr
    assert len(stderr.splitlines()) == 1
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    assert main([*arguments[:-1], str(tmp_path / "thesis")]) == 2
    assert "holds no run" in capsys.readouterr().err


#: A process of its own whose batches take their time, so that a signal meets it in the middle.
SLOW = """
import sys, time
from depthprobe.lens import table
from depthprobe.pipeline import questions
from depthprobe.runs import folder
questions.TRAINING_STORIES = 30
folder.git_commit = lambda: "c0ffee"
batch = table.lens_batch
table.lens_batch = lambda *a: (time.sleep(0.3), batch(*a))[1]
from depthprobe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_kill_9_and_resume_give_equal_tables(tiny: Path, tmp_path: Path) -> None:
    arguments = ["analyze", str(tiny), *QUICK, "--batch-size", "2"]
    run = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", SLOW, *arguments, "--out", str(run)])
    deadline = time.monotonic() + 240
    while not (run / "tables/lens/part-00001.parquet").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads((run / "manifest.json").read_text())["status"] == "running"
    assert 2 <= len(list((run / "tables/lens").glob("part-*"))) < 6
    assert main([*arguments, "--out", str(run), "--resume"]) == 0
    assert main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    names = sorted(os.listdir(tmp_path / "whole/tables"))
    assert sorted(os.listdir(run / "tables")) == names
    for name in names:
        assert pl.read_parquet(run / "tables" / name).equals(
            pl.read_parquet(tmp_path / "whole/tables" / name)
        ), name


@pytest.mark.slow
@pytest.mark.parametrize(("room", "left"), [(4_000, None), (400_000, ["manifest.json", "tables"])])
def test_a_disk_that_is_really_full(tiny: Path, tmp_path: Path, room: int, left: list[str] | None) -> None:
    """A limit on file size stands in for the disk: no table fits, or all tables and not the page."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    run = tmp_path / "run"
    command = [sys.executable, "-c", SLOW, "analyze", str(tiny), *QUICK, "--out", str(run)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert "make room" in done.stderr
    assert (sorted(os.listdir(run)) if run.exists() else None) == left
