"""At which depth answers settle, become right and become plausible: distributions by hops."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl

from depthprobe.report import palette
from depthprobe.report.data import Task
from depthprobe.report.figures import ROW, Figure, Grid, Key, depth_axis, hops_axis, layout
from depthprobe.report.text import number, percent

__all__ = ["STRIPS", "settling_strips"]

#: column of `settling`, its name, what it is
STRIPS = (
    ("settling_depth", "Settling depth", "from here on the top token stays the final one"),
    ("correct_depth", "Correct depth", "from here on the right candidate leads"),
    ("plausible_depth", "Plausible depth", "from here on a plausible candidate leads"),
)


def settling_strips(task: Task) -> tuple[Figure, ...]:
    """Three strips, hops × depth, on one colour scale; a column "never" where an item never gets there."""
    shares = {column: _shares(task, column) for column, _, _ in STRIPS}
    # "never" is told in numbers, so that it does not take the colour scale from the depths
    peak = max(max(max(row[:-1]) for row in rows) for rows in shares.values()) or 1.0
    return tuple(_strip(task, *strip, shares[strip[0]], peak) for strip in STRIPS)


def _shares(task: Task, column: str) -> list[list[float]]:
    """[hops][depths + 1]: share of items at each depth; the last entry is "never"."""
    n_depths = len(task.axis.coordinates)
    rows: list[list[float]] = []
    for k in task.hops:
        values = _depths(task, k, column)
        row = [0.0] * (n_depths + 1)
        for depth, count in Counter(values).items():
            row[n_depths if depth is None else depth] = count / len(values)
        rows.append(row)
    return rows


def _depths(task: Task, k: int, column: str) -> list[int | None]:
    """Depths of the items of k hops. Where the model ends with a loop they are loop ends: the states within a loop are
    not made to be read, and an answer would "settle" only at the last of them."""
    if not task.axis.ends_in_loop:
        return task.settling_of[k][column].to_list()
    ends = [i for i, c in enumerate(task.axis.coordinates) if c.is_loop_end]
    loops = task.settling_of[k][column.replace("_depth", "_loop")].to_list()
    return [None if loop is None else ends[loop - 1] for loop in loops]


def _mean(values: list[int | None]) -> float | None:
    reached = [value for value in values if value is not None]
    return sum(reached) / len(reached) if reached else None


def _strip(
    task: Task, column: str, name: str, meaning: str, shares: list[list[float]], peak: float
) -> Figure:
    n_depths = len(task.axis.coordinates)
    never = [row[n_depths] for row in shares]
    means = [_mean(_depths(task, k, column)) for k in task.hops]
    mean_text = [_mean_words(task, mean) for mean in means]

    def strip(x0: float, rows: list[list[float]], words: list[str]) -> dict[str, Any]:
        return {
            "type": "heatmap",
            "z": rows,
            "x0": x0,
            "dx": 1,
            "zmin": 0,
            "zmax": peak,
            "colorscale": palette.heat_scale(),
            "showscale": False,
            "xgap": 2 if n_depths <= 14 else 0,
            "ygap": 2,
            "hoverinfo": "text",
            "hovertext": [
                [
                    f"k = {k}, {where}<br><b>{percent(v)}</b> of questions"
                    for where, v in zip(words, row, strict=True)
                ]
                for k, row in zip(task.hops, rows, strict=True)
            ],
        }

    data = [strip(0, [row[:n_depths] for row in shares], [task.axis.long(d) for d in range(n_depths)])]
    xaxis = depth_axis(task.axis)
    if any(never):
        width = max(1.0, n_depths / 9)  # of the column, in depth steps: its numbers need room on a long axis
        at = n_depths - 0.5 + 0.5 * width + 0.25 * width
        xaxis = depth_axis(task.axis, extra=(at, "never", width))
        data.append(
            strip(at, [[value] for value in never], ["never"])
            | {
                "dx": width,
                "colorscale": [[0, "var(--sunk)"], [1, "var(--sunk)"]],
                "text": [[f"{100 * value:.0f}"] for value in never],
                "texttemplate": "%{text}",
                "textfont": {"size": 11.5, "color": "var(--soft)"},
            }
        )
    reached = [i for i, mean in enumerate(means) if mean is not None]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [means[i] for i in reached],
            "y": reached,
            "marker": {
                "symbol": "diamond",
                "size": 10,
                "color": "var(--rival)",
                "line": {"color": "var(--card)", "width": 1.5},
            },
            "hoverinfo": "text",
            "hovertext": [f"k = {task.hops[i]}<br>mean <b>{mean_text[i]}</b>" for i in reached],
        }
    )
    listed = ", ".join(f"{mean_text[i]} at k = {task.hops[i]}" for i in reached)
    return Figure(
        id=f"{task.slug}-{column.replace('_', '-')}",
        title=f"{name}: {meaning}",
        spec={
            "data": data,
            "layout": layout(
                height=ROW * len(task.hops) + 66, xaxis=xaxis, yaxis=hops_axis(task.hops), left=48
            ),
        },
        alt=f"Distribution over depth, one row per hops. Means: {listed or 'no question gets there'}."
        + (
            f" Never reached by {', '.join(map(percent, never))} of the rows' questions."
            if any(never)
            else ""
        ),
        grid=Grid(
            ("hops", "mean", "never", *(task.axis.short(d) for d in range(n_depths))),
            tuple(
                (f"k = {k}", mean_text[i], percent(never[i]), *(percent(v) for v in shares[i][:n_depths]))
                for i, k in enumerate(task.hops)
            ),
            "settling",
        ),
        sheet=pl.DataFrame(
            {
                "task": [task.name] * sum(map(len, shares)),
                "hops": [k for k in task.hops for _ in range(n_depths + 1)],
                "depth": [*map(str, range(n_depths)), "never"] * len(task.hops),
                "share": [value for row in shares for value in row],
            }
        ),
        keys=(Key("diamond", "rival", "mean"),),
        scale=("0 %", f"{percent(peak)} of a row"),
    )


def _mean_words(task: Task, mean: Any) -> str:
    if mean is None:
        return "–"
    if not task.axis.looped:
        return f"layer {number(mean, 1)}"
    first = next((i for i, c in enumerate(task.axis.coordinates) if c.loop == 1), 0)
    steps = task.axis.steps_per_loop
    if steps == 1 or task.axis.ends_in_loop:  # loop r ends `steps` depths after loop r − 1
        return f"loop {number((mean - first + 1) / steps, 1)}"
    return f"readout {number(mean, 1)}"
