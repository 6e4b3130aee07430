"""Where cutting the last token off a story's words does its harm, and whether that moves with hops."""

from __future__ import annotations

import polars as pl

from depthprobe import tables
from depthprobe.analysis.centres import centres, slope_of

__all__ = ["LEAST_HARM", "knockout_slopes_table"]

#: Of an item's cuts together, in nats: with less harm than this its centre would be one of noise.
LEAST_HARM = 0.1


def knockout_slopes_table(knockout: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `knockout_slopes` table: of each task the change per hop of the centre of the harm (`centres`).

    The harm is what a cut from the story's words takes from the log-probability of the answer, over all roles but the
    last token itself, in the narrowest window that was cut.
    """
    rows: list[dict[str, object]] = []
    cuts = knockout.filter(~pl.col("role").is_in(["last", "all"]))
    for (task,), own in sorted(cuts.partition_by("task", as_dict=True).items()):
        own = own.filter(pl.col("window") == pl.col("window").min()).sort("item", "role", "depth")
        harm = own.with_columns(harm=pl.col("logprob_clean") - pl.col("logprob_cut"))
        found = centres(harm, "harm", least=LEAST_HARM)
        slope = slope_of(found, "centre", seed=seed, resamples=resamples)
        counts = {"n_harmed": found["centre"].count(), "n_asked": found.height, "window": own["window"][0]}
        rows.append({"task": task, "quantity": "centre"} | slope | counts)
    return tables.conform("knockout_slopes", rows)
