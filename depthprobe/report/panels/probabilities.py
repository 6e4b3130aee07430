"""How much probability the right and the plausible answers have, over depth."""

from __future__ import annotations

from typing import Any

import polars as pl

from depthprobe.report.data import Task
from depthprobe.report.figures import Figure, Grid, depth_axis, layout
from depthprobe.report.palette import hop_token
from depthprobe.report.text import missing, percent, percent_interval

__all__ = ["probability_curves"]

_PANELS = (
    ("p_correct", "p(correct)", "probability of the right answer"),
    ("p_plausible", "p(plausible)", "probability of any plausible answer"),
)


def probability_curves(task: Task, all_hops: tuple[int, ...]) -> tuple[Figure, Figure]:
    """p(correct) and p(plausible) over depth by hops, on one scale; `all_hops`: the run's, for colours."""
    columns = [column + end for column, _, _ in _PANELS for end in ("", "_high")]
    largest = max(
        (value for column in columns for value in task.accuracy[column].to_list() if not missing(value)),
        default=1.0,
    )
    top = min(max(1.08 * largest, 0.01), 1.03)
    correct, plausible = (_curve(task, all_hops, *panel, top) for panel in _PANELS)
    return correct, plausible


def _curve(task: Task, all_hops: tuple[int, ...], column: str, short: str, long: str, top: float) -> Figure:
    bands: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    frames: dict[int, pl.DataFrame] = {}
    n_depths = len(task.axis.coordinates)
    for k in task.hops:
        frames[k] = task.accuracy_of[k]
        df = frames[k][task.axis.between_loops]  # the table has every depth
        token = hop_token(all_hops.index(k))
        x, y = df["depth"].to_list(), df[column].to_list()
        low, high = df[f"{column}_low"].to_list(), df[f"{column}_high"].to_list()
        if not any(missing(value) for value in (*low, *high)):
            bands.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [*x, *reversed(x)],
                    "y": [*high, *reversed(low)],
                    "fill": "toself",
                    "fillcolor": f"var(--{token}-band)",
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "meta": {"hop": k},
                }
            )
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": x,
                "y": y,
                "line": {"color": f"var(--{token})", "width": 2},
                "marker": {"color": f"var(--{token})", "size": 6 if n_depths <= 16 else 3.5},
                "cliponaxis": False,
                "meta": {"hop": k},
                "hoverinfo": "text",
                "hovertext": [
                    f"k = {k}, {task.axis.long(d)}<br><b>{percent(v)}</b> (95 % interval "
                    f"{percent_interval(a, b)})"
                    for d, v, a, b in zip(x, y, low, high, strict=True)
                ],
            }
        )
    yaxis = {
        "title": "mean probability",
        "range": [-0.02 * top, top],
        "tickformat": ".0%" if top > 0.06 else ".1%",
        "nticks": 6,
    }
    ends = ", ".join(f"{percent(frames[k][column][-1])} at k = {k}" for k in task.hops)
    return Figure(
        id=f"{task.slug}-{column.replace('_', '-')}",
        title=f"{short}: {long}",
        spec={
            "data": [*bands, *lines],
            "layout": layout(height=330, xaxis=depth_axis(task.axis), yaxis=yaxis),
        },
        alt=f"Lines over depth, one per hops: mean {long}. At the last depth: {ends}.",
        grid=Grid(
            ("depth", *(f"k = {k}" for k in task.hops)),
            tuple(
                (
                    task.axis.long(depth),
                    *(
                        f"{percent(df[column][depth])} "
                        f"({percent_interval(df[column + '_low'][depth], df[column + '_high'][depth])})"
                        for df in frames.values()
                    ),
                )
                for depth in range(n_depths)
            ),
            "accuracy",
        ),
        sheet=pl.concat(list(frames.values())).select(
            "task", "hops", "depth", "loop", "layer", column, f"{column}_low", f"{column}_high", "n"
        ),
    )
