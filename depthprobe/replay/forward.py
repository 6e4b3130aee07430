"""Served tokens through whole forwards: every decode row at every loop, given the keys of the others.

Semantics are those of `models.loops`: with exits e, a query at loop d reads key j at min(d, e_j), and past its own exit
a row runs on as if it alone had stayed. A coda's layers run once, over the states that tokens left with. What a row
would say had it left at d is read with a *shadow* of it in the coda: its query and its own key come from its state at
d, the keys of all others from theirs as served. That is exact, and not the norm and head alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from depthprobe.models.attend import RaggedAttend, Slots
from depthprobe.models.core import Rotary
from depthprobe.models.masks import build_mask
from depthprobe.models.modeling import LoopedForCausalLM
from depthprobe.replay.served import ServedRequest


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests side by side, padded on the right, where causality hides the padding.

    Fields:
        ids: int64 `[B, S]`.
        prompt, served: int64 `[B, S]`, exits with the prompt alone as served and with all as served; U elsewhere.
        row, column: int64 `[N]`, where the decode rows stand, request by request and in order.
        token, exit: int64 `[N]`, what each was followed by and where it left.
    """

    ids: Tensor
    prompt: Tensor
    served: Tensor
    row: Tensor
    column: Tensor
    token: Tensor
    exit: Tensor

    @classmethod
    def of(cls, requests: Sequence[ServedRequest], n_loops: int, device: torch.device) -> Batch:
        shape = (len(requests), max(len(r.ids) for r in requests))
        ids = torch.zeros(shape, dtype=torch.int64)
        prompt = torch.full(shape, n_loops)
        rows, columns = [], []
        for at, r in enumerate(requests):
            first = len(r.prompt) - 1
            ids[at, : len(r.ids)] = torch.tensor(r.ids)
            prompt[at, :first] = torch.tensor(r.prompt_exits, dtype=torch.int64)
            rows.append(torch.full((len(r.tokens),), at))
            columns.append(torch.arange(first, first + len(r.tokens)))
        row, column = torch.cat(rows), torch.cat(columns)
        exit_ = torch.tensor([e for r in requests for e in r.exits])
        served = prompt.clone()
        served[row, column] = exit_
        token = torch.tensor([t for r in requests for t in r.tokens])
        return cls(*(x.to(device) for x in (ids, prompt, served, row, column, token, exit_)))


@dataclass(frozen=True, slots=True)
class RowStates:
    """The decode rows of a batch at loops 1 … U; U tensors `[N, d]` each.

    Fields:
        loops: loop states, as rules see them.
        heads: what the head reads had the row left there, already normed.
    """

    loops: list[Tensor]
    heads: list[Tensor]


@torch.inference_mode()
def row_states(model: LoopedForCausalLM, batch: Batch, exits: Tensor | None, n_loops: int) -> RowStates:
    """Run a batch with these exits, int64 `[B, S]` (None: all loops)."""
    ran = model(batch.ids, exits=exits, n_loops=n_loops, output_loop_states=True, skip_logits=True)
    states = cast(tuple[Tensor, ...], ran.loop_states)
    at = (batch.row, batch.column)
    loops = [state[at] for state in states]
    if not len(model.coda):
        return RowStates(loops, [model.normed(state) for state in loops])
    left = torch.stack(states)
    depth = torch.full_like(batch.ids, n_loops) if exits is None else exits
    served = left.gather(0, (depth - 1)[None, :, :, None].expand(1, -1, -1, left.shape[-1]))[0]
    return RowStates(loops, [model.norm(x[at]) for x in _codas(model, served, states)])


def _codas(model: LoopedForCausalLM, served: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    """The coda's output `[B, S, d]` for each of `states`, every position a shadow beside the others as `served`."""
    config, length, device = model.config, served.shape[1], served.device
    mask = build_mask(length, length, device)
    slots = Slots(config.n_prelude, config.n_core, config.n_coda, 1)
    # ragged attention as it is: "loop 1" is the coda as served, then all have left and each runs on in the shadow
    attend = RaggedAttend(mask, slots, own_key=True)
    positions = Rotary.of(torch.arange(length, device=device)[None], config, served.dtype)
    attend.enter("core")
    model.coda(served, positions, attend)
    attend.leave(torch.ones(served.shape[:2], dtype=torch.bool, device=device))
    return [model.coda(state, positions, attend) for state in states]
