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
from depthprobe.analysis.bootstrap import mean_interval
from depthprobe.analysis.grid import DepthGrid, with_clusters

__all__ = [
    "GROUPS",
    "expected_loops",
    "first_true",
    "in_group",
    "q_exit",
    "settling_by_hops_table",
    "settling_table",
    "stays_true",
]

#: Group → which items. "correct" keeps the questions that the model answers in the end, "all_rungs" those of
#: stories that it answers at every rung of the ladder. Both are selected by the outcome and are read beside "all",
#: never instead of it: harder k lose more of "correct"; "all_rungs" has the same stories at every k, but easy ones.
GROUPS = ("all", "correct", "all_rungs")

#: What an item settles at, in axis steps, loops and shares of the depth. `correct_*` exist only for items that end so.
SETTLING = tuple(
    f"{stem}_{unit}"
    for unit in ("depth", "loop", "relative")
    for stem in ("settling", "correct", "plausible", "earliest_equal")
)


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
    end settles then). `*_relative` are shares of the model's depth (`DepthGrid.relative_depth`), at loop ends
    and behind the last for a model with loops.

    Args:
        grids: `DepthGrid.by_task` of a lens table.
        exit_q: threshold of the gate's Q-exit; `gate_exit` is null without one.
    """
    return pl.concat([_of_task(grid, exit_q) for grid in grids.values()])


def _of_task(grid: DepthGrid, exit_q: float | None) -> pl.DataFrame:
    depth = grid.axis["depth"].to_numpy()
    ends = grid.loop_ends
    loop = np.arange(1, len(ends) + 1)
    read, relative = grid.read_depths, grid.relative_depth
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
        found[f"{name}_relative"] = _labels(position(flags[:, read]), relative[read])
    nothing = pl.repeat(None, grid.items.height, dtype=pl.Int32, eager=True)
    cdf = grid.gate_cdf
    found["final_correct"] = pl.Series(correct[:, -1])
    found["gate_exit"] = nothing if cdf is None or exit_q is None else pl.Series(q_exit(cdf, exit_q))
    found["expected_depth"] = nothing if cdf is None else pl.Series(expected_loops(cdf))
    found["all_rungs"] = _all_rungs(grid.items.with_columns(right=found["final_correct"]))
    return tables.conform("settling", grid.items.with_columns(**found))


def _all_rungs(items: pl.DataFrame) -> pl.Series:
    """[I] bool. A story that was not asked at every hop count (it grew too long, say) does not count."""
    whole = pl.col("hops").n_unique().over("story") == items["hops"].n_unique()
    return items.select(found=whole & pl.col("right").all().over("story"))["found"]


def in_group(settling: pl.DataFrame, group: str) -> pl.DataFrame:
    """The rows of a `settling` table that belong to a group of `GROUPS`."""
    if group == "all":
        return settling
    return settling.filter(pl.col("final_correct" if group == "correct" else "all_rungs"))


def settling_by_hops_table(settling: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `settling_by_hops` table: one row per task, hops, quantity and group that has items there.

    `mean` is over the items that have the quantity, in its own unit (`SETTLING`), with an interval over clusters;
    `never` is the share of the others.
    """
    rows: list[dict[str, object]] = []
    for (task,), of_task in settling.sort("task", "hops", "item").partition_by(
        "task", as_dict=True, maintain_order=True
    ).items():
        quantities = [name for name in SETTLING if of_task[name].null_count() < of_task.height]
        for group in GROUPS:
            kept = in_group(with_clusters(of_task), group)
            for (hops,), cell in kept.partition_by("hops", as_dict=True, maintain_order=True).items():
                for name in quantities:
                    keys = {"task": task, "hops": hops, "quantity": name, "group": group}
                    rows.append(keys | _mean(cell, name, seed, resamples))
    return tables.conform("settling_by_hops", rows)


def _mean(cell: pl.DataFrame, name: str, seed: int, resamples: int) -> dict[str, object]:
    have = cell.filter(pl.col(name).is_not_null())
    found: dict[str, object] = {
        "mean": None,
        "low": None,
        "high": None,
        "never": 1 - have.height / cell.height,
        "n_items": cell.height,
        "n_clusters": have["cell"].n_unique(),
    }
    if have.height:
        values = have[name].to_numpy().astype(np.float64)
        bounds = mean_interval(values, have["cell"].to_numpy(), resamples=resamples, seed=seed)
        named = zip(("mean", "low", "high"), bounds, strict=True)
        found |= {key: None if np.isnan(value) else float(value) for key, value in named}
    return found


def _labels(position: np.ndarray, names: np.ndarray) -> pl.Series:
    """Position on the axis → its name there, null past the end: [I] int64, [D] → [I]."""
    padded = np.append(names, 0)
    return pl.DataFrame({"name": padded[position], "found": position < len(names)}).select(
        pl.when("found").then("name")
    )["name"]
