"""Settings of the scheduler, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from depthprobe.errors import UserError
from depthprobe.runtime.layouts import Layout, layout

Policy = Literal["refill", "no-refill", "lockstep", "full"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of a `Scheduler`.

    Fields:
        n_loops: U.
        width: most rows of a prelude, recurrent or coda tick.
        spare: further slots, so that rows may wait for the coda, or prefilled ones for the batch.
        policy: *refill*: a freed row is taken by any other at once, so that a batch mixes depths; *no-refill*: a
            cohort starts together, shrinks as rows leave, and has one coda; *lockstep*: as no-refill, but rows
            that left are computed until the slowest has; *full*: a cohort, every row runs U loops.
        kv: layout, or its name.
        core_pages: pages of the pool, each one token at one depth over all core layers.
        outer_pages: pages of one token over all prelude and coda layers; 0 where the model has none.
        prefill_tokens: most prompt tokens of a prefill tick. Layouts without a parallel forward prefill a prompt
            in one piece however long it is.
        coda_share: in refill, the coda waits until ceil(coda_share · width) rows have left, or that share of
            those that decode where they are fewer, or nothing else can run.
        horizon: 0: whether a row leaves after a loop is known after that loop; 1: one loop before it.
        prefill: *dense*: prompts run all loops; *ragged*: prompt tokens leave by rule.
        by_depth: batch rows of one depth only, as where `kv` cannot mix them (for comparison: the published
            prototype of Ragged KV does that).
        max_len: longest sequence that the tables hold, prompt and generated; 0: no limit but the pages.

    Raises:
        UserError: a value out of range, an unknown name, a layout that cannot serve the policy.
    """

    n_loops: int
    width: int
    core_pages: int
    outer_pages: int = 0
    spare: int = 0
    policy: Policy = "refill"
    kv: Layout | str = "ragged"
    prefill_tokens: int = 512
    coda_share: float = 0.0
    horizon: int = 0
    prefill: Literal["dense", "ragged"] = "dense"
    by_depth: bool = False
    max_len: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("n_loops", 1), ("width", 1), ("core_pages", 1), ("outer_pages", 0), ("spare", 0),
            ("prefill_tokens", 1), ("max_len", 0),
        ):  # fmt: skip
            whole(name, getattr(self, name), least)
        _known("policy", self.policy, POLICIES)
        _known("prefill", self.prefill, ("dense", "ragged"))
        _known("horizon", self.horizon, (0, 1))
        share = self.coda_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            what = f"coda_share is {self.coda_share!r}"
            raise UserError(what, where="coda_share", remedy="give a share of the width, 0 to 1")
        self.layout.allows(early=self.policy != "full" or self.prefill == "ragged")

    @property
    def layout(self) -> Layout:
        """The layout that `kv` names."""
        return layout(self.kv)

    @property
    def n_slots(self) -> int:
        """Requests in flight at most."""
        return self.width + self.spare

    def least_coda(self, decoding: int) -> int:
        """Rows for which the coda waits in refill when `decoding` requests are past their prefill."""
        return max(1, math.ceil(self.coda_share * min(self.width, decoding) - 1e-9))  # 0.1 · 30 > 3


def whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse a setting that is no whole number from `least` to `most` (None: any), naming it (`UserError`)."""
    inside = isinstance(value, int) and not isinstance(value, bool) and least <= value
    if not inside or (most is not None and isinstance(value, int) and value > most):
        top = "" if most is None else f" to {most}, which the model has"
        raise UserError(f"{name} is {value!r}", where=name, remedy=f"give a whole number from {least}{top}")


def _known(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        names = ", ".join(str(one) for one in known)
        raise UserError(f"{name} is {value!r}", where=name, remedy=f"use one of {names}")
