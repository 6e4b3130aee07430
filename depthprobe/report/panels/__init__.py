"""The figures of a task's section, one module per question that they answer."""

from __future__ import annotations

from depthprobe.report.panels.accuracy import accuracy_beside_shortcuts, accuracy_by_depth
from depthprobe.report.panels.compare import compare_accuracy
from depthprobe.report.panels.effective import contributions, later_layers, output_reached, skips
from depthprobe.report.panels.frontier import frontier_depth, frontier_memory
from depthprobe.report.panels.gate import exit_trade_off, exits_by_hops
from depthprobe.report.panels.knockout import knockout_curves
from depthprobe.report.panels.loops import layers_within_loops
from depthprobe.report.panels.patching import controls_beside_donors, patching_map
from depthprobe.report.panels.probabilities import probability_curves
from depthprobe.report.panels.served import exit_minus_settling, served_terms
from depthprobe.report.panels.settling import settling_strips
from depthprobe.report.panels.tokens import patched_tokens
from depthprobe.report.panels.windows import no_windows, windows_by_hops

__all__ = [
    "accuracy_beside_shortcuts",
    "accuracy_by_depth",
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
    "no_windows",
    "output_reached",
    "patched_tokens",
    "patching_map",
    "probability_curves",
    "served_terms",
    "settling_strips",
    "skips",
    "windows_by_hops",
]
