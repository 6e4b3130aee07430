"""What a figure of the report is, and the layout that all of them share.

A figure is plain data in plotly's schema whose colours are tokens (`depthprobe.report.palette`), together
with the words and the table that say the same to someone who cannot see it.

    figure                               # in a notebook: drawn, in the theme of plotly's default template
    figure.plotly("dark", n_hops=6)      # a plotly Figure with real colours, title and legend
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from depthprobe.errors import UserError
from depthprobe.report.data import Axis

__all__ = [
    "Choice", "Figure", "Grid", "Key", "agrees", "band", "bounds", "depth_axis", "hops_axis", "hops_line_axis",
    "layout", "relative_axis", "selected",
]  # fmt: skip

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'Helvetica Neue', Arial, sans-serif"
ROW = 34  # pixels of a rung in figures whose rows are hops


@dataclass(frozen=True, slots=True)
class Grid:
    """The table view of a figure: the numbers that it draws, already as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    source: str  # the Parquet file that they come from
    when: tuple[Mapping[str, str], ...] = ()  # of each row: under which choices it is shown; none: always
    note: str = ""  # on what the table leaves out


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a mark (a class of the style sheet), its colour token and its name."""

    mark: str
    token: str
    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What a figure lets its reader pick, one option at a time.

    Attributes:
        key: of the `meta["when"]` of traces, which says under which option each is drawn.
        name: in words.
        options: (value, its words); the first is drawn until another is picked.
    """

    key: str
    name: str
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Figure:
    """One panel.

    Attributes:
        id: unique on the page.
        title: what is drawn, a noun phrase.
        spec: {"data": […], "layout": {…}}, colours as tokens.
        alt: one or two sentences for a screen reader, with the numbers that matter.
        grid: the table view.
        sheet: the numbers behind the drawing, as the page exports them to CSV; no nested columns.
        keys: the legend; hops have a legend of their own for the whole section.
        scale: (low, high) labels of the heat ramp, if it is used; three for the ramp of both signs.
        choices: what can be picked; the spec holds the traces of all options.
    """

    id: str
    title: str
    spec: dict[str, Any]
    alt: str
    grid: Grid
    sheet: pl.DataFrame
    keys: tuple[Key, ...] = field(default=())
    scale: tuple[str, ...] | None = None
    choices: tuple[Choice, ...] = field(default=())

    def choose(self, **picked: str | int) -> Figure:
        """The figure with some of its choices made, as in `figure.choose(hops=3)`; the sheet keeps all.

        Raises:
            UserError: there is no such choice, or it has no such option.
        """
        return choose(self, picked)

    def plotly(self, theme: str | None = None, n_hops: int | None = None) -> Any:
        """A `plotly.graph_objects.Figure` that stands alone: real colours, a card behind it, title and legend.

        Args:
            theme: "light" or "dark"; None for that of plotly's default template (`report.notebook.current_theme`).
            n_hops: rungs of the run, which decide the colour of each; None for those that the figure draws.
        """
        from depthprobe.report.notebook import standalone

        return standalone(self, theme, n_hops)

    def __repr__(self) -> str:
        return f"Figure({self.id!r}: {self.title})"

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Drawn by plotly's default renderer; as plotly's own type of data where that opens a window instead."""
        drawn = self.plotly()
        bundle: dict[str, Any] = drawn._repr_mimebundle_(*args, **kwargs)
        return bundle or {"application/vnd.plotly.v1+json": json.loads(drawn.to_json())}

    def csv(self) -> str:
        """The sheet as CSV: full column names, six decimals, nothing for a missing number."""
        return self.sheet.fill_nan(None).write_csv(float_precision=6)


def selected(choices: Sequence[Choice]) -> dict[str, str]:
    """What is drawn until a reader picks: the first option of each."""
    return {choice.key: choice.options[0][0] for choice in choices}


def agrees(when: Mapping[str, str], picked: Mapping[str, str]) -> bool:
    """Whether what belongs to these options is shown; a choice that neither knows of does not matter."""
    return all(picked.get(key, value) == value for key, value in when.items())


def choose(figure: Figure, picked: Mapping[str, str | int]) -> Figure:
    """See `Figure.choose`."""
    known = {choice.key: choice for choice in figure.choices}
    for key, value in picked.items():
        if key not in known:
            offers = f"it offers {', '.join(known)}" if known else "it offers none"
            raise UserError(f"the figure {figure.id} has no choice '{key}'", remedy=offers)
        options = [option for option, _ in known[key].options]
        if str(value) not in options:
            raise UserError(f"the figure {figure.id} has no {key} '{value}'", remedy=f"known: {', '.join(options)}")
    made = {key: str(value) for key, value in picked.items()}
    data = [trace for trace in figure.spec["data"] if agrees(trace.get("meta", {}).get("when", {}), made)]
    left = tuple(choice for choice in figure.choices if choice.key not in made)
    data = [
        trace | {"visible": agrees(trace["meta"]["when"], selected(left))} if "when" in trace.get("meta", {}) else trace
        for trace in data
    ]
    grid, when = figure.grid, figure.grid.when
    if when:
        kept = [i for i, own in enumerate(when) if agrees(own, made)]
        grid = replace(grid, rows=tuple(grid.rows[i] for i in kept), when=tuple(when[i] for i in kept))
    open_ = [known[key] for key in made if len(known[key].options) > 1]
    title = ", ".join([figure.title, *(f"{c.name} {dict(c.options)[made[c.key]]}" for c in open_)])
    return replace(figure, spec={**figure.spec, "data": data}, grid=grid, title=title, choices=left)


def layout(*, height: int, xaxis: dict[str, Any], yaxis: dict[str, Any], left: int = 58) -> dict[str, Any]:
    """The shared layout: no zooming (a page is scrolled over), no plotly legend (it would cover data)."""
    common = {
        "showline": False,
        "zeroline": False,
        "gridcolor": "var(--grid)",
        "tickcolor": "var(--rule)",
        "tickfont": {"size": 12, "color": "var(--soft)"},
        "fixedrange": True,
        "automargin": False,
    }

    def axis(own: dict[str, Any]) -> dict[str, Any]:
        title = {"font": {"size": 12.5, "color": "var(--soft)"}, "standoff": 8, "text": own.get("title", "")}
        return {**common, **own, "title": title}

    second_line = 16 if "<br>" in xaxis.get("title", "") else 0
    return {
        "height": height + second_line,
        "margin": {"l": left, "r": 14, "t": 10, "b": 50 + second_line, "pad": 0},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": "var(--ink)"},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "var(--card)",
            "bordercolor": "var(--rule)",
            "font": {"family": FONT, "size": 12.5, "color": "var(--ink)"},
            "align": "left",
        },
        "xaxis": axis(xaxis),
        # a label like "0.0006" is wider than the margin, and would stand under the title
        "yaxis": axis({"automargin": True} | yaxis),
    }


def depth_axis(axis: Axis, *, extra: tuple[float, str, float] | None = None) -> dict[str, Any]:
    """The x axis of figures over depth; `extra` is a further column on the right (centre, label, width)."""
    at: list[float] = [float(depth) for depth in axis.ticks()]
    text = [axis.short(depth) for depth in axis.ticks()]
    right = len(axis.coordinates) - 0.5
    if extra is not None:
        centre, label, width = extra
        # a tick right beside the column would run into its label on a long axis
        near = [i for i, tick in enumerate(at) if len(axis.coordinates) <= 14 or centre - tick > 0.9 * width]
        at, text = [*(at[i] for i in near), centre], [*(text[i] for i in near), label]
        right = centre + 0.5 * width
    return {
        "title": axis.title,
        "tickmode": "array",
        "tickvals": at,
        "ticktext": text,
        "tickangle": 0,
        "range": [-0.5, right],
        "showgrid": False,
        "ticks": "outside",
        "ticklen": 4,
    }


def relative_axis() -> dict[str, Any]:
    """The x axis of figures over the share of a model's depth, for models of different sizes."""
    return {
        "title": "share of the model's depth (0 is the embedding)",
        "range": [-0.02, 1.02],
        "dtick": 0.25,
        "showgrid": False,
        "ticks": "outside",
        "ticklen": 4,
    }


