"""The parts of a model that can be left out: every layer, and every whole loop.

A layer is skipped by letting tokens keep what they entered it with. A loop is skipped by setting the state that it ends
with to the state that it began with, so that its work is lost, though other tokens have seen its keys and values:

* In a model of this package the state is what one loop hands to the next, behind the norm where every loop is normed.
  Loop r > 1 began with the end of loop r − 1; what the model injects is injected again by the loop that follows. The
  first loop began with the prelude's output; but where the input is *added* to the state, the first loop had no state
  to add it to, and the second must not get it twice: the skipped first loop then ends with 0. So the loop that follows
  always reads what the skipped one read, and a model without one of its loops is the model run with one loop less,
  whichever it is, because loops share their weights (tested). Equal `skip_*` of the loops are therefore no finding, and
  neither are those of the layers where a loop is one layer and nothing is injected; `later_same` and `later_others`, in
  which other tokens do run the loop, can differ.
* How a looped model of transformers mixes its inputs is not known here. Its loop is skipped by giving the residual
  behind the loop's last layer the value that its first layer read: what is mixed in before it, and a norm behind it,
  remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from depthprobe.depth import Cell, Coordinate, DepthModel, Edit, LoopedModel
from depthprobe.depth.coordinates import layer_points

T = TypeVar("T")
LOOP = "loop"
#: Bytes of states that are held at once; what needs more is run again for the rest.
STATE_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class Part:
    """Something that can be left out.

    Attributes:
        coordinate: the axis coordinate behind it, where a lens reads it.
        depth: its index on the axis.
        site: "resid_post" for a layer, "loop" for a whole loop.
        entered, left: the points between which it works; Δ is the difference.
        zero: the skipped state is 0 instead of what stood at `entered`.
        later: the layers (their residuals) that run after it.
    """

    coordinate: Coordinate
    depth: int
    site: str
    entered: Coordinate
    left: Coordinate
    zero: bool
    later: tuple[Coordinate, ...]

    def skipped(self, positions: tuple[int, ...], entered: Tensor, left: Tensor) -> Cell:
        """The changed forward in which some tokens skip it; [S, d] each, of the unchanged one.

        A part that does nothing for these tokens, bit for bit, gives a cell that changes nothing.
        """
        at = list(positions)
        kept = torch.zeros_like(entered[at]) if self.zero else entered[at]
        if torch.equal(kept, left[at]):
            return Cell()
        return Cell((Edit(self.left, positions, kept if self.site == LOOP else None),))


def entry_of(layer: Coordinate) -> Coordinate:
    """What a layer reads."""
    return layer._replace(site="resid_pre")


def parts_of(model: DepthModel) -> tuple[Part, ...]:
    """Layers and loops in the order in which they end; a loop behind its last layer."""
    layers = layer_points(model)
    place = {coordinate: depth for depth, coordinate in enumerate(model.axis)}
    found = [
        Part(layer, place[layer], "resid_post", entry_of(layer), layer, False, layers[number + 1 :])
        for number, layer in enumerate(layers)
    ]
    for loop, end in enumerate(model.loop_ends, 1):
        inside = [number for number, layer in enumerate(layers) if layer.loop == loop]
        first, last = layers[inside[0]], layers[inside[-1]]
        later = layers[inside[-1] + 1 :]
        if isinstance(model, LoopedModel):
            entered = model.axis[place[first] - 1] if loop == 1 else model.loop_ends[loop - 2]
            adds = model.config.input_injection == "add"
            zero = adds and loop == 1 < model.n_loops
            found.append(Part(end, place[end], LOOP, entered, end, zero, later))
        else:
            found.append(Part(end, place[end], LOOP, entry_of(first), last, False, later))
    return tuple(sorted(found, key=lambda part: (part.depth, part.site != "resid_post")))


@torch.inference_mode()
def around(
    model: DepthModel, ids: Tensor, parts: Sequence[Part], state_bytes: int = STATE_BYTES
) -> Iterator[tuple[Part, Tensor, Tensor]]:
    """(part, the states before and behind it, [S, d] each) of a forward of `ids`, int64 [S]; parts come in chunks."""
    for some in chunks(parts, _together(model, len(ids), state_bytes)):
        points = tuple({point for part in some for point in (part.entered, part.left)})
        states = model.capture(ids[None], positions="all", coordinates=points, logits=False).states
        for part in some:
            yield part, states[part.entered][0], states[part.left][0]


def n_captures(model: DepthModel, length: int, n_parts: int, state_bytes: int = STATE_BYTES) -> int:
    """Forwards that `around` makes for so many parts."""
    return -(-n_parts // max(1, _together(model, length, state_bytes)))


def _together(model: DepthModel, length: int, state_bytes: int) -> int:
    return state_bytes // (2 * length * model.width * model.dtype.itemsize)


def cell_bytes(model: DepthModel, ids: Tensor, parts: Sequence[Part]) -> int:
    """Of the states [S, d] that a cell puts in place: a skipped loop's; a skipped layer needs none."""
    return len(ids) * model.width * model.dtype.itemsize if any(part.site == LOOP for part in parts) else 1


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Runs of at most `size` (at least 1)."""
    size = max(1, size)
    for start in range(0, len(items), size):
        yield items[start : start + size]
