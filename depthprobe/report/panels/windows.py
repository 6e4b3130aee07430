"""When the information has moved: the depth at which a patch's effect crosses one half, by hops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from depthprobe.analysis import means_by_hops, site_of
from depthprobe.analysis.windows import NO_WINDOWS
from depthprobe.report.data import Task
from depthprobe.report.figures import Choice, Figure, Grid, Key, agrees, error_bar, hops_line_axis, layout, selected
from depthprobe.report.names import SITES, known_first, site_name
from depthprobe.report.text import missing, number, percent

__all__ = ["WINDOW_ENDS", "no_windows", "windows_by_hops"]

#: end -> its words, colour token, symbol, dash, and how far its marks stand beside their k: bars must be told apart
WINDOW_ENDS = {
    "source": ("source: changed word", "rival", "circle", "solid", -0.05),
    "destination": ("destination: last token", "model", "diamond", "dash", 0.05),
}
_KINDS = (
    ("depth_crossed", "window", "Depth at which the effect crosses ½"),
    ("area", "window-area", "Area under the effect, share of the depth"),
)
#: The option in which each end is patched at the site that is told of (`analysis.site_of`).
OWN = "own"
_SHARES = (("censored", "circle", "solid", "no crossing"), ("nonmonotone", "circle-open", "dot", "not monotone"))


def windows_by_hops(task: Task) -> tuple[Figure, ...]:
    """Crossing depth, area and the shares of pairs without a clear crossing, by hops; none in a run without windows."""
    if not task.windows.height:
        return ()
    ends = [end for end in WINDOW_ENDS if end in task.windows["end"].unique().to_list()]
    sites = known_first(task.windows["site"].unique().to_list(), SITES)
    own = {end: site_of(task.windows, end) for end in ends}
    told = _told(task, {site: dict.fromkeys(ends, site) for site in sites})
    options = [(site, site_name(site)) for site in sites]
    if len(set(own.values())) > 1:  # each end where it is told of, first: what slopes and sentences speak of
        told = pl.concat([_told(task, {OWN: own}), told])
        options.insert(0, (OWN, "; ".join(f"{end}: {site_name(site)}" for end, site in own.items())))
    choice = Choice("site", "site", tuple(options))
    return (*(_depths(task, *kind, told, choice) for kind in _KINDS), _shares(task, told, choice))


def no_windows(task: Task) -> str | None:
    """A sentence for a task in which no pair of stories is answered right twice, so that nothing has a window."""
    reasons = task.window_slopes["reason"].drop_nulls().to_list()
    found = next((reason for reason in reasons if reason.startswith(NO_WINDOWS)), None)
    return None if found is None or task.windows.height else f"{found[0].upper()}{found[1:]}."


def _told(task: Task, options: Mapping[str, Mapping[str, str]]) -> pl.DataFrame:
    """site, end, hops: mean and interval of crossing depth and area, and shares of all pairs.

    Args:
        options: option of the figure → end → the site at which that end is patched; `patched` of the result.
    """
    rows: list[dict[str, Any]] = []
    for site, by_end in options.items():
        for end, patched in by_end.items():
            own = task.windows.filter((pl.col("site") == patched) & (pl.col("end") == end))
            if not own.height:
                continue
            means = {column: {r["hops"]: r for r in means_by_hops(own, column)} for column, _, _ in _KINDS}
            for (k,), part in own.sort("hops").partition_by("hops", as_dict=True, maintain_order=True).items():
                row: dict[str, Any] = {"task": task.name, "site": site, "patched": patched, "end": end}
                row |= {"hops": k, "n_pairs": part.height}
                for column in means:
                    found = means[column][k]
                    row |= {column: found["mean"], f"{column}_low": found["low"], f"{column}_high": found["high"]}
                    row |= {f"{column}_n": found["n"]}
                row["censored"] = float(part["censored"].sum()) / part.height
                row["nonmonotone"] = float((~part["monotone"]).sum()) / part.height
                rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


def _depths(task: Task, column: str, slug: str, title: str, told: pl.DataFrame, choice: Choice) -> Figure:
    depth = column == "depth_crossed"
    shown = (lambda v: _depth(task, v)) if depth else percent
    start = selected((choice,))
    data: list[dict[str, Any]] = []
    for (site, end), part in _parts(told):
        name, token, symbol, dash, shift = WINDOW_ENDS[end]
        bounds = list(part.select(column, f"{column}_low", f"{column}_high").iter_rows())
        had = [i for i, row in enumerate(bounds) if not missing(row[0])]
        when = {"site": site}
        hover = [
            f"k = {k}, {name}<br><b>{shown(v)}</b> ({shown(a)} to {shown(b)})<br>{n} of {pairs} pairs"
            for k, (v, a, b), n, pairs in zip(part["hops"], bounds, part[f"{column}_n"], part["n_pairs"], strict=True)
        ]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers",
                "x": [part["hops"][i] + shift for i in had], "y": [bounds[i][0] for i in had],
                "line": {"color": f"var(--{token})", "width": 2, "dash": dash},
                "marker": {"color": f"var(--{token})", "size": 9, "symbol": symbol},
                "error_y": error_bar([bounds[i] for i in had], token), "cliponaxis": False,
                "hoverinfo": "text", "hovertext": [hover[i] for i in had],
                "meta": {"when": when}, "visible": agrees(when, start),
            }
        )  # fmt: skip
    return Figure(
        id=f"{task.slug}-{slug}",
        title=title,
        spec={"data": data, "layout": layout(height=330, xaxis=hops_line_axis(task.hops), yaxis=_y(task, depth))},
        alt=f"Lines over hops, source and destination: {title.lower()}. " + _ends(told, column, shown, start),
        grid=_grid(told, [(column, title.lower(), shown)]),
        sheet=told.drop([c for c in told.columns if c.startswith("area" if depth else "depth_crossed")]),
        keys=_keys(told),
        choices=(choice,),
    )


def _shares(task: Task, told: pl.DataFrame, choice: Choice) -> Figure:
    start, data = selected((choice,)), []
    for (site, end), part in _parts(told):
        name, token, _, _, shift = WINDOW_ENDS[end]
        when = {"site": site}
        for column, symbol, dash, words in _SHARES:
            data.append(
                {
                    "type": "scatter", "mode": "lines+markers",
                    "x": [k + shift for k in part["hops"]], "y": part[column].to_list(),
                    "line": {"color": f"var(--{token})", "width": 1.6, "dash": dash},
                    "marker": {"color": f"var(--{token})", "size": 8, "symbol": symbol},
                    "cliponaxis": False, "hoverinfo": "text",
                    "hovertext": [
                        f"k = {k}, {name}<br><b>{percent(v)}</b> of {n} pairs: {words}"
                        for k, v, n in zip(part["hops"], part[column], part["n_pairs"], strict=True)
                    ],
                    "meta": {"when": when}, "visible": agrees(when, start),
                }
            )  # fmt: skip
    yaxis = {"title": "share of pairs", "range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6}
    columns = [(column, words, percent) for column, _, _, words in _SHARES]
    return Figure(
        id=f"{task.slug}-window-shares",
        title="Pairs without a clear crossing",
        spec={"data": data, "layout": layout(height=330, xaxis=hops_line_axis(task.hops), yaxis=yaxis)},
        alt="Lines over hops: the shares of pairs whose effect does not cross one half on its way, and whose effect "
        "over depth is not monotone. " + _ends(told, "censored", percent, start),
        grid=_grid(told, columns),
        sheet=told.select("task", "site", "patched", "end", "hops", "censored", "nonmonotone", "n_pairs"),
        keys=(
            *(Key("dot", WINDOW_ENDS[end][1], end) for end in WINDOW_ENDS if end in told["end"].to_list()),
            Key("dot", "soft", "no crossing"),
            Key("ring", "soft", "not monotone"),
        ),
        choices=(choice,),
    )


def _parts(told: pl.DataFrame) -> list[tuple[tuple[str, str], pl.DataFrame]]:
    parts = told.partition_by(["site", "end"], as_dict=True, maintain_order=True)
    return [((str(site), str(end)), part) for (site, end), part in parts.items()]


def _keys(told: pl.DataFrame) -> tuple[Key, ...]:
    marks = {"circle": "dot", "diamond": "diamond"}
    ends = [end for end in WINDOW_ENDS if end in told["end"].to_list()]
    return tuple(Key(marks[WINDOW_ENDS[end][2]], WINDOW_ENDS[end][1], WINDOW_ENDS[end][0]) for end in ends)


def _y(task: Task, depth: bool) -> dict[str, Any]:
    if not depth:
        return {"title": "share of the depth", "range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6}
    axis = task.axis
    # the depth of the tables, at the labels of the axis: a coda or a prelude has its own letters
    return {
        "title": axis.title.split("<br>")[0].split(" (")[0],
        "tickmode": "array", "tickvals": axis.ticks(), "ticktext": [axis.short(d) for d in axis.ticks()],
        "range": [-0.5, len(axis.coordinates) - 0.5],
    }  # fmt: skip


def _depth(task: Task, value: float | None) -> str:
    """A depth between two of the axis, in words."""
    if value is None or missing(value):
        return "–"
    if not task.axis.looped:
        return f"layer {number(value, 1)}"
    return f"depth {number(value, 1)}" if task.axis.steps_per_loop > 1 else f"loop {number(value, 1)}"


def _grid(told: pl.DataFrame, columns: list[tuple[str, str, Any]]) -> Grid:
    rows: list[tuple[str, ...]] = []
    when: list[dict[str, str]] = []
    for row in told.iter_rows(named=True):
        cells = [f"k = {row['hops']}", WINDOW_ENDS[row["end"]][0], site_name(row["patched"])]
        for column, _, shown in columns:
            bounds = (row.get(f"{column}_low"), row.get(f"{column}_high"))
            with_bounds = f" ({shown(bounds[0])} to {shown(bounds[1])})" if not any(map(missing, bounds)) else ""
            cells.append(f"{shown(row[column])}{with_bounds}")
        rows.append((*cells, str(row["n_pairs"])))
        when.append({"site": row["site"]})
    head = ("hops", "end", "site", *(words for _, words, _ in columns), "pairs")
    return Grid(head, tuple(rows), "windows", tuple(when))


def _ends(told: pl.DataFrame, column: str, shown: Any, start: dict[str, str]) -> str:
    said: list[str] = []
    for (_, end), part in _parts(told.filter(pl.col("site") == start["site"])):
        first, last = part.row(0, named=True), part.row(-1, named=True)
        said.append(f"{end} {shown(first[column])} at k = {first['hops']}, {shown(last[column])} at k = {last['hops']}")
    return "; ".join(said) + "." if said else ""
