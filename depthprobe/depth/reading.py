"""Which tokens of a forward are read: picking them from hidden states, and running the head on them alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from depthprobe.errors import UserError

#: None: the last real token of each row; int64 [B] or [B, P]; "all": every token.
Positions = Tensor | Literal["all"] | None


@dataclass(frozen=True, slots=True)
class Read:
    """The tokens to read. `index`: int64 [B] or [B, P], or None for all S tokens."""

    index: Tensor | None

    def __call__(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[B, S, d] → [B, d], [B, P, d] or [B, S, d]; a copy, which holds nothing but what was asked for."""
        return pick(hidden, self.index, dtype)


def pick(hidden: Tensor, index: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """[B, S, d] at tokens `index` ([B] or [B, P]; None: all) → [B, d], [B, P, d] or [B, S, d], always a copy."""
    if index is None:
        return hidden.to(dtype or hidden.dtype, copy=True, memory_format=torch.contiguous_format)
    index = index.to(hidden.device)
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    picked = hidden[rows if index.dim() == 1 else rows[:, None], index]  # indexing by tensors copies
    return picked if dtype is None else picked.to(dtype)


class HeadAt:
    """Context in which a head computes the logits of the tokens that are read and no others; or does not run.

    `logits_to_keep` of transformers takes the same columns for every row, and padded rows end in different
    ones.

    Args:
        head: the module from hidden states to logits.
        read: which tokens.
        run: False puts a column of zeros in the place of the logits, and the head's weights are not touched.
    """

    def __init__(self, head: nn.Module, read: Read, run: bool = True) -> None:
        self._head, self._read, self._run, self._fired = head, read, run, False

    def __enter__(self) -> HeadAt:
        # not a hook: hooks on the head, of ours and of other libraries, are to see what the model gives it
        # in the dict of the instance: wrappers of TransformerLens hand an attribute that is set on to what they wrap
        place = self._head.__dict__
        self._own = place.get("forward")  # other libraries set one there themselves
        self._forward = self._head.forward
        place["forward"] = self._cut if self._run else _nothing
        return self

    def __exit__(self, *_: object) -> None:
        place = self._head.__dict__
        del place["forward"]
        if self._own is not None:
            place["forward"] = self._own

    def _cut(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        index = self._read.index
        if state.dim() == 3:
            self._fired = True
            if index is not None:
                state = pick(state, index if index.dim() == 2 else index[:, None])
        return self._forward(state, *args, **kwargs)

    def logits(self, logits: Tensor) -> Tensor | None:
        """[B, V], [B, P, V] or [B, S, V] from what the model returned; None if the head was not to run."""
        if not self._run:
            return None
        if not self._fired:
            return self._read(logits)
        index = self._read.index
        return logits[:, 0] if index is not None and index.dim() == 1 else logits


def _nothing(state: Tensor, *_: Any, **__: Any) -> Tensor:
    return state.new_zeros(*state.shape[:-1], 1)


def token_tensor(given: Any, what: str) -> Tensor:
    """A tensor of whole numbers [B, S], as int64. Raises UserError for anything else."""
    if not isinstance(given, Tensor):
        raise UserError(f"{what} is a {type(given).__name__}", remedy="give a tensor of rows × tokens")
    if given.dim() != 2 or not given.numel():
        verb = "have" if what.endswith("s") else "has"
        raise UserError(f"{what} {verb} shape {tuple(given.shape)}", remedy="give rows × tokens")
    if given.is_complex() or bool((given != given.long()).any()):
        raise UserError(f"{what} is {str(given.dtype).removeprefix('torch.')}", remedy="give whole numbers")
    return given.long()


def embedded_tokens(model: nn.Module) -> int | None:
    """How many tokens a model has embeddings for; None where its embedding has no table."""
    try:
        weight = getattr(cast("Any", model).get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):  # of a model that does not follow transformers here
        return None
    return int(weight.shape[0]) if isinstance(weight, Tensor) else None


def known_tokens(ids: Tensor, mask: Tensor, n_tokens: int | None, name: str) -> Tensor:
    """ids, with 0 at padding, whose ids do not matter. ids, mask: int64 [B, S].

    Raises:
        UserError: a real token that the model has no embedding for.
    """
    ids = ids.masked_fill(mask == 0, 0)
    if n_tokens is None:
        return ids
    outside = (ids < 0) | (ids >= n_tokens)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        what = f"token {column} is {int(ids[row, column])}, and {name} knows 0 … {n_tokens - 1}"
        raise UserError(what, where=f"row {row}", remedy="tokenise with the tokenizer of the model")
    return ids


def read_positions(mask: Tensor, positions: Positions) -> Read:
    """Checked positions. mask: int64 [B, S], 1 at real tokens.

    Raises:
        UserError: another shape or type, a position out of range or at padding, a row of padding alone.
    """
    rows, length = mask.shape
    empty = ~mask.bool().any(-1)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise UserError(f"row {row} holds padding alone", remedy="give each row a real token to read")
    if isinstance(positions, str):
        if positions != "all":
            raise UserError(f"positions is '{positions}'", remedy='give "all", or token indices as a tensor')
        return Read(None)
    if positions is None:
        return Read(length - 1 - mask.flip(-1).argmax(-1))
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        kind = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise UserError(f"positions is {kind}", remedy='give "all", or token indices as an int64 tensor')
    index = positions.to(mask.device, torch.long)
    if index.dim() not in (1, 2) or index.shape[0] != rows or not index.numel():
        raise UserError(
            f"positions have shape {tuple(index.shape)}", remedy=f"one (or P) for each of {rows} rows"
        )
    columns = index if index.dim() == 2 else index[:, None]
    outside = (columns < 0) | (columns >= length)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        what = f"position {int(columns[row, column])} is outside its {length} tokens"
        raise UserError(what, where=f"row {row}", remedy=f"give 0 … {length - 1}")
    padding = mask.gather(1, columns) == 0
    if bool(padding.any()):
        row, column = padding.nonzero()[0].tolist()
        raise UserError(
            f"row {row} is read at padding, token {int(columns[row, column])}",
            remedy="give each row a real token to read",
        )
    return Read(index)


def without_left_padding(ids: Tensor, mask: Tensor, read: Read) -> tuple[Tensor, Tensor, Read]:
    """The same rows padded on the right, and the same tokens to read. ids, mask: int64 [B, S]."""
    first = mask.argmax(-1, keepdim=True)  # [B, 1], each row's first real token
    if not bool(first.any()):
        return ids, mask, read
    length = mask.shape[-1]
    places = torch.arange(length, device=mask.device)
    source = (places + first) % length  # [B, S]
    # at padding there is nothing to read; with positions "all" its place is filled with whatever lies there
    index = (places - first) % length if read.index is None else read.index
    if read.index is not None:
        index = index - (first[:, 0] if index.dim() == 1 else first)
    return ids.gather(1, source), mask.gather(1, source), Read(index)