def hops_axis(hops: Sequence[int]) -> dict[str, Any]:
    """A y axis with one row per hops, the fewest on top; rows are 0, 1, … so missing rungs leave no gap."""
    return {
        "title": "hops k",
        "tickmode": "array",
        "tickvals": list(range(len(hops))),
        "ticktext": [str(k) for k in hops],
        "range": [len(hops) - 0.5, -0.5],
        "showgrid": False,
    }


def hops_line_axis(hops: Sequence[int]) -> dict[str, Any]:
    """An x axis with a tick for each hops."""
    axis = {"title": "hops k", "tickmode": "array", "tickvals": list(hops), "ticktext": [str(k) for k in hops]}
    return axis | {"range": [hops[0] - 0.4, hops[-1] + 0.4], "showgrid": False}


def band(
    x: Sequence[float], low: Sequence[float | None], high: Sequence[float | None], token: str, meta: dict[str, Any]
) -> list[dict[str, Any]]:
    """The trace of a translucent band (token: one that has a "-band"); none where any bound is missing."""
    ends = [*low, *high]
    if not ends or any(value is None or math.isnan(value) for value in ends):
        return []
    shape = {"type": "scatter", "mode": "lines", "fill": "toself", "line": {"width": 0}, "hoverinfo": "skip"}
    y = [*high, *reversed(low)]
    return [shape | {"x": [*x, *reversed(x)], "y": y, "fillcolor": f"var(--{token}-band)", "meta": meta}]


def bounds(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Lengths of the error bar up and down; 0 where there is no interval (too few stories)."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return 0.0, 0.0
    return max(high - value, 0.0), max(value - low, 0.0)


def error_bar(
    rows: Sequence[tuple[float, float | None, float | None]], token: str, *, thickness: float = 1.6
) -> dict[str, Any]:
    """Asymmetric error bars of (value, low, high) rows."""
    pairs = [bounds(*row) for row in rows]
    return {
        "type": "data",
        "symmetric": False,
        "array": [up for up, _ in pairs],
        "arrayminus": [down for _, down in pairs],
        "color": f"var(--{token})",
        "thickness": thickness,
        "width": 0,
    }
