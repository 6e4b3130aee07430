"""The logit lens: what each depth would answer, read with the model's own head."""

from __future__ import annotations

from depthprobe.lens.coda import check_coda
from depthprobe.lens.logit import LENSES, logit_lens
from depthprobe.lens.result import LensResult
from depthprobe.lens.table import Prepared, lens_batch, lens_rows, n_batches, prepare_items
from depthprobe.lens.targets import Node, Target, resolve
from depthprobe.lens.tokens import browse_depths, browsed, token_batch, token_rows
from depthprobe.lens.tuned import TunedLens, as_lens
from depthprobe.lens.tuned_train import Recipe, train_tuned

__all__ = [
    "LENSES", "LensResult", "Node", "Prepared", "Recipe", "Target", "TunedLens", "as_lens", "browse_depths", "browsed",
    "check_coda", "lens_batch", "lens_rows", "logit_lens", "n_batches", "prepare_items", "resolve", "token_batch",
    "token_rows", "train_tuned",
]  # fmt: skip
