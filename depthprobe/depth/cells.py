"""What is changed in a forward: a cell of a sweep, its edits of states and its cuts of attention edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthprobe.depth.arguments import coordinates_of, listed, memory, shown, token_row, whole
from depthprobe.depth.coordinates import Coordinate
from depthprobe.errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """Other states for some tokens at one point.

    Attributes:
        coordinate: a point of the model.
        positions: tokens of the unpadded row, ascending.
        value: [len(positions), d], what stands there instead; None, at "resid_post" alone: the block is skipped for
            these tokens, which keep what they entered it with (attention output and feed-forward are not added).
    """

    coordinate: Coordinate
    positions: tuple[int, ...]
    value: Tensor | None


@dataclass(frozen=True, slots=True)
class Cut:
    """Attention edges that are cut in one layer: none of the queries sees any of the keys.

    Attributes:
        coordinate: (loop, layer) of the layer; its site is not looked at.
        queries, keys: tokens of the unpadded row, ascending. A query cannot be cut from itself.
    """

    coordinate: Coordinate
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One changed forward: all of its edits and cuts at once."""

    edits: tuple[Edit, ...] = ()
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """What changed forwards end with.

    Attributes:
        states: coordinate → [C, P, d], in the model's dtype: of each cell, at the tokens that were read.
        clean: coordinate → [P, d], of the unchanged forward.
        engine: "suffix" or "hooks".
        n_run, n_filled: cells that ran, and cells that provably change nothing that is read, filled from `clean`.
        token_layers: tokens × layers that were computed, unpatched rows included.
        flops: of all matrix products of these, counted.
        drift: largest difference of an unpatched row from the clean run, as a share of the largest |state| there.
    """

    states: dict[Coordinate, Tensor]
    clean: dict[Coordinate, Tensor]
    engine: str
    n_run: int
    n_filled: int
    token_layers: int
    flops: float
    drift: float


class Asked(NamedTuple):
    """The arguments of `DepthModel.resume` in one form, whatever they came in."""

    input_ids: Tensor
    cells: tuple[Cell, ...]
    read: tuple[int, ...] | None
    coordinates: tuple[Coordinate, ...] | None
    max_bytes: int


def asked(input_ids: Any, cells: Any, read: Any, coordinates: Any, max_bytes: Any) -> Asked:
    """What a caller of `DepthModel.resume` gave: one cell, token or coordinate serves for a list of one.

    Raises:
        UserError: anything of another kind, in one line. Whether it fits the model is looked at later (`check_cells`).
    """
    if isinstance(cells, Cell):
        cells = (cells,)
    if isinstance(cells, str) or not isinstance(cells, Iterable):
        raise UserError(f"cells is {shown(cells)}", remedy="give cells of depthprobe.depth.Cell")
    found = tuple(cells)
    for number, cell in enumerate(found):
        if not isinstance(cell, Cell):
            raise UserError(f"{shown(cell)} is no Cell", where=f"cell {number}", remedy="give Cell((Edit(…),))")
    at = None
    if read is not None:
        remedy = "give tokens by their number"
        at = tuple(whole(one, "read", remedy=remedy) for one in listed(read, "tokens", "by its number"))
    wanted = None if coordinates is None else coordinates_of(coordinates)
    return Asked(token_row(input_ids), found, at, wanted, memory(max_bytes))


def layer_of(coordinate: Coordinate) -> tuple[int, int]:
    """(loop, layer), by which cuts and edits are looked up."""
    return coordinate.loop, coordinate.layer


def check_cells(
    cells: Sequence[Cell], points: Iterable[Coordinate], layers: Iterable[tuple[int, int]], length: int, width: int,
    dtype: torch.dtype, name: str,
) -> None:  # fmt: skip
    """Whether cells fit a model and a prompt.

    Args:
        points: the points of the model; layers: (loop, layer) of its layers.
        length: S; width: d; dtype: that in which values stand in the model.

    Raises:
        UserError: a site, depth or position that there is not, a value of another shape or not finite, a skip
            elsewhere than at a layer's end, a query cut from itself; it names the cell.
    """
    known, stacked = frozenset(points), frozenset(layers)
    sites = sorted({point.site for point in known})
    for number, cell in enumerate(cells):
        where = f"cell {number}"
        if not isinstance(cell, Cell):
            raise UserError(f"{shown(cell)} is no Cell", where=where, remedy="give Cell((Edit(…),))")
        for edit in _all(cell.edits, Edit, where):
            coordinates_of([edit.coordinate], where)
            if edit.coordinate not in known:
                if edit.coordinate.site not in sites:
                    what = f"{name} does not show its {edit.coordinate.site}"
                    raise UserError(what, where=where, remedy=f"it has {', '.join(sites)}")
                raise UserError(f"{name} has no depth {edit.coordinate}", where=where)
            _check_positions(edit.positions, length, where)
            if edit.value is None:
                if edit.coordinate.site != "resid_post":
                    what = f"a block is skipped at its resid_post, not at {edit.coordinate.site}"
                    raise UserError(what, where=where)
            elif not isinstance(edit.value, Tensor) or not edit.value.is_floating_point():
                what = f"the value of an edit is {shown(edit.value)}"
                raise UserError(what, where=where, remedy=f"give a tensor of states, {len(edit.positions)} × {width}")
            elif edit.value.shape != (len(edit.positions), width):
                what = f"an edit of {len(edit.positions)} tokens has a value of shape {tuple(edit.value.shape)}"
                raise UserError(what, where=where, remedy=f"give {len(edit.positions)} × {width}")
            elif not bool(edit.value.to(dtype).isfinite().all()):
                what = f"the value of an edit at {edit.coordinate} is not finite in {str(dtype).removeprefix('torch.')}"
                raise UserError(what, where=where, remedy="look for an overflow where it comes from")
        for cut in _all(cell.cuts, Cut, where):
            coordinates_of([cut.coordinate], where)
            if layer_of(cut.coordinate) not in stacked:
                raise UserError(f"{name} has no layer {cut.coordinate}", where=where)
            _check_positions(cut.queries, length, where)
            _check_positions(cut.keys, length, where)
            if both := set(cut.queries) & set(cut.keys):
                what = f"token {min(both)} is cut from itself"
                raise UserError(what, where=where, remedy="leave a query its own key")


