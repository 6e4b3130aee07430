"""What leaving early costs and saves: accuracy beside mean depth, work, latency and memory, setting by setting.

    found = frontier_tables(answers, served)
    found["frontier"].filter(kind="rule", hops=None)     # with `gain`: over a mixture of fixed depths of the same mean

A *mixture* leaves each question at random at one of the two fixed depths next to a mean depth, and so has that mean:
what a rule gains over it, it gains by choosing where to go deep. Everything here was executed; the mixture is the mean
of two servings, item by item. All differences are paired, and their intervals draw clusters of stories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import by_cluster, proportion, ratio_draws, within
from depthprobe.analysis.grid import with_clusters
from depthprobe.analysis.slopes import MIN_CLUSTERS
from depthprobe.errors import UserError

__all__ = ["AGAINST", "frontier_tables", "interpolated"]

#: What a rule is compared with, question by question.
AGAINST = ("full", "permuted", "confidence", "settling", "earliest")

_SETTING = ("setting", "kind", "kv", "rule", "beside")
_SUMS = ("correct", "decode_rows", "tokens", "all_rows")  # columns of `_Cell.sums`, in order
_MEASURED = ("read_rows", "seconds", "tokens_per_s", "peak_kv_bytes")
_AGAIN = "run `depthprobe frontier` again"

Row = dict[str, Any]


def interpolated(x: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """Height at x of the line through points in rising order; beyond its ends that of the end.

    Args:
        x: […].
        xs, ys: […, U].
    """
    if xs.shape[-1] == 1:
        return np.broadcast_to(ys[..., 0], x.shape).copy()
    below = np.clip((xs <= x[..., None]).sum(-1) - 1, 0, xs.shape[-1] - 2)[..., None]
    left, right = (np.take_along_axis(xs, below + step, -1)[..., 0] for step in (0, 1))
    low, high = (np.take_along_axis(ys, below + step, -1)[..., 0] for step in (0, 1))
    share = np.clip((x - left) / np.where(right > left, right - left, 1.0), 0.0, 1.0)
    return (1 - share) * low + share * high


def frontier_tables(
    answers: pl.DataFrame, served: pl.DataFrame, *, seed: int = 0, resamples: int = 2000
) -> dict[str, pl.DataFrame]:
    """The tables `frontier` and `frontier_differences`, by task and layout: over all questions, and by hops.

    Args:
        answers, served: the tables `frontier_answers` and `frontier_served`. Every layout needs every fixed depth.
        seed, resamples: of the intervals (95 %), which are null, with the reason, from fewer than 50 clusters.

    Raises:
        UserError: settings that were not asked the same questions, or a fixed depth that is missing.
    """
    rows: list[Row] = []
    differences: list[Row] = []
    for task, kv in answers.select("task", "kv").unique(maintain_order=True).iter_rows():
        own = answers.filter((pl.col("task") == task) & (pl.col("kv") == kv))
        group = _Group.of(own, served.filter((pl.col("task") == task) & (pl.col("kv") == kv)), f"{task}, {kv}")
        for hops, cell in group.cells(seed, resamples):
            same = {"task": task, "hops": hops, "n": cell.n, "n_clusters": cell.n_clusters, "reason": cell.reason}
            rows += [same | row for row in cell.rows()]
            differences += [same | row for row in cell.differences()]
    return {
        "frontier": tables.conform("frontier", rows),
        "frontier_differences": tables.conform("frontier_differences", differences),
    }


# -- inside ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The settings of one task and layout.

    Attributes:
        items: I rows with `whole` and `cell`.
        settings: S rows as of `_SETTING`.
        sums: [I, S, 4], see `_SUMS`; means over the seeds of a setting.
        latency: for each setting the answers' latencies, [seeds, I].
        fixed: [U], where the fixed depths are among the settings.
        measured: for each setting what holds of a whole serving alone, and core passes beyond those of the answers.
    """

    items: pl.DataFrame
    settings: list[Row]
    sums: np.ndarray
    latency: list[np.ndarray]
    fixed: np.ndarray
    measured: list[Row]
    n_loops: int
    prompt_tokens: np.ndarray  # [I]

    @classmethod
    def of(cls, answers: pl.DataFrame, served: pl.DataFrame, where: str) -> _Group:
        names: list[str] = served["setting"].unique(maintain_order=True).to_list()
        n_loops = int(served["n_loops"][0])
        items = None
        settings, sums, latency, measured = [], [], [], []
        for name in names:
            own = answers.filter(pl.col("setting") == name).sort("seed", "story", "hops", "item")
            runs = served.filter(pl.col("setting") == name)
            asked = own.filter(pl.col("seed") == own["seed"][0]).select("item", "story", "cluster", "hops")
            items = asked if items is None else items
            if own.height != items.height * runs.height or not asked.equals(items):
                what = f"setting {name} was not asked the questions of the others"
                raise UserError(what, where=where, remedy=_AGAIN)
            all_rows = own["decode_rows"] + own["prompt_rows"]
            columns = np.stack([own[c].to_numpy().astype(np.float64) for c in _SUMS[:3]] + [all_rows.to_numpy()], -1)
            shape = (runs.height, items.height)
            sums.append(columns.reshape(*shape, 4).mean(0))
            latency.append(own["latency"].to_numpy().reshape(shape))
            seconds = float(runs["seconds"].to_numpy().mean())
            settings.append(own.row(0, named=True))
            measured.append({
                "read_rows": float(runs["read_rows"].to_numpy().mean()),
                "seconds": seconds, "tokens_per_s": float(runs["tokens"].to_numpy().mean()) / max(seconds, 1e-9),
                "peak_kv_bytes": int(runs["peak_kv_bytes"].to_numpy().max()),
                "more_rows": float(runs["all_rows"].to_numpy().mean() - all_rows.to_numpy().sum() / runs.height),
            })  # fmt: skip
        kinds = {row["rule"]: at for at, row in enumerate(settings) if row["kind"] == "fixed"}
        depths = [f"fixed:{depth}" for depth in range(1, n_loops + 1)]
        if missing := [depth for depth in depths if depth not in kinds]:
            raise UserError(f"{missing[0]} was not served", where=where, remedy=_AGAIN)
        assert items is not None
        fixed = np.array([kinds[depth] for depth in depths])
        full = sums[fixed[-1]]
        prompt_tokens = (full[:, 3] - full[:, 1]) / n_loops  # at full depth, each ran U loops
        return cls(with_clusters(items), [{k: row[k] for k in _SETTING} for row in settings], np.stack(sums, 1),
                   latency, fixed, measured, n_loops, prompt_tokens)  # fmt: skip

    def cells(self, seed: int, resamples: int) -> Iterator[tuple[int | None, _Cell]]:
        hops = self.items["hops"].to_numpy()
        yield None, _Cell(self, np.ones(len(hops), bool), "whole", seed, resamples)
        for k in np.unique(hops):
            yield int(k), _Cell(self, hops == k, "cell", seed, resamples)


