"""One question patched token by token: the story's tokens against depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from depthprobe.errors import UserError
from depthprobe.report import palette
from depthprobe.report.data import Axis
from depthprobe.report.figures import Figure, Grid, depth_axis, layout
from depthprobe.report.text import missing, number, percent

__all__ = ["patched_tokens"]

_ROW = 22


def patched_tokens(axis: Axis, patching: pl.DataFrame, tokens: Sequence[str]) -> Figure:
    """Heat map of the effect, token × depth, of one item and one kind of patch.

    Args:
        axis: of the task, `task.axis`.
        patching: rows of that table with positions, of one item, donor and patch.
        tokens: of the item's prompt, by position; those that were not patched keep an empty row.

    Raises:
        UserError: no rows with a position, rows of several items or patches, or a position without a token.
    """
    rows = patching.filter(pl.col("position").is_not_null())
    where, remedy = "table patching", 'ask for `causal_patch(…, positions="all", position="each")`'
    if not rows.height:
        raise UserError("no row has a position", where=where, remedy=remedy)
    for column in ("item", "donor_kind", "direction", "kind", "span", "site"):
        found = rows[column].unique().sort().to_list()
        if len(found) > 1:
            raise UserError(f"the rows are of {len(found)} in column {column}", where=where, remedy="keep one of them")
    if int(str(rows["position"].max())) >= len(tokens):
        raise UserError(f"there are {len(tokens)} tokens and a position beyond", where=where, remedy="give all tokens")
    n_depths = len(axis.coordinates)
    z: list[list[float | None]] = [[None] * n_depths for _ in tokens]
    hover = [[""] * n_depths for _ in tokens]
    for row in rows.iter_rows(named=True):
        at, depth = row["position"], row["depth"]
        z[at][depth] = None if missing(row["effect"]) else round(row["effect"], 4)
        flips = ", flips" if row["flip"] else ""
        hover[at][depth] = (
            f"{tokens[at]} at {at}, {axis.long(depth)}<br><b>{number(row['effect'])}</b>{flips}<br>"
            f"p(answer) {percent(row['p_answer'])}, p(donor's) {percent(row['p_donor'])}"
        )
    item = rows["item"][0]
    trace: dict[str, Any] = {
        "type": "heatmap", "z": z, "x0": 0, "dx": 1, "y0": 0, "dy": 1, "zmin": -1, "zmax": 1,
        "colorscale": palette.effect_scale(), "showscale": False, "xgap": 1, "ygap": 1, "hoverongaps": False,
        "hoverinfo": "text", "hovertext": hover,
    }  # fmt: skip
    yaxis = {
        "title": "", "tickmode": "array", "tickvals": list(range(len(tokens))), "showgrid": False,
        "ticktext": [f"{token.strip()} {at}" for at, token in enumerate(tokens)], "range": [len(tokens) - 0.5, -0.5],
        "tickfont": {"size": 11, "color": "var(--soft)"},
    }  # fmt: skip
    done = sorted({row["position"] for row in rows.iter_rows(named=True)})
    peak = rows.sort("effect", descending=True, nulls_last=True).row(0, named=True)
    return Figure(
        id="patched-tokens",
        title=f"{item}: effect of a patch, token by {axis.unit[:-1]}",
        spec={
            "data": [trace],
            "layout": layout(height=_ROW * len(tokens) + 70, xaxis=depth_axis(axis), yaxis=yaxis, left=150),
        },
        alt="Heat map: normalised effect, a row for each token, columns by depth. Largest: "
        f"{number(peak['effect'])} at “{tokens[peak['position']]}”, {axis.long(peak['depth'])}.",
        grid=Grid(
            ("token", *(axis.short(depth) for depth in range(n_depths))),
            tuple((f"{tokens[at]} {at}", *(number(value) for value in z[at])) for at in done),
            "patching",
        ),
        sheet=rows.with_columns(token=pl.col("position").map_elements(lambda at: tokens[at], return_dtype=pl.String)),
        scale=("−1", "0", "1: the donor's answer"),
    )
