"""A clock from a trace: least squares over its ticks, no coefficient negative.

    fitted = fit(Path("runs/trace"))
    print(fitted.lines["recurrent"], fitted.follows)

What a tick read is not in its line of the trace, so the scheduler is run again on the recorded requests, exits and
times (`follow`): it makes the same ticks, and knows rows and context of each. Where it does not, the trace does not
explain itself (requests aborted while a token was in flight, or taken in between two looks at the time), and the fit
uses the ticks before the first that differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthprobe.errors import UserError
from depthprobe.runtime.record import read_lines, read_meta
from depthprobe.runtime.roofline import Clock, Line
from depthprobe.runtime.settings import SchedulerConfig
from depthprobe.runtime.simulate import STAGES, Ran, Simulator
from depthprobe.runtime.workload import of_trace

#: recurrent ticks without which nothing is fitted; a stage with fewer gets its mean as the fixed part
LEAST_TICKS = 12
#: what a tick's line and the replay must have in common
SAME = ("stage", "rows", "depths", "frozen", "free_core", "free_outer", "ahead", "replay", "preempted")


@dataclass(frozen=True, slots=True)
class LineFit:
    """One stage.

    Fields:
        n: ticks; the first of the stage is left out where there are enough, it warms up.
        rms: root mean square of the residuals, seconds.
        relative: median of |residual| / duration.
        r2: share of the variance that is explained; None where there is none.
        left_out: the terms that could not be told apart and were left out, such as context where all rows read alike.
    """

    line: Line
    n: int
    rms: float
    relative: float
    r2: float | None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fitted:
    """A clock, and how well it tells the time.

    Fields:
        ticks: in the trace; follows: how many of them the scheduler makes again from the record before the first
            difference.
        measured, predicted: seconds of all ticks that follow, as recorded and by the clock.
    """

    clock: Clock
    lines: dict[str, LineFit]
    ticks: int
    follows: int
    measured: float
    predicted: float


def config_of(folder: Path) -> SchedulerConfig:
    """The scheduler's settings in a trace.

    Raises:
        UserError: no trace, or one without them.
    """
    about = read_meta(folder)
    try:
        return SchedulerConfig(**{one.name: about[one.name] for one in dataclasses.fields(SchedulerConfig)})
    except KeyError as error:
        what = f"the trace does not say {error}"
        raise UserError(what, where=str(folder), remedy="serve the requests again") from None


def follow(folder: Path) -> tuple[list[Ran], list[dict[str, Any]]]:
    """Run the scheduler again on a trace's requests, exits and times.

    Returns:
        the ticks it makes, up to the first that is not the recorded one; and all recorded lines.
    """
    config, works = config_of(folder), of_trace(folder)
    lines = list(read_lines(folder, "ticks"))
    ran: list[Ran] = []
    times = [(row["start"], row["duration"]) for row in lines]
    still = Clock("still", config.n_loops, Line())
    Simulator(config, still, works, watch=ran.append, times=times).run()
    for k, (mine, row) in enumerate(zip(ran, lines, strict=False)):
        if any(getattr(mine, name) != row[name] for name in SAME):
            return ran[:k], lines
    return ran, lines


def fit(folder: Path) -> Fitted:
    """The clock of a trace.

    Raises:
        UserError: no trace, or fewer than LEAST_TICKS recurrent ticks.
    """
    about = read_meta(folder)
    ran, lines = follow(folder)
    fits = {stage: fit_line([one for one in ran if one.stage == stage]) for stage in STAGES}
    if fits["recurrent"].n < LEAST_TICKS:
        what = f"{fits['recurrent'].n} recurrent ticks are too few to tell what a row and a key cost"
        if len(ran) < len(lines):
            what += f"; the record explains {len(ran)} of {len(lines)} ticks"
        raise UserError(what, where=str(folder), remedy=f"serve more requests: {LEAST_TICKS} at least")
    core, outer = about.get("core_page_bytes", 1), about.get("outer_page_bytes", 0)
    clock = Clock(
        folder.name or "trace", about["n_loops"], fits["recurrent"].line, fits["prelude"].line, fits["coda"].line,
        fits["prefill"].line, core_page_bytes=core, outer_page_bytes=outer,
        kv_bytes=about["core_pages"] * core + about["outer_pages"] * outer,
        about={"trace": str(folder), **{key: about.get(key) for key in ("model", "device", "dtype")}},
    )  # fmt: skip
    return Fitted(
        clock, fits, len(lines), len(ran), sum(one.duration for one in ran),
        sum(clock.seconds(one.stage, one.work, one.context) for one in ran),
    )  # fmt: skip


def fit_line(ticks: Sequence[Ran]) -> LineFit:
    """δ, γ and α ≥ 0 with the least sum of squared residuals over ticks of one stage."""
    if len(ticks) > LEAST_TICKS:
        ticks = ticks[1:]
    y = np.array([one.duration for one in ticks])
    if not len(y):
        return LineFit(Line(), 0, 0.0, 0.0, None)
    names = ["per_row", "per_context"] if len(y) >= LEAST_TICKS else []
    x = np.array([[1.0, one.work, one.context] for one in ticks])[:, : 1 + len(names)]
    x = x / (scale := x.max(0))
    while names and np.linalg.matrix_rank(x, tol=1e-6 * len(y) ** 0.5) < x.shape[1]:
        x, scale = x[:, :-1], scale[:-1]
        names.pop()
    solution = nonnegative(x, y) / scale
    residual = y - (x * scale) @ solution
    spread = float(((y - y.mean()) ** 2).sum())
    left = tuple(name for name in ("per_row", "per_context") if name not in names)
    return LineFit(
        Line(*(float(one) for one in solution)), len(y), float(np.sqrt((residual**2).mean())),
        float(np.median(np.abs(residual) / np.maximum(y, 1e-12))),
        1 - float((residual**2).sum()) / spread if spread else None, left,
    )  # fmt: skip


def nonnegative(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin ‖x b − y‖ over b ≥ 0, exactly: the best of the ordinary solutions on all sets of columns.

    Args:
        x: `[n, k]` with k small (2^k solutions); y: `[n]`.

    Returns:
        float64 `[k]`.
    """
    k = x.shape[1]
    best, least = np.zeros(k), float((y**2).sum())
    for size in range(1, k + 1):
        for chosen in map(list, combinations(range(k), size)):
            b = np.linalg.lstsq(x[:, chosen], y, rcond=None)[0]
            loss = float(((x[:, chosen] @ b - y) ** 2).sum())
            if (b >= 0).all() and loss < least:
                best, least = np.zeros(k), loss
                best[chosen] = b
    return best
