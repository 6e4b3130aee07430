"""Accuracy and probabilities by hops and depth."""

from __future__ import annotations

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import mean_interval, proportion
from depthprobe.analysis.grid import DepthGrid

__all__ = ["accuracy_table"]


def accuracy_table(grids: dict[str, DepthGrid], *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `accuracy` table: one row per task, hops and depth.

    `accuracy` is the share of items whose best candidate is the answer (Wilson interval over clusters),
    `p_correct` the mean probability of the answer and `p_plausible` that of the plausible set, both over the
    whole vocabulary (bootstrap over clusters). Intervals are null where fewer than two clusters have such a
    question.
    """
    parts = [
        _cell(grid, task, int(hops), seed, resamples)
        for task, grid in grids.items()
        for hops in np.unique(grid.hops)
    ]
    return pl.concat(parts)


def _cell(grid: DepthGrid, task: str, hops: int, seed: int, resamples: int) -> pl.DataFrame:
    rows = grid.hops == hops
    clusters = grid.cell_clusters[rows]
    share, low, high = proportion(grid.columns["candidate_correct"][rows], clusters)
    columns: dict[str, object] = {"relative_depth": grid.relative_depth, "accuracy": share, "low": low, "high": high}
    for name in ("p_correct", "p_plausible"):
        values = mean_interval(grid.columns[name][rows], clusters, resamples=resamples, seed=seed)
        columns |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
    table = pl.DataFrame(columns).with_columns(
        pl.all().fill_nan(None),
        task=pl.lit(task),
        hops=pl.lit(hops),
        n=pl.lit(int(rows.sum())),
        **{name: grid.axis[name] for name in ("depth", "loop", "layer")},
    )
    return tables.conform("accuracy", table)
