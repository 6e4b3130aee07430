"""One depth for each item from a curve over depth, and how it changes with hops.

    rows = centres(knockout.filter(role == "changed_fact"), "harm", least=0.1)    # item, …, hops, centre
    slope_of(rows, "centre")                                                       # as a row of `slopes`
    means_by_hops(rows, "centre")                                                  # mean and interval at each k

The centre of a curve is its mean depth, each depth weighted by the curve there: where a cut or a skipped layer does
its harm. Unlike the depth of the largest value it does not jump when two depths are alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from depthprobe.analysis.bootstrap import mean_interval
from depthprobe.analysis.grid import with_clusters
from depthprobe.analysis.slopes import paired_slope

__all__ = ["centres", "means_by_hops", "slope_of"]

_KEYS = ["item", "story", "cluster", "task", "hops"]


def centres(rows: pl.DataFrame, weight: str, *, least: float = 0.0) -> pl.DataFrame:
    """The mean depth of each item's curve.

    Args:
        rows: one for each item and depth, with the item's keys, `depth` and the weight.
        weight: a column; what is negative or missing counts as nothing.
        least: an item whose weights add up to no more than this has no centre: it would be one of noise.

    Returns:
        One row for each item: its keys and `centre` (Float64, in steps of the depth axis; null: none).
    """
    size = pl.col(weight).cast(pl.Float64).fill_nan(None).fill_null(0.0).clip(lower_bound=0.0)
    sums = rows.group_by(_KEYS, maintain_order=True).agg(whole=size.sum(), moment=(size * pl.col("depth")).sum())
    told = pl.col("whole") > least
    centre = pl.when(told).then(pl.col("moment") / pl.col("whole"))
    return sums.select(*_KEYS, centre=centre).sort("story", "hops", "item")


def slope_of(rows: pl.DataFrame, quantity: str, *, seed: int = 0, resamples: int = 2000) -> dict[str, Any]:
    """The change of a quantity per hop in one task, paired by story.

    Args:
        rows: one task's items (item, story, cluster, hops and the quantity, null where an item has none).

    Returns:
        slope, low, high, n_clusters, n_stories, n_items and reason, as a row of the table `slopes` has them.
    """
    return paired_slope(with_clusters(rows).filter(pl.col(quantity).is_not_null()), quantity, seed, resamples)


def means_by_hops(rows: pl.DataFrame, quantity: str, *, seed: int = 0, resamples: int = 2000) -> list[dict[str, Any]]:
    """The mean of a quantity of one task's items at each hop count, over the items that have it.

    Returns:
        hops, mean, low, high (95 %, over clusters; None where it cannot be told), n (items that have it), n_items.
    """
    found: list[dict[str, Any]] = []
    parts = with_clusters(rows).sort("hops", "item").partition_by("hops", as_dict=True, maintain_order=True)
    for (hops,), part in parts.items():
        had = part.filter(pl.col(quantity).is_not_null())
        row: dict[str, Any] = {"hops": hops, "n": had.height, "n_items": part.height}
        row |= {"mean": None, "low": None, "high": None}
        if had.height:
            values = had[quantity].to_numpy().astype(np.float64)
            bounds = mean_interval(values, had["cell"].to_numpy(), resamples=resamples, seed=seed)
            told = zip(("mean", "low", "high"), map(float, bounds), strict=True)
            row |= {name: None if np.isnan(value) else value for name, value in told}
        found.append(row)
    return found
