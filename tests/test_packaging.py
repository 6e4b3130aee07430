"""The wheel holds what the checkout holds: the linked rooms, the embedded models, every data file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SKIP = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel that is built from a copy, so that the checkout gets no build folder."""
    pytest.importorskip("setuptools.build_meta", reason="setuptools builds the wheel")
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("depthprobe", *linked()):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=SKIP)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    run = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    (path,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def linked() -> list[str]:
    """Top-level folders that are rooms of the package by a relative symlink."""
    return [p.name for p in (ROOT / "depthprobe").iterdir() if p.is_symlink()]


def checkout() -> set[str]:
    """Every file of the package, as a path from the root; links are followed one level down."""
    folders = [ROOT / "depthprobe", *((ROOT / "depthprobe" / name) for name in linked())]
    files = {
        f for folder in folders for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts
    }
    return {f.relative_to(ROOT).as_posix() for f in files}


def test_every_file_is_in_the_wheel(wheel: set[str]) -> None:
    assert checkout() - wheel == set()


def test_nothing_else_is_in_the_wheel(wheel: set[str]) -> None:
    rest = {name for name in wheel - checkout() if ".dist-info/" not in name}
    assert rest == set()
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_links_are_relative() -> None:
    assert "tasks" in linked()
    for name in linked():
        assert (ROOT / "depthprobe" / name).readlink() == Path("..") / name


def test_embedded_models_are_whole_and_small() -> None:
    folders = [p for p in (ROOT / "depthprobe/models/embedded").iterdir() if p.is_dir() and p.name[0] != "_"]
    assert folders
    for folder in folders:
        names = {f.name for f in folder.iterdir()}
        assert {"config.json", "model.safetensors", "README.md"} <= names, folder.name
        assert any(name.startswith("tokenizer") for name in names), folder.name
        assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20


def test_core_dependencies_are_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert all(">=" in text and "==" not in text.partition(";")[0] for text in project["dependencies"])
    assert project["license"] == "Apache-2.0"
