"""Exit rules: objects that are asked after each loop which tokens leave.

`base` says what a rule sees and answers. Rules on the gate stand in `gate`, on states in `state`, on outputs in
`output`; those that know beforehand in `planned`; `act` weighs states; `lookahead` decides a loop ahead; `parse` reads
rules from text.
"""

from __future__ import annotations

from depthprobe.halting.rules.act import ACT, act_weights
from depthprobe.halting.rules.base import ExitRule, LoopSignal
from depthprobe.halting.rules.gate import HazardThreshold, QExit, SampledExit
from depthprobe.halting.rules.lookahead import Lookahead
from depthprobe.halting.rules.output import Confidence, EntropyChange, OutputEntropy, OutputKL
from depthprobe.halting.rules.parse import RULE_NAMES, parse_rule
from depthprobe.halting.rules.planned import FixedDepth, FullDepth, GivenExits, RandomExit, Replay
from depthprobe.halting.rules.state import RelativeL2, SecondOrder

__all__ = [
    "ACT", "act_weights", "Confidence", "EntropyChange", "ExitRule", "FixedDepth", "FullDepth", "GivenExits",
    "HazardThreshold", "Lookahead", "LoopSignal", "OutputEntropy", "OutputKL", "parse_rule", "QExit", "RandomExit",
    "RelativeL2", "Replay", "RULE_NAMES", "SampledExit", "SecondOrder",
]  # fmt: skip
