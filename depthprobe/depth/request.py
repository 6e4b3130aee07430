"""A call of `DepthModel.capture`, checked: what is wanted, how it is stored, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth.arguments import coordinates_of
from depthprobe.depth.coordinates import SITES, Coordinate, NamesFilter, select_names
from depthprobe.depth.reading import Read
from depthprobe.errors import UserError


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call of `capture`, for `_forward`.

    Attributes:
        input_ids: int64 [B, S].
        attention_mask: int64 [B, past + S].
        token_positions: int64 [B, S], position of each token in its own row.
        read: the tokens whose states are kept.
        wanted: the coordinates to keep.
        dtype: storage dtype of the states.
        logits: whether the head is to run.
        cache, keep_cache: as `capture` takes them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_positions: Tensor
    read: Read
    wanted: frozenset[Coordinate]
    dtype: torch.dtype
    logits: bool
    cache: Any
    keep_cache: bool


@dataclass(frozen=True, slots=True)
class Caught:
    """What `_forward` gives back; shapes as in `Capture`."""

    states: dict[Coordinate, Tensor]
    logits: Tensor | None
    gate_lambda: Tensor | None
    cache: Any


def wanted_points(
    names: Mapping[Coordinate, str],
    axis: tuple[Coordinate, ...],
    coordinates: Sequence[Coordinate] | None,
    names_filter: NamesFilter | None,
    model: str,
    route: str,
) -> tuple[Coordinate, ...]:
    """The coordinates that a call asks for.

    Args:
        names: point → name, all that the model offers.
        axis: what is meant if nothing is said.
        coordinates, names_filter: as in `capture`.
        model, route: their names, for errors.

    Raises:
        UserError: both are given, or one names what there is not.
    """
    if names_filter is not None:
        if coordinates is not None:
            raise UserError("coordinates and names_filter are both given", remedy="give one of them")
        points = {name: point for point, name in names.items()}
        return tuple(points[name] for name in select_names(tuple(points), names_filter, model))
    if coordinates is None:
        return axis
    coordinates = coordinates_of(coordinates)
    for coordinate in coordinates:
        if coordinate in names:
            continue
        site, offered = coordinate.site, {point.site for point in names}
        sites = ", ".join(known for known in SITES if known in offered)
        if site not in SITES:
            raise UserError(f"there is no site '{site}'", where=str(coordinate), remedy=f"{model} has {sites}")
        if site not in offered:
            raise UserError(f"{model} does not show its {site}", where=f"route {route}", remedy=f"it has {sites}")
        known = f"{axis[0]} … {axis[-1]}"
        raise UserError(f"{model} has no depth {coordinate} ({site})", remedy=f"it has {known}")
    return coordinates


def past_tokens(cache: Any) -> int:
    """Tokens that a key-value cache holds; 0 without one. Raises UserError for something that is no cache."""
    if cache is None:
        return 0
    count: Any = getattr(cache, "get_seq_length", None)
    if not callable(count):
        remedy = "give the Capture.cache of an earlier call with keep_cache=True"
        raise UserError(f"a {type(cache).__name__} is no key-value cache", where="cache", remedy=remedy)
    held: Any = count()
    return int(held)


def storage_dtype(dtype: torch.dtype | str | None, default: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept. Raises UserError unless it is a floating one."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or default
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UserError(f"states cannot be stored as '{dtype}'", remedy="one of float32, bfloat16, float16")
    return found


def check_stored(states: Mapping[Coordinate, Tensor], dtype: torch.dtype, model: str) -> None:
    """Raises UserError if a state is too large for the dtype in which it is kept."""
    for coordinate, state in states.items():
        if bool(state.isinf().any()):
            kind = str(dtype).removeprefix("torch.")
            what = f"the states of {model} overflow {kind} (its largest number is {torch.finfo(dtype).max:.5g})"
            raise UserError(what, where=f"depth {coordinate}", remedy="keep them in float32 or bfloat16")


def one_device(model: nn.Module, name: str) -> None:
    """Where the weights are. Raises UserError unless that is one place, and a real one."""
    places = {tensor.device: key for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    for place, key in places.items():
        if place.type == "meta":
            remedy = "load it with its weights, and without an offload or an empty-weights context"
            raise UserError(f"{name} has weights on the meta device, which hold no values", where=key, remedy=remedy)
    if len(places) != 1:
        where = ", ".join(f"{key} on {place}" for place, key in places.items())
        raise UserError(f"{name} lies on {len(places)} devices", where=where, remedy="move it to one with .to(device)")
