"""What leaving early costs and saves: accuracy against mean depth, and against the memory that it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from depthprobe.errors import UserError
from depthprobe.report.figures import Choice, Figure, Grid, Key, error_bar, layout
from depthprobe.report.text import interval, number, percent, percent_interval, points_interval

__all__ = ["KINDS", "frontier_depth", "frontier_memory"]

#: kind -> its words, colour token, plotly's symbol, mark of the legend
KINDS = {
    "rule": ("exit rule", "model", "circle", "dot"),
    "confidence": ("confidence exit of the same mean depth elsewhere", "rival", "diamond", "diamond"),
    "permuted": ("the rule's exits permuted", "other", "x", "cross"),
    "settling": ("settling oracle", "gate", "triangle-up", "triangle"),
    "earliest": ("earliest-equal oracle", "role-gender", "square-open", "square-open"),
    "fixed": ("fixed depths; between them their mixtures", "soft", "line-ns-open", "tick"),
}
_TOKENS = ("model", "rival", "gate", "role-gender", "other")


def frontier_depth(frontier: pl.DataFrame, task: str | None = None) -> Figure:
    """Accuracy against executed depth: a mark for each setting, a line through the fixed depths.

    Args:
        frontier: the table of that name.
        task: whose rows; None where there is one.

    Raises:
        UserError: no such task, or several and none is named.
    """
    rows, name = _of_task(frontier, task)
    kvs = rows["kv"].unique(maintain_order=True).to_list()
    hops = sorted(rows["hops"].drop_nulls().unique().to_list())
    layouts = Choice("kv", "keys and values", tuple((kv, kv) for kv in kvs))
    rungs = Choice("hops", "hops k", (("all", "all"), *((str(k), str(k)) for k in hops)))
    data: list[dict[str, Any]] = []
    grid: list[tuple[str, ...]] = []
    when_rows: list[dict[str, str]] = []
    first = {"kv": kvs[0], "hops": "all"}
    for (kv, k), cell in rows.partition_by("kv", "hops", as_dict=True, maintain_order=True).items():
        when = {"kv": str(kv), "hops": "all" if k is None else str(k)}
        for kind in reversed(KINDS):
            part = cell.filter(pl.col("kind") == kind)
            if part.height:
                data.append(_depth_trace(kind, part) | {"meta": {"when": when}, "visible": when == first})
        for row in cell.iter_rows(named=True):
            gain = "" if row["gain"] is None else f"{number(100 * row['gain'], 1)} ({_points(row, 'gain')})"
            grid.append((row["setting"], number(row["mean_exit"]), _share(row), gain))
            when_rows.append(when)
    loops = rows.filter(pl.col("kind") == "fixed").height // len(rows.select("kv", "hops").unique())
    xaxis = {"title": "core passes of a decoded token", "range": [0.7, loops + 0.3], "dtick": 1, "showgrid": False}
    shown = rows.filter((pl.col("kv") == kvs[0]) & pl.col("hops").is_null() & (pl.col("kind") == "rule"))
    said = "; ".join(
        f"{row['setting']} {percent(row['accuracy'])} at {number(row['mean_exit'])}, a mixture "
        f"{percent(row['mixture_accuracy'])}" for row in shown.iter_rows(named=True)
    )  # fmt: skip
    return Figure(
        id=f"{name}-frontier-depth",
        title="Accuracy against executed depth",
        spec={"data": data, "layout": layout(height=420, xaxis=xaxis, yaxis=_accuracy_axis())},
        alt=f"Accuracy over mean depth in loops, {kvs[0]} keys, all hops: {said}.",
        grid=Grid(("setting", "mean depth", "right (95 % interval)", "points over a mixture"), tuple(grid), "frontier",
                  when=tuple(when_rows)),
        sheet=rows,
        keys=_keys(rows),
        choices=(layouts, rungs),
    )  # fmt: skip


def frontier_memory(frontier: pl.DataFrame, task: str | None = None) -> Figure:
    """Accuracy against the most KV that was taken at a time, layouts beside each other; all hops together."""
    rows, name = _of_task(frontier, task)
    rows = rows.filter(pl.col("hops").is_null()).with_columns(mib=pl.col("peak_kv_bytes") / 2**20)
    kvs = rows["kv"].unique(maintain_order=True).to_list()
    data: list[dict[str, Any]] = []
    for at, kv in enumerate(kvs):
        for kind, (words, _, symbol, _) in KINDS.items():
            part = rows.filter((pl.col("kv") == kv) & (pl.col("kind") == kind))
            if part.height:
                colour = f"var(--{_TOKENS[at % len(_TOKENS)]})"
                data.append({
                    "type": "scatter", "mode": "markers", "x": part["mib"].to_list(), "y": part["accuracy"].to_list(),
                    "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 1.6, "color": colour}},
                    "cliponaxis": False, "hoverinfo": "text",
                    "hovertext": [f"{kv}: {_hover(words, row)}" for row in part.iter_rows(named=True)],
                })  # fmt: skip
    top = max(rows["mib"].to_list())
    grid = tuple((row["kv"], row["setting"], number(row["mib"], 1), _share(row)) for row in rows.iter_rows(named=True))
    xaxis = {"title": "most KV at a time, MiB, reservations included", "range": [0, 1.06 * top], "nticks": 7}
    peaks = rows.group_by("kv", maintain_order=True).agg(pl.col("mib").max())
    said = ", ".join(f"{kv} at most {number(mib, 1)} MiB" for kv, mib in peaks.iter_rows())
    return Figure(
        id=f"{name}-frontier-memory",
        title="Accuracy against keys and values",
        spec={"data": data, "layout": layout(height=420, xaxis=xaxis, yaxis=_accuracy_axis())},
        alt=f"Accuracy over the peak of keys and values: {said}.",
        grid=Grid(("keys and values", "setting", "MiB", "right (95 % interval)"), grid, "frontier"),
        sheet=rows.drop("mib"),
        keys=tuple(Key("square", _TOKENS[at % len(_TOKENS)], kv) for at, kv in enumerate(kvs)),
    )


def _of_task(frontier: pl.DataFrame, task: str | None) -> tuple[pl.DataFrame, str]:
    names = frontier["task"].unique(maintain_order=True).to_list()
    if task is None and len(names) == 1:
        task = names[0]
    if task not in names:
        what = "no task is named" if task is None else f"there is no task '{task}'"
        raise UserError(what, where="table frontier", remedy=f"it has {', '.join(names)}")
    return frontier.filter(pl.col("task") == task), str(task)


def _depth_trace(kind: str, part: pl.DataFrame) -> dict[str, Any]:
    words, token, symbol, _ = KINDS[kind]
    colour = f"var(--{token})"
    trace: dict[str, Any] = {
        "type": "scatter", "mode": "lines+markers" if kind == "fixed" else "markers",
        "x": part["mean_exit"].to_list(), "y": part["accuracy"].to_list(), "cliponaxis": False, "hoverinfo": "text",
        "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 1.6, "color": colour}},
        "error_y": error_bar(list(part.select("accuracy", "accuracy_low", "accuracy_high").iter_rows()), token),
        "hovertext": [_hover(words, row) for row in part.iter_rows(named=True)],
    }  # fmt: skip
    return trace | ({"line": {"color": colour, "width": 1.4, "dash": "dot"}} if kind == "fixed" else {})


def _keys(rows: pl.DataFrame) -> tuple[Key, ...]:
    there: Sequence[str] = rows["kind"].unique().to_list()
    return tuple(Key(mark, token, words) for kind, (words, token, _, mark) in KINDS.items() if kind in there)


def _accuracy_axis() -> dict[str, Any]:
    return {"title": "right answers", "range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6}


def _share(row: dict[str, Any]) -> str:
    return f"{percent(row['accuracy'])} ({percent_interval(row['accuracy_low'], row['accuracy_high'])})"


def _points(row: dict[str, Any], name: str) -> str:
    return points_interval(row[f"{name}_low"], row[f"{name}_high"])


def _hover(words: str, row: dict[str, Any]) -> str:
    said = f"{row['setting']} ({words})<br><b>{percent(row['accuracy'])}</b> right at {number(row['mean_exit'])} loops"
    if row["gain"] is not None:
        said += f"<br>{number(100 * row['gain'], 1)} points over a mixture ({_points(row, 'gain')})"
    return f"{said}<br>mean depth {interval(row['mean_exit_low'], row['mean_exit_high'])}"
