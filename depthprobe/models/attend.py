"""Ways to attend: each object decides which keys and values a query sees. The block is the same for all.

An `Attend` is told where in the execution it is by `enter(stage, loop)` and is then called once a layer.
Dense attention ignores the place; the others find the slot of a (stage, loop, layer) with `Slots`. New ways
(a suffix behind a shared prefix, pages) are further subclasses; nothing else changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from depthprobe.models.masks import Mask

Stage = Literal["prelude", "core", "coda"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Key/value slots of a token in order of execution: prelude, loop · L + layer of the core, coda."""

    n_prelude: int
    n_core: int
    n_coda: int
    n_loops: int

    def first(self, stage: Stage, loop: int = 1) -> int:
        """Slot of layer 0 of a stage; loops are counted from 1."""
        if stage == "prelude":
            return 0
        if stage == "core":
            return self.n_prelude + (loop - 1) * self.n_core
        return self.n_prelude + self.n_loops * self.n_core


class Attend(ABC):
    """Base of the attend objects; see `core.Attention` for the call."""

    def enter(self, stage: Stage, loop: int = 1) -> None:  # noqa: B027 - most need no notice
        """The layers of this stage, and for the core of this loop (from 1), run next."""

    @abstractmethod
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class DenseAttend(Attend):
    """Every query sees the keys of its own pass that the mask shows: training and plain forwards."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.mask)


class CachedAttend(Attend):
    """Keys and values go to a cache, one slot for each executed layer; queries see all of their slot."""

    def __init__(self, mask: Mask, slots: Slots, cache: Cache) -> None:
        self.mask, self.slots, self.cache = mask, slots, cache
        self._first = 0

    def enter(self, stage: Stage, loop: int = 1) -> None:
        self._first = self.slots.first(stage, loop)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.cache.update(k, v, self._first + layer)
        return attention(q, k, v, self.mask)


class RaggedAttend(Attend):
    """In the core, a query at loop d reads key j as it was at depth min(d, e_j); e_j is the exit of token j.

    Keys and values of a token that has left stay what they were in its last loop (Ragged KV, arXiv
    2610.09013). With a cache they are appended in that form to the slot of every loop, so that later tokens
    read min(d, e_j) as well.

    Args:
        mask, slots, cache: as above; cache None for a forward over whole sequences.
        own_key: whether a token that runs on past its exit reads its *own* key and value at d. The others
            never see them. It matters to whoever looks at states past the exit, and costs an attention by
            hand.
    """

    def __init__(self, mask: Mask, slots: Slots, cache: Cache | None = None, own_key: bool = False) -> None:
        self.mask, self.slots, self.cache, self.own_key = mask, slots, cache, own_key
        self._first = 0
        self._in_core = False
        self._left: Tensor | None = None
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values at min(loop, e)

    def enter(self, stage: Stage, loop: int = 1) -> None:
        self._first = self.slots.first(stage, loop)
        self._in_core = stage == "core"

    def leave(self, left: Tensor) -> None:
        """From the next loop on, the tokens marked in bool `[B, S]` have left."""
        self._left = left[:, None, :, None]

    def finish(self, loop: int) -> None:
        """The core stops after this loop: what the deeper slots hold is what the tokens left with."""
        if self.cache is None:
            return
        for deeper in range(loop + 1, self.slots.n_loops + 1):
            for layer, (k, v) in self._last.items():
                self.cache.update(k, v, self.slots.first("core", deeper) + layer)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own_k, own_v = k, v
        ragged = self._in_core and self._left is not None
        if ragged:
            last_k, last_v = self._last[layer]
            k, v = torch.where(self._left, last_k, k), torch.where(self._left, last_v, v)  # type: ignore[arg-type]
        if self._in_core:
            self._last[layer] = (k, v)
        seen_k, seen_v = (k, v) if self.cache is None else self.cache.update(k, v, self._first + layer)
        if ragged and self.own_key:
            return _own_key_attention(q, seen_k, seen_v, own_k, own_v - v, self.mask)
        return attention(q, seen_k, seen_v, self.mask)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax attention. q `[B, H, S, h]`, k and v `[B, G, T, h]` → `[B, S, H·h]`."""
    if q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu" and torch.is_grad_enabled():
        out = _by_hand(q, k, v, mask)
    else:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.visible, is_causal=mask.causal, enable_gqa=grouped
        )
    return out.transpose(1, 2).flatten(2)


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    # On a CPU the fused kernel's backward in bf16 takes twice its time in fp32; two products with a float32
    # softmax between them take two thirds of it.
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return torch.matmul(_softmax(masked_scores(q, k, mask)).to(v.dtype), v)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def masked_scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Scaled scores, −inf where hidden, `[B, H, S, T]`; q and k with equally many heads."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    bias = mask.additive(q.shape[-2], k.shape[-2], q.device)
    return scores if bias is None else scores + bias


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, G, T, h]` → `[B, heads, T, h]`, each repeated heads/G times in place."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _own_key_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v_change: Tensor, mask: Mask
) -> Tensor:
    # each query's score with itself is replaced by that with its own key, and its value put right afterwards
    heads, past = q.shape[1], k.shape[-2] - q.shape[-2]
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    own_k, own_v_change = repeat_heads(own_k, heads), repeat_heads(own_v_change, heads)
    scores = masked_scores(q, k, mask)
    own = (q * own_k).sum(-1).to(scores.dtype) * q.shape[-1] ** -0.5
    weights = _softmax(torch.diagonal_scatter(scores, own, offset=past, dim1=-2, dim2=-1)).to(v.dtype)
    own_weight = weights.diagonal(offset=past, dim1=-2, dim2=-1).unsqueeze(-1)
    return (torch.matmul(weights, v) + own_weight * own_v_change).transpose(1, 2).flatten(2)
