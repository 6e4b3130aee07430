"""What leaving early costs: Q-exit over a sweep of q, beside fixed depths and a mixture of the same mean.

All exits here are *selected* by the gate at the position that predicts the answer and *read* from the lens at
the end of that loop; nothing is skipped, no depth is executed less. With a coda the loop's own readout is not
what a model that really left there would say.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import by_cluster, mean_interval, proportion, ratio_draws, within
from depthprobe.analysis.grid import DepthGrid, with_clusters
from depthprobe.analysis.settling import q_exit

__all__ = ["SWEEP", "exits_by_hops_table", "exits_table", "fixed_exits_table", "mixture"]

#: Thresholds of the sweep; the model's own q is added.
SWEEP = tuple(round(0.05 * step, 2) for step in range(1, 20)) + (0.98, 0.99)


def mixture(mean_exit: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Accuracy of leaving at random after one of the two loops next to a mean depth, keeping that mean.

    Args:
        mean_exit: […, Q] in 1 … R.
        fixed: […, R] accuracy after each loop.

    Returns:
        […, Q].
    """
    below = np.clip(np.floor(mean_exit).astype(np.int64), 1, fixed.shape[-1])
    above = np.minimum(below + 1, fixed.shape[-1])
    share = mean_exit - below
    at_below = np.take_along_axis(fixed, below - 1, axis=-1)
    at_above = np.take_along_axis(fixed, above - 1, axis=-1)
    return (1 - share) * at_below + share * at_above


def exits_table(
    grids: dict[str, DepthGrid], *, exit_q: float | None = None, seed: int = 0, resamples: int = 2000
) -> pl.DataFrame:
    """The `exits` table: one row per task and q, all hops together; empty for a model without loops or gate.

    `gain` is the accuracy of Q-exit minus that of the mixture of the same mean depth; its interval resamples
    clusters and recomputes mean, mixture and accuracy in each draw.
    """
    parts = [tables.empty("exits")]
    for task, grid in grids.items():
        cdf = grid.gate_cdf
        if cdf is None:
            continue
        qs: list[float] = sorted({*SWEEP} if exit_q is None else {*SWEEP, float(exit_q)})
        exits = np.stack([q_exit(cdf, q) for q in qs], axis=1)  # [I, Q]
        right = grid.columns["candidate_correct"][:, grid.loop_ends]  # [I, R]
        taken = np.take_along_axis(right, exits - 1, axis=1)  # [I, Q]
        share, low, high = proportion(taken, grid.clusters)
        fixed, mean_exit = right.mean(axis=0), exits.mean(axis=0)
        mixed = mixture(mean_exit, fixed)
        gain_low, gain_high = _gain(taken, exits, right, grid.clusters, seed, resamples)
        table = pl.DataFrame(
            {
                "q": qs,
                "mean_exit": mean_exit,
                "accuracy": share,
                "low": low,
                "high": high,
                "mixture_accuracy": mixed,
                "gain": share - mixed,
                "gain_low": gain_low,
                "gain_high": gain_high,
            }
        ).with_columns(pl.all().fill_nan(None), task=pl.lit(task))
        parts.append(tables.conform("exits", table))
    return pl.concat(parts)


def _gain(
    taken: np.ndarray, exits: np.ndarray, right: np.ndarray, clusters: np.ndarray, seed: int, resamples: int
) -> tuple[np.ndarray, np.ndarray]:
    n_q, n_r = exits.shape[1], right.shape[1]
    stacked = np.concatenate([taken, exits, right, np.ones((len(right), 1))], axis=1)
    totals = ratio_draws(by_cluster(stacked, clusters), resamples=resamples, seed=seed)
    means = totals[:, :-1] / totals[:, -1:]
    accuracy, mean_exit, fixed = np.split(means, [n_q, 2 * n_q], axis=1)
    assert fixed.shape[1] == n_r
    return within(accuracy - mixture(np.clip(mean_exit, 1.0, n_r), fixed), int(clusters.max()) + 1)


def fixed_exits_table(grids: dict[str, DepthGrid]) -> pl.DataFrame:
    """The `fixed_exits` table: accuracy if every item left after the same loop; empty without loops."""
    parts = [tables.empty("fixed_exits")]
    for task, grid in grids.items():
        if len(grid.loop_ends) == 0:
            continue
        share, low, high = proportion(grid.columns["candidate_correct"][:, grid.loop_ends], grid.clusters)
        table = pl.DataFrame(
            {"loop": np.arange(1, len(share) + 1), "accuracy": share, "low": low, "high": high}
        ).with_columns(pl.col("low", "high").fill_nan(None), task=pl.lit(task))
        parts.append(tables.conform("fixed_exits", table))
    return pl.concat(parts)


def exits_by_hops_table(settling: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `exits_by_hops` table: mean Q-exit at the model's own q, in loops; empty without a gate."""
    rows = []
    gated = settling.filter(pl.col("gate_exit").is_not_null())
    if gated.height:
        gated = pl.concat([with_clusters(own) for own in gated.partition_by("task")])
    for (task, hops), cell in sorted(gated.group_by("task", "hops"), key=lambda pair: pair[0]):
        cell = cell.sort("story", "item")
        values = mean_interval(
            cell["gate_exit"].to_numpy(), cell["cell"].to_numpy(), resamples=resamples, seed=seed
        )
        mean, low, high = (None if np.isnan(value) else float(value) for value in values)
        row = {"task": task, "hops": hops, "mean_exit": mean, "low": low, "high": high}
        rows.append(
            row | {"expected_depth": float(cell["expected_depth"].cast(pl.Float64).to_numpy().mean())}
        )
    return tables.conform("exits_by_hops", rows)
