"""When the gate would stop, and what that costs."""

from __future__ import annotations

from typing import Any

import polars as pl

from depthprobe.report.data import Task
from depthprobe.report.figures import Figure, Grid, Key, error_bar, layout
from depthprobe.report.text import (
    interval,
    missing,
    number,
    percent,
    percent_interval,
    points_interval,
    signed,
)

__all__ = ["exit_trade_off", "exits_by_hops"]


def exits_by_hops(task: Task, exit_q: float | None) -> Figure | None:
    """Mean exit by hops beside the expected depth and the lens' settling loop; None without a gate."""
    df = task.exits_by_hops.sort("hops")
    if not df.height:
        return None
    hops = df["hops"].to_list()
    settle = (
        task.settling.group_by("hops")
        .agg(pl.col("settling_loop").mean())
        .sort("hops")
        .filter(pl.col("hops").is_in(hops))
    )
    q = "" if exit_q is None else f" at q = {exit_q:g}"

    def line(
        x: list[Any], y: list[Any], token: str, symbol: str, dash: str, name: str, **own: Any
    ) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "x": x,
            "y": y,
            "line": {"color": f"var(--{token})", "width": 2, "dash": dash},
            "marker": {"color": f"var(--{token})", "size": 9, "symbol": symbol},
            "hoverinfo": "text",
            "hovertext": [f"k = {k}<br>{name}: <b>{number(v)}</b> loops" for k, v in zip(x, y, strict=True)],
            **own,
        }

    data = [
        line(
            settle["hops"].to_list(),
            settle["settling_loop"].to_list(),
            "other",
            "diamond-open",
            "dot",
            "settling loop",
        ),
        line(hops, df["expected_depth"].to_list(), "model", "square-open", "dash", "expected depth"),
        line(
            hops,
            df["mean_exit"].to_list(),
            "gate",
            "circle",
            "solid",
            f"mean exit{q}",
            error_y=error_bar(list(df.select("mean_exit", "low", "high").iter_rows()), "gate"),
        ),
    ]
    xaxis = {"title": "hops k", "tickmode": "array", "tickvals": hops, "ticktext": [str(k) for k in hops]}
    xaxis |= {"range": [hops[0] - 0.4, hops[-1] + 0.4], "showgrid": False}
    yaxis = {"title": "loops", "range": [0.7, task.axis.n_loops + 0.3], "dtick": 1}
    ends = ", ".join(f"{number(r['mean_exit'])} at k = {r['hops']}" for r in df.iter_rows(named=True))
    return Figure(
        id=f"{task.slug}-exits",
        title="Where the gate stops, by hops",
        spec={"data": data, "layout": layout(height=330, xaxis=xaxis, yaxis=yaxis)},
        alt=f"Lines over hops. Mean exit loop{q}: {ends}.",
        grid=Grid(
            ("hops", f"mean exit{q}, loops", "95 % interval", "expected depth, loops", "settling loop, mean"),
            tuple(
                (
                    f"k = {r['hops']}",
                    number(r["mean_exit"]),
                    interval(r["low"], r["high"]),
                    number(r["expected_depth"]),
                    number(s),
                )
                for r, s in zip(df.iter_rows(named=True), settle["settling_loop"], strict=True)
            ),
            "exits_by_hops",
        ),
        sheet=df.join(settle, on="hops", how="left").rename({"settling_loop": "mean_settling_loop"}),
        keys=(
            Key("dot", "gate", f"mean Q-exit{q}"),
            Key("square-open", "model", "expected depth under the gate"),
            Key("diamond-open", "other", "settling loop (lens)"),
        ),
    )


