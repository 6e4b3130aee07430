"""`depthprobe train`: refuses before it trains, and ends cleanly when it is told to."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthprobe.cli.main import main
from depthprobe.training import family_demo
from depthprobe.training.recipes import RECIPES, Recipe


def test_options_reach_the_recipe_and_the_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def train(recipe: Recipe, seed: int, say: Callable[[str], None]) -> tuple[str, str]:
        say("step 1")
        calls.append((recipe, seed))
        return "model", "words"

    monkeypatch.setattr(family_demo, "train", train)
    # by its full name: nnsight, once imported, gives every object a method `save`
    save = importlib.import_module("depthprobe.training.save")
    monkeypatch.setattr(save, "save_model", lambda *arguments: calls.append(arguments))
    out = tmp_path / "demo"
    command = ["train", "follow-demo", "--out", str(out), "--seed", "4"]
    assert main([*command, "--steps", "9", "--threads", "2"]) == 0
    recipe = replace(RECIPES["follow"], steps=9, threads=2)
    assert calls == [(recipe, 4), ("model", "words", out, 4, recipe)]
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n" and shown.err == "step 1\n"
    assert main(command) == 0
    assert calls[2] == (RECIPES["follow"], 4)
    assert main(["train", "kinship-demo", "--out", str(out)]) == 0
    assert calls[4] == (RECIPES["kinship"], 0)


def full(at: Path) -> Path:
    at.mkdir()
    (at / "theirs").touch()
    return at


def file(at: Path) -> Path:
    at.touch()
    return at


def below_a_file(at: Path) -> Path:
    return file(at) / "model"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (full, "the output folder is in use"),
        (file, "the output folder is in use"),
        (below_a_file, "the folder cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_in_a_line_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: Callable[[Path], Path],
    words: str,
) -> None:
    monkeypatch.setattr(family_demo, "train", lambda *_, **__: pytest.fail("trained"))
    out = place(tmp_path / "place")
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", "follow-demo", "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"error: {words}") and shown.err.count("\n") == 1
    assert str(tmp_path / "place") in shown.err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_only_some_machines_refuse_is_refused_in_a_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(family_demo, "train", lambda *_, **__: pytest.fail("trained"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
        assert main(["train", "follow-demo", "--out", str(tmp_path / "demo")]) == 2
    assert capsys.readouterr().err.startswith(f"error: the folder cannot be written ({tmp_path})")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda self: True)
        assert main(["train", "follow-demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: the output folder is in use")

    def exists(self: Path) -> bool:
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", exists)
        code = main(["train", "follow-demo", "--out", str(tmp_path / "demo")])
    assert code == 2
    assert capsys.readouterr().err == f"error: the output folder cannot be made: File name too long ({tmp_path}/demo)\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seed", "-1"], ["--threads", "none"]])
def test_bad_numbers_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["train", "follow-demo", "--out", str(tmp_path / "demo"), *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and arguments[0] in shown and shown.count("\n") == 1


def alive(group: int) -> set[int]:
    """Processes of a process group that have not ended, from /proc."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                _, rest = (entry / "stat").read_text().rsplit(") ", 1)
            except OSError:
                continue
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.add(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_stopped_training_leaves_neither_files_nor_processes(tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "depthprobe.cli.main",
        "train",
        "follow-demo",
        "--out",
        str(tmp_path / "a" / "demo"),
    ]
    training = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        until = time.monotonic() + 300
        while len(alive(training.pid)) < 3:  # itself, the pools' process, and Python's tracker of semaphores
            assert training.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        if number is signal.SIGINT:
            os.killpg(training.pid, number)  # as a terminal does: to all of them
        else:
            training.send_signal(number)  # which it cannot answer
        out, shown = training.communicate(timeout=200)
        if number is signal.SIGINT:
            told = shown.removeprefix("making 1,500 stories\n")
            assert (training.returncode, out, told) == (130, "", "interrupted\n")
        while alive(training.pid):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert list(tmp_path.iterdir()) == []
    finally:
        if alive(training.pid):
            os.killpg(training.pid, signal.SIGKILL)
