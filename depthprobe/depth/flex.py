"""The mask of flex attention, which says by a function who sees whom, as a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask


def is_block_mask(mask: Any) -> bool:
    """Whether a mask is one of flex attention."""
    return isinstance(mask, BlockMask)


def visible_of(mask: BlockMask, length: int, device: torch.device) -> Tensor:
    """bool [B, H or 1, S, S], True where seen, of a mask over S tokens."""
    rows, heads = mask.shape[0], mask.shape[1]
    return create_mask(mask.mask_mod, rows, heads, length, length, device=device)  # pyright: ignore[reportArgumentType]
