"""At which depth an item's answer settles.

*Settling depth*: the earliest depth from which top-1 stays equal to that of the last depth. *Correct depth*
and *plausible depth* likewise: the earliest depth from which the best candidate stays the answer, or stays a
plausible answer. *Earliest-equal depth* is another thing: the first depth whose top-1 is the final one, even
if it leaves again.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.grid import DepthGrid

__all__ = ["expected_loops", "first_true", "q_exit", "settling_table", "stays_true"]


def stays_true(flags: np.ndarray) -> np.ndarray:
    """Position from which a row stays true to its end: [I, D] bool → [I] int64, D where it never does."""
    return flags.shape[1] - np.logical_and.accumulate(flags[:, ::-1], axis=1).sum(axis=1)


def first_true(flags: np.ndarray) -> np.ndarray:
    """Position of the first true flag: [I, D] bool → [I] int64, D where there is none."""
    return flags.shape[1] - np.logical_or.accumulate(flags, axis=1).sum(axis=1)


def q_exit(cdf: np.ndarray, q: float) -> np.ndarray:
    """First loop whose CDF reaches q (2510.25741): cdf [I, R] float32, last column 1 → [I] int64, 1 … R."""
    return (cdf >= np.float32(q)).argmax(axis=1) + 1


def expected_loops(cdf: np.ndarray) -> np.ndarray:
    """Mean of the stopping distribution: cdf [I, R], last column 1 → [I] float64 in 1 … R.

    Σ d·p_d = Σ_d P(not left before d) = R − Σ_{d<R} CDF_d.
    """
    return cdf.shape[1] - cdf[:, :-1].astype(np.float64).sum(axis=1)


def settling_table(grids: dict[str, DepthGrid], *, exit_q: float | None = None) -> pl.DataFrame:
    """One row per item: the `settling` table.

    `*_depth` are indices on the model's axis. `*_loop` ask the same of the loop ends alone, in loops 1 … R;
    they are null for a model without loops, and where a coda changes the answer after the last loop (no loop
    end settles then).

    Args:
        grids: `DepthGrid.by_task` of a lens table.
        exit_q: threshold of the gate's Q-exit; `gate_exit` is null without one.
    """
    return pl.concat([_of_task(grid, exit_q) for grid in grids.values()])


def _of_task(grid: DepthGrid, exit_q: float | None) -> pl.DataFrame:
    depth = grid.axis["depth"].to_numpy()
    ends = grid.loop_ends
    loop = np.arange(1, len(ends) + 1)
    equal = grid.columns["equals_final"]
    correct = grid.columns["candidate_correct"]
    plausible = grid.columns["candidate_plausible"]
    found: dict[str, pl.Series] = {}
    for name, position, flags in (
        ("settling", stays_true, equal),
        ("correct", stays_true, correct),
        ("plausible", stays_true, plausible),
        ("earliest_equal", first_true, equal),
    ):
        found[f"{name}_depth"] = _labels(position(flags), depth)
        found[f"{name}_loop"] = _labels(position(flags[:, ends]), loop)
    nothing = pl.repeat(None, grid.items.height, dtype=pl.Int32, eager=True)
    cdf = grid.gate_cdf
    found["final_correct"] = pl.Series(correct[:, -1])
    found["gate_exit"] = nothing if cdf is None or exit_q is None else pl.Series(q_exit(cdf, exit_q))
    found["expected_depth"] = nothing if cdf is None else pl.Series(expected_loops(cdf))
    return tables.conform("settling", grid.items.with_columns(**found))


def _labels(position: np.ndarray, names: np.ndarray) -> pl.Series:
    """Position on the axis → its name there, null past the end: [I] int64, [D] int → [I] Int32."""
    padded = np.append(names, 0).astype(np.int32)
    return pl.DataFrame({"name": padded[position], "found": position < len(names)}).select(
        pl.when("found").then("name")
    )["name"]
