"""The coda lens: what a looped model with a coda would answer if it stopped after loop r.

"coda": *all* positions stop at r, so that the coda reads states of one loop throughout; this is the model run with
n_loops = r. "coda-exits": the position that is read stops at r, and the others where their gate let them go (Q-exit
at the model's own q), as in a server that exits early. The two differ from the second loop on, and neither is the
plain lens, which leaves the coda out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from depthprobe.depth import Coordinate, DepthModel, pick
from depthprobe.depth.taps import Tap, tapped
from depthprobe.errors import UserError
from depthprobe.halting import ExitRule, QExit
from depthprobe.lens.reads import Reads, pad_id, padded
from depthprobe.lens.targets import Target
from depthprobe.models import LoopedForCausalLM

#: Rows of one forward of "coda-exits", which runs a row for every position that is read.
_ROWS = 64


@torch.inference_mode()
def coda_states(
    model: DepthModel, ids: Tensor, mask: Tensor, index: Tensor, loops: Sequence[int] | None = None
) -> list[Tensor]:
    """States behind the coda, all positions stopped at loop r, for each r of `loops`.

    Args:
        ids, mask: int64 [B, S]; padding on either side.
        index: int64 [B, P], the tokens to read.
        loops: default: 1 … R.

    Returns:
        States [B, P, d] in the model's dtype, before the final norm; read them as the last depth.

    Raises:
        UserError: the model has no coda, or is no looped model of this package.
    """
    looped = check_coda(model)
    loops = range(1, model.n_loops + 1) if loops is None else loops
    return [_run(model, looped, ids, mask, index, n_loops=loop) for loop in loops]


def coda_reads(model: DepthModel, targets: Sequence[Target], reads: Reads) -> Reads:
    """Reads whose states at the ends of loops are those behind the coda, all positions stopped there.

    The last loop's is the model's own last state. These states are to be read as the last depth (`coda_places`).

    Raises:
        UserError: as `coda_states`.
    """
    prompts = [target.prompt_ids for target in targets]
    rows = [(*prompts[number], *suffix) for number, suffix in reads.after]
    at_root = _ends(model, prompts)
    pieces = [_ends(model, rows[start : start + len(prompts)]) for start in range(0, len(rows), len(prompts))]
    last = model.axis[-1]
    root, states = dict(reads.root.states), dict(reads.states)
    for number, end in enumerate(model.loop_ends):
        final = number == model.n_loops - 1
        root[end] = root[last] if final else at_root[number]
        if rows:
            states[end] = states[last] if final else torch.cat([piece[number] for piece in pieces])
    return replace(reads, root=replace(reads.root, states=root), states=states)


def coda_places(model: DepthModel) -> dict[Coordinate, Coordinate]:
    """The depths that are read behind the coda → the depth whose norm their states still want."""
    return dict.fromkeys(model.loop_ends, model.axis[-1])


def _ends(model: DepthModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """[B, d] for every loop but the last, at the end of each row."""
    ids, mask = padded(rows, pad_id(model))
    at_end = torch.full((len(rows), 1), ids.shape[1] - 1)
    found = coda_states(model, ids, mask, at_end, range(1, model.n_loops))
    return [state[:, 0] for state in found]


@torch.inference_mode()
def coda_exit_states(model: DepthModel, ids: Tensor, mask: Tensor, index: Tensor) -> list[Tensor]:
    """As `coda_states`, but the positions that are not read stopped where the gate let them go.

    Every position that is read is a row of its own here: R · B · P rows are run.

    Raises:
        UserError: as `coda_states`; a model without a gate.
    """
    looped = check_coda(model)
    if not model.gate or model.exit_q is None:
        raise UserError(f"{model.name} has no exit gate", where="lens coda-exits", remedy="take lens 'coda'")
    device = model.device
    ids, mask, index = ids.to(device), mask.to(device), index.to(device)
    ran = looped(ids, attention_mask=mask, exits=QExit(model.exit_q), skip_logits=True)
    assert ran.exit_depths is not None
    rows = torch.arange(len(ids), device=device).repeat_interleave(index.shape[1])  # [N], N = B · P
    places = index.flatten()
    found: list[Tensor] = []
    for loop in range(1, model.n_loops + 1):
        pieces = []
        for some, at in zip(rows.split(_ROWS), places.split(_ROWS), strict=True):
            exits = ran.exit_depths[some].scatter(1, at[:, None], loop)
            pieces.append(_run(model, looped, ids[some], mask[some], at[:, None], exits=exits)[:, 0])
        found.append(torch.cat(pieces).view(*index.shape, -1))
    return found


def _run(
    model: DepthModel,
    looped: LoopedForCausalLM,
    ids: Tensor,
    mask: Tensor,
    index: Tensor,
    n_loops: int | None = None,
    exits: Tensor | ExitRule | None = None,
) -> Tensor:
    """The state behind the coda's last layer at the tokens `index`, [B, P, d]."""
    last = model.axis[-1]
    states: list[Tensor] = []

    def take(coordinate: Coordinate, state: Tensor) -> None:
        del coordinate
        states.append(pick(state, index))

    ids, mask = ids.to(model.device), mask.to(model.device)
    with tapped(looped, {last: Tap(f"coda.{looped.config.n_coda - 1}")}, take):
        looped(ids, attention_mask=mask, n_loops=n_loops, exits=exits, skip_logits=True)
    return states[0]


def check_coda(model: DepthModel) -> LoopedForCausalLM:
    """The module that can be stopped at a loop. Raises UserError for another kind of model, or one without a coda."""
    if not isinstance(model.model, LoopedForCausalLM):
        what = f"{model.name} cannot be stopped at a loop: it is a {type(model.model).__name__}"
        raise UserError(what, where="lens coda", remedy="take lens 'plain'")
    if not model.model.config.n_coda:
        raise UserError(f"{model.name} has no coda", where="lens coda", remedy="take lens 'plain', which is the same")
    return model.model
