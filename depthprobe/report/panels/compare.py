"""Several models in one figure, over the share of their depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from depthprobe.errors import UserError
from depthprobe.report.data import Task
from depthprobe.report.figures import Figure, Grid, layout, relative_axis
from depthprobe.report.text import number, percent, percent_interval

__all__ = ["compare_accuracy"]

#: token, symbol and dash of the first, second, … model
_MARKS = (
    ("model", "circle", "solid"),
    ("rival", "diamond", "dash"),
    ("gate", "square", "dot"),
    ("other", "x", "dashdot"),
)


def compare_accuracy(tasks: Mapping[str, Task], hops: int) -> Figure:
    """Accuracy at one hop count over relative depth, a line for each model (or each task of one).

    Args:
        tasks: name in the legend -> its task of a run; at most four.
        hops: which rung.

    Raises:
        UserError: no task, more than four, or one that was not asked at these hops.
    """
    if not 1 <= len(tasks) <= len(_MARKS):
        raise UserError(f"{len(tasks)} tasks in one comparison", remedy=f"give 1 to {len(_MARKS)}")
    data: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    sheets: list[pl.DataFrame] = []
    for (name, task), (token, symbol, dash) in zip(tasks.items(), _MARKS, strict=False):
        if hops not in task.accuracy_of:
            asked = ", ".join(map(str, task.hops))
            raise UserError(f"{name} was not asked at {hops} hops", remedy=f"it was asked at {asked}")
        df = task.accuracy_of[hops][task.axis.between_loops]
        cells = list(df.iter_rows(named=True))
        shown = [f"{percent(r['accuracy'])} ({percent_interval(r['low'], r['high'])})" for r in cells]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": df["relative_depth"].to_list(),
                "y": df["accuracy"].to_list(),
                "line": {"color": f"var(--{token})", "width": 2, "dash": dash},
                "marker": {"color": f"var(--{token})", "size": 8, "symbol": symbol},
                "cliponaxis": False,
                "hoverinfo": "text",
                "hovertext": [
                    f"{name}, {task.axis.long(r['depth'])}<br><b>{words}</b> right"
                    for r, words in zip(cells, shown, strict=True)
                ],
            }
        )
        rows += [
            (name, task.axis.long(r["depth"]), number(r["relative_depth"]), words)
            for r, words in zip(cells, shown, strict=True)
        ]
        sheets.append(df.select(model=pl.lit(name), **{c: c for c in ("task", "hops", "relative_depth", "accuracy")}))
    ends = ", ".join(f"{name} {percent(trace['y'][-1])}" for name, trace in zip(tasks, data, strict=True))
    yaxis = {"title": "accuracy", "range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6}
    return Figure(
        id=f"compare-accuracy-{hops}",
        title=f"Accuracy at k = {hops} over relative depth",
        spec={"data": data, "layout": layout(height=330, xaxis=relative_axis(), yaxis=yaxis)},
        alt=f"Lines over the share of depth, at {hops} hops. At full depth: {ends}.",
        grid=Grid(("model", "depth", "share of depth", "right (95 % interval)"), tuple(rows), "accuracy"),
        sheet=pl.concat(sheets),
    )
