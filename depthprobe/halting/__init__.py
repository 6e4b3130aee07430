"""Gate mathematics, once for all users: stopping distributions, exits, exit rules.

For example:

    from depthprobe.halting import QExit, q_exit, stopping_distribution

    p = stopping_distribution(torch.tensor([0.2, 0.5, 0.5]))    # 0.2, 0.4, 0.4
    q_exit(torch.tensor([0.2, 0.5, 0.5]), q=0.9)                # 3
    model(tokens, exits=QExit(0.9, min_depth=2))
"""

from __future__ import annotations

from depthprobe.halting.distribution import (
    cdf,
    entropy,
    expected_depth,
    log_stopping_distribution,
    log_survival,
    q_exit,
    stopping_distribution,
)
from depthprobe.halting.rules import ExitRule, FixedDepth, GivenExits, LoopSignal, QExit, SampledExit

__all__ = [
    "stopping_distribution", "log_stopping_distribution", "log_survival", "cdf", "expected_depth", "entropy",
    "q_exit", "ExitRule", "LoopSignal", "QExit", "FixedDepth", "SampledExit", "GivenExits",
]  # fmt: skip
