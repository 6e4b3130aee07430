"""Effective depth: what each layer or loop adds, and what breaks when it is skipped, by hops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from depthprobe.report.data import Task
from depthprobe.report.figures import Choice, Figure
from depthprobe.report.palette import hop_token
from depthprobe.report.panels.lines import Series, curves
from depthprobe.report.text import missing, number, percent

__all__ = ["contributions", "later_layers", "output_reached", "skips"]

_SHARE = {"range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6}
_PLACES = Choice("at", "at", (("answer", "the answer's position"), ("others", "mean over the other positions")))


@dataclass(frozen=True, slots=True)
class _Plot:
    """A figure of one quantity, or of one at the answer's position and its like at the others."""

    slug: str
    title: str
    ytitle: str
    quantities: tuple[str, ...]
    shown: Callable[[float | None], str] = number
    yaxis: dict[str, Any] | None = None
    unit: str = ""


def contributions(task: Task, all_hops: tuple[int, ...] | None = None) -> tuple[Figure, ...]:
    """‖Δ‖/‖h‖ and the cosine of Δ and h of each layer, by hops."""
    return _figures(
        task,
        all_hops,
        _Plot("contribution", "Contribution ‖Δ‖ / ‖h‖", "‖Δ‖ / ‖h‖", ("contribution", "contribution_all")),
        _Plot("cosine", "Cosine of Δ and h", "cosine", ("cosine", "cosine_all")),
    )


def skips(task: Task, all_hops: tuple[int, ...] | None = None) -> tuple[Figure, ...]:
    """What the output loses when a layer or a loop is skipped, by hops."""
    return _figures(
        task,
        all_hops,
        _Plot("skip-kl", "Skipped: KL from the full output", "KL, nats", ("skip_kl",), unit=" nats"),
        _Plot("skip-top5", "Skipped: first five words kept", "overlap of five", ("skip_top5",), percent, _SHARE),
        _Plot("skip-correct", "Skipped: accuracy that is left", "accuracy", ("skip_correct",), percent, _SHARE),
    )


def later_layers(task: Task, all_hops: tuple[int, ...] | None = None) -> tuple[Figure, ...]:
    """How far the later layers' contributions change when one is skipped: at the same token, and at later ones."""
    return _figures(
        task,
        all_hops,
        _Plot("later-same", "Skipped: later layers at the same token", "relative change", ("later_same",)),
        _Plot("later-others", "Skipped earlier: later layers at later tokens", "relative change", ("later_others",)),
    )


def output_reached(task: Task, all_hops: tuple[int, ...] | None = None) -> tuple[Figure, ...]:
    """How near the lens is to the final output at each depth, by hops."""
    return _figures(
        task,
        all_hops,
        _Plot("lens-kl", "Lens: KL from the final output", "KL, nats", ("lens_kl",), unit=" nats"),
        _Plot("lens-top5", "Lens: first five words shared", "overlap of five", ("lens_top5",), percent, _SHARE),
    )


def _figures(task: Task, all_hops: tuple[int, ...] | None, *plots: _Plot) -> tuple[Figure, ...]:
    all_hops = task.hops if all_hops is None else all_hops
    return tuple(figure for figure in (_figure(task, all_hops, plot) for plot in plots) if figure)


def _figure(task: Task, all_hops: tuple[int, ...], plot: _Plot) -> Figure | None:
    main = next(iter(plot.quantities))
    rows = task.effective_by_hops.filter(pl.col("quantity").is_in(plot.quantities) & pl.col("hops").is_in(all_hops))
    rows = rows.filter(pl.col("mean").is_not_nan())
    if not rows.height:
        return None
    if task.axis.steps_per_loop == 1:  # a loop is its one layer
        rows = rows.filter((pl.col("site") != "loop") | (rows["site"] == "loop").all())
    units = [kind for kind in ("layer", "loop") if kind in _kinds(rows)]
    choices: list[Choice] = []
    if len(units) > 1:
        choices.append(Choice("unit", "of", tuple((kind, f"each {kind}") for kind in units)))
    if len(plot.quantities) > 1 and rows["quantity"].n_unique() > 1:
        choices.append(_PLACES)
    series: list[Series] = []
    parts = rows.with_columns(unit=_unit()).sort("depth").partition_by(
        ["unit", "quantity", "hops"], as_dict=True, maintain_order=True
    )  # fmt: skip
    for (unit, quantity, hops), part in parts.items():
        k = int(str(hops))
        options = {"unit": str(unit), "at": "answer" if quantity == main else "others"}
        when = {choice.key: options[choice.key] for choice in choices}
        own = part.select("depth", "low", "high", "n", y="mean")
        look = (hop_token(all_hops.index(k)), "circle", "solid")
        series.append(Series(f"k = {k}", look, own, when, k))
    series.sort(key=lambda one: one.hop or 0)
    shown = [v for c in ("mean", "low", "high") for v in rows[c].to_list() if not missing(v)]
    low, high = min([*shown, 0.0]), max([*shown, 1e-3])
    yaxis = plot.yaxis or {"range": [low - 0.05 * (high - low), high + 0.06 * (high - low)], "nticks": 6}
    return curves(
        task.axis,
        series,
        id=f"{task.slug}-{plot.slug}",
        title=plot.title,
        alt=f"Lines over depth, one for each hops: {plot.title}. " + _most(task, series, plot),
        source="effective_by_hops",
        sheet=rows,
        yaxis={"title": plot.ytitle, **yaxis},
        shown=plot.shown,
        unit=plot.unit,
        choices=tuple(choices),
        keys=False,
    )


def _unit() -> pl.Expr:
    return pl.when(pl.col("site") == "loop").then(pl.lit("loop")).otherwise(pl.lit("layer"))


def _kinds(rows: pl.DataFrame) -> list[str]:
    return rows.select(_unit().alias("unit"))["unit"].unique().to_list()


def _most(task: Task, series: list[Series], plot: _Plot) -> str:
    """Where the curve of the most hops is highest."""
    last = series[-1].rows.sort("y", descending=True)
    return f"At {series[-1].name} the largest is {plot.shown(last['y'][0])}, at {task.axis.long(last['depth'][0])}."
