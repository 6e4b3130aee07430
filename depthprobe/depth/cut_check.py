"""Whether cutting attention edges by hooks cuts them, tried once a layer: a key that nobody sees cannot matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from depthprobe.depth.cells import Cell, Cut, Edit, layer_of
from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.hooked import edited
from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: Tokens of the prompt that it is tried on, and the one that is hidden from all later ones.
_LENGTH, _KEY = 9, 3
#: What may be left of the key's influence, as a share of it, and of the largest |state|: rounding.
_LEFT = 1e-2
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@torch.inference_mode()
def check_cuts(model: TappedModel, cells: Iterable[Cell]) -> None:
    """Raises unless the layers of the cells' cuts obey them.

    Of each layer, what a token enters it with is replaced, with all edges to it cut and not; the state behind that
    layer must show the change at later tokens in the second case alone.

    Raises:
        UserError: a layer whose attention takes a mask and does not hide what that hides.
    """
    wanted = {layer_of(cut.coordinate) for cell in cells for cut in cell.cuts} - model._cuts_tried
    layers = [Coordinate(*place) for place in sorted(wanted)]
    if not layers:
        return
    ids = torch.arange(1, _LENGTH + 1, device=model.device) % (model._embedded or model.vocab_size)
    entering = [layer._replace(site="resid_pre") for layer in layers]
    clean = model.capture(ids[None], positions="all", coordinates=entering, logits=False).states
    later = tuple(range(_KEY + 1, _LENGTH))
    rows: list[Cell] = []
    for layer, point in zip(layers, entering, strict=True):
        noise = torch.randn(model.width, generator=torch.Generator().manual_seed(layer.layer))
        value = clean[point][:, _KEY] + noise.to(model.device, model.dtype) * clean[point].float().std()
        edit, cut = Edit(point, (_KEY,), value.to(model.dtype)), Cut(layer, later, (_KEY,))
        rows += [Cell((edit,), (cut,)), Cell((), (cut,)), Cell((edit,))]
    rows.append(Cell())
    with edited(model.model, model.taps, rows, _LENGTH, model.name):
        made = model.capture(ids.expand(len(rows), -1), positions="all", coordinates=layers, logits=False).states
    for number, layer in enumerate(layers):
        states = made[layer].float()
        hidden, cut, seen = states[3 * number : 3 * number + 3]
        plain = states[-1]
        rounding = _ROUNDING.get(model.dtype, 1e-5) * float(plain.abs().max())
        influence = float((seen - plain)[_KEY + 1 :].abs().max())
        left = float((hidden - cut)[_KEY + 1 :].abs().max())
        earlier = float((cut - plain)[: _KEY + 1].abs().max())
        if not (left <= _LEFT * influence + rounding and earlier <= rounding):
            what = f"the attention of {model.name} does not hide what its mask hides, so its edges cannot be cut"
            raise UserError(what, where=str(layer), remedy="patch its states instead")
    model._cuts_tried |= wanted
