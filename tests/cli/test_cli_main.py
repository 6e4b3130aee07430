"""The command line answers at once, and turns what the user must mend into one line and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from depthprobe import __version__
from depthprobe.cli import main as cli
from depthprobe.errors import UserError

HEAVY = ["torch", "transformers", "polars", "plotly", "numpy", "triton", "safetensors"]


def heavy_after(code: str) -> list[str]:
    """Which heavy packages a fresh process has imported after `code`."""
    tail = f"\nimport sys, json; print('HEAVY ' + json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.rpartition("HEAVY ")[2])


def fail_with(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Put `action` in the place of every command."""
    group = typer.Typer()
    group.command("doctor")(lambda: action())
    monkeypatch.setattr(cli, "_load", lambda name: cli.build_command(group))


def raising(error: BaseException) -> Callable[[], Any]:
    def action() -> None:
        raise error

    return action


def test_import_is_light() -> None:
    assert heavy_after("import depthprobe") == []


def test_help_is_light() -> None:
    assert heavy_after("from depthprobe.cli.main import main; assert main(['--help']) == 0") == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_is_light(name: str) -> None:
    assert heavy_after(f"from depthprobe.cli.main import main; assert main([{name!r}, '--help']) == 0") == []


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == shown


def test_every_command_module_keeps_the_contract() -> None:
    modules = {p.stem for p in Path(cli.__file__).parent.glob("*.py") if not p.stem.startswith("_")}
    assert set(cli.COMMANDS) <= modules
    for name in cli.COMMANDS:
        assert cli._load(name).name == name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"depthprobe {__version__}\n"


@pytest.mark.parametrize("arguments", [["analyse"], ["--nope"], ["doctor", "--nope"], ["doctor", "extra"]])
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "--help" in err


def test_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, raising(UserError("no such model\nat all", where="x", remedy="depthprobe doctor")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr() == ("", "error: no such model at all (x): depthprobe doctor\n")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "runs/a/part"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "runs/a/part"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["os", "quota", "words only"],
)
def test_full_disk(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, raising(error))
    assert cli.main(["doctor"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the disk is full") and err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_for_real() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "depthprobe", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert run.returncode == 2
    assert run.stderr.startswith("error: the disk is full") and run.stderr.count("\n") == 1


def test_a_place_one_may_not_write_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, raising(PermissionError(errno.EACCES, "Permission denied", "/secret/x")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "error: Permission denied (/secret/x): choose another place\n"


def test_missing_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, raising(ModuleNotFoundError("No module named 'plotly'", name="plotly")))
    assert cli.main(["doctor"]) == 2
    assert "plotly is not installed" in capsys.readouterr().err


def test_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, raising(MemoryError()))
    assert cli.main(["doctor"]) == 2
    assert "--batch-size" in capsys.readouterr().err


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), KeyError("bug"), FileNotFoundError(2, "x", "y")])
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, raising(error))
    with pytest.raises(type(error)):
        cli.main(["doctor"])


def test_an_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, raising(typer.Exit(1)))
    assert cli.main(["doctor"]) == 1
