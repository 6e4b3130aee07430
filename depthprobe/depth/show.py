"""A model in words: its lines for a terminal and for Jupyter, and what a capture of it would keep."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, TypedDict

import torch

from depthprobe.depth.capture import human_bytes
from depthprobe.depth.coordinates import Coordinate, NamesFilter
from depthprobe.depth.request import storage_dtype

if TYPE_CHECKING:
    from depthprobe.depth.model import DepthModel


class Kept(TypedDict, total=False):
    """What a capture keeps, as `DepthModel.capture_bytes` takes it."""

    coordinates: Sequence[Coordinate] | None
    names_filter: NamesFilter | None
    dtype: torch.dtype | str | None
    logits: bool


def model_line(model: DepthModel) -> str:
    """ "LoopedModel('follow-demo', 8 loops × 2 layers, float32, cpu)" """
    loops = f"{model.n_loops} loops × " if model.loop_ends else ""
    route = "" if model.route == "native" else f", {model.route}"
    kind = type(model).__name__
    return f"{kind}({model.name!r}, {loops}{model.n_layers} layers, {_dtype(model.dtype)}, {model.device}{route})"


def model_html(model: DepthModel) -> str:
    """A small table."""
    weights = sum(p.numel() for p in model.model.parameters())
    names = list(model.names.values())
    rows = {
        "depths": f"{model.axis[0]} … {model.axis[-1]} ({len(model.axis)})",
        "loops × layers": f"{model.n_loops} × {model.n_layers}" if model.loop_ends else f"{model.n_layers}",
        "width, vocabulary": f"{model.width}, {model.vocab_size}",
        "weights": f"{weights / 1e6:.2f} M, {_dtype(model.dtype)}, {model.device}",
        "exit gate": "yes" if model.gate else "no",
        "sites": ", ".join(model.sites),
        "names": f"{names[0]} … {names[-1]}",
        "route": model.route,
    }
    cells = "".join(f"<tr><th>{key}</th><td>{escape(value)}</td></tr>" for key, value in rows.items())
    return f"<table><caption>{escape(f'{type(model).__name__} {model.name}')}</caption>{cells}</table>"


def capture_line(model: DepthModel, rows: int, length: int, states: int, total: int, kept: Kept) -> str:
    """Of a capture of so many states and bytes."""
    parts = [f"{states} of {len(model.points)} states in {_dtype(storage_dtype(kept.get('dtype'), model.dtype))}"]
    parts += ["logits"] if kept.get("logits", True) else []
    parts += ["gate"] if model.gate else []
    return f"{model.name}: {', '.join(parts)} of {rows} × {length} tokens: {human_bytes(total)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
