"""All analysis tables of one lens table, by name."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from depthprobe import tables
from depthprobe.analysis.accuracy import accuracy_table
from depthprobe.analysis.effective import analyse_effective
from depthprobe.analysis.exits import exits_by_hops_table, exits_table, fixed_exits_table
from depthprobe.analysis.grid import DepthGrid
from depthprobe.analysis.settling import settling_by_hops_table, settling_table
from depthprobe.analysis.slopes import differences_table, slopes_table
from depthprobe.analysis.windows import patching_tables

#: The tables that `analyse` makes of a lens table, in the order in which a reader needs them.
TABLES = (
    "settling",
    "settling_by_hops",
    "accuracy",
    "slopes",
    "differences",
    "exits",
    "fixed_exits",
    "exits_by_hops",
)


def analyse(
    lens: pl.DataFrame,
    *,
    more: Mapping[str, pl.DataFrame] | None = None,
    exit_q: float | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> dict[str, pl.DataFrame]:
    """A lens table → every analysis table, each checked against its schema.

    The result depends on the rows alone, not on their order, so that a resumed run ends with the same tables.

    Args:
        lens: rows of the `lens` table; one model, any number of tasks.
        more: tables of other probes by name; what can be made of them is made.
        exit_q: the gate's threshold q in the model's own config; None for a model without a gate.
        seed: of the bootstrap. The same seed gives the same intervals.
        resamples: bootstrap draws for each interval.
    """
    grids = DepthGrid.by_task(lens)
    settling = settling_table(grids, exit_q=exit_q)
    boot = {"seed": seed, "resamples": resamples}
    made = {
        "settling": settling,
        "settling_by_hops": settling_by_hops_table(settling, **boot),
        "accuracy": accuracy_table(grids, **boot),
        "slopes": slopes_table(settling, **boot),
        "differences": differences_table(grids, exit_q=exit_q, **boot),
        "exits": exits_table(grids, exit_q=exit_q, **boot),
        "fixed_exits": fixed_exits_table(grids),
        "exits_by_hops": exits_by_hops_table(settling, **boot),
    }
    found = {name: made[name] for name in TABLES}
    axis = next(iter(grids.values())).axis
    if more and "patching" in more:
        found |= patching_tables(more, axis, **boot)
    if more and "effective" in more:
        found |= analyse_effective(more["effective"], **boot)
    return {name: tables.check(name, table) for name, table in found.items()}
