"""A clock for stages: t = δ + γ·rows + α·context, and what a machine and a model cost in it.

The recurrent step is the roofline of arXiv 2608.09444: δ reloads the weights whatever the batch, γ multiplies for a
row, α streams one key and value (over all layers of the stage). Prelude, coda and prefill have lines of their own.
No tensor, no array: a clock is a handful of numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from depthprobe.errors import UserError
from depthprobe.runtime.jobs import Stage

CLOCK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one tick: `fixed` + `per_row` · rows + `per_context` · context; none is negative.

    Rows are tokens; in a prefill core passes, a token through the core once. Context is the number of keys that the
    rows read, their own included, each counted once whatever the layers; in a prefill for each pass.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    per_context: float = 0.0

    def __call__(self, rows: float, context: float = 0.0) -> float:
        return self.fixed + self.per_row * rows + self.per_context * context

    def saturation(self, length: float) -> float:
        """B*(L) = δ/(γ + αL): rows of L keys each that cost as much as the fixed part (2608.09444, appendix A)."""
        slope = self.per_row + self.per_context * length
        return self.fixed / slope if slope else math.inf

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.per_row * factor, self.per_context * factor)

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.per_row + other.per_row, self.per_context + other.per_context)


@dataclass(frozen=True, slots=True)
class Clock:
    """What the stages of one model cost on one machine.

    Fields:
        n_loops: U.
        recurrent, prelude, coda, prefill: seconds of their ticks. The coda includes norm, head and sampling.
        host: seconds in which the host prepares a tick. They pass on the device as idle, unless the tick was planned
            while the one before it ran.
        f0: FLOPs outside the core for each FLOP of one core application (F0/F_r); None where it is not known.
        core_page_bytes, outer_page_bytes: of one token at one loop over the core layers, and over the others
            (0: there are none).
        kv_bytes: what the machine has for pages.
        least_coda: rows for which the coda waits in refill; 0: as the engine does.
        least_depth: no row leaves before it.
        about: where the numbers come from.

    Raises:
        UserError: a number that is negative or not finite.
    """

    name: str
    n_loops: int
    recurrent: Line
    prelude: Line = Line()
    coda: Line = Line()
    prefill: Line = Line()
    host: float = 0.0
    f0: float | None = None
    core_page_bytes: int = 1
    outer_page_bytes: int = 0
    kv_bytes: int = 1 << 30
    least_coda: int = 0
    least_depth: int = 1
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {"host": self.host, "f0": self.f0 or 0.0}
        for stage in ("recurrent", "prelude", "coda", "prefill"):
            line = getattr(self, stage)
            numbers |= {f"{stage}.{one.name}": getattr(line, one.name) for one in fields(line)}
        for name, value in numbers.items():
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise UserError(f"{name} is {value!r}, not a number of 0 or more", where=f"clock {self.name}")
        for name, least in (
            ("n_loops", 1), ("core_page_bytes", 1), ("outer_page_bytes", 0), ("kv_bytes", 1), ("least_coda", 0),
            ("least_depth", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UserError(f"{name} is {value!r}, not a whole number from {least}", where=f"clock {self.name}")

    def seconds(self, stage: Stage, rows: float, context: float = 0.0) -> float:
        """Seconds of one tick."""
        return getattr(self, stage)(rows, context)

    def pages(self, per_token: float, kv_bytes: int | None = None) -> tuple[int, int]:
        """Core and outer pages within the bytes, in the proportion that `per_token` core pages a token ask for."""
        budget = self.kv_bytes if kv_bytes is None else kv_bytes
        outer = 0
        if self.outer_page_bytes:
            outer = int(budget / (per_token * self.core_page_bytes + self.outer_page_bytes))
        return (budget - outer * self.outer_page_bytes) // self.core_page_bytes, outer


def save_clock(clock: Clock, file: Path) -> None:
    """Write a clock as JSON, to be edited or given to `load_clock`."""
    from depthprobe.files import atomic_write

    text = json.dumps({"clock_version": CLOCK_VERSION, **asdict(clock)}, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write(file, (text + "\n").encode())


def load_clock(file: Path) -> Clock:
    """Read what `save_clock` wrote.

    Raises:
        UserError: not there, not a clock, or a field that is unknown or missing.
    """
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"the clock cannot be read: {why}", where=str(file)) from None
    if not isinstance(said, dict) or said.pop("clock_version", None) != CLOCK_VERSION:
        raise UserError(f"this is no clock of version {CLOCK_VERSION}", where=str(file),
                        remedy="make one with `depthprobe simulate fit`")  # fmt: skip
    try:
        lines = {name: Line(**said.pop(name)) for name in ("recurrent", "prelude", "coda", "prefill") if name in said}
        return Clock(**lines, **said)
    except TypeError as error:
        raise UserError(f"the clock has a field too many or too few: {error}", where=str(file)) from None
