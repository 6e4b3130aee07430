"""What the last token reads, and when: attention from it to some words is cut, layer by layer."""

from __future__ import annotations

import polars as pl

from depthprobe.report.data import Task
from depthprobe.report.figures import Choice, Figure
from depthprobe.report.names import MARKS, ROLES, known_first, role_name
from depthprobe.report.panels.lines import Series, curves, hops_choice
from depthprobe.report.text import number, percent

__all__ = ["knockout_curves"]


def knockout_curves(task: Task) -> tuple[Figure, ...]:
    """Drop of the answer's log-probability, and accuracy, over the depth of the cut, a line for each role."""
    rows = task.knockout_by_depth
    if not rows.height:
        return ()
    windows = sorted(rows["window"].unique().to_list())
    choices = (
        hops_choice(rows["hops"].unique().to_list()),
        Choice("window", "layers cut", tuple((str(n), str(n)) for n in windows)),
    )
    roles = known_first(rows["role"].unique().to_list(), ROLES)
    drops: list[Series] = []
    rates: list[Series] = []
    parts = rows.sort("depth").partition_by(["role", "hops", "window"], as_dict=True, maintain_order=True)
    for (role, hops, window), part in sorted(parts.items(), key=lambda pair: roles.index(str(pair[0][0]))):
        when = {"hops": "all" if hops is None else str(hops), "window": str(window)}
        look = MARKS.get(str(role), ("soft", "x", "dot"))
        drop = part.select("depth", "low", "high", "n", y="drop")
        rate = part.select("depth", "n", y="accuracy", low=pl.lit(None, pl.Float64), high=pl.lit(None, pl.Float64))
        drops.append(Series(role_name(str(role)), look, drop, when))
        rates.append(Series(role_name(str(role)), look, rate, when))
    values = [v for c in ("drop", "low", "high") for v in rows[c].drop_nulls().drop_nans()]
    top, bottom = max([*values, 0.05]), min([*values, 0.0])
    shared = {"sheet": rows, "source": "knockout_by_depth", "choices": choices}
    return (
        curves(
            task.axis,
            drops,
            id=f"{task.slug}-knockout",
            title="Cut: drop of the answer's log-probability",
            alt="Lines over the depth of the cut, one for each role of the words that the last token may not look at: "
            "how far the log-probability of the answer drops. " + _peaks(task, rows, roles),
            yaxis={"title": "drop, nats", "range": [bottom - 0.04 * top, 1.06 * top], "nticks": 6},
            shown=number,
            unit=" nats",
            **shared,
        ),
        curves(
            task.axis,
            rates,
            id=f"{task.slug}-knockout-accuracy",
            title="Cut: accuracy that is left",
            alt="Lines over the depth of the cut, one for each role: accuracy with those edges cut.",
            yaxis={"title": "accuracy", "range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6},
            shown=percent,
            unit=" right",
            **shared,
        ),
    )


def _peaks(task: Task, rows: pl.DataFrame, roles: list[str]) -> str:
    """Where each role's cut does most, over all hops."""
    of_all = rows.filter(pl.col("hops").is_null())
    said: list[str] = []
    for role in roles:
        own = (of_all if of_all.height else rows).filter(pl.col("role") == role).sort("drop", descending=True)
        if own.height:
            said.append(f"{role_name(role)}: most at {task.axis.long(own['depth'][0])}, {number(own['drop'][0])} nats")
    return "; ".join(said) + "."
