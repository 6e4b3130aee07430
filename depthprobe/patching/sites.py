"""Where a sweep patches: the places of a site in the order of execution, and which of them go together.

| site       | its places                                                                                  |
|------------|---------------------------------------------------------------------------------------------|
| resid_post | the embedding (depth 0), the residual behind every layer, and the state that the head reads |
| resid_pre  | what every layer reads (of a loop's first, what the injection has made)                     |
| attn_out, mlp_out | what every layer's attention, or feed-forward module, returns                        |
| loop_state | the end of every loop                                                                       |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from depthprobe.depth import Coordinate, DepthModel
from depthprobe.depth.arguments import shown, whole
from depthprobe.errors import UserError

SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out", "loop_state")
SPANS = ("one", "window", "later")
_WITH_RESIDUAL = ("embed", "resid_post", "final_state")


@dataclass(frozen=True, slots=True)
class Place:
    """One depth of one site.

    Attributes:
        site: the sweep that it belongs to, of `SITES`.
        coordinate: where it is patched.
        depth: index on the model's axis; of a site beside the axis, that of its layer's resid_post.
    """

    site: str
    coordinate: Coordinate
    depth: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Places that are patched together: `place`, by which the cell is called, the coordinates of all, and why these."""

    place: Place
    coordinates: tuple[Coordinate, ...]
    span: str = "one"


def places(
    model: DepthModel, site: str, at: Sequence[tuple[int, int]] | tuple[int, int] | None = None
) -> tuple[Place, ...]:
    """The places of a site, in the order of execution.

    Args:
        at: only those at these (loop, layer), or at this one, counted as in `Coordinate`; (0, 0) is the embedding.

    Raises:
        UserError: a site, or a (loop, layer), that the model lacks.
    """
    if site not in SITES:
        raise UserError(f"there is no site '{site}'", where="sites", remedy=f"one of {', '.join(SITES)}")
    axis = {coordinate: depth for depth, coordinate in enumerate(model.axis)}
    if site == "loop_state":
        found = model.loop_ends
    elif site == "resid_post":
        # where a norm ends the model's last loop, the head reads that state and no residual
        found = tuple(c for c in model.axis if c.site in _WITH_RESIDUAL or c == model.axis[-1])
    else:
        found = tuple(point for point in model.points if point.site == site)
    if not found:
        why = "it has no loops" if site == "loop_state" else f"it has {', '.join(offered_sites(model))}"
        raise UserError(f"{model.name} does not show its {site}", where="sites", remedy=why)
    chosen = [Place(site, c, axis[c if c in axis else c._replace(site="resid_post")]) for c in found]
    if at is None:
        return tuple(chosen)
    wanted = _pairs(at)
    known = {(c.loop, c.layer) for c in found}
    if missing := sorted(wanted - known):
        loop, layer = missing[0]
        what = f"{model.name} has no {site} at loop {loop}, layer {layer}"
        raise UserError(what, where="at", remedy=f"it has {found[0]} … {found[-1]}; both count from 1")
    return tuple(place for place in chosen if (place.coordinate.loop, place.coordinate.layer) in wanted)


_AT = "give (loop, layer) or several, e.g. at=[(1, 1), (1, 2)]; both count from 1"


def _pairs(at: Any) -> set[tuple[int, int]]:
    """(loop, layer) of one or several; of a `Coordinate` its loop and layer. Raises UserError for anything else."""
    if isinstance(at, np.ndarray | torch.Tensor):
        at = at.tolist()
    if isinstance(at, str) or not isinstance(at, Iterable):
        raise UserError(f"at is {shown(at)}", remedy=_AT)
    given = list(at)
    if not given:
        raise UserError("no depth is asked for", where="at", remedy=f"{_AT}; or leave it out for all of them")
    if isinstance(at, Coordinate):
        given = [at]
    elif not any(isinstance(one, Iterable) for one in given):
        given = [given]
    found: set[tuple[int, int]] = set()
    for one in given:
        pair = list(one)[:2] if isinstance(one, Coordinate) else list(one) if isinstance(one, Iterable) else [one]
        if isinstance(one, str) or len(pair) != 2:
            raise UserError(f"{shown(one)} is no (loop, layer)", where="at", remedy=_AT)
        found.add((whole(pair[0], "a loop of at", remedy=_AT), whole(pair[1], "a layer of at", remedy=_AT)))
    return found


def offered_sites(model: DepthModel) -> tuple[str, ...]:
    """Those of `SITES` that a model has."""
    shown = {point.site for point in model.points}
    return tuple(site for site in SITES if (bool(model.loop_ends) if site == "loop_state" else site in shown))


def together(
    model: DepthModel,
    along: Sequence[Place],
    span: str,
    window: int,
    name: str = "window",
    starts: Sequence[Place] | None = None,
) -> tuple[Patch, ...]:
    """What is patched at once, for each place of a site.

    Args:
        along: all places of the site: what a cell takes along stands there, whether or not it is a start.
        span: "one": the place alone, in this loop alone; "window": it and the places behind it, `window` in all;
            "later": the same layer in this and all later loops. Where a loop reads the embedding again, a token that is
            patched in one loop has its old word back in the next, and only "later" keeps it away.
        name: of the option that gives the window, for errors.
        starts: only cells that are called by these places, of `along`; None: by all.

    Raises:
        UserError: an unknown span, a window outside 1 … the number of places or with too few behind a start, later
            loops of a model without loops.
    """
    if span not in SPANS:
        raise UserError(f"there is no span '{span}'", where="span", remedy=f"one of {', '.join(SPANS)}")
    begun = frozenset(along if starts is None else starts)
    if span == "later":
        if not model.loop_ends:
            what = f"{model.name} has no loops, so there are no later ones"
            raise UserError(what, where="span", remedy="ask for 'one' or 'window'")
        return tuple(Patch(place, _later(model, along, place), span) for place in along if place in begun)
    if not 1 <= window <= len(along):
        what = f"a window of {window} does not fit {len(along)} places"
        raise UserError(what, where=name, remedy=f"give 1 … {len(along)}")
    window = window if span == "window" else 1
    firsts = along[: len(along) - window + 1]
    if starts is not None:
        begin = {_pair(place) for place in firsts}
        if late := [place for place in starts if _pair(place) not in begin]:
            loop, layer = _pair(late[0])
            what = f"a window of {window} does not fit behind loop {loop}, layer {layer}"
            loop, layer = _pair(firsts[-1])
            raise UserError(what, where=name, remedy=f"start no later than loop {loop}, layer {layer}")
    found = (
        (place, tuple(p.coordinate for p in along[n : n + window])) for n, place in enumerate(firsts) if place in begun
    )
    return tuple(Patch(place, coordinates, span) for place, coordinates in found)


def _pair(place: Place) -> tuple[int, int]:
    return place.coordinate.loop, place.coordinate.layer


def _later(model: DepthModel, along: Sequence[Place], place: Place) -> tuple[Coordinate, ...]:
    here = place.coordinate
    if not 1 <= here.loop <= model.n_loops:
        return (here,)
    return tuple(
        c for p in along if (c := p.coordinate).layer == here.layer and here.site == c.site
        and here.loop <= c.loop <= model.n_loops
    )  # fmt: skip
