"""What callers from Python give as options, checked: one line for whatever is of another kind.

    window = whole(window, "window", least=1)          # of whatever library: numpy's, a tensor of one number
    sites = names(sites, "sites", SITES, default)      # one name or several, each once; None: the default

A bool is no number here, though Python takes it for one: `positions=True` was meant otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthprobe.depth.coordinates import Coordinate
from depthprobe.errors import UserError


def shown(given: Any) -> str:
    """A value as an error names it: short, with its type where that is not plain to see."""
    text = repr(given)
    if not isinstance(given, (str, int, float, bool, type(None))):
        text = f"a {type(given).__name__}, {text}"
    return text if len(text) <= 80 else f"{text[:79]}…"


def is_flag(given: Any) -> bool:
    """Whether it is true or false, of whatever library."""
    return isinstance(given, bool | np.bool_) or (isinstance(given, Tensor | np.ndarray) and "bool" in str(given.dtype))


def whole(given: Any, name: str, least: int | None = None, *, remedy: str | None = None) -> int:
    """One whole number of whatever library. Raises UserError for anything else, or less than `least`."""
    remedy = remedy or ("give a whole number" if least is None else f"give a whole number of at least {least}")
    try:
        if is_flag(given):
            raise TypeError
        number = index(given)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {shown(given)}", remedy=remedy) from None
    if least is not None and number < least:
        raise UserError(f"{name} is {number}", remedy=remedy)
    return number


def flag(given: Any, name: str) -> bool:
    """True or False, numpy's too. Raises UserError for anything else: a text such as "no" counts as true in Python."""
    if not isinstance(given, bool | np.bool_):
        raise UserError(f"{name} is {shown(given)}", remedy="give True or False")
    return bool(given)


def memory(given: Any, name: str = "max_bytes") -> int:
    """A number of bytes, from 1 on; 2e9 serves. Raises UserError for anything else."""
    remedy = f"give a number of bytes, e.g. {name}=2 << 30 for 2 GiB"
    if isinstance(given, float | np.floating) and math.isfinite(given) and given == int(given):
        given = int(given)
    return whole(given, name, 1, remedy=remedy)


def one_of(given: Any, name: str, known: Sequence[str], noun: str = "") -> str:
    """One of some names. Raises UserError for anything else; `noun`: what such a name is called there."""
    if not isinstance(given, str) or given not in known:
        what = f"there is no {noun} '{given}'".replace("  ", " ") if isinstance(given, str) else f"it is {shown(given)}"
        raise UserError(what, where=name, remedy=f"one of {', '.join(known)}")
    return given


def names(given: Any, name: str, known: Sequence[str], default: Sequence[str], noun: str = "") -> tuple[str, ...]:
    """One name or several, each once, in the order given; None: the default. noun: as `one_of` takes it.

    Raises:
        UserError: none at all, one that is not among `known`, or something else.
    """
    if given is None:
        return tuple(default)
    asked = listed(given, name, ", ".join(known))
    return tuple(dict.fromkeys(one_of(one, name, known, noun) for one in asked))


def listed(given: Any, name: str, remedy: str) -> list[Any]:
    """What is given, as a list; of a text or a single value, one entry. Raises UserError for nothing, or a mapping."""
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    if isinstance(given, Mapping):
        raise UserError(f"{name} is {shown(given)}", remedy=remedy)
    one = isinstance(given, str | bytes | Coordinate) or not isinstance(given, Iterable)
    found = [given] if one else list(given)
    if not found:
        raise UserError(f"no {name} are asked for", remedy=f"name one ({remedy}), or leave it out")
    return found


def coordinates_of(given: Any, name: str = "coordinates") -> tuple[Coordinate, ...]:
    """One coordinate or several. Raises UserError for anything that is none; none at all are left to the caller."""
    remedy = "take them from the axis or the points of the model"
    if isinstance(given, Coordinate):
        return (given,)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"{name} is {shown(given)}", remedy=remedy)
    found = tuple(given)
    for one in found:
        if not isinstance(one, Coordinate):
            raise UserError(f"{shown(one)} is no Coordinate", where=name, remedy=remedy)
    return found


def token_row(given: Any, name: str = "input_ids") -> Tensor:
    """The tokens of one prompt as int64 [S], of a tensor, an array or a list.

    Raises:
        UserError: anything but one or more whole numbers in a row.
    """
    remedy = "give the token ids of one prompt, a tensor [S]"
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise UserError(f"{name} is {shown(given)}", remedy=remedy)
    try:
        row = torch.as_tensor(given if isinstance(given, Tensor | np.ndarray) else list(given))
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} is {shown(given)}", remedy=remedy) from None
    if row.dim() != 1 or not len(row):
        raise UserError(f"{name} have shape {tuple(row.shape)}", remedy="give the tokens of one prompt")
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise UserError(f"{name} are {str(row.dtype).removeprefix('torch.')}", remedy="give whole numbers")
    return row.long()
