"""The figures of a task's section, one module per question that they answer."""

from __future__ import annotations

from depthprobe.report.panels.accuracy import accuracy_beside_shortcuts, accuracy_by_depth
from depthprobe.report.panels.gate import exit_trade_off, exits_by_hops
from depthprobe.report.panels.loops import layers_within_loops
from depthprobe.report.panels.probabilities import probability_curves
from depthprobe.report.panels.settling import settling_strips

__all__ = [
    "accuracy_beside_shortcuts",
    "accuracy_by_depth",
    "exit_trade_off",
    "exits_by_hops",
    "layers_within_loops",
    "probability_curves",
    "settling_strips",
]
