"""Reading many states over a large vocabulary: what they say, without ever holding their logits.

    said = read(model, [(coordinate, states), ...], top_k=5)     # states [N, d] at the same N positions
    said.top_ids, said.entropy                                   # [N, D, 5], [N, D]

N positions at D depths have N · D · V logits. They are made a tile at a time (rows × columns of the head, 2 MiB
of float32), and each tile is reduced at once: a running maximum and sum give the normaliser and the entropy
(as in Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), the tile's best columns
compete with the best so far, ranks are counted. All depths of a position stand in one tile, so the divergence
from the last depth needs nothing but the tile either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from depthprobe.depth import Coordinate, DepthModel
from depthprobe.depth.identity import FLOAT32_TOLERANCE, identity_error
from depthprobe.depth.tail import is_quantised
from depthprobe.errors import UserError

#: Logits held at once, in elements (2 MiB of float32), and states whose logits they are, at most.
_TILE, _ROWS = 1 << 19, 1024
#: Columns that compete as one for a place among the best.
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Said:
    """What N positions say at D depths, float32 unless noted; natural logarithms, entropy and KL in nats.

    Attributes:
        top_ids, top_logprobs: [N, D, k], the best tokens (int64), best first.
        log_normaliser: [N, D], logsumexp of the logits.
        entropy, kl_final: [N, D]; KL(last depth ‖ this depth). None unless asked for.
        target_logit: [N, D, T]. None without targets. Likewise:
        target_rank: int64 [N, D, T], the tokens with a larger logit; of the targets that were `ranked`.
        identity: [N], largest difference of the last depth from the model's own logits, as a share of the
            largest |logit| (at least 1). None if they were not given.
    """

    top_ids: Tensor
    top_logprobs: Tensor
    log_normaliser: Tensor
    entropy: Tensor | None = None
    kl_final: Tensor | None = None
    target_logit: Tensor | None = None
    target_rank: Tensor | None = None
    identity: Tensor | None = None


@torch.inference_mode()
def read(
    model: DepthModel,
    depths: Sequence[tuple[Coordinate, Tensor]],
    *,
    top_k: int = 5,
    targets: Tensor | None = None,
    ranked: int | None = None,
    own: Tensor | None = None,
    full: bool = True,
    name: Callable[[int], str] = "row {}".format,
) -> Said:
    """Read states with the model's own norm and head, in float32.

    Args:
        depths: (coordinate, states [N, d], any floating dtype); the last is what `kl_final` is taken from.
        top_k: how many of the best tokens to name.
        targets: int64 [N, T], tokens whose logits and ranks are wanted at each position.
        ranked: so many of them, from the first, are ranked; None: all. A rank looks at every logit.
        own: [N, V], the model's own logits there, which the last of the depths must reproduce.
        full: whether entropy and KL are wanted.
        name: position → what an error calls it.

    Raises:
        UserError: NaN or an infinity in a state or in its logits (says where); the last depth does not
            reproduce `own` within `identity.FLOAT32_TOLERANCE`.
    """
    n = depths[0][1].shape[0]
    columns = model.vocab_size if not model.tail32.plain else 1
    block = max(1, min(_ROWS, _TILE // columns) // len(depths))
    pieces: list[Said] = []
    for start in range(0, n, block):
        part = slice(start, min(start + block, n))
        piece = _read_block(
            model,
            [(coordinate, state[part]) for coordinate, state in depths],
            min(top_k, model.vocab_size),
            None if targets is None else targets[part],
            ranked,
            None if own is None else own[part],
            full,
        )
        bad = ~piece.log_normaliser.isfinite()
        if bool(bad.any()):
            row, depth = (int(index) for index in bad.nonzero()[0])
            raise not_finite(model, depths[depth][1][start + row], depths[depth][0], name(start + row))
        if piece.identity is not None:
            worst = float(piece.identity.max())
            allowed = FLOAT32_TOLERANCE.get(model.dtype, 1e-4)
            if not worst <= allowed:
                raise identity_error(model.name, worst, allowed, model.dtype, is_quantised(model.tail32.head))
        pieces.append(piece)
    whole: dict[str, Any] = {}
    for field in fields(Said):
        parts = [getattr(piece, field.name) for piece in pieces]
        whole[field.name] = None if parts[0] is None else torch.cat(parts)
    return Said(**whole)


def not_finite(model: DepthModel, state: Tensor, coordinate: Coordinate, where: str) -> UserError:
    """The one line about a state, or what is read from it, that holds a NaN or an infinity."""
    dtype = str(model.dtype).removeprefix("torch.")
    place = f"{where}, depth {coordinate}"
    if bool(state.isinf().any()):
        largest = torch.finfo(state.dtype).max
        return UserError(
            f"the states of {model.name} overflow {dtype} (its largest number is {largest:.5g})", where=place,
            remedy="run it with --dtype float32 or bfloat16",
        )  # fmt: skip
    if bool(state.isnan().any()):
        remedy = "the weights may be damaged; in half precision, try --dtype float32"
        return UserError(f"the states of {model.name} are NaN", where=place, remedy=remedy)
    remedy = "the norm or the head may be damaged"
    return UserError(f"{model.name} gives NaN in the lens", where=place, remedy=remedy)


def _read_block(
    model: DepthModel,
    depths: Sequence[tuple[Coordinate, Tensor]],
    top_k: int,
    targets: Tensor | None,
    ranked: int | None,
    own: Tensor | None,
    full: bool,
) -> Said:
    """`read` for so few positions that a tile holds all their depths. P positions, D depths, R = P · D rows."""
    tail = model.tail32
    normed = torch.stack([model.normed(state, coordinate) for coordinate, state in depths], dim=1)  # [P, D, d]
    n, d = normed.shape[:2]
    plain = tail.plain
    wanted = None if targets is None or not plain else tail.columns(normed, targets).flatten(0, 1)  # [R, T]
    ids = None if targets is None else targets.repeat_interleave(d, 0)
    rank = None if ids is None else torch.zeros_like(ids[:, :ranked])
    apart = scale = None
    if own is not None:
        apart = scale = torch.zeros(n, device=normed.device)
    best, best_ids = normed.new_full((n * d, top_k), -torch.inf), normed.new_zeros((n * d, top_k), dtype=torch.long)
    high = mass = spread = cross = None
    for start, logits in tail.tiles(normed.flatten(0, 1), max(_GROUP, _TILE // (n * d) // _GROUP * _GROUP)):
        if not plain:  # a model may rule tokens out with −inf, which has no product with a probability of 0
            logits = logits.clamp(min=torch.finfo(torch.float32).min)
        width = logits.shape[-1]
        if apart is not None and scale is not None and own is not None:
            theirs = own[:, start : start + width].float()
            # what the model itself rules out with −inf is not compared
            gap = (logits.view(n, d, width)[:, -1] - theirs).masked_fill(theirs == -torch.inf, 0.0)
            apart = torch.maximum(apart, gap.abs().amax(-1))
            scale = torch.maximum(scale, theirs.masked_fill(theirs == -torch.inf, 0.0).abs().amax(-1))
        if ids is not None and rank is not None:
            if wanted is None:
                wanted = logits.gather(-1, ids)
            if rank.shape[-1]:
                rank += _counted(logits, wanted[:, :ranked], ids[:, :ranked] - start)
        groups = logits.view(n * d, -1, _GROUP if width % _GROUP == 0 else width)
        highest = groups.amax(-1)  # [R, groups]
        peak = highest.amax(-1)
        _compete(best, best_ids, groups, highest, peak, start)
        top = peak if high is None else torch.maximum(high, peak)
        logits = logits.sub_(top[:, None]) if plain else logits - top[:, None]
        weights = logits.exp()
        sums = weights.sum(-1)
        moment = torch.linalg.vecdot(weights, logits) if full else None  # Σ e^u · u with u = logit − top
        final = None
        if full:
            of_last = weights.view(n, d, width)[:, -1:]  # [P, 1, width]
            final = torch.linalg.vecdot(logits.view(n, d, width), of_last).flatten()  # Σ e^{u of the last} · u, [R]
        if high is not None and mass is not None:  # what was summed below another maximum
            shift = high - top
            shrink = shift.exp()
            if moment is not None and final is not None and spread is not None and cross is not None:
                last_mass, last_shrink = _of_last(mass, d), _of_last(shrink, d)
                moment = moment + shrink * (spread + shift * mass)
                final = final + last_shrink * (cross + shift * last_mass)
            sums = sums + shrink * mass
        high, mass, spread, cross = top, sums, moment, final
    assert high is not None and mass is not None
    log_mass = mass.log()
    normaliser = high + log_mass
    said = Said(
        top_ids=best_ids.view(n, d, -1),
        top_logprobs=(best - normaliser[:, None]).view(n, d, -1),
        log_normaliser=normaliser.view(n, d),
    )
    if spread is not None and cross is not None:
        last_log, last_mass = _of_last(log_mass, d), _of_last(mass, d)
        kl = (_of_last(spread, d) - cross) / last_mass - last_log + log_mass
        said = replace(said, entropy=(log_mass - spread / mass).view(n, d), kl_final=kl.clamp(min=0.0).view(n, d))
    if wanted is not None and rank is not None:
        said = replace(said, target_logit=wanted.view(n, d, -1), target_rank=rank.view(n, d, rank.shape[-1]))
    if apart is not None and scale is not None:
        said = replace(said, identity=apart / scale.clamp(min=1.0))
    return said


def _of_last(values: Tensor, depths: int) -> Tensor:
    """[R] → [R], at every depth the value of the position's last depth."""
    return values.view(-1, depths)[:, -1:].expand(-1, depths).flatten()


