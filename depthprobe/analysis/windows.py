"""When information moves: the windows of a patching sweep, by item, and their change with hops.

The *source* is the changed word: patched at depth 0 it brings the other story's answer (effect 1), behind the last
depth it brings nothing. The *destination* is the last token: nothing at depth 0, the other answer at the end. Each
curve is summed up by the depth at which it first crosses one half, linear between depths, and by the area under it: not
by the first or last single cell that shows an effect, which noise decides. A curve that never crosses, or is across at
its first depth, is *censored*; one that goes back by more than `BACK` on its way is not *monotone*. Both are counted,
and kept.

In a model with loops the source is read where this and all later loops are patched (span "later"), if that was swept:
loops that read the embedding again have the old word back after one, however late it is needed. Of a loop's layers that
one stands for it at which patching from the first loop on moves most, over all pairs: what another layer of the same
loop still reads of the word is not kept away there. Behind the last layer nothing reads the word's own token, which the
sweep of residuals has measured: that point ends the curve. What a layer reads (resid_pre) lies one depth before it.

Only pairs that the model answers right on both stories enter, and no controls.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import mean_interval
from depthprobe.analysis.grid import with_clusters
from depthprobe.analysis.knockout import knockout_slopes_table
from depthprobe.analysis.slopes import paired_slope

__all__ = ["BACK", "ENDS", "knockout_by_depth_table", "patching_by_role_table", "patching_tables", "site_of",
           "window_slopes_table", "windows_table"]  # fmt: skip

#: End → (role, whether its effect rises along the depth).
ENDS: dict[str, tuple[str, bool]] = {"source": ("changed_word", False), "destination": ("last", True)}

#: How far an effect may go back before its curve is called not monotone.
BACK = 0.1

#: What the reason of a missing slope begins with where there are no pairs to have windows.
NO_WINDOWS = "no windows"

#: The quantity of loops that need the changed word, counted from the end.
NEEDED = "source_needed_loop"

_ITEM = ("item", "story", "cluster", "task", "hops")
_SWEEP = ("donor_kind", "control", "direction", "kind", "span", "site", "role", "depth")
#: Columns of `windows` whose slope is reported, and what the slope is called.
_QUANTITIES = {
    "depth_crossed": "crossed", "relative": "crossed_relative", "loop_crossed": "crossed_loop", "area": "area",
}  # fmt: skip


def patching_tables(
    found: Mapping[str, pl.DataFrame], axis: pl.DataFrame, *, seed: int = 0, resamples: int = 2000
) -> dict[str, pl.DataFrame]:
    """Every table that analysis makes of the tables `patching` and `knockout`.

    Args:
        axis: the model's depths (depth, loop, layer, is_loop_end), as `DepthGrid.axis` has them.
    """
    patching, cuts = found["patching"], found.get("knockout", tables.empty("knockout"))
    windows = windows_table(patching, axis)
    boot = {"seed": seed, "resamples": resamples}
    return {
        "windows": windows,
        "window_slopes": window_slopes_table(windows, patching, **boot),
        "patching_by_role": patching_by_role_table(patching, **boot),
        "knockout_by_depth": knockout_by_depth_table(cuts, **boot),
        "knockout_slopes": knockout_slopes_table(cuts, **boot),
    }


def windows_table(patching: pl.DataFrame, axis: pl.DataFrame) -> pl.DataFrame:
    """The `windows` table: one row per item, end and site. Several donors of an item are averaged, depth by depth."""
    rows: list[dict[str, object]] = []
    curves = patching.filter(
        pl.col("both_right") & ~pl.col("control") & pl.col("effect").is_not_null() & pl.col("position").is_null()
        & (pl.col("kind") == "set") & (pl.col("direction") == "donor_to_item") & (pl.col("span") != "window")
    )  # fmt: skip
    for end, (role, rising) in ENDS.items():
        of_role = curves.filter(pl.col("role") == role)
        at_end = of_role.filter(
            (pl.col("depth") == axis["depth"].max()) & (pl.col("site") == "resid_post") & (pl.col("span") == "one")
        )
        for (site,), of_site in sorted(of_role.partition_by("site", as_dict=True).items()):
            later = of_site.filter(pl.col("span") == "later")
            if rising or later.is_empty():
                kept = of_site.filter(pl.col("span") == "one")
            else:
                kept = pl.concat([_one_layer(own, axis) for own in later.partition_by("task")])
            if site == "resid_pre":
                before = kept.with_columns(pl.col("depth") - 1).drop("loop")
                loops = axis.select(pl.col("depth", "loop").cast(pl.Int32))
                kept = before.join(loops, on="depth", how="left").select(curves.columns)
                kept = kept if rising else pl.concat([kept, at_end.join(kept, on="item", how="semi")])
            cells = (
                kept.group_by(*_ITEM, "depth")
                .agg(pl.col("effect").cast(pl.Float64).mean(), pl.col("loop").first())
                .sort("task", "story", "hops", "item", "depth")
            )
            for keys, curve in cells.partition_by(_ITEM, as_dict=True, maintain_order=True).items():
                about = dict(zip(_ITEM, keys, strict=True)) | {"end": end, "site": site}
                rows.append(about | _window(curve, axis, rising))
    return tables.conform("windows", rows)


def _one_layer(later: pl.DataFrame, axis: pl.DataFrame) -> pl.DataFrame:
    """Of each loop the one layer that stands for it; what lies before, behind and at the very end stays."""
    loops = axis.filter("is_loop_end")["loop"]
    if len(loops) < 2:
        return later
    first = later.filter(pl.col("loop") == loops.min()).group_by("layer").agg(pl.col("effect").mean())
    if first.is_empty():
        return later
    layer = first.sort(["effect", "layer"], descending=[True, False])["layer"][0]
    end = axis["depth"].max()
    return later.filter(~pl.col("loop").is_in(loops.to_list()) | (pl.col("layer") == layer) | (pl.col("depth") == end))


def _window(curve: pl.DataFrame, axis: pl.DataFrame, rising: bool) -> dict[str, object]:
    depth, effect = curve["depth"].to_numpy().astype(np.float64), curve["effect"].to_numpy()
    crossed = crossing(depth, effect, rising)
    last = max(float(axis["depth"].to_numpy().max()), 1.0)
    toward = effect if rising else -effect
    width = depth[-1] - depth[0]
    clipped = np.clip(effect, 0.0, 1.0)
    area = np.trapezoid(clipped, depth) / width if width > 0 else clipped.mean()
    return {
        "depth_crossed": crossed,
        "relative": None if crossed is None else crossed / last,
        "loop_crossed": None if crossed is None else _loops(curve, axis, rising),
        "area": float(area),
        "censored": crossed is None,
        "monotone": bool((np.maximum.accumulate(toward) - toward).max() <= BACK),
        "effect_first": float(effect[0]),
        "effect_last": float(effect[-1]),
    }


def crossing(where: np.ndarray, effect: np.ndarray, rising: bool) -> float | None:
    """Where an effect [D] first crosses one half, linear between depths [D]; None if it does not, or has at once."""
    beyond = effect - 0.5 if rising else 0.5 - effect
    across = np.flatnonzero(beyond >= 0)
    if len(across) == 0 or across[0] == 0:
        return None
    at = int(across[0])
    share = -beyond[at - 1] / (beyond[at] - beyond[at - 1])
    return float(where[at - 1] + share * (where[at] - where[at - 1]))


def _loops(curve: pl.DataFrame, axis: pl.DataFrame, rising: bool) -> float | None:
    """The crossing in loops, read at their ends; 0 if it lies before the first loop, None without loops."""
    ends = axis.filter("is_loop_end").sort("depth")
    if ends.height < 2:
        return None
    depth, effect = curve["depth"].to_numpy(), curve["effect"].to_numpy()
    # a norm at the end of a loop is a depth of its own, which a sweep of residuals does not have
    first = axis.filter(pl.col("loop") == ends["loop"][0])["depth"].to_numpy().min()
    at, loops = [np.flatnonzero(depth < first)], [0]
    for loop, end in zip(ends["loop"], ends["depth"], strict=True):
        at.append(np.flatnonzero((curve["loop"].to_numpy() == loop) & (depth <= end)))
        loops.append(loop)
    read = [(loop, places[-1]) for loop, places in zip(loops, at, strict=True) if len(places)]
    values = effect[[place for _, place in read]]
    if len(values) and ((values[0] >= 0.5) if rising else (values[0] <= 0.5)):
        return 0.0 if read[0][0] == 0 else None
    return crossing(np.array([float(loop) for loop, _ in read]), values, rising)


def site_of(windows: pl.DataFrame, end: str) -> str:
    """The site that is told of: what layers read for the source, what they leave for the destination, if swept."""
    sites = windows.filter(pl.col("end") == end)["site"].unique().to_list()
    liked = ("resid_pre", "resid_post") if end == "source" else ("resid_post", "resid_pre")
    return next((site for site in (*liked, "loop_state", *sorted(sites)) if site in sites), "")


def window_slopes_table(
    windows: pl.DataFrame, patching: pl.DataFrame, *, seed: int = 0, resamples: int = 2000
) -> pl.DataFrame:
    """The `window_slopes` table: change per hop, paired by story, at the site of each end (`site_of`).

    Args:
        patching: all rows, from which clusters are known before any pair is left out.

    `*_crossed` is in steps of the axis, `*_crossed_relative` and `*_area` in shares of the depth, `*_crossed_loop` in
    loops. Where the source is patched in a loop and all later ones, patching from late on still suffices if the word is
    needed late alone: the *earlier* it crosses, the more loops need the word. That number, the loops from the crossing
    to the end, is `source_needed_loop`. A slope from too few clusters is refused, as in `slopes`; a censored window has
    an area and no crossing. Of a task in which no pair is answered right on both stories `reason` says so, and of how
    many (`NO_WINDOWS`).
    """
    rows: list[dict[str, object]] = []
    for (task,), of_task in patching.select(_ITEM).unique().sort("task", "story", "hops", "item").partition_by(
        "task", as_dict=True, maintain_order=True
    ).items():
        clusters = with_clusters(of_task).select("item", "whole")
        own = windows.filter(pl.col("task") == task)
        nothing = _no_windows(patching.filter(pl.col("task") == task))
        for end in ENDS:
            pairs = own.filter((pl.col("end") == end) & (pl.col("site") == site_of(own, end)))
            shares = {
                "share_censored": pairs["censored"].mean(),
                "share_nonmonotone": (~pairs["monotone"]).mean(),
                "n_pairs": pairs.height,
            }
            for column, name in _QUANTITIES.items():
                if column == "loop_crossed" and pairs[column].null_count() == pairs.height:
                    continue
                kept = pairs.filter(pl.col(column).is_not_null()).join(clusters, on="item", how="left")
                slope = paired_slope(kept.sort("story", "hops", "item"), column, seed, resamples)
                if nothing is not None:
                    slope["reason"] = nothing
                rows.append({"task": task, "quantity": f"{end}_{name}"} | slope | shares)
                if column == "loop_crossed" and end == "source" and _later_patched(patching, str(task), own):
                    rows.append({"task": task, "quantity": NEEDED} | backwards(slope) | shares)
    return tables.conform("window_slopes", rows)


def backwards(row: Mapping[str, object]) -> dict[str, object]:
    """The slope of what is counted from the end."""
    found = dict(row)
    for one, other in (("slope", "slope"), ("low", "high"), ("high", "low")):
        value = row[other]
        found[one] = -value if isinstance(value, float) else None
    return found


def _later_patched(patching: pl.DataFrame, task: str, windows: pl.DataFrame) -> bool:
    """Whether the source that is told of is patched in all later loops, too."""
    return not patching.filter(
        (pl.col("task") == task) & (pl.col("role") == ENDS["source"][0]) & (pl.col("span") == "later")
        & (pl.col("site") == site_of(windows, "source"))
    ).is_empty()  # fmt: skip


def _no_windows(patching: pl.DataFrame) -> str | None:
    """Why a task has no windows, if no pair of its stories is answered right twice; None if one is."""
    pairs = patching.filter(~pl.col("control")).group_by("item", "donor_kind", "hop").agg(pl.col("both_right").any())
    if pairs["both_right"].any():
        return None
    of = f"{pairs.height} pair{'' if pairs.height == 1 else 's'}"
    return f"{NO_WINDOWS}: the model answers none of {of} right on both stories"


def patching_by_role_table(patching: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `patching_by_role` table: mean effect and share of flips, by hops and over all (hops null).

    Over pairs answered right on both stories; cells of single positions are left out.
    """
    kept = patching.filter("both_right", pl.col("position").is_null(), pl.col("effect").is_not_null())
    parts = [tables.empty("patching_by_role")]
    for (task,), of_task in sorted(patching.partition_by("task", as_dict=True).items()):
        clusters = with_clusters(of_task.select(_ITEM).unique()).select("item", "whole", "cell")
        own = kept.filter(pl.col("task") == task).join(clusters, on="item", how="left")
        for hops, cells, cluster in _levels(own):
            # one matrix for each sweep, so that a bootstrap serves all its depths
            for keys, block in sorted(cells.partition_by(_SWEEP[:-1], as_dict=True).items()):
                about = {"task": task, "hops": hops, **dict(zip(_SWEEP[:-1], keys, strict=True))}
                parts.append(_by_depth("patching_by_role", about, block, cluster, ("effect", "flip"), seed, resamples))
    return pl.concat(parts)


