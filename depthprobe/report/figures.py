"""What a figure of the report is, and the layout that all of them share.

A figure is plain data in plotly's schema whose colours are tokens (`depthprobe.report.palette`), together
with the words and the table that say the same to someone who cannot see it.

    figure                               # in a notebook: drawn, in the theme of plotly's default template
    figure.plotly("dark", n_hops=6)      # a plotly Figure with real colours, title and legend
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from depthprobe.report.data import Axis

__all__ = ["Figure", "Grid", "Key", "bounds", "depth_axis", "hops_axis", "layout", "relative_axis"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'Helvetica Neue', Arial, sans-serif"
ROW = 34  # pixels of a rung in figures whose rows are hops


@dataclass(frozen=True, slots=True)
class Grid:
    """The table view of a figure: the numbers that it draws, already as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    source: str  # the Parquet file that they come from


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a mark (a class of the style sheet), its colour token and its name."""

    mark: str
    token: str
    name: str


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
        scale: (low, high) labels of the heat ramp, if it is used.
    """

    id: str
    title: str
    spec: dict[str, Any]
    alt: str
    grid: Grid
    sheet: pl.DataFrame
    keys: tuple[Key, ...] = field(default=())
    scale: tuple[str, str] | None = None

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
        "yaxis": axis(yaxis),
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
