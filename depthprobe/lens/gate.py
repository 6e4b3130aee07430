"""The gate's columns of a table that has a row for each position and depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from depthprobe import halting
from depthprobe.depth import Coordinate


def gate_columns(
    gate_lambda: Tensor | None,
    loop_ends: Sequence[Coordinate],
    depths: Sequence[Coordinate],
    places: np.ndarray[Any, Any],
) -> tuple[pl.Series, pl.Series]:
    """λ and CDF as Float32 of length P · D, positions outermost; null where no loop ends.

    Args:
        gate_lambda: [N, R], or None without a gate.
        loop_ends: the R coordinates that these belong to.
        depths: the D depths of each position.
        places: int [P], the row of `gate_lambda` of each position.
    """
    if gate_lambda is None:
        nothing = pl.Series([None] * (len(places) * len(depths)), dtype=pl.Float32)
        return nothing, nothing
    at = [loop_ends.index(c) if c in loop_ends else -1 for c in depths]
    lambdas = gate_lambda.float().cpu()
    left = halting.cdf(halting.stopping_distribution(lambdas))
    none = torch.full((len(lambdas), 1), torch.nan)
    columns = [torch.cat([values, none], dim=1)[:, at].numpy()[places].ravel() for values in (lambdas, left)]
    found = [pl.Series(column, dtype=pl.Float32).fill_nan(None) for column in columns]
    return found[0], found[1]
