"""How much of what later layers contribute rests on a part: at the same token, and at a later one.

2505.13898, section 3.2: skip layer s, and compare what every later layer l adds, Δ'_l against Δ_l, as a relative change
‖Δ'_l − Δ_l‖ / ‖Δ_l‖. There the skip covers the tokens up to some t, the change is looked at behind t, and figures show
the maximum over tokens and over a few t for each pair (s, l). Here both are looked at where the answer is read, t being
the token before it, so that no maximum is needed, and the later layers l of a skipped s are averaged:

    same      the part is skipped at the last token alone: what depth does with its own intermediate results
    others    the part is skipped at the tokens before alone: what reaches the last token through later attention
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from depthprobe.depth import Coordinate
from depthprobe.depth.tapped import TappedModel
from depthprobe.effective.parts import STATE_BYTES, Part, around, cell_bytes, chunks, entry_of

#: A contribution below this share of the residual is taken for so large: nothing is divided by rounding.
FLOOR = 1e-6


@torch.inference_mode()
def later_changes(
    model: TappedModel,
    ids: Tensor,
    parts: Sequence[Part],
    positions: tuple[int, ...],
    *,
    engine: str,
    max_bytes: int,
    state_bytes: int = STATE_BYTES,
) -> list[float | None]:
    """Relative change of later layers' contributions at the last token, averaged over these layers.

    Args:
        ids: int64 [S], a prompt.
        positions: the tokens at which each part is skipped.
        engine, max_bytes: as `DepthModel.resume` takes them.
        state_bytes: of the clean states, and of the changed ones, that are held at once.

    Returns:
        One a part; None where no layer runs after it, or where no token is skipped.
    """
    if not positions:
        return [None] * len(parts)
    totals = [0.0] * len(parts)
    for read, some, numbers in sweeps(model, ids, parts, state_bytes):
        cells = [
            part.skipped(positions, before, behind)
            for part, before, behind in around(model, ids, [parts[n] for n in numbers], state_bytes)
        ]
        resumed = model.resume(ids, cells, coordinates=read, engine=engine, max_bytes=max_bytes)
        for layer in some:
            before, after = entry_of(layer), layer
            entered = resumed.clean[before].float()  # [1, d]
            clean = resumed.clean[after].float() - entered
            changed = resumed.states[after].float() - resumed.states[before].float()  # [C, 1, d]
            scale = torch.maximum(clean.norm(dim=-1), FLOOR * entered.norm(dim=-1)).clamp(min=1e-30)
            change = ((changed - clean).norm(dim=-1) / scale)[:, 0].tolist()
            for n, value in zip(numbers, change, strict=True):
                if layer in parts[n].later:
                    totals[n] += value
    return [total / len(part.later) if part.later else None for total, part in zip(totals, parts, strict=True)]


def sweeps(
    model: TappedModel, ids: Tensor, parts: Sequence[Part], state_bytes: int = STATE_BYTES
) -> Iterator[tuple[tuple[Coordinate, ...], Sequence[Coordinate], Sequence[int]]]:
    """(points to read, the layers that they belong to, numbers of the parts to skip) of every sweep of `ids`."""
    layers = max((part.later for part in parts), key=len, default=())
    point_bytes = 2 * model.width * model.dtype.itemsize  # before and behind a layer
    put = cell_bytes(model, ids, parts)
    for some in chunks(layers, state_bytes // (point_bytes * len(ids))):
        read = tuple(point for layer in some for point in (entry_of(layer), layer))
        affecting = [n for n, part in enumerate(parts) if some[-1] in part.later]
        for numbers in chunks(affecting, state_bytes // max(point_bytes * len(some), put)):
            yield read, some, numbers
