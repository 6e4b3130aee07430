"""The exit rule of a trace, taken apart for the replay: its own part, what the runtime asked, its threshold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from depthprobe.errors import UserError
from depthprobe.halting import ExitRule, Lookahead
from depthprobe.runtime.layouts import layout

#: Where a threshold is smaller, distances are relative to this: a difference of probabilities cancels, and what is left
#: of a divergence of 5e-4 nats has an absolute error, not a relative one.
LEAST_SCALE = 0.1


@dataclass(frozen=True, slots=True)
class AskedRule:
    """A rule as served and by itself.

    Fields:
        asked: what the runtime asked; None where it asked nothing (planned exits).
        own: the rule without the lookahead, which compares the depth that it is asked at.
        threshold: what the numbers of both are compared with.
    """

    asked: ExitRule | None
    own: ExitRule | None
    threshold: float | None

    @classmethod
    def of(cls, rule: ExitRule) -> AskedRule:
        """Take a rule apart; a planned or sampled one decides nothing that could be asked again."""
        if rule.planned or rule.sampled:
            return cls(None, None, None)
        own = rule.rule if isinstance(rule, Lookahead) else rule
        threshold = getattr(own, "q", None)
        return cls(rule, own, float(getattr(own, "tau", np.nan) if threshold is None else threshold))

    def distance(self, criterion: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far numbers are from the threshold, relative to it (or to `LEAST_SCALE`); NaN where there is none."""
        if self.threshold is None:
            return np.full_like(criterion, np.nan)
        return np.abs(criterion - self.threshold) / max(abs(self.threshold), LEAST_SCALE)


def check_replayable(kv: str, rule: ExitRule | None = None) -> None:
    """Refuse layouts and rules that no forward over all positions at once follows (`UserError`)."""
    kind = layout(kv)
    if not kind.parallel or kind.terminal:
        what = f"layout {kind.name} has no forward over all positions at once, so its trace cannot be replayed"
        raise UserError(what, where="kv", remedy="serve with layout ragged, last-exited or depth-indexed")
    if rule is not None and rule.reprojects:
        what = "ACT projects the keys of halted tokens anew, which no forward over all positions does"
        raise UserError(what, where=f"exit rule {rule.name}", remedy="take another rule")