def _counted(logits: Tensor, wanted: Tensor, places: Tensor) -> Tensor:
    """How many logits of a tile [R, W] are above the wanted ones [R, T], int64; a token is not above itself.

    Logits within 8 ε of the largest of the tile count as tied: the wanted ones are another matrix product's.

    Args:
        places: int64 [R, T], the wanted tokens' columns in this tile; outside 0 … W − 1 if they are in another.
    """
    width = logits.shape[-1]
    # rows of one direction in a head (unused tokens, often) tie but for rounding, which is no order
    margin = 8 * torch.finfo(logits.dtype).eps * logits.abs().amax(-1, keepdim=True).clamp(min=1.0)
    wanted = wanted + margin
    above = torch.stack([(logits > column[:, None]).sum(-1) for column in wanted.unbind(-1)], dim=-1)
    here = (places >= 0) & (places < width)
    # the same logit computed apart may differ in its last bit
    itself = logits.gather(-1, places.clamp(0, width - 1)) > wanted
    return above - (here & itself).long()


def _compete(best: Tensor, best_ids: Tensor, groups: Tensor, highest: Tensor, peak: Tensor, start: int) -> None:
    """Let a tile's columns into the best so far, in place.

    Few rows of a later tile hold anything better than what they have, and what is better lies in the groups of
    columns whose maxima are largest, so most columns are looked at but once.

    Args:
        best, best_ids: [R, k], best first, and int64.
        groups: [R, G, W], the tile by groups of columns; highest: [R, G], peak: [R], their maxima.
        start: the tile's first column.
    """
    rows = (peak > best[:, -1]).nonzero()[:, 0]
    if not len(rows):
        return
    k, size = best.shape[1], groups.shape[-1]
    chosen = highest[rows].topk(min(k, highest.shape[-1])).indices  # [r, k]
    inside = groups[rows[:, None], chosen].flatten(1)  # [r, k · W]
    columns = start + chosen[..., None] * size + torch.arange(size, device=chosen.device)
    values, places = torch.cat([best[rows], inside], -1).topk(k)
    best[rows] = values
    best_ids[rows] = torch.cat([best_ids[rows], columns.flatten(1)], -1).gather(-1, places)
