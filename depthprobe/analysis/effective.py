"""Effective depth by hops: the table `effective` → profiles, one number an item, its slope, a sentence.

One number an item says how much of the depth counts, and two say where it lies; all are shares of the layers that run
(those of every loop, prelude and coda included), 0 … 1:

    used_share   the share of layers whose skip moves the output by a KL of more than `USED` nats
    half_depth   the depth before which half of the skip effect lies: the KL of the output when one layer is skipped,
                 added up over layers from the first on, reaches half of its total (linearly within a layer)
    half_later   the same of `later_others`: half of what later layers at the answer token owe to a layer at the tokens
                 before it. The last layer has none

A model uses more depth on harder items if `used_share` rises with hops. Where the effect lies is another matter: loops
repair what an earlier one left out, until an item needs them all, so a point that moves *up* can mean more depth used.
The first two are null for a model of which every layer's skip does the same, as when loops of one layer share
it: leaving any of them out is to run one less, and where that one is placed says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import mean_interval, proportion
from depthprobe.analysis.grid import with_clusters
from depthprobe.analysis.slopes import MIN_CLUSTERS, story_slopes
from depthprobe.errors import UserError

__all__ = [
    "EFFECTIVE_DEPTHS", "EFFECTIVE_MEASURES", "USED", "analyse_effective", "effective_by_hops", "effective_depths",
    "effective_sentence", "effective_slopes", "item_depths",
]  # fmt: skip

#: Columns of `effective` whose means are reported.
EFFECTIVE_MEASURES = (
    "contribution", "cosine", "contribution_all", "cosine_all", "skip_kl", "skip_top5", "skip_logprob", "skip_correct",
    "later_same", "later_others", "lens_kl", "lens_top5",
)  # fmt: skip

#: One number an item about its whole depth.
EFFECTIVE_DEPTHS = ("used_share", "half_depth", "half_later")

#: A layer counts as used if its skip moves the output by more than this KL, in nats.
USED = 0.1

#: Skips that differ by less than this share are the same; sums below `_NOISE` (nats) are rounding, and have no half.
_SAME, _NOISE = 1e-3, 1e-5
_KEYS = ("item", "story", "cluster", "task", "hops")
_AXIS = ("depth", "loop", "layer", "site")
_NO_PLACE = "skipping any of its layers does the same"


def analyse_effective(effective: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> dict[str, pl.DataFrame]:
    """The tables `effective_by_hops`, `effective_depths` and `effective_slopes` of one model."""
    boot = {"seed": seed, "resamples": resamples}
    return {
        "effective_by_hops": effective_by_hops(effective, **boot),
        "effective_depths": effective_depths(effective, **boot),
        "effective_slopes": effective_slopes(effective, **boot),
    }


@dataclass(frozen=True)
class _Grid:
    """One task: I items (with `whole` and `cell`, what intervals are taken over), P parts, name → [I, P] with NaN."""

    items: pl.DataFrame
    parts: pl.DataFrame
    columns: dict[str, np.ndarray]

    @classmethod
    def by_task(cls, effective: pl.DataFrame) -> dict[str, _Grid]:
        if effective.is_empty():
            raise UserError("the table has no rows", where="table effective", remedy="run `depthprobe analyze` again")
        tasks = sorted(effective["task"].unique().to_list())
        return {task: cls._of(effective.filter(pl.col("task") == task)) for task in tasks}

    @classmethod
    def _of(cls, rows: pl.DataFrame) -> _Grid:
        loop = pl.col("site") == "loop"
        rows = rows.sort("story", "hops", "item", "depth", loop)
        parts = rows.select(_AXIS).unique().sort("depth", loop)
        items = rows.select(_KEYS).unique().sort("story", "hops", "item")
        shape = items.height, parts.height
        expected = pl.concat([parts] * items.height) if rows.height == items.height * parts.height else None
        if expected is None or not rows.select(_AXIS).equals(expected):
            raise UserError(
                f"the table holds {rows.height} rows for {shape[0]} items of {shape[1]} layers and loops",
                where=f"table effective, task {items['task'][0]}",
                remedy="every item has each of them once: run `depthprobe analyze` again",
            )
        columns = {
            name: rows[name].cast(pl.Float64).fill_null(float("nan")).to_numpy().reshape(shape)
            for name in EFFECTIVE_MEASURES
        }
        return cls(with_clusters(items), parts, columns)

    def of_layers(self, name: str) -> np.ndarray:
        """[I, L] of a measure, without the rows of whole loops."""
        return self.columns[name][:, self.parts["site"].to_numpy() != "loop"]

    @property
    def placeless(self) -> bool:
        """Whether every layer's skip does the same, and something."""
        kl = self.of_layers("skip_kl")
        spread = np.ptp(kl, axis=1)
        return kl.shape[1] > 1 and bool(kl.max() > _NOISE and (spread <= _SAME * kl.max(axis=1) + _NOISE).all())

    def depths(self, used: float) -> dict[str, np.ndarray]:
        """`EFFECTIVE_DEPTHS` → [I] float64, NaN where an item does not have it."""
        kl, later = self.of_layers("skip_kl"), self.of_layers("later_others")
        half, share = _half(kl), (kl > used).mean(axis=1)
        if self.placeless:
            half, share = np.full_like(half, np.nan), np.full_like(share, np.nan)
        return {"used_share": share, "half_depth": half, "half_later": _half(np.nan_to_num(later))}