def knockout_by_depth_table(knockout: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `knockout_by_depth` table: what cutting costs, in the answer's log-probability, over all items."""
    parts = [tables.empty("knockout_by_depth")]
    dropped = knockout.with_columns(drop=pl.col("logprob_clean") - pl.col("logprob_cut"))
    for (task,), of_task in sorted(dropped.partition_by("task", as_dict=True).items()):
        clusters = with_clusters(of_task.select(_ITEM).unique()).select("item", "whole", "cell")
        own = of_task.join(clusters, on="item", how="left")
        for hops, cells, cluster in _levels(own):
            for (role, window), block in sorted(cells.partition_by("role", "window", as_dict=True).items()):
                about = {"task": task, "hops": hops, "role": role, "window": window}
                columns = ("drop", "correct")
                parts.append(_by_depth("knockout_by_depth", about, block, cluster, columns, seed, resamples))
    return pl.concat(parts)


def _levels(own: pl.DataFrame) -> list[tuple[int | None, pl.DataFrame, str]]:
    """(hops or None for all, its rows, the column of its clusters)."""
    if own.is_empty():
        return []
    by_hops = [(int(cells["hops"][0]), cells, "cell") for cells in own.sort("hops").partition_by("hops")]
    return [(None, own, "whole"), *by_hops]


#: Column of a probe → what its mean is called.
_MEANS = {"effect": "effect", "flip": "flip", "drop": "drop", "correct": "accuracy"}


def _by_depth(
    name: str, about: Mapping[str, object], block: pl.DataFrame, cluster: str, columns: tuple[str, str], seed: int,
    resamples: int,
) -> pl.DataFrame:  # fmt: skip
    """Means of two columns at every depth, with an interval over clusters for the first."""
    rows: list[dict[str, object]] = []
    value, share = columns
    grid = block.pivot(on="depth", index=("item", cluster), values=value, aggregate_function="mean", sort_columns=False)
    depths = sorted(block["depth"].unique().to_list())
    values = grid.select([str(depth) for depth in depths]).to_numpy().astype(np.float64)  # [I, D]
    order = np.argsort(grid["item"].to_numpy())
    values, groups = values[order], grid[cluster].to_numpy()[order]
    shares = dict(block.group_by("depth").agg(pl.col(share).cast(pl.Float64).mean()).iter_rows())
    whole = not np.isnan(values).any()
    means = mean_interval(values, groups, resamples=resamples, seed=seed) if whole else None
    for number, depth in enumerate(depths):
        there = ~np.isnan(values[:, number])
        if means is None:
            bounds = mean_interval(values[there, number], groups[there], resamples=resamples, seed=seed)
        else:
            bounds = tuple(bound[number] for bound in means)
        mean, low, high = (None if np.isnan(bound) else float(bound) for bound in bounds)
        found = {_MEANS[value]: mean, "low": low, "high": high, _MEANS[share]: shares[depth]}
        row: dict[str, object] = {**about, "depth": depth, **found}
        counts: dict[str, object] = {"n_items": int(there.sum()), "n_clusters": len(np.unique(groups[there]))}
        rows.append(row | (counts if name == "patching_by_role" else {"n": counts["n_items"]}))
    return tables.conform(name, rows)
