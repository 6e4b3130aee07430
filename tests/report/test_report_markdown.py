"""The Markdown table of a run: every cell is a cell of the accuracy table."""

from __future__ import annotations

from pathlib import Path

import pytest

from depthprobe.cli.main import main
from depthprobe.report import accuracy_markdown, read_run


def test_cells_are_the_tables(looped_run: Path) -> None:
    run = read_run(looped_run)
    blocks = accuracy_markdown(run).split("\n\n**")
    assert len(blocks) == len(run.tasks)
    task = run.tasks[0]
    head, _, *rows = blocks[0].split("\n\n")[1].splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert names == ["hops", *map(str, range(1, 8)), "8 (last)", "95 %", "best shortcut", "mean exit"]
    for row, (hops, table) in zip(rows, task.accuracy_of.items(), strict=True):
        cells = [cell.strip(" *") for cell in row.strip("|").split("|")]
        ends = table.filter(table["depth"] > 0)["accuracy"].to_list()
        assert cells[:9] == [str(hops), *(f"{value:.2f}" for value in ends)]


def test_a_transformer_has_no_gate_column(layers_run: Path) -> None:
    assert "mean exit" not in accuracy_markdown(read_run(layers_run))


def test_it_prints_and_writes_nothing(looped_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(looped_run.rglob("*"))
    assert main(["report", str(looped_run), "--markdown"]) == 0
    assert "| hops |" in capsys.readouterr().out
    assert sorted(looped_run.rglob("*")) == before


def test_out_beside_markdown_is_refused(looped_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(looped_run), "--markdown", "--out", "x.html"]) == 2
    assert "--markdown prints" in capsys.readouterr().err
