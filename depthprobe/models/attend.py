"""Ways to attend: each object decides which keys and values a block's queries see. The block is the same for all.

An `Attend` is told where in the execution it is by `enter(stage, loop)` and is then called once a layer. Dense attention
ignores the place; the others find the slot of a (stage, loop, layer) with `Slots`. New ways (a suffix behind a shared
prefix, pages) are further subclasses; nothing else changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.models.masks import Mask

Stage = Literal["prelude", "core", "coda"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Key/value slots of a token in order of execution: prelude, then loop · L + layer of the core, then coda."""

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


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax attention. q `[B, H, S, h]`, k and v `[B, G, T, h]` → `[B, S, H·h]`, heads of a group share keys."""
    if q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu" and torch.is_grad_enabled():
        out = _by_hand(q, k, v, mask)
    else:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.visible, is_causal=mask.causal, enable_gqa=grouped
        )
    return out.transpose(1, 2).flatten(2)


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    # On a CPU the fused kernel's backward in bf16 takes twice its time in fp32; two products with a float32 softmax
    # between them take two thirds of it.
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    weights = softmax_scores(q, k, mask)
    return torch.matmul(weights.to(v.dtype), v)


def softmax_scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Attention weights in float32, `[B, H, S, T]`; q and k with equally many heads."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    bias = mask.additive(q.shape[-2], k.shape[-2], q.device)
    return (scores if bias is None else scores + bias).softmax(-1, dtype=torch.float32)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, G, T, h]` → `[B, heads, T, h]`, each repeated heads/G times in place."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
