"""Accuracy and probability layer by layer within the loops: what each layer adds, loop after loop."""

from __future__ import annotations

from typing import Any

import polars as pl

from depthprobe.report import palette
from depthprobe.report.data import Axis, Task
from depthprobe.report.figures import Figure, Grid, layout
from depthprobe.report.text import missing, percent

__all__ = ["layers_within_loops"]

_PANELS = (
    ("accuracy", "layer-accuracy", "Accuracy, layer by loop", "right"),
    ("p_correct", "layer-p-correct", "p(correct), layer by loop", "probability of the right answer"),
)
_GAP = 12  # pixels between two rungs
_STATE = "end"


def layers_within_loops(task: Task) -> tuple[Figure, ...]:
    """Heat maps layer × loop, one band for each hops; none for a model whose loops hold a single layer.

    A loop's end (the state behind the norm that some models apply there) is a row of its own, the prelude and the coda
    are columns before the first loop and behind the last. The embedding lies in no layer and is left out.
    """
    axis = task.axis
    outside = any(c.layer > 0 and not 1 <= c.loop <= axis.n_loops for c in axis.coordinates)
    if not axis.looped or (axis.layers_per_loop < 2 and not outside):
        return ()
    return tuple(_panel(task, *panel) for panel in _PANELS)


def _places(axis: Axis) -> tuple[list[str], list[str], dict[tuple[int, int], int]]:
    """Row names, column names, and (row, column) -> depth."""
    inner = [(i, c) for i, c in enumerate(axis.coordinates) if c.site != "embed"]
    deepest = max(c.layer for _, c in inner)
    rows = [str(layer) for layer in range(1, deepest + 1)]
    if any(c.site == "loop_state" for _, c in inner):
        rows.append(_STATE)
    loops = sorted({c.loop for _, c in inner})
    columns = ["p" if r < 1 else "c" if r > axis.n_loops else str(r) for r in loops]
    place = {
        (deepest if c.site == "loop_state" else c.layer - 1, loops.index(c.loop)): depth for depth, c in inner
    }
    return rows, columns, place


def _panel(task: Task, column: str, slug: str, title: str, what: str) -> Figure:
    rows, columns, place = _places(task.axis)
    values = {k: task.accuracy_of[k][column].to_list() for k in task.hops}
    seen = [values[k][depth] for k in task.hops for depth in place.values() if not missing(values[k][depth])]
    peak = 1.0 if column == "accuracy" else max([*seen, 1e-6])
    band = max(9, 20 - len(rows)) * len(rows)
    height = len(task.hops) * band + (len(task.hops) - 1) * _GAP
    key = ", ".join(words for letter, words in (("p", "p prelude"), ("c", "c coda")) if letter in columns)
    base = layout(
        height=height + 60,
        left=100,
        xaxis={
            "title": f"loop r ({key})" if key else "loop r",
            "tickmode": "array",
            "tickvals": list(range(len(columns))),
            "ticktext": _thinned(columns, 16),
            "range": [-0.5, len(columns) - 0.5],
            "showgrid": False,
            "tickangle": 0,
            # under the lowest band, whichever axis that is
            "anchor": _axis_name("y", len(task.hops) - 1),
        },
        yaxis={"title": "layer", "showgrid": False},
    )
    plain = base.pop("yaxis")
    data: list[dict[str, Any]] = []
    base["annotations"] = []
    for i, k in enumerate(task.hops):
        top = 1 - i * (band + _GAP) / height
        bottom = max(top - band / height, 0.0)
        base["yaxis" if i == 0 else f"yaxis{i + 1}"] = plain | {
            "title": plain["title"] | {"text": "layer", "standoff": 4},
            "domain": [bottom, top],
            "tickmode": "array",
            "tickvals": list(range(len(rows))),
            "ticktext": _thinned(rows, max(2, band // 13)),
            "tickfont": {"size": 10.5, "color": "var(--soft)"},
            "range": [len(rows) - 0.5, -0.5],
        }
        base["annotations"].append(
            {
                "text": f"k = {k}", "xref": "paper", "yref": "paper", "x": 0, "xshift": -98, "y": (top + bottom) / 2,
                "xanchor": "left", "yanchor": "middle", "showarrow": False, "align": "left",
                "font": {"size": 12.5, "color": "var(--ink)"},
            }
        )  # fmt: skip
        trace = _band(task, values[k], rows, columns, place, peak, what)
        trace["hovertext"] = [[f"k = {k}, {cell}" if cell else "" for cell in row] for row in trace["hovertext"]]
        data.append(trace | {"yaxis": _axis_name("y", i)})
    for i in range(1, len(task.hops)):  # a title at the first band alone
        base[f"yaxis{i + 1}"]["title"] = {"text": ""}
    last = values[task.hops[-1]]
    named = [(task.axis.long(depth), depth) for depth in sorted(place.values())]
    return Figure(
        id=f"{task.slug}-{slug}",
        title=f"{title}: {what}" if column != "accuracy" else title,
        spec={"data": data, "layout": base},
        alt=f"Heat map: {what}, one band of layers for each hops, columns by loop. At k = {max(task.hops)}: "
        + ", ".join(f"{percent(last[depth])} at {name}" for name, depth in (named[0], named[-1]))
        + ".",
        grid=Grid(
            ("depth", *(f"k = {k}" for k in task.hops)),
            tuple((name, *(percent(values[k][depth]) for k in task.hops)) for name, depth in named),
            "accuracy",
        ),
        sheet=task.accuracy.select("task", "hops", "depth", "loop", "layer", column, "n")
        .filter(pl.col("depth").is_in(list(place.values())))
        .with_columns(site=pl.col("depth").replace_strict(_sites(task.axis), return_dtype=pl.String)),
        scale=("0 %", f"{percent(peak)} {'right' if column == 'accuracy' else ''}".strip()),
    )


def _band(
    task: Task,
    values: list[float],
    rows: list[str],
    columns: list[str],
    place: dict[tuple[int, int], int],
    peak: float,
    what: str,
) -> dict[str, Any]:
    """One rung's trace; a place that the model does not have is empty."""
    depth = [[place.get((row, column)) for column in range(len(columns))] for row in range(len(rows))]
    return {
        "type": "heatmap",
        "z": [[None if d is None or missing(values[d]) else values[d] for d in row] for row in depth],
        "x0": 0,
        "dx": 1,
        "y0": 0,
        "dy": 1,
        "zmin": 0,
        "zmax": peak,
        "colorscale": palette.heat_scale(),
        "showscale": False,
        "xgap": 2 if len(columns) <= 18 else 0,
        "ygap": 1,
        "hoverongaps": False,
        "hoverinfo": "text",
        "hovertext": [
            ["" if d is None else f"{task.axis.long(d)}<br><b>{percent(values[d])}</b> {what}" for d in row]
            for row in depth
        ],
    }


def _sites(axis: Axis) -> dict[int, str]:
    return {depth: c.site for depth, c in enumerate(axis.coordinates)}


def _axis_name(letter: str, i: int) -> str:
    return letter if i == 0 else f"{letter}{i + 1}"


def _thinned(names: list[str], most: int) -> list[str]:
    """At most so many names, evenly; the others stay empty."""
    step = -(-len(names) // max(most, 1))
    return [name if i % step == 0 else "" for i, name in enumerate(names)]
