"""Effective depth: what each layer and each loop adds, and what is lost without it."""

from __future__ import annotations

from depthprobe.effective.cost import part_cost
from depthprobe.effective.parts import Part, parts_of
from depthprobe.effective.result import EffectiveDepth, effective_depth
from depthprobe.effective.table import effective_batch, effective_rows, n_batches, spared_of

__all__ = [
    "EffectiveDepth", "Part", "effective_batch", "effective_depth", "effective_rows", "n_batches", "part_cost",
    "parts_of", "spared_of",
]  # fmt: skip
