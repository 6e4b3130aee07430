"""Attention over packed rows: a story once, and the questions behind it, none of which sees another.

Equal to dense attention under the block mask, at a third of its cost: a question's L queries meet the story's T keys
and their own L, never the other questions' keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthprobe.models.attend import Attend, repeat_heads


class PackedAttend(Attend):
    """An `attend` object for rows of T story tokens and Q questions of L tokens each.

    Padding inside a question stands at its end, so causality hides it from every real token.
    """

    def __init__(self, story_length: int, n_questions: int, length: int) -> None:
        self.told, self.n, self.length = story_length, n_questions, length
        self.story_hidden = torch.ones(story_length, story_length, dtype=torch.bool).triu(1)
        self.own_hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[B, H, S, h]`, k and v `[B, G, S, h]`, S = T + Q·L → `[B, S, H·h]`; softmax in float32."""
        batch, heads, _, width = q.shape
        told, n, length = self.told, self.n, self.length
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        q = q * width**-0.5
        to_story = torch.matmul(q, k[:, :, :told].transpose(-1, -2)).float()  # [B, H, S, T]
        in_story = to_story[:, :, :told].masked_fill(self.story_hidden, float("-inf")).softmax(-1).to(v.dtype)
        story = torch.matmul(in_story, v[:, :, :told])
        own_q, own_k, own_v = (x[:, :, told:].reshape(batch, heads, n, length, width) for x in (q, k, v))
        own = torch.matmul(own_q, own_k.transpose(-1, -2)).float().masked_fill(self.own_hidden, float("-inf"))
        scores = torch.cat([to_story[:, :, told:].reshape(batch, heads, n, length, told), own], dim=-1)
        weights = scores.softmax(-1).to(v.dtype)
        asked = torch.matmul(weights[..., :told].reshape(batch, heads, n * length, told), v[:, :, :told])
        asked = asked + torch.matmul(weights[..., told:], own_v).reshape(batch, heads, n * length, width)
        return torch.cat([story, asked], dim=2).transpose(1, 2).flatten(2)
