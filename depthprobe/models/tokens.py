"""What is known of a forward's tokens besides embeddings: padding, positions, and the tokens before each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.models.cache import LoopedCache


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a forward with those of its past.

    Fields:
        ids: int64 `[B, T]`, −1 at padding; T = cached + new tokens.
        mask: bool `[B, T]`, False at keys not to be seen; None where it is known that all are real.
    """

    ids: Tensor
    mask: Tensor | None

    @classmethod
    def of(
        cls, input_ids: Tensor, attention_mask: Tensor | None, cache: LoopedCache | None, n_loops: int
    ) -> Tokens:
        """From new ids `[B, S]`, a mask over the new tokens or over all, and the cache that holds the past.

        Raises:
            UserError: a mask of another shape, a cache of other rows or another number of loops.
        """
        batch, length = input_ids.shape
        if cache is not None:
            cache.check(batch, n_loops)
        past = None if cache is None else cache.token_ids
        total = length if past is None else length + past.shape[1]
        if attention_mask is None and past is None:
            return cls(input_ids, None)
        if attention_mask is None:
            new = input_ids
        else:
            if tuple(attention_mask.shape) not in ((batch, length), (batch, total)):
                what = f"attention_mask has shape {list(attention_mask.shape)}, not [{batch}, {total}]"
                remedy = "block_mask takes masks of who sees whom"
                raise UserError(what, where="attention_mask", remedy=remedy)
            new = input_ids.masked_fill(~attention_mask[:, -length:].bool(), -1)
        ids = new if past is None else torch.cat([past, new], dim=1)
        if attention_mask is not None and attention_mask.shape[1] == total:
            return cls(ids, attention_mask.bool())
        return cls(ids, ids >= 0)

    def real(self, length: int) -> Tensor:
        """bool `[B, length]`: which of the last tokens are not padding."""
        return self.ids[:, -length:] >= 0

    def count(self, length: int) -> Tensor:
        """How many of the last `length` tokens are real, int64 scalar."""
        new = self.ids[:, -length:]
        return torch.tensor(new.numel(), device=new.device) if self.mask is None else (new >= 0).sum()

    def positions(self, length: int) -> Tensor:
        """Positions of the last tokens among real ones: int64 `[B or 1, length]`, 0 at left padding."""
        if self.mask is None:
            return torch.arange(length, device=self.ids.device)[None]
        return (self.mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]

    def previous(self, length: int, back: int, position_ids: Tensor, block_mask: Tensor | None) -> Tensor:
        """Ids of the `back` tokens before each of the last `length`, nearest first; −1 where there is none,
        or padding.

        Without a packing mask these are the neighbours to the left. In a packed row the token before the
        first word of a question is the last word of the story, wherever that stands: the visible token
        whose position is smaller by one.

        Args:
            position_ids: int64 `[B or 1, length]`.
            block_mask: bool `[B or 1, 1, length, T]` or None.

        Returns:
            int64 `[B, length, back]`.
        """
        if block_mask is None:
            padded = F.pad(self.ids[:, -(length + back) :], (back, 0), value=-1)
            end = padded.shape[1]
            columns = [padded[:, end - length - b : end - b] for b in range(1, back + 1)]
            return torch.stack(columns, dim=-1)
        if self.ids.shape[1] != length:
            what = "with a block_mask and a cache the previous tokens cannot be told"
            raise UserError(what, where="block_mask", remedy="give previous_ids")
        gaps = position_ids[:, :, None] - position_ids[:, None, :]
        visible = block_mask[:, 0].tril()
        columns = []
        for b in range(1, back + 1):
            match = visible & (gaps == b)
            match = match.expand(self.ids.shape[0], -1, -1)
            ids = self.ids.gather(1, match.to(torch.uint8).argmax(-1))
            columns.append(torch.where(match.any(-1), ids, -1))
        return torch.stack(columns, dim=-1)
