"""Which key a query may see: causality, padding and packing, made once a forward for all layers and loops."""

from __future__ import annotations

import torch
from torch import Tensor


class Mask:
    """A visibility mask in the cheapest form that says the same.

    Attributes:
        visible: bool `[B or 1, 1, S, T]`, True where seen; None where causality alone, or nothing, hides
            anything.
        causal: with `visible` None: whether later keys are hidden (then S = T).
    """

    __slots__ = ("_bias", "causal", "visible")

    def __init__(self, visible: Tensor | None, causal: bool) -> None:
        self.visible = visible
        self.causal = causal
        self._bias: Tensor | None = None

    def additive(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The mask as float32 to be added to scores, 0 or −inf; None if all is seen. Made once and kept."""
        if self._bias is None and (self.visible is not None or self.causal):
            visible = self.visible
            if visible is None:
                visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()[None, None]
            self._bias = torch.zeros(visible.shape, device=device).masked_fill(~visible, float("-inf"))
        return self._bias


def build_mask(
    queries: int,
    keys: int,
    device: torch.device,
    key_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
) -> Mask:
    """Mask of the last `queries` tokens over all `keys`.

    Args:
        key_mask: bool `[B, keys]`, False at padding; None if there is none.
        block_mask: bool `[B or 1, 1, queries, keys]`, True where a query may see a key; causality is added to
            it.

    A query always sees itself, also at padding, so that no row is empty (its softmax would be NaN).
    """
    past = keys - queries
    if key_mask is not None and block_mask is None and past == 0:
        # padding at the right end only is already hidden from every real query by causality
        if bool((key_mask[:, 1:] <= key_mask[:, :-1]).all()):
            key_mask = None
    elif key_mask is not None and bool(key_mask.all()):
        key_mask = None
    if key_mask is None and block_mask is None:
        if past == 0:
            return Mask(None, causal=queries > 1)
        if queries == 1:
            return Mask(None, causal=False)
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    visible = ones.tril(past)[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    if block_mask is not None:
        visible = visible & block_mask
    return Mask(visible | (ones.tril(past) & ones.triu(past)), causal=False)