def _half(effects: np.ndarray) -> np.ndarray:
    """Share of the layers before which half of a total lies: [I, L] ≥ 0 → [I], NaN where the total is nothing."""
    total = effects.sum(axis=1)
    found = np.full(len(effects), np.nan)
    for row in np.flatnonzero(total > _NOISE):
        reached = np.concatenate([[0.0], np.cumsum(effects[row])])
        layer = int(np.searchsorted(reached, total[row] / 2))  # the first layer behind which half is reached
        within = (total[row] / 2 - reached[layer - 1]) / effects[row, layer - 1]
        found[row] = (layer - 1 + within) / effects.shape[1]
    return found


def item_depths(effective: pl.DataFrame, *, used: float = USED) -> pl.DataFrame:
    """One row an item: item, story, cluster, task, hops and `EFFECTIVE_DEPTHS` (null where an item has none)."""
    parts = [
        grid.items.select(_KEYS).with_columns(
            pl.Series(name, values).fill_nan(None) for name, values in grid.depths(used).items()
        )
        for grid in _Grid.by_task(effective).values()
    ]
    return pl.concat(parts)


def effective_by_hops(effective: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `effective_by_hops` table: means of `EFFECTIVE_MEASURES`, one row per task, hops, part and measure.

    Intervals are taken over clusters of stories (a bootstrap; Wilson's for `skip_correct`), and null where there are
    too few. A measure that no item has there has no row.
    """
    rows: list[dict[str, object]] = []
    for task, grid in _Grid.by_task(effective).items():
        hops = grid.items["hops"].to_numpy()
        axis = grid.parts.to_dicts()
        for k in np.unique(hops):
            mine = hops == k
            cell = grid.items["cell"].to_numpy()[mine]
            for name in EFFECTIVE_MEASURES:
                values = grid.columns[name][mine]
                for part, bounds in zip(axis, _means(name, values, cell, resamples, seed), strict=True):
                    if bounds["n"]:
                        rows.append({"task": task, "hops": int(k), **part, "quantity": name, **bounds})
    return tables.conform("effective_by_hops", rows)


def _means(
    name: str, values: np.ndarray, clusters: np.ndarray, resamples: int, seed: int
) -> list[dict[str, float | int | None]]:
    """Mean, low, high and n of each column of [I, P] over the items that have it."""
    found: list[dict[str, float | int | None]] = [{"n": 0}] * values.shape[1]
    has = ~np.isnan(values)
    patterns, which = np.unique(has, axis=1, return_inverse=True)
    for number, kept in enumerate(patterns.T):
        if not kept.any():
            continue
        columns = np.flatnonzero(which.reshape(-1) == number)
        some, of = values[np.ix_(kept, columns)], clusters[kept]
        if name == "skip_correct":
            bounds = proportion(some > 0.5, of)
        else:
            bounds = mean_interval(some, of, resamples=resamples, seed=seed)
        for column, mean, low, high in zip(columns, *bounds, strict=True):
            found[column] = {"mean": mean, "low": _known(low), "high": _known(high), "n": int(kept.sum())}
    return found


def effective_depths(
    effective: pl.DataFrame, *, used: float = USED, seed: int = 0, resamples: int = 2000
) -> pl.DataFrame:
    """The `effective_depths` table: mean of each of `EFFECTIVE_DEPTHS` per task and hops, intervals over clusters."""
    rows: list[dict[str, object]] = []
    for task, grid in _Grid.by_task(effective).items():
        hops = grid.items["hops"].to_numpy()
        for quantity, values in grid.depths(used).items():
            for k in np.unique(hops):
                kept = (hops == k) & ~np.isnan(values)
                if not kept.any():
                    continue
                clusters = grid.items["cell"].to_numpy()[kept]
                mean, low, high = mean_interval(values[kept], clusters, resamples=resamples, seed=seed)
                bounds = {"mean": float(mean), "low": _known(float(low)), "high": _known(float(high))}
                sizes = {"n_items": int(kept.sum()), "n_clusters": len(np.unique(clusters))}
                rows.append({"task": task, "hops": int(k), "quantity": quantity, **bounds, **sizes})
    return tables.conform("effective_depths", rows)


def effective_slopes(
    effective: pl.DataFrame, *, used: float = USED, seed: int = 0, resamples: int = 2000
) -> pl.DataFrame:
    """The `effective_slopes` table: change of each of `EFFECTIVE_DEPTHS` per hop, paired by story.

    Intervals are taken over clusters. Slope and bounds are null, and `reason` says why, where fewer than
    `MIN_CLUSTERS` clusters have a story with the number at two hop counts, or where the model has no such number.
    """
    rows: list[dict[str, object]] = []
    for task, grid in _Grid.by_task(effective).items():
        for quantity, values in grid.depths(used).items():
            row = {"task": task, "quantity": quantity, **_slope(grid.items, values, seed, resamples)}
            if grid.placeless and np.isnan(values).all():
                row["reason"] = _NO_PLACE
            rows.append(row)
    return tables.conform("effective_slopes", rows)


def _slope(items: pl.DataFrame, values: np.ndarray, seed: int, resamples: int) -> dict[str, object]:
    has = ~np.isnan(values)
    kept = items.filter(pl.Series(has))
    slopes, belongs = story_slopes(values[has], kept["hops"].to_numpy().astype(np.int64), kept["story"].to_numpy())
    clusters = kept.filter(pl.Series(belongs, dtype=pl.Boolean)).unique("story").sort("story")["whole"].to_numpy()
    n = len(np.unique(clusters))
    found: dict[str, object] = {"n_clusters": n, "n_stories": len(slopes), "n_items": int(belongs.sum())}
    if n >= MIN_CLUSTERS:
        slope, low, high = mean_interval(slopes, clusters, resamples=resamples, seed=seed)
        return found | {
            "slope": float(slope), "low": _known(float(low)), "high": _known(float(high)), "reason": None,
        }  # fmt: skip
    why = f"too few clusters ({n} of {MIN_CLUSTERS})" if n else "no story has it at two hop counts"
    return found | {"slope": None, "low": None, "high": None, "reason": why}


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def effective_sentence(found: Mapping[str, pl.DataFrame], task: str, name: str) -> str:
    """One sentence for the summary: how many of a model's layers count, where, and whether that moves with hops.

    Args:
        found: what `analyse_effective` returned; `name`: of the model.
    """
    slopes = {row["quantity"]: row for row in found["effective_slopes"].filter(pl.col("task") == task).to_dicts()}
    if not slopes:
        raise UserError(f"there are no rows of the task '{task}'", where="table effective_slopes")
    means = found["effective_depths"].filter(pl.col("task") == task).sort("hops")
    at = {name: means.filter(pl.col("quantity") == name).to_dicts() for name in EFFECTIVE_DEPTHS}
    if slopes["used_share"]["reason"] == _NO_PLACE:
        said = f"On {task}, leaving out any one layer of {name} is the same, so skips do not say where depth is used"
        if at["half_later"]:
            where, moved = _places(at["half_later"]), _moved(slopes["half_later"], "deeper", "less deep")
            said += f"; half of what later layers at the answer owe to earlier tokens lies before {where} of its depth"
            said += moved
        return said + "."
    said = (
        f"On {task}, {_places(at['used_share'])} of {name}'s layers move its output when skipped (by a KL above "
        f"{USED} nats){_moved(slopes['used_share'], 'more of them', 'fewer of them')}"
    )
    if at["half_depth"]:
        said += f"; half of the effect of all skips lies before {_places(at['half_depth'])} of the depth"
        if slopes["half_depth"]["slope"] is not None:
            said += _moved(slopes["half_depth"], "deeper", "less deep")
    return said + "."


def _places(rows: Sequence[Mapping[str, Any]]) -> str:
    """The share at the fewest and at the most hops."""
    ends = rows if len(rows) == 1 else (rows[0], rows[-1])
    return " and ".join(f"{100 * row['mean']:.0f} % (at {_hops(row['hops'])})" for row in ends)


def _moved(slope: Mapping[str, Any], more: str, less: str) -> str:
    """What follows the places, with the mark before it."""
    value, low, high = slope["slope"], slope["low"], slope["high"]
    if value is None:
        return f"; whether that changes with hops is not told: {slope['reason']}"
    change = f"{100 * value:+.1f} points per hop"
    if low is None or high is None:
        return f", {change}, without an interval"
    change += f", 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    asked = f"{slope['n_stories']} stories in {slope['n_clusters']} clusters"
    if low > 0 or high < 0:
        return f", {more if low > 0 else less} the more hops are asked ({change}; {asked})"
    return f", with no change by hops measured ({change}, which includes 0; {asked})"


def _hops(k: int) -> str:
    return f"{k} hop" if k == 1 else f"{k} hops"
