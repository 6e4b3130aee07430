"""Lines over depth with bands: one figure for several options of what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from depthprobe.report.data import Axis
from depthprobe.report.figures import Choice, Figure, Grid, Key, agrees, band, depth_axis, layout, selected
from depthprobe.report.text import missing

__all__ = ["Series", "curves", "hops_choice", "tabled"]

#: A table view holds at most so many cells; beyond it shows the first options of all choices but the hops, or of all.
MOST_CELLS = 3000
_NOTE = "This table holds the first option of {}; the CSV has all."
#: symbol of a line -> mark of its key
_MARKS = {
    "circle": "dot", "square": "square", "diamond": "diamond", "triangle-up": "triangle", "x": "cross",
    "circle-open": "ring", "square-open": "square-open",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: in the legend and the table's head.
        look: colour token, symbol, dash.
        rows: with depth, y, low, high (null: none) and n, sorted by depth.
        when: under which options it is drawn.
        hop: of a line that the section's chips switch.
    """

    name: str
    look: tuple[str, str, str]
    rows: pl.DataFrame
    when: Mapping[str, str] = field(default_factory=dict)
    hop: int | None = None


def hops_choice(hops: Sequence[int | None]) -> Choice:
    """Of the hop counts in a table; null, which stands for all, comes first."""
    values = [("all", "all"), *((str(k), str(k)) for k in sorted({k for k in hops if k is not None}))]
    return Choice("hops", "hops k", tuple(values if None in hops else values[1:]))


def curves(
    axis: Axis,
    series: Sequence[Series],
    *,
    id: str,
    title: str,
    alt: str,
    source: str,
    sheet: pl.DataFrame,
    yaxis: dict[str, Any],
    shown: Callable[[float | None], str],
    unit: str = "",
    choices: tuple[Choice, ...] = (),
    height: int = 330,
    keys: bool = True,
    what: str = "questions",
) -> Figure:
    """The figure of some series.

    Args:
        shown: a value as text, for hover texts and the table.
        unit: behind a value in hover texts.
        keys: whether the series are explained by a legend of the figure's own.
        what: n counts.
    """
    bands: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    n_depths = len(axis.coordinates)
    for one in series:
        token, symbol, dash = one.look
        meta: dict[str, Any] = {"when": dict(one.when)} if one.when else {}
        meta |= {} if one.hop is None else {"hop": one.hop}
        x, y = one.rows["depth"].to_list(), one.rows["y"].to_list()
        low, high = one.rows["low"].to_list(), one.rows["high"].to_list()
        bands += band(x, low, high, token, meta)
        hover = [
            f"{one.name}, {axis.long(d)}<br><b>{shown(v)}</b>{unit}{_bounds(a, b, shown)}<br>{n} {what}"
            for d, v, a, b, n in zip(x, y, low, high, one.rows["n"].to_list(), strict=True)
        ]
        lines.append(
            {
                "type": "scatter", "mode": "lines+markers", "x": x, "y": [_rounded(v) for v in y],
                "line": {"color": f"var(--{token})", "width": 2, "dash": dash},
                "marker": {"color": f"var(--{token})", "size": 6.5 if n_depths <= 16 else 4, "symbol": symbol},
                "cliponaxis": False, "meta": meta, "hoverinfo": "text", "hovertext": hover,
            }
        )  # fmt: skip
    start = selected(choices)
    for trace in (*bands, *lines):
        if "when" in trace["meta"]:
            trace["visible"] = agrees(trace["meta"]["when"], start)
    names = list(dict.fromkeys((one.name, one.look) for one in series))
    return Figure(
        id=id,
        title=title,
        spec={"data": [*bands, *lines], "layout": layout(height=height, xaxis=depth_axis(axis), yaxis=yaxis)},
        alt=alt,
        grid=_grid(axis, series, choices, [name for name, _ in names], source, shown),
        sheet=sheet,
        keys=tuple(Key(_MARKS.get(look[1], "dot"), look[0], name) for name, look in names) if keys else (),
        choices=choices,
    )


def tabled(
    rows: Sequence[tuple[tuple[str, ...], Mapping[str, str]]], choices: Sequence[Choice]
) -> tuple[tuple[tuple[str, ...], ...], tuple[Mapping[str, str], ...], str]:
    """Rows of a table view with their options → rows, options and a note; a long one is cut to first options."""
    start, width = selected(choices), max((len(cells) for cells, _ in rows), default=1)
    rest = {key: value for key, value in start.items() if key != "hops"}
    note = ""
    for fixed, words in ((rest, "all choices but the hops"), (start, "each choice")):
        if len(rows) * width <= MOST_CELLS:
            break
        rows = [(cells, when) for cells, when in rows if agrees(when, fixed)]
        rows = [(cells, {key: value for key, value in when.items() if key not in fixed}) for cells, when in rows]
        note = _NOTE.format(words)
    return tuple(cells for cells, _ in rows), tuple(when for _, when in rows), note


def _grid(
    axis: Axis, series: Sequence[Series], choices: Sequence[Choice], names: list[str], source: str,
    shown: Callable[[float | None], str],
) -> Grid:  # fmt: skip
    several = [choice for choice in choices if len(choice.options) > 1]
    cell: dict[tuple[tuple[str, ...], int], dict[str, str]] = {}
    options: dict[tuple[str, ...], Mapping[str, str]] = {}
    for one in series:
        key = tuple(one.when.get(choice.key, "") for choice in several)
        options[key] = dict(one.when)
        for d, v, a, b in one.rows.select("depth", "y", "low", "high").iter_rows():
            cell.setdefault((key, d), {})[one.name] = f"{shown(v)}{_bounds(a, b, shown)}"
    order = [[value for value, _ in choice.options] for choice in several]
    place = {key: [o.index(v) if v in o else -1 for o, v in zip(order, key, strict=True)] for key in options}
    rows: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
    for key, depth in sorted(cell, key=lambda found: (place[found[0]], found[1])):
        words = [dict(choice.options).get(value, "–") for choice, value in zip(several, key, strict=True)]
        values = [cell[key, depth].get(name, "–") for name in names]
        rows.append(((*words, axis.long(depth), *values), options[key]))
    cells, when, note = tabled(rows, choices)
    return Grid((*(choice.name for choice in several), "depth", *names), cells, source, when, note)


def _bounds(low: float | None, high: float | None, shown: Callable[[float | None], str]) -> str:
    return "" if missing(low) or missing(high) else f" ({shown(low)} to {shown(high)})"


def _rounded(value: float | None) -> float | None:
    """Five digits draw the same line, on a smaller page."""
    return None if value is None or missing(value) else float(f"{value:.5g}")