class _Cell:
    """A group's settings over some of its questions: means, and the same means in resampled clusters."""

    def __init__(self, group: _Group, kept: np.ndarray, drawn: str, seed: int, resamples: int) -> None:
        self.group, self.kept, self.whole = group, kept, bool(kept.all()) and drawn == "whole"
        self.clusters = np.unique(group.items[drawn].to_numpy()[kept], return_inverse=True)[1]
        self.n, self.n_clusters = int(kept.sum()), int(self.clusters.max()) + 1
        enough = self.n_clusters >= MIN_CLUSTERS
        self.reason = None if enough else f"too few clusters ({self.n_clusters} of {MIN_CLUSTERS})"
        sums = group.sums[kept]
        self.point = _Means.of(sums.sum(0), self.n, group.fixed)
        self.draws = None
        if enough:
            ones = np.ones((self.n, 1))
            stacked = np.concatenate([sums.reshape(self.n, -1), ones], 1)
            totals = ratio_draws(by_cluster(stacked, self.clusters), resamples=resamples, seed=seed)
            drawn_sums = totals[:, :-1].reshape(len(totals), *sums.shape[1:])
            self.draws = _Means.of(drawn_sums, totals[:, -1:], group.fixed)

    def bounds(self, name: str, values: np.ndarray | None) -> Row:
        """Columns of an interval of draws [B]."""
        if values is None:
            return {f"{name}_low": None, f"{name}_high": None}
        low, high = within(values, self.n_clusters)
        return {f"{name}_low": float(low), f"{name}_high": float(high)}

    def rows(self) -> Iterator[Row]:
        group, point, draws = self.group, self.point, self.draws
        prompt_tokens = float(group.prompt_tokens[self.kept].sum())
        for at, setting in enumerate(group.settings):
            sums = group.sums[self.kept, at].sum(0)
            measured = group.measured[at]
            all_rows = sums[3] + (measured["more_rows"] if self.whole else 0.0)
            latency = np.quantile(group.latency[at][:, self.kept], [0.5, 0.9])
            row: Row = {
                **setting, "accuracy": float(point.accuracy[at]), "mean_exit": float(point.depth[at]),
                **self._accuracy(at), **self.bounds("mean_exit", None if draws is None else draws.depth[:, at]),
                "decode_rows": float(sums[1]), "all_rows": float(all_rows),
                "decode_share": float(sums[1] / (group.n_loops * sums[2])),
                "all_share": float(all_rows / (group.n_loops * (sums[2] + prompt_tokens))),
                **{name: measured[name] if self.whole else None for name in _MEASURED},
                "latency_p50": float(latency[0]), "latency_p90": float(latency[1]),
            }  # fmt: skip
            for name, mixed in (("gain", "mixture"), ("gain_all", "mixture_all")):
                mixture = getattr(point, mixed)[at]
                chosen = setting["kind"] != "fixed"  # a fixed depth is its own mixture
                gains = None if draws is None or not chosen else draws.accuracy[:, at] - getattr(draws, mixed)[:, at]
                row[f"{mixed}_accuracy"] = float(mixture)
                row[name] = float(point.accuracy[at] - mixture) if chosen else None
                row |= self.bounds(name, gains)
            yield row

    def _accuracy(self, at: int) -> Row:
        """Wilson's interval of answers that are right or wrong; the bootstrap's of means over permutations."""
        right = self.group.sums[self.kept, at, 0]
        if self.draws is None or not np.isin(right, (0.0, 1.0)).all():
            return self.bounds("accuracy", None if self.draws is None else self.draws.accuracy[:, at])
        _, low, high = proportion(right, self.clusters)
        return {"accuracy_low": float(low), "accuracy_high": float(high)}

    def differences(self) -> Iterator[Row]:
        group = self.group
        for at, setting in enumerate(group.settings):
            if setting["kind"] != "rule":
                continue
            for against, other in self._beside(setting["setting"]):
                row: Row = {**setting, "against": against}
                for name, attribute in (("accuracy", "accuracy"), ("mean_exit", "depth")):
                    point = getattr(self.point, attribute)
                    row[name] = float(point[at] - point[other])
                    values = None if self.draws is None else getattr(self.draws, attribute)
                    row |= self.bounds(name, None if values is None else values[:, at] - values[:, other])
                yield row

    def _beside(self, name: str) -> Iterator[tuple[str, int]]:
        yield "full", int(self.group.fixed[-1])
        for at, other in enumerate(self.group.settings):
            if other["kind"] in AGAINST and other["beside"] in (None, name):
                yield other["kind"], at


@dataclass(frozen=True)
class _Means:
    """Accuracy, mean depth and mixtures of S settings, […, S] each."""

    accuracy: np.ndarray
    depth: np.ndarray
    mixture: np.ndarray
    mixture_all: np.ndarray

    @classmethod
    def of(cls, sums: np.ndarray, n: np.ndarray | float, fixed: np.ndarray) -> _Means:
        """Of totals […, S, 4] over n […, 1] questions; `fixed` [U] says which settings are the fixed depths."""
        accuracy = sums[..., 0] / n
        depth, work = (sums[..., at] / sums[..., 2] for at in (1, 3))
        heights = accuracy[..., None, fixed]
        mixed = (interpolated(x, np.broadcast_to(x[..., None, fixed], (*x.shape, len(fixed))),
                              np.broadcast_to(heights, (*x.shape, len(fixed)))) for x in (depth, work))  # fmt: skip
        return cls(accuracy, depth, *mixed)


