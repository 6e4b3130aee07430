"""What is changed in a forward: a cell of a sweep, its edits of states and its cuts of attention edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth.coordinates import Coordinate
from depthprobe.errors import UserError

#: Sites behind which nothing of their own layer mixes tokens any more.
_BEHIND_ATTENTION = ("attn_out", "mlp_out", "resid_post", "loop_state", "final_state")


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


def layer_of(coordinate: Coordinate) -> tuple[int, int]:
    """(loop, layer), by which cuts and edits are looked up."""
    return coordinate.loop, coordinate.layer


def check_cells(
    cells: Sequence[Cell], points: Iterable[Coordinate], layers: Iterable[tuple[int, int]], length: int, width: int,
    name: str,
) -> None:  # fmt: skip
    """Whether cells fit a model and a prompt.

    Args:
        points: the points of the model; layers: (loop, layer) of its layers.
        length: S; width: d.

    Raises:
        UserError: a site, depth or position that there is not, a value of another shape, a skip elsewhere than at a
            layer's end, a query cut from itself; it names the cell.
    """
    known, stacked = frozenset(points), frozenset(layers)
    sites = sorted({point.site for point in known})
    for number, cell in enumerate(cells):
        where = f"cell {number}"
        for edit in cell.edits:
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
            elif edit.value.shape != (len(edit.positions), width):
                what = f"an edit of {len(edit.positions)} tokens has a value of shape {tuple(edit.value.shape)}"
                raise UserError(what, where=where, remedy=f"give {len(edit.positions)} × {width}")
        for cut in cell.cuts:
            if layer_of(cut.coordinate) not in stacked:
                raise UserError(f"{name} has no layer {cut.coordinate}", where=where)
            _check_positions(cut.queries, length, where)
            _check_positions(cut.keys, length, where)
            if both := set(cut.queries) & set(cut.keys):
                what = f"token {min(both)} is cut from itself"
                raise UserError(what, where=where, remedy="leave a query its own key")


def _check_positions(positions: tuple[int, ...], length: int, where: str) -> None:
    if not positions or list(positions) != sorted(set(positions)):
        raise UserError(f"positions are {positions}", where=where, remedy="give tokens once, in ascending order")
    for position in positions:
        if not 0 <= position < length:
            what = f"position {position} is outside the prompt of {length} tokens"
            raise UserError(what, where=where, remedy=f"give 0 … {length - 1}")


def changes_nothing(
    cell: Cell, read: Sequence[int], last_layer: tuple[int, int], clean: Mapping[Coordinate, Tensor]
) -> bool:
    """Whether a cell provably leaves all that is read as it is.

    Later tokens do not reach earlier ones; behind the last layer's attention no token reaches another; a value that
    is what stood there changes nothing.

    Args:
        read: the tokens that are read.
        last_layer: (loop, layer) of the last one that runs.
        clean: states [S, d] of the unchanged forward at the coordinates of the edits, in the dtype that runs.
    """
    latest, read_at = max(read), frozenset(read)
    for edit in cell.edits:
        at_end = edit.coordinate.site == "final_state" or (
            layer_of(edit.coordinate) == last_layer and edit.coordinate.site in _BEHIND_ATTENTION
        )
        reached = any(p in read_at for p in edit.positions) if at_end else edit.positions[0] <= latest
        if not reached:
            continue
        if edit.value is None:
            return False
        stood = clean[edit.coordinate][list(edit.positions)]
        if not torch.equal(edit.value.to(stood.dtype), stood):
            return False
    for cut in cell.cuts:
        queries = read_at & set(cut.queries) if layer_of(cut.coordinate) == last_layer else cut.queries
        if any(query <= latest and key < query for query in queries for key in cut.keys):
            return False
    return True
