"""Refusals of a forward's arguments, each naming the one that does not fit."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from depthprobe.errors import UserError
from depthprobe.halting import ExitRule
from depthprobe.models.cache import LoopedCache


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Ids must be integer `[B, S]`, S ≥ 1, within the vocabulary (the last is not looked at on a device)."""
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        what = f"input_ids have shape {list(input_ids.shape)}, not [rows, tokens]"
        raise UserError(what, where="input_ids")
    if input_ids.device.type == "cpu" and input_ids.numel():  # a device would have to be waited for
        low, high = (int(x) for x in input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            what = f"token ids go from {low} to {high}, outside a vocabulary of {vocab_size}"
            raise UserError(what, where="input_ids")


def check_shape(name: str, value: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """`value`, if given, must have one of the shapes."""
    if value is not None and tuple(value.shape) not in shapes:
        raise UserError(f"{name} has shape {list(value.shape)}, not {list(shapes[-1])}", where=name)


def check_block_mask(block_mask: Tensor | None, batch: int, queries: int, keys: int) -> None:
    """A packing mask, if given, must be bool `[B or 1, 1, S, T]`."""
    if block_mask is not None and block_mask.dtype != torch.bool:
        raise UserError(f"block_mask is {block_mask.dtype}, not bool (True: may see)", where="block_mask")
    check_shape("block_mask", block_mask, (1, 1, queries, keys), (batch, 1, queries, keys))


def check_exit_options(
    rule: ExitRule | None, exit_seed: int | Tensor | None, is_prompt: Tensor | None, shape: tuple[int, int]
) -> None:
    """Seeds and marks of prompt tokens must have a rule to go with, and a rule that needs the latter must get it."""
    if rule is None:
        for name, value in (("exit_seed", exit_seed), ("is_prompt", is_prompt)):
            if value is not None:
                raise UserError(f"{name} is given without exits", where=name, remedy="give exits, or leave it out")
        return
    if exit_seed is not None and rule.sampled and not rule.needs_uniform:
        raise UserError("the rule draws from a generator of its own", where="exit_seed", remedy="give one of the two")
    check_shape("is_prompt", is_prompt, shape)
    if is_prompt is not None and is_prompt.dtype != torch.bool:
        raise UserError(f"is_prompt is {is_prompt.dtype}, not bool", where="is_prompt")
    if rule.min_depth_prompt is not None and is_prompt is None:
        what = "the rule has another least depth for the prompt, and nothing says which tokens are the prompt's"
        raise UserError(what, where=f"exit rule {rule.name}", remedy="give is_prompt, bool [B, S]")


def the_cache(
    cache: Cache | None, past_key_values: Cache | None, use_cache: bool | None
) -> LoopedCache | None:
    """The cache to fill: the one given under its new or its old name, a fresh one if asked for, or None."""
    if cache is not None and past_key_values is not None:
        raise UserError("cache and its old name past_key_values are both given", where="cache")
    held = past_key_values if cache is None else cache
    if held is None:
        return LoopedCache() if use_cache else None
    if not isinstance(held, LoopedCache):
        what = f"the cache is a {type(held).__name__}, which does not know the token ids it holds"
        raise UserError(what, where="cache", remedy="pass a depthprobe.models.LoopedCache")
    return held
