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
from depthprobe.halting.head import LookaheadHead
from depthprobe.halting.rules import (
    ACT,
    Confidence,
    EntropyChange,
    ExitRule,
    FixedDepth,
    FullDepth,
    GivenExits,
    HazardThreshold,
    Lookahead,
    LoopSignal,
    OutputEntropy,
    OutputKL,
    QExit,
    RandomExit,
    RelativeL2,
    Replay,
    SampledExit,
    SecondOrder,
    act_weights,
    parse_rule,
)
from depthprobe.halting.uniforms import Purpose, uniforms

__all__ = [
    "stopping_distribution", "log_stopping_distribution", "log_survival", "cdf", "expected_depth", "entropy",
    "q_exit", "ExitRule", "LoopSignal", "QExit", "HazardThreshold", "SampledExit", "ACT", "act_weights", "RelativeL2",
    "SecondOrder", "OutputKL", "OutputEntropy", "EntropyChange", "Confidence", "FullDepth", "FixedDepth", "GivenExits",
    "Replay", "RandomExit", "Lookahead", "LookaheadHead", "parse_rule", "uniforms", "Purpose",
]  # fmt: skip
