"""Every notebook runs from top to bottom with the public API, and is committed without its outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_committed(path: Path) -> None:
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "clear the outputs before a commit"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (the extra `notebook`)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (the extra `dev`)")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (the extra `notebook`)")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the kernel takes this checkout, whatever is installed
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TERM", "dumb")
    notebook = nbformat.read(path, as_version=4)
    # each cell may wait long on a busy machine; on a free core the whole notebook takes well under a minute
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _CHECKS[path.stem](notebook, tmp_path)


def _shown(notebook: Any) -> list[Any]:
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    return shown


def _figures(shown: list[Any]) -> int:
    return [kind for output in shown for kind in output.get("data", {})].count("application/vnd.plotly.v1+json")


def _depth(notebook: Any, folder: Path) -> None:
    shown = _shown(notebook)
    assert _figures(shown) >= 5
    assert any("report.html" in _html(output) for output in shown)
    assert any("too few clusters" in _html(output) for output in shown)
    assert (folder / "runs" / "ten-minutes-follow" / "report.html").exists()


def _patching(notebook: Any, folder: Path) -> None:
    shown = _shown(notebook)
    assert _figures(shown) == 6
    said = "".join(str(output.get("text", "")) for output in shown)
    assert "became" in said and "PatchResult(follow-demo" in said
    assert any("too few clusters" in _html(output) for output in shown)
    assert not list(folder.glob("runs*"))


def _served(notebook: Any, folder: Path) -> None:
    shown = _shown(notebook)
    assert _figures(shown) == 1
    assert any("settling oracle" in _html(output) for output in shown)
    assert any("too few clusters" in _html(output) for output in shown)
    assert (folder / "runs" / "frontier" / "frontier.html").exists()


#: notebook -> what must have come out
_CHECKS: dict[str, Callable[[Any, Path], None]] = {
    "01_depth_in_ten_minutes": _depth,
    "02_causal_patching": _patching,
    "03_served_depth": _served,
}


def _html(output: Any) -> str:
    return str(output.get("data", {}).get("text/html", ""))
