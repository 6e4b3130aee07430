"""`LoopedCache`: keys and values of every executed layer, and the token ids they belong to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from depthprobe.errors import UserError


class LoopedCache(Cache):
    """Cache of a looped model; `generate` and `forward(use_cache=True)` make one, callers may pass one.

    Its layers are the slots of `attend.Slots`: prelude, loop · L + layer of the core, coda. A token that left
    the loop early has its last keys and values copied into the slots of the deeper loops, which makes a later
    query at loop d read it at depth min(d, e).

    Attributes:
        token_ids: int64 `[B, T]`, ids of the cached tokens, −1 at padding. The mixing of previous tokens
            needs the last two of them, and the padding of the past can be told from them when no mask is
            given.
        n_loops: U of the forwards that filled it; others cannot continue it.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.token_ids: Tensor | None = None
        self.n_loops: int | None = None

    def check(self, rows: int, n_loops: int) -> None:
        """Refuse to go on with another number of rows or loops than it was filled with (`UserError`)."""
        if self.n_loops is not None and self.n_loops != n_loops:
            what = f"the cache was filled with {self.n_loops} loops and cannot continue with {n_loops}"
            raise UserError(what, where="n_loops", remedy="start with an empty LoopedCache")
        if self.token_ids is not None and self.token_ids.shape[0] != rows:
            what = f"the cache holds {self.token_ids.shape[0]} rows, the input {rows}"
            raise UserError(what, where="cache")

    def extend(self, token_ids: Tensor, n_loops: int) -> None:
        """Append ids `[B, S]` (−1 at padding) of tokens whose keys are about to be written."""
        past = self.token_ids
        self.n_loops = n_loops
        self.token_ids = token_ids if past is None else torch.cat([past, token_ids], dim=1)

    # whatever reorders, repeats or cuts the keys has to do the same to the ids

    def reset(self) -> None:
        self.layers = []  # the next forward makes them again; zeroed ones would count as tokens
        self.token_ids = self.n_loops = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._on_ids(lambda ids: ids.index_select(0, beam_idx.to(ids.device)))

    def crop(self, *args: int, **kwargs: int) -> None:
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self._on_ids(lambda ids: ids[:, :length])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._on_ids(lambda ids: ids.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._on_ids(lambda ids: ids[indices])

    def _on_ids(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.token_ids is not None:
            self.token_ids = change(self.token_ids)
