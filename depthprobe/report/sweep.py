"""A sweep's tables as a task, without a run folder: for figures in a notebook.

    result = depthprobe.causal_patch(model, items, knockout=1)
    task = report.patched_task(result.frame, result.knockout, axis=model.axis, loop_ends=model.loop_ends)
    report.patching_map(task).choose(hops=3)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import polars as pl

from depthprobe import tables
from depthprobe.analysis import patching_tables
from depthprobe.errors import UserError
from depthprobe.report.data import Axis, Coordinate, Task

__all__ = ["Place", "patched_task"]

_MADE = ("windows", "window_slopes", "patching_by_role", "knockout_by_depth", "knockout_slopes")
_LENS_ONLY = (
    "items", "settling", "settling_by_hops", "accuracy", "slopes", "shortcuts", "differences", "exits", "fixed_exits",
    "exits_by_hops", "effective_by_hops", "effective_depths", "effective_slopes", "agreement", "agreement_by_hops",
)  # fmt: skip


class Place(Protocol):
    """What a depth of a model is known by."""

    @property
    def loop(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def site(self) -> str: ...


def patched_task(
    patching: pl.DataFrame,
    knockout: pl.DataFrame | None = None,
    *,
    axis: Sequence[Place],
    loop_ends: Collection[Place] = (),
    name: str | None = None,
    resamples: int = 1000,
) -> Task:
    """The task of a sweep, with what analysis makes of it; its tables of the lens are without rows.

    Args:
        patching: rows of that table, as `causal_patch(…).frame`.
        knockout: rows of that table, or None.
        axis, loop_ends: of the model that was patched.
        name: of the task; needed where the rows are of several.
        resamples: bootstrap draws for each interval.

    Raises:
        UserError: no rows, rows of another schema, or several tasks and no name.
    """
    patching = tables.check("patching", patching)
    cut = tables.empty("knockout") if knockout is None else tables.check("knockout", knockout)
    names = patching["task"].unique().sort().to_list()
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        what = "there are no rows" if not names else "the rows are of several tasks" if name is None else f"no '{name}'"
        raise UserError(what, where="table patching", remedy=f"give name, one of {', '.join(names) or 'none'}")
    coordinates = tuple(Coordinate(c.loop, c.layer, c.site, c in loop_ends) for c in axis)
    own_axis = Axis(coordinates, max(len({c.loop for c in coordinates if c.is_loop_end}), 1))
    depths = pl.DataFrame(
        {
            "depth": range(len(coordinates)),
            "loop": [c.loop for c in coordinates],
            "layer": [c.layer for c in coordinates],
            "is_loop_end": [c.is_loop_end for c in coordinates],
        },
        schema_overrides={"depth": pl.Int32, "loop": pl.Int32, "layer": pl.Int32},
    )
    rows = patching.filter(pl.col("task") == name)
    cut = cut.filter(pl.col("task") == name)
    made = {table: tables.empty(table) for table in _MADE}
    if rows["position"].null_count():  # single tokens have no role to be averaged over
        made = patching_tables({"patching": rows, "knockout": cut}, depths, resamples=resamples)
    return Task(
        name=name or "",
        axis=own_axis,
        hops=tuple(rows["hops"].unique().sort().to_list()),
        n_stories=rows["story"].n_unique(),
        accuracy_of={},
        settling_of={},
        slope_of={},
        knockout=cut,
        **made,
        **{table: tables.empty(table) for table in _LENS_ONLY},
    )