def _all(given: Any, kind: type[Any], where: str) -> Sequence[Any]:
    """The edits, or the cuts, of a cell."""
    if isinstance(given, list | tuple) and all(isinstance(one, kind) for one in given):
        return given
    name = f"{kind.__name__.lower()}s"
    raise UserError(f"the {name} of a cell are {shown(given)}", where=where, remedy=f"give a tuple of {kind.__name__}")


def _check_positions(positions: Any, length: int, where: str) -> None:
    if not isinstance(positions, list | tuple | range):
        raise UserError(f"positions are {shown(positions)}", where=where, remedy="give a tuple of tokens")
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, int | np.integer):
            raise UserError(f"a position is {shown(position)}", where=where, remedy="give tokens by their number")
    if not positions or list(positions) != sorted(set(positions)):
        raise UserError(f"positions are {positions}", where=where, remedy="give tokens once, in ascending order")
    for position in positions:
        if not 0 <= position < length:
            what = f"position {position} is outside the prompt of {length} tokens"
            raise UserError(what, where=where, remedy=f"give 0 … {length - 1}")


@dataclass(frozen=True, slots=True)
class Reach:
    """How far down a sweep reads.

    Attributes:
        order: coordinate → its place in the order of execution; points that are one tap have one place.
        deepest: the largest place that is read.
        last_layer: (loop, layer) of the last layer whose attention runs before that; None if none does.
        entered: the place from which on no edit reaches another token: that at which the last layer is entered.
        left: the place of the last layer's end.
    """

    order: Mapping[Coordinate, int]
    deepest: int
    last_layer: tuple[int, int] | None
    entered: int
    left: int

    @classmethod
    def of(cls, taps: Mapping[Coordinate, object], read: Iterable[Coordinate]) -> Reach:
        """taps: every point in the order of execution, and where it lies; read: the coordinates that are read."""
        first: dict[object, int] = {}
        order = {point: first.setdefault(tap, number) for number, (point, tap) in enumerate(taps.items())}
        deepest = max(order[point] for point in read)
        ran = [p for p in order if p.site in ("attn_out", "mlp_out", "resid_post") and order[p] <= deepest]
        if not ran:
            return cls(order, deepest, None, -1, -1)
        last = Coordinate(*layer_of(ran[-1]))
        return cls(order, deepest, layer_of(last), order[last._replace(site="resid_pre")], order[last])


def changes_nothing(
    cell: Cell, read: Sequence[int], reach: Reach, clean: Mapping[Coordinate, Tensor] | None
) -> bool:
    """Whether a cell provably leaves all that is read as it is.

    Later tokens do not reach earlier ones, nor deeper layers what is read above them; behind the last attention no
    token reaches another; a value that is what stood there changes nothing.

    Args:
        read: the tokens that are read.
        clean: states [S, d] of the unchanged forward at the coordinates of the edits, in the dtype that runs; None:
            values are not looked at.
    """
    latest, read_at = max(read), frozenset(read)
    for edit in cell.edits:
        place = reach.order[edit.coordinate]
        if place > reach.deepest:
            continue
        at_end = place > reach.entered
        if not (any(p in read_at for p in edit.positions) if at_end else edit.positions[0] <= latest):
            continue
        if edit.value is None or clean is None:
            return False
        stood = clean[edit.coordinate][list(edit.positions)]
        if not torch.equal(edit.value.to(stood.device, stood.dtype), stood):
            return False
    for cut in cell.cuts:
        if reach.order[Coordinate(*layer_of(cut.coordinate))] > reach.left:
            continue
        queries = read_at & set(cut.queries) if layer_of(cut.coordinate) == reach.last_layer else cut.queries
        if any(query <= latest and key < query for query in queries for key in cut.keys):
            return False
    return True
