"""The transformer block, written once, and `core_step`, the one pass of the looped layers.

A block does not know how attention finds its keys: it hands queries, keys and values to an `attend` object
(depthprobe.models.attend). Dense training, cached decoding, mixed depths, shared prefixes and pages differ in
that object alone. Shapes: B sequences of S tokens, H query heads, G key/value heads of width h, residual
width d.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthprobe.models.configuration import LoopedConfig


class Attention(Protocol):
    """What a block needs of an `attend` object: queries in, mixed values out."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. q `[B, H, S, h]`, k and v `[B, G, S, h]`, keys already turned; returns `[B, S, H·h]`.

        `layer` counts within the stack that is running (prelude, core or coda), from 0.
        """
        ...


class Rotary(NamedTuple):
    """Rotary tables of the positions at hand, made once a forward. cos and sin: `[B or 1, S, 1, r/2]`."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, position_ids: Tensor, config: LoopedConfig, dtype: torch.dtype = torch.float32) -> Rotary:
        """Tables for int64 position ids `[B or 1, S]`, in float32 or better whatever the model's dtype is."""
        half = config.rotary_dim // 2
        dtype = torch.promote_types(dtype, torch.float32)
        steps = torch.arange(half, dtype=dtype, device=position_ids.device)
        frequencies = config.rope_theta ** (-steps / max(half, 1))
        angles = position_ids[..., None, None].to(dtype) * frequencies
        return cls(angles.cos(), angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the first r dimensions of each head, as two halves. x `[B, S, heads, h]`, same shape out."""
        half = self.cos.shape[-1]
        if half == 0:
            return x
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned if rest.shape[-1] == 0 else (*turned, rest), dim=-1)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    """Attention and SwiGLU, each a residual branch with a norm before it and, for "sandwich", one after."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        d, f, h = config.hidden_size, config.intermediate_size, config.head_size
        self.heads, self.kv_heads, self.head_size = config.num_attention_heads, config.kv_heads, h
        sandwich = config.norm == "sandwich"
        self.attention_norm = RMSNorm(d, config.rms_norm_eps)
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * h, bias=config.attention_bias)
        self.out = nn.Linear(self.heads * h, d, bias=False)
        self.attention_out_norm = RMSNorm(d, config.rms_norm_eps) if sandwich else nn.Identity()
        self.mlp_norm = RMSNorm(d, config.rms_norm_eps)
        # two matrices, not one: cutting a fused product costs more than it saves
        self.mlp_gate = nn.Linear(d, f, bias=False)
        self.mlp_up = nn.Linear(d, f, bias=False)
        self.mlp_down = nn.Linear(f, d, bias=False)
        self.mlp_out_norm = RMSNorm(d, config.rms_norm_eps) if sandwich else nn.Identity()

    def forward(self, x: Tensor, positions: Rotary, attend: Attention, layer: int) -> Tensor:
        """The residual after the block. x `[B, S, d]` → `[B, S, d]`."""
        batch, length, _ = x.shape
        turned = self.heads + self.kv_heads
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, turned + self.kv_heads, self.head_size)
        qk, v = qkv.split((turned, self.kv_heads), dim=2)
        q, k = positions.turn(qk).split((self.heads, self.kv_heads), dim=2)
        mixed = attend(layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.attention_out_norm(self.out(mixed))
        h = self.mlp_norm(x)
        return x + self.mlp_out_norm(self.mlp_down(F.silu(self.mlp_gate(h)) * self.mlp_up(h)))


class Stack(nn.ModuleList):
    """Blocks in sequence; the prelude, the core and the coda are each one."""

    def __init__(self, config: LoopedConfig, layers: int) -> None:
        super().__init__(Block(config) for _ in range(layers))

    def forward(self, x: Tensor, positions: Rotary, attend: Attention) -> Tensor:
        """x `[B, S, d]` → `[B, S, d]`."""
        for layer, block in enumerate(self):
            x = block(x, positions, attend, layer)
        return x


def core_step(core: Stack, x: Tensor, positions: Rotary, attend: Attention) -> Tensor:
    """One pass of the looped layers: x `[B, S, d]` → `[B, S, d]`.

    The rows may be at different loops: the weights are the same, and `attend` knows at which depth each row
    reads. What enters a loop and what leaves it (injection, per-loop norm) is the model's `loop_input` and
    `loop_output`.
    """
    return core(x, positions, attend)
