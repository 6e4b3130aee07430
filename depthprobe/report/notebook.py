"""Figures outside the page: in a notebook they bring what the page's HTML says around them.

    from depthprobe import report
    report.use_theme("dark")                    # figures, and your own plotly figures, until the kernel ends
    report.accuracy_by_depth(run.task("follow"))
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from depthprobe.errors import UserError
from depthprobe.report import palette
from depthprobe.report.figures import agrees

if TYPE_CHECKING:
    from depthprobe.report.figures import Choice, Figure

__all__ = ["current_theme", "standalone", "use_theme"]

#: mark of a legend's key on the page -> plotly's symbol
_SYMBOLS = {
    "dot": "circle",
    "diamond": "diamond",
    "tick": "line-ns-open",
    "square-open": "square-open",
    "diamond-open": "diamond-open",
    "ring": "circle-open",
    "triangle": "triangle-up",
    "cross": "x",
    "square": "square",
}


def current_theme() -> str:
    """ "dark" if plotly's default template is a dark one (`plotly.io.templates.default`), else "light".

    A kernel does not know the theme of the page that shows it, so the template is what a user sets.
    """
    import plotly.io as pio

    return "dark" if "dark" in str(pio.templates.default or "") else "light"


def use_theme(theme: str) -> None:
    """Make a theme plotly's default: "light" or "dark"; for our figures and those that a user draws.

    Raises:
        UserError: another name.
    """
    import plotly.graph_objects as go
    import plotly.io as pio

    _known(theme)
    colours = palette.THEMES[theme]
    axis = {"gridcolor": colours["grid"], "linecolor": colours["rule"], "zerolinecolor": colours["rule"]}
    name = "depthprobe" if theme == "light" else "depthprobe_dark"
    pio.templates[name] = go.layout.Template(
        layout={
            "paper_bgcolor": colours["card"],
            "plot_bgcolor": colours["card"],
            "font": {"color": colours["ink"]},
            "colorway": [colours[token] for token in ("model", "rival", "gate", "other")],
            "xaxis": axis,
            "yaxis": axis,
        }
    )
    pio.templates.default = name


def standalone(figure: Figure, theme: str | None = None, n_hops: int | None = None) -> Any:
    """A `plotly.graph_objects.Figure` with title, legend and a card behind it; see `Figure.plotly`.

    Raises:
        UserError: an unknown theme.
    """
    from plotly.graph_objects import Figure as PlotlyFigure

    theme = current_theme() if theme is None else theme
    _known(theme)
    # a notebook's drop-down can switch one choice; the others keep their first options, or `Figure.choose` makes them
    figure = figure.choose(**{choice.key: choice.options[0][0] for choice in figure.choices[1:]})
    spec = copy.deepcopy(figure.spec)
    rungs = [int(found) for found in re.findall(r"--hop-(\d+)", str(spec))]
    n_hops = max([1, *rungs]) if n_hops is None else n_hops
    for trace in spec["data"]:
        if "marker" in trace and "hop" in trace.get("meta", {}):
            trace |= {"name": f"k = {trace['meta']['hop']}", "showlegend": True}
        else:
            trace["showlegend"] = trace["type"] == "scatter" and "name" in trace
    for key in figure.keys:
        colour = f"var(--{key.token})"
        marker: dict[str, Any] = {"symbol": _SYMBOLS.get(key.mark, "circle"), "size": 10, "color": colour}
        marker["line"] = {"color": colour, "width": 1.6}
        spec["data"].append(
            {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker, "name": key.name}
            | {"showlegend": True}
        )
    has_legend = any(trace["showlegend"] for trace in spec["data"] if "showlegend" in trace)
    layout = spec["layout"]
    head = 74 if has_legend else 44
    layout["height"] += head
    layout["margin"] |= {"t": layout["margin"]["t"] + head}
    layout |= {
        "paper_bgcolor": "var(--card)",
        "title": {"text": figure.title, "x": 0, "xref": "paper", "y": 0.98, "yanchor": "top", "font": {"size": 15}},
        "showlegend": has_legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom", "font": {"size": 12}},
        "template": "none",
    }
    for choice in figure.choices:
        if len(choice.options) > 1:
            layout["updatemenus"] = [_menu(choice, spec["data"])]
    return PlotlyFigure(palette.resolve(spec, theme, n_hops))


def _menu(choice: Choice, data: list[dict[str, Any]]) -> dict[str, Any]:
    """A drop-down that shows the traces of one option, and those of none."""
    buttons = [
        {
            "label": f"{choice.name}: {words}",
            "method": "restyle",
            "args": ["visible", [agrees(trace.get("meta", {}).get("when", {}), {choice.key: value}) for trace in data]],
        }
        for value, words in choice.options
    ]
    place = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "font": {"size": 12, "color": "var(--ink)"}}
    return {"buttons": buttons, "bgcolor": "var(--card)", "bordercolor": "var(--rule)", "showactive": True, **place}


def _known(theme: str) -> None:
    if theme not in palette.THEMES:
        raise UserError(f"there is no theme '{theme}'", remedy=f"known: {', '.join(palette.THEMES)}")
