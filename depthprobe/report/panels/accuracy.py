"""How often the right candidate leads, at every depth and against what needs no depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from depthprobe.report import palette
from depthprobe.report.data import Task
from depthprobe.report.figures import ROW, Figure, Grid, Key, depth_axis, error_bar, hops_axis, layout
from depthprobe.report.text import percent, percent_interval, span
from depthprobe.report.words import shortcut_name

__all__ = ["accuracy_beside_shortcuts", "accuracy_by_depth"]

#: Up to so many depths a cell is wide enough for its number on a phone.
_LABELLED = 14
_CHANCE = "chance (any candidate)"
_SHOWN = ("rule", "accuracy", "low", "high", "n")


def accuracy_by_depth(task: Task) -> Figure:
    """Heat map of accuracy, hops × depth; its table ends in chance."""
    rows, chance = [task.accuracy_of[k] for k in task.hops], task.chance()
    n_depths = len(task.axis.coordinates)
    hover = [
        [
            f"k = {k}, {task.axis.long(r['depth'])}<br><b>{percent(r['accuracy'])}</b> right "
            f"(95 % interval {percent_interval(r['low'], r['high'])})<br>{r['n']} questions; "
            f"chance {percent(chance[k])}"
            for r in df.iter_rows(named=True)
        ]
        for k, df in zip(task.hops, rows, strict=True)
    ]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": [df["accuracy"].to_list() for df in rows],
        "x0": 0,
        "dx": 1,
        "zmin": 0,
        "zmax": 1,
        "colorscale": palette.heat_scale(),
        "showscale": False,
        "xgap": 2 if n_depths <= _LABELLED else 0,
        "ygap": 2,
        "hoverinfo": "text",
        "hovertext": hover,
    }
    if n_depths <= _LABELLED:
        trace |= {
            "text": [[f"{100 * value:.0f}" for value in df["accuracy"]] for df in rows],
            "texttemplate": "%{text}",
            "textfont": {"size": 11.5},
        }
    final = task.final()
    return Figure(
        id=f"{task.slug}-accuracy",
        title=f"Accuracy by hops and {'loop' if task.axis.looped else 'layer'}",
        spec={
            "data": [trace],
            "layout": layout(
                height=ROW * len(rows) + 66, xaxis=depth_axis(task.axis), yaxis=hops_axis(task.hops), left=48
            ),
        },
        alt="Heat map: share of questions whose right candidate leads, rows by hops, columns by depth. "
        f"At the last depth: {_listed(final)}. Chance: {_of_hops(chance)}.",
        grid=Grid(
            ("depth", *(f"k = {k}" for k in task.hops)),
            tuple(
                (
                    task.axis.long(depth),
                    *(
                        f"{percent(df['accuracy'][depth])} "
                        f"({percent_interval(df['low'][depth], df['high'][depth])})"
                        for df in rows
                    ),
                )
                for depth in range(n_depths)
            )
            + ((_CHANCE, *(percent(chance[k]) for k in task.hops)),),
            "accuracy",
        ),
        sheet=task.accuracy.select("task", "hops", "depth", "loop", "layer", "accuracy", "low", "high", "n"),
        scale=("0 %", "100 % right"),
    )


def accuracy_beside_shortcuts(task: Task) -> Figure | None:
    """Dot plot: full-depth accuracy, chance, the best shortcut and the others; None if the run has no shortcuts."""
    if not task.shortcuts.height:
        return None
    row_of = {k: i for i, k in enumerate(task.hops)}
    final, best, chance = task.final(), task.best_shortcuts(), task.chance()
    rest = task.shortcuts.join(best.select("hops", "shortcut"), on=["hops", "shortcut"], how="anti")

    def points(df: pl.DataFrame, name: str | None, shift: float, **own: Any) -> dict[str, Any]:
        names = list(map(shortcut_name, df["shortcut"])) if name is None else [name] * df.height
        return {
            "type": "scatter",
            "mode": "markers",
            "x": df["accuracy"].to_list(),
            "y": [row_of[k] + shift for k in df["hops"]],
            "cliponaxis": False,
            "hoverinfo": "text",
            "hovertext": [
                f"k = {k}: {label}<br><b>{percent(r['accuracy'])}</b> right "
                f"({percent_interval(r['low'], r['high'])})"
                for k, label, r in zip(df["hops"], names, df.iter_rows(named=True), strict=True)
            ],
            **own,
        }

    def bars(df: pl.DataFrame, token: str) -> dict[str, Any]:
        return error_bar(list(df.select("accuracy", "low", "high").iter_rows()), token)

    data = [
        {
            "type": "scatter", "mode": "markers",
            "x": [chance[k] for k in task.hops], "y": [row_of[k] for k in task.hops],
            "marker": {"symbol": "circle-open", "size": 9, "color": "var(--soft)", "line": {"width": 1.6}},
            "cliponaxis": False, "hoverinfo": "text",
            "hovertext": [f"k = {k}: {_CHANCE}<br><b>{percent(chance[k])}</b> right" for k in task.hops],
        },
        points(
            rest, None, 0.0,
            marker={"symbol": "line-ns", "size": 11, "line": {"width": 1.6, "color": "var(--other)"}},
        ),
        points(
            best, None, 0.15, error_x=bars(best, "rival"),
            marker={"symbol": "diamond", "size": 10, "color": "var(--rival)"},
        ),
        points(
            final, "the model at full depth", -0.15, error_x=bars(final, "model"),
            marker={"symbol": "circle", "size": 10, "color": "var(--model)"},
        ),
    ]  # fmt: skip
    xaxis = {
        "title": "accuracy",
        "range": [-0.02, 1.03],
        "tickformat": ".0%",
        "dtick": 0.25,
        "showgrid": True,
    }
    # thin lines between the rows: marks of one row lie at two heights
    between = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": i + 0.5, "y1": i + 0.5, "layer": "below"}
        | {"line": {"color": "var(--grid)", "width": 1}}
        for i in range(len(task.hops) - 1)
    ]
    names = list(dict.fromkeys(task.shortcuts["shortcut"].to_list()))
    cell = {(r["hops"], r["shortcut"]): r for r in task.shortcuts.iter_rows(named=True)}
    leader = dict(best.select("hops", "shortcut").iter_rows())

    def shown(k: int, name: str) -> str:
        r = cell.get((k, name))
        if r is None:
            return "–"
        text = f"{percent(r['accuracy'])} ({percent_interval(r['low'], r['high'])})"
        return f"{text} ★" if leader[k] == name else text

    luck = (_CHANCE, *(percent(chance[k]) for k in task.hops))
    model_row = ("the model at full depth", *(_with_interval(r) for r in final.iter_rows(named=True)))
    return Figure(
        id=f"{task.slug}-shortcuts",
        title="Full depth beside the shortcuts",
        spec={
            "data": data,
            "layout": layout(
                height=ROW * len(task.hops) + 66,
                xaxis=xaxis,
                yaxis=hops_axis(task.hops),
                left=48,
            )
            | {"shapes": between},
        },
        alt=f"Dot plot of accuracy by hops. Model: {_listed(final)}. Best shortcut: "
        + ", ".join(
            f"{percent(r['accuracy'])} at k = {r['hops']} ({shortcut_name(r['shortcut'])})"
            for r in best.iter_rows(named=True)
        )
        + f". Chance: {_of_hops(chance)}.",
        grid=Grid(
            ("★ best shortcut", *(f"k = {k}" for k in task.hops)),
            (model_row, luck, *((shortcut_name(name), *(shown(k, name) for k in task.hops)) for name in names)),
            "shortcuts",
        ),
        sheet=pl.concat(
            [
                final.with_columns(rule=pl.lit("the model at full depth")).select("task", "hops", *_SHOWN),
                task.shortcuts.with_columns(rule=pl.col("shortcut")).select("task", "hops", *_SHOWN),
                pl.DataFrame({"hops": list(chance), "accuracy": list(chance.values())}).with_columns(
                    task=pl.lit(task.name), rule=pl.lit("chance")
                ),
            ],
            how="diagonal_relaxed",
        ),
        keys=(
            Key("dot", "model", "the model, full depth"),
            Key("diamond", "rival", "best shortcut"),
            Key("tick", "other", "other shortcuts"),
            Key("ring", "soft", "chance"),
        ),
    )


def _with_interval(row: dict[str, Any]) -> str:
    return f"{percent(row['accuracy'])} ({percent_interval(row['low'], row['high'])})"


def _listed(final: pl.DataFrame) -> str:
    return _of_hops(dict(final.select("hops", "accuracy").iter_rows()))


def _of_hops(values: Mapping[int, float]) -> str:
    """ "96 % at k = 1, 90 % at k = 2"; the first and the last of many."""
    rows = list(values.items())
    if len(rows) > 8:
        rows = [rows[0], rows[-1]]
    return ", ".join(f"{percent(value)} at {span((k,))}" for k, value in rows)
