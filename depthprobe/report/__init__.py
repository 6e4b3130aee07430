"""A run folder as one self-contained page, and its figures.

    from depthprobe.report import write_report
    write_report(Path("runs/demo"))             # runs/demo/report.html

    from depthprobe import report               # in a notebook
    run = report.read_run(Path("runs/demo"))
    report.accuracy_by_depth(run.task("follow"))

The report draws what analysis computed: nothing here runs a model, and each figure names the Parquet file
behind it.
"""

from __future__ import annotations

from depthprobe.report.data import Axis, Run, Task, read_run
from depthprobe.report.figures import Choice, Figure
from depthprobe.report.frontier import write_frontier
from depthprobe.report.markdown import accuracy_markdown, causal_markdown
from depthprobe.report.notebook import use_theme
from depthprobe.report.page import render, write_report
from depthprobe.report.panels import (
    accuracy_beside_shortcuts,
    accuracy_by_depth,
    compare_accuracy,
    contributions,
    controls_beside_donors,
    exit_minus_settling,
    exit_trade_off,
    exits_by_hops,
    frontier_depth,
    frontier_memory,
    knockout_curves,
    later_layers,
    layers_within_loops,
    output_reached,
    patched_tokens,
    patching_map,
    probability_curves,
    served_terms,
    settling_strips,
    skips,
    windows_by_hops,
)
from depthprobe.report.sweep import patched_task

__all__ = [
    "Axis",
    "Choice",
    "Figure",
    "Run",
    "Task",
    "accuracy_beside_shortcuts",
    "accuracy_by_depth",
    "accuracy_markdown",
    "causal_markdown",
    "compare_accuracy",
    "contributions",
    "controls_beside_donors",
    "exit_minus_settling",
    "exit_trade_off",
    "exits_by_hops",
    "frontier_depth",
    "frontier_memory",
    "knockout_curves",
    "later_layers",
    "layers_within_loops",
    "output_reached",
    "patched_task",
    "patched_tokens",
    "patching_map",
    "probability_curves",
    "read_run",
    "render",
    "served_terms",
    "settling_strips",
    "skips",
    "use_theme",
    "windows_by_hops",
    "write_frontier",
    "write_report",
]
