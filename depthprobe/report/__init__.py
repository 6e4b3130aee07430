"""A run folder as one self-contained page, and its figures.

    from depthprobe.report import write_report
    write_report(Path("runs/demo"))             # runs/demo/report.html

The report draws what analysis computed: nothing here runs a model, and each figure names the Parquet file
behind it.
"""

from __future__ import annotations

from depthprobe.report.data import Axis, Run, Task, read_run
from depthprobe.report.figures import Figure
from depthprobe.report.markdown import accuracy_markdown
from depthprobe.report.page import render, write_report

__all__ = ["Axis", "Figure", "Run", "Task", "accuracy_markdown", "read_run", "render", "write_report"]