def exit_trade_off(task: Task, exit_q: float | None) -> Figure | None:
    """Accuracy against mean depth: Q-exit over a sweep of q, fixed loops, and the mixtures between them."""
    if not task.exits.height:
        return None
    swept = task.exits.sort("mean_exit", "q")
    fixed = task.fixed_exits.sort("loop")

    def bars(df: pl.DataFrame, token: str) -> dict[str, Any]:
        return error_bar(list(df.select("accuracy", "low", "high").iter_rows()), token, thickness=1.2)

    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": fixed["loop"].to_list(),
            "y": fixed["accuracy"].to_list(),
            "line": {"color": "var(--other)", "width": 1.5, "dash": "dot"},
            "marker": {"color": "var(--other)", "size": 9, "symbol": "square-open"},
            "error_y": bars(fixed, "other"),
            "hoverinfo": "text",
            "hovertext": [
                f"all leave after loop {r['loop']}<br><b>{percent(r['accuracy'])}</b> right "
                f"({percent_interval(r['low'], r['high'])})"
                for r in fixed.iter_rows(named=True)
            ],
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": swept["mean_exit"].to_list(),
            "y": swept["accuracy"].to_list(),
            "line": {"color": "var(--gate)", "width": 2},
            "marker": {"color": "var(--gate)", "size": 6, "symbol": "circle"},
            "hoverinfo": "text",
            "hovertext": [
                f"q = {r['q']:g}: mean {number(r['mean_exit'])} loops<br><b>{percent(r['accuracy'])}</b> "
                "right "
                f"({percent_interval(r['low'], r['high'])})<br>{signed(100 * r['gain'], 1)} points against "
                "a mixture "
                f"({points_interval(r['gain_low'], r['gain_high'])})"
                for r in swept.iter_rows(named=True)
            ],
        },
    ]
    if not any(missing(value) for value in (*swept["low"], *swept["high"])):
        data.insert(
            0,
            {
                "type": "scatter",
                "mode": "lines",
                "x": [*swept["mean_exit"], *reversed(swept["mean_exit"])],
                "y": [*swept["high"], *reversed(swept["low"])],
                "fill": "toself",
                "fillcolor": "var(--gate-band)",
                "line": {"width": 0},
                "hoverinfo": "skip",
            },
        )
    own = swept.filter((pl.col("q") - exit_q).abs() < 1e-6) if exit_q is not None else swept.clear()
    keys = [
        Key("dot", "gate", "Q-exit, one point for each q"),
        Key("square-open", "other", "fixed loops; dotted: their mixtures"),
    ]
    if own.height:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": own["mean_exit"].to_list(),
                "y": own["accuracy"].to_list(),
                "marker": {
                    "symbol": "circle-open",
                    "size": 18,
                    "color": "var(--gate)",
                    "line": {"width": 2, "color": "var(--gate)"},
                },
                "hoverinfo": "skip",
            }
        )
        keys.insert(1, Key("ring", "gate", f"the model's own q = {exit_q:g}"))
    values = [v for df in (fixed, swept) for c in ("accuracy", "low") for v in df[c].drop_nulls().drop_nans()]
    bottom = max(min(values) - 0.05, -0.02) if values else -0.02
    xaxis = {
        "title": "mean loops until the exit",
        "range": [0.7, task.axis.n_loops + 0.3],
        "dtick": 1,
        "showgrid": False,
    }
    yaxis = {
        "title": "accuracy, all hops together",
        "range": [bottom, 1.03],
        "tickformat": ".0%",
        "nticks": 6,
    }
    return Figure(
        id=f"{task.slug}-trade-off",
        title="Q-exit accuracy against mean depth",
        spec={"data": data, "layout": layout(height=330, xaxis=xaxis, yaxis=yaxis)},
        alt="Accuracy against mean loops. "
        + "; ".join(
            f"q {r['q']:g}: {number(r['mean_exit'])} loops, {percent(r['accuracy'])}"
            for r in swept.iter_rows(named=True)
        )
        + ".",
        grid=Grid(
            ("rule", "mean loops", "accuracy", "mixture of fixed loops, same mean", "gain over it, points"),
            (
                *(
                    (
                        f"q = {r['q']:g}",
                        number(r["mean_exit"]),
                        f"{percent(r['accuracy'])} ({percent_interval(r['low'], r['high'])})",
                        percent(r["mixture_accuracy"]),
                        f"{signed(100 * r['gain'], 1)} ({points_interval(r['gain_low'], r['gain_high'])})",
                    )
                    for r in swept.iter_rows(named=True)
                ),
                *(
                    (
                        f"fixed: loop {r['loop']}",
                        number(float(r["loop"])),
                        f"{percent(r['accuracy'])} ({percent_interval(r['low'], r['high'])})",
                        "–",
                        "–",
                    )
                    for r in fixed.iter_rows(named=True)
                ),
            ),
            "exits and fixed_exits",
        ),
        sheet=pl.concat(
            [
                swept.with_columns(rule=pl.lit("Q-exit")),
                fixed.with_columns(rule=pl.lit("fixed loop"), mean_exit=pl.col("loop").cast(pl.Float64)).drop("loop"),
            ],
            how="diagonal",
        ).select("rule", pl.all().exclude("rule")),
        keys=tuple(keys),
    )
