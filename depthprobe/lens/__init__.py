"""The logit lens on items: what each depth would answer, read with the model's own head."""

from __future__ import annotations

from depthprobe.lens.table import Prepared, lens_batch, lens_rows, n_batches, prepare_items
from depthprobe.lens.targets import Node, Target, resolve

__all__ = ["Node", "Prepared", "Target", "lens_batch", "lens_rows", "n_batches", "prepare_items", "resolve"]
