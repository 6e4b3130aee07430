"""`depthprobe report`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from depthprobe.cli.main import main


def test_report_is_drawn_again(small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").stat().st_size > 1_000_000  # plotly.js is in it
    assert main(["report", str(run), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == (run / "report.html").read_text()


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["report", str(folder)]) == 2
        caught = capsys.readouterr()
        assert caught.out == "" and caught.err.startswith("error: ") and caught.err.count("\n") == 1
