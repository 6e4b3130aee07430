"""Next tokens from logits: greedy, temperature and top-p, each request with its own seed.

The number a token is drawn with is a hash of the request's seed and the token's position, and every reduction runs
within one row, so that a token depends neither on the width of the batch nor on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.halting import Purpose, uniforms

#: columns whose probabilities are added up first when a draw is looked up
_BLOCK = 256
#: logits whose logarithms are taken in one piece: they fit into a core's cache
_AT_ONCE = 1 << 18
#: how many of the most probable tokens are tried as a nucleus before all are sorted
_NUCLEUS = 1024

Floats = Sequence[float] | NDArray[np.floating]
Ints = Sequence[int] | NDArray[np.integer]


class Sampled(NamedTuple):
    """What was drawn, on the device of the logits.

    Fields:
        tokens: int64 `[n]`.
        logprobs: float32 `[n]`, of the tokens in nats, under the model itself (temperature 1, nothing cut off).
        top_ids, top_logprobs: int64 and float32 `[n, k]`, the k most probable tokens, likewise.
        leads: float32 `[n]`, how far the largest logit is ahead of the second; 0 where there is one only.
        What was not asked for is empty.
    """

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    leads: Tensor


@torch.inference_mode()
def sample(
    logits: Tensor,
    temperature: Floats,
    top_p: Floats,
    seed: Ints,
    position: Ints,
    *,
    top_logprobs: int | None = 0,
    leads: bool = False,
) -> Sampled:
    """Draw the next token of each row.

    Args:
        logits: float `[n, V]`.
        temperature: `[n]`; 0 takes the most probable token (the first of equals).
        top_p: `[n]` in (0, 1]; only the fewest most probable tokens that have this mass together are drawn from, and
            those equal to the last of them.
        seed: `[n]`, of the requests.
        position: `[n]`, index of the new token in its request.
        top_logprobs: k; None: no log-probabilities at all, whose sums take longer than all else here.
        leads: whether these are wanted.
    """
    hot = np.flatnonzero(np.asarray(temperature, dtype=np.float64) > 0.0)
    tokens, ahead = _best(logits, leads)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if len(hot):
        device = logits.device

        def put(x: Floats | Ints, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.asarray(x)[hot], dtype=dtype).to(device)

        rows = torch.from_numpy(hot).to(device)
        chosen = logits[rows].to(wide)
        # the largest first, and in float64: however cold, no logit overflows and the best stays at 0
        below = (chosen - chosen.amax(-1, keepdim=True)).double() / put(temperature, torch.float64)[:, None]
        p = below.to(wide).softmax(-1)
        mass = put(top_p, torch.float64)
        cut = torch.from_numpy(np.flatnonzero(np.asarray(top_p, dtype=np.float64)[hot] < 1.0)).to(device)
        if len(cut):
            p[cut] = _nucleus(p[cut], mass[cut])
        drawn = uniforms(put(seed, torch.int64), put(position, torch.int64), Purpose.TOKEN)
        tokens[rows] = _lookup(p, drawn)
    if top_logprobs is None:
        nothing = logits.new_empty(0, dtype=torch.float32)
        return Sampled(tokens, nothing, tokens.new_empty(0), nothing, ahead)
    top = logits.topk(top_logprobs, -1).indices
    wanted = torch.cat((tokens[:, None], top), -1)
    # few rows at a time: a large result would have to be asked of the system, for a few of its columns
    few = max(1, _AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    logprobs = torch.cat([
        rows.to(wide).log_softmax(-1).gather(-1, columns).float()
        for rows, columns in zip(logits.split(few), wanted.split(few), strict=True)
    ])  # fmt: skip
    return Sampled(tokens, logprobs[:, 0], top, logprobs[:, 1:], ahead)


def _best(logits: Tensor, leads: bool) -> tuple[Tensor, Tensor]:
    """First column of the largest logit of each row `[n, V]`, int64 `[n]`, and its lead if that is asked for.

    By maxima of blocks of columns, then in one block: a CPU's `argmax` takes several times as long.
    """
    size, wide = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
    whole = size // _BLOCK * _BLOCK
    maxima = logits[:, :whole].unflatten(-1, (-1, _BLOCK)).amax(-1) if whole else logits[:, :0]
    if whole < size:
        maxima = torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), -1)
    block = maxima.argmax(-1)
    first = block * _BLOCK
    at = first[:, None] + torch.arange(_BLOCK, device=logits.device)
    columns = logits.gather(-1, at.clamp_max(size - 1)).masked_fill(at >= size, -torch.inf)
    tokens = first + columns.argmax(-1)
    if not leads or size == 1:
        return tokens, torch.zeros(len(logits) if leads else 0, device=logits.device)
    best, second = columns.topk(2, -1).values.to(wide).T
    others = maxima.scatter(-1, block[:, None], -torch.inf).amax(-1)
    return tokens, (best - torch.maximum(second, others)).float()


def _nucleus(p: Tensor, mass: Tensor) -> Tensor:
    """p `[n, V]` with 0 outside the nucleus of `mass`, float64 `[n]`."""
    best = p.topk(min(_NUCLEUS, p.shape[-1]), -1).values
    if bool((best.sum(-1, dtype=torch.float64) < mass).any()):
        best = p.sort(-1, descending=True).values
    # the last token needed is the first at which the sum reaches the mass; by value, for equals come in any order
    before = best.cumsum(-1, dtype=torch.float64) - best
    last = (before < mass[:, None]).sum(-1, keepdim=True) - 1
    return torch.where(p >= best.gather(-1, last), p, 0.0)


def _lookup(p: Tensor, drawn: Tensor) -> Tensor:
    """Where the sums of p `[n, V]` (not normalised) pass `drawn`, float64 `[n]` in (0, 1): int64 `[n]`."""
    n, size = p.shape
    blocks = F.pad(p, (0, -size % _BLOCK)).view(n, -1, _BLOCK)
    rows = torch.arange(n, device=p.device)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = drawn * sums[:, -1]
    block = _passed(sums, target)
    rest = target - torch.where(block > 0, sums[rows, block - 1], 0.0)
    within = blocks[rows, block].cumsum(-1, dtype=torch.float64)
    return block * _BLOCK + _passed(within, rest)


def _passed(sums: Tensor, target: Tensor) -> Tensor:
    """First column of rising sums `[n, m]` above the target, never one that adds nothing."""
    last = (sums < sums[:, -1:]).sum(-1)  # where rounding would put the target at the very end
    return torch.minimum((sums <= target[:, None]).sum(-1), last)
