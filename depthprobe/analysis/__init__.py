"""Tables in, tables out: what a lens table says about a model's use of depth, with its uncertainty.

    import polars as pl
    from depthprobe import analysis
    found = analysis.analyse(pl.read_parquet("run/tables/lens.parquet"), exit_q=0.5)
    found["slopes"]                        # change per hop, paired by story, 95 % intervals over clusters
    analysis.summarise(found, name="follow-demo")["headline"]

Nothing here runs a model. Every interval treats the cluster (in kinship, stories of like
chains; else the story) as the unit that was drawn.
"""

from __future__ import annotations

from depthprobe.analysis.accuracy import accuracy_table
from depthprobe.analysis.centres import centres, means_by_hops, slope_of
from depthprobe.analysis.effective import (
    EFFECTIVE_DEPTHS,
    EFFECTIVE_MEASURES,
    analyse_effective,
    effective_by_hops,
    effective_depths,
    effective_sentence,
    effective_slopes,
    item_depths,
)
from depthprobe.analysis.exits import exits_by_hops_table, exits_table, fixed_exits_table
from depthprobe.analysis.grid import DepthGrid
from depthprobe.analysis.knockout import knockout_slopes_table
from depthprobe.analysis.settling import GROUPS, settling_by_hops_table, settling_table
from depthprobe.analysis.slopes import MIN_CLUSTERS, differences_table, slopes_table
from depthprobe.analysis.summary import LEAST_MOVED, summarise
from depthprobe.analysis.whole import TABLES, analyse
from depthprobe.analysis.windows import NEEDED, patching_tables, site_of, window_slopes_table, windows_table

__all__ = [
    "EFFECTIVE_DEPTHS",
    "EFFECTIVE_MEASURES",
    "GROUPS",
    "LEAST_MOVED",
    "MIN_CLUSTERS",
    "NEEDED",
    "TABLES",
    "DepthGrid",
    "accuracy_table",
    "analyse",
    "analyse_effective",
    "centres",
    "differences_table",
    "effective_by_hops",
    "effective_depths",
    "effective_sentence",
    "effective_slopes",
    "exits_by_hops_table",
    "exits_table",
    "fixed_exits_table",
    "item_depths",
    "knockout_slopes_table",
    "means_by_hops",
    "patching_tables",
    "site_of",
    "settling_by_hops_table",
    "settling_table",
    "slope_of",
    "slopes_table",
    "summarise",
    "window_slopes_table",
    "windows_table",
]
