"""How a depth changes with the number of hops, paired by story.

A ladder asks one story at every k, so length and content are held equal: the slope is fitted within each
story (least squares on k) and averaged over stories, each counting once; the interval draws whole clusters of
stories. Stories with fewer than two hop counts say nothing about a slope and drop out. A slope from fewer than
`MIN_CLUSTERS` clusters is refused: such a sample is too small for a claim about depth, whatever its interval.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import by_cluster, mean_interval
from depthprobe.analysis.grid import DepthGrid, with_clusters
from depthprobe.analysis.settling import GROUPS, SETTLING, in_group, q_exit

__all__ = ["MIN_CLUSTERS", "QUANTITIES", "differences_table", "paired_slope", "slopes_table", "story_slopes"]

#: Columns of `settling` whose slope is reported.
QUANTITIES = (*SETTLING, "gate_exit", "expected_depth")

#: A slope needs so many clusters of stories.
MIN_CLUSTERS = 50

#: From this many hops on one loop is expected to fall short.
DIFFERENCE_FROM_HOPS = 3


def story_slopes(values: np.ndarray, hops: np.ndarray, stories: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least-squares slope on hops within each story.

    Args:
        values: [I] float, no NaN.
        hops: [I] int.
        stories: [I], anything that sorts.

    Returns:
        slopes [S] float64 of the stories with at least two hop counts, and which items belong to those, [I]
        bool.
    """
    codes = np.unique(stories, return_inverse=True)[1]
    if len(codes) == 0:
        return np.empty(0), np.empty(0, dtype=bool)
    size = np.bincount(codes).astype(np.float64)
    k = hops - (by_cluster(hops, codes) / size)[codes]
    y = values - (by_cluster(values, codes) / size)[codes]
    spread = by_cluster(k * k, codes)
    kept = np.bincount(codes, weights=hops != hops[np.unique(codes, return_index=True)[1]][codes]) > 0
    return (by_cluster(k * y, codes)[kept] / spread[kept]), kept[codes]


def slopes_table(settling: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `slopes` table: one row per task, quantity and group, for the quantities that the model has.

    `slope` is in axis steps per hop for `*_depth`, in loops per hop for `*_loop`, `gate_exit` and
    `expected_depth`, and in shares of the model's depth per hop for `*_relative`. It and its bounds are null, and
    `reason` says why, where fewer than `MIN_CLUSTERS` clusters have a story with the quantity at two hop counts.
    """
    rows = []
    for task in sorted(settling["task"].unique().to_list()):
        # before any row is left out, so that a story stays in one cluster whatever is asked of it
        of_task = with_clusters(settling.filter(pl.col("task") == task))
        for quantity in QUANTITIES:
            if of_task[quantity].null_count() == of_task.height:
                continue
            for group in GROUPS:
                kept = in_group(of_task, group).filter(pl.col(quantity).is_not_null())
                keys = {"task": task, "quantity": quantity, "group": group}
                rows.append(keys | paired_slope(kept, quantity, seed, resamples))
    return tables.conform("slopes", rows)


def paired_slope(
    rows: pl.DataFrame, quantity: str, seed: int, resamples: int
) -> dict[str, float | int | str | None]:
    """Columns slope, low, high, n_items, n_stories, n_clusters and reason of one quantity.

    Args:
        rows: items of one task that have the quantity: story, hops, `whole` (`grid.with_clusters`) and the quantity.
    """
    slopes, used = story_slopes(
        rows[quantity].to_numpy().astype(np.float64),
        rows["hops"].to_numpy().astype(np.int64),
        rows["story"].to_numpy(),
    )
    kept = rows.filter(pl.Series(used)).unique("story").sort("story")
    clusters = kept["whole"].to_numpy()
    n = len(np.unique(clusters))
    found: dict[str, float | int | str | None] = {"n_items": int(used.sum()), "reason": None}
    if n >= MIN_CLUSTERS:
        return found | _interval("slope", slopes, clusters, seed, resamples)
    nothing = {"slope": None, "low": None, "high": None, "n_clusters": n, "n_stories": len(slopes)}
    why = f"too few clusters ({n} of {MIN_CLUSTERS})" if n else "no story has it at two hop counts"
    return found | nothing | {"reason": why}


def differences_table(
    grids: dict[str, DepthGrid], *, exit_q: float | None = None, seed: int = 0, resamples: int = 2000
) -> pl.DataFrame:
    """The `differences` table: accuracy after one loop, and at the gate's exit, minus that at full depth.

    Both sides are read from the same items, averaged within each story and then over stories. The first is
    taken over items of at least three hops, the second over all. No rows for a model without loops.
    """
    rows = []
    for task, grid in grids.items():
        ends, cdf = grid.loop_ends, grid.gate_cdf
        if len(ends) == 0:
            continue
        right = grid.columns["candidate_correct"].astype(np.float64)
        change = right[:, ends[0]] - right[:, -1]
        asked = [("accuracy: loop 1 - full depth", change, DIFFERENCE_FROM_HOPS)]
        if cdf is not None and exit_q is not None:
            at = ends[q_exit(cdf, exit_q) - 1]
            change = right[np.arange(len(right)), at] - right[:, -1]
            asked.append(("accuracy: gate exit - full depth", change, 1))
        rows += [_difference(grid, task, *what, seed, resamples) for what in asked]
    return tables.conform("differences", [row for row in rows if row["n_items"]])


def _difference(
    grid: DepthGrid, task: str, quantity: str, change: np.ndarray, min_hops: int, seed: int, resamples: int
) -> dict[str, object]:
    rows = grid.hops >= min_hops
    _, firsts, codes = np.unique(grid.stories[rows], return_index=True, return_inverse=True)
    per_story = by_cluster(change[rows], codes) / np.bincount(codes) if len(codes) else np.empty(0)
    found: dict[str, object] = {
        "task": task,
        "quantity": quantity,
        "min_hops": int(grid.hops[rows].min()) if rows.any() else min_hops,
        "max_hops": int(grid.hops.max()),
        "n_items": int(rows.sum()),
    }
    return {**found, **_interval("difference", per_story, grid.clusters[rows][firsts], seed, resamples)}


def _interval(
    name: str, per_story: np.ndarray, clusters: np.ndarray, seed: int, resamples: int
) -> dict[str, float | int | None]:
    """Mean over stories, interval over their clusters: per_story, clusters [S]."""
    sizes: dict[str, float | int | None] = {
        "n_clusters": len(np.unique(clusters)),
        "n_stories": len(per_story),
    }
    if len(per_story) == 0:
        return sizes | {name: None, "low": None, "high": None}
    bounds = mean_interval(per_story, clusters, resamples=resamples, seed=seed)
    named = zip((name, "low", "high"), bounds, strict=True)
    return sizes | {key: None if np.isnan(value) else float(value) for key, value in named}
