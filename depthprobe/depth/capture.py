"""What a forward leaves behind: `Capture`, and `DepthCache`, the same states under names.

    capture = model.capture(input_ids, names_filter="loops.*.blocks.1.hook_resid_post", positions="all")
    cache = capture.cache_dict()
    cache["loops.2.blocks.1.hook_resid_post"]                # [B, S, d]
    cache[Coordinate(3, 2)]                                  # the same: coordinates count from one
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from torch import Tensor

from depthprobe.depth.coordinates import Coordinate, NamesFilter, select_names
from depthprobe.errors import UserError


@dataclass(frozen=True, slots=True, repr=False)
class Capture:
    """What one forward left behind. B rows; [P] stands for nothing, P or S, by the positions asked for.

    Attributes:
        states: coordinate → [B, [P,] d] in the storage dtype.
        logits: [B, [P,] V] in the model's dtype, the model's own output at the same positions; None if it was
            not asked for.
        gate_lambda: [B, [P,] R] float32, conditional stop probability after each loop; None without a gate.
        attention_mask: [B, past + S], past and present tokens; what a continuation passes on, lengthened.
        cache: the model's key-value cache if it was asked for.
        positions: int64 [B] or [B, P], the tokens that were read; None: all S.
        names: coordinate → its name, for `cache_dict`.
        model_name: whose states these are.
    """

    states: Mapping[Coordinate, Tensor]
    logits: Tensor | None
    gate_lambda: Tensor | None
    attention_mask: Tensor
    cache: Any = None
    positions: Tensor | None = None
    names: Mapping[Coordinate, str] = field(default_factory=dict)
    model_name: str = "the model"

    @property
    def nbytes(self) -> int:
        """Bytes of states, logits and gate; not of a key-value cache."""
        held = [*self.states.values(), self.logits, self.gate_lambda]
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def cache_dict(self) -> DepthCache:
        """The states under names (`coordinates.point_name`) as well as coordinates; nothing is copied."""
        return DepthCache(self)

    def summary(self) -> str:
        """One line: what is held, and in how many bytes."""
        parts = [f"{len(self.states)} states"]
        if self.states:
            state = next(iter(self.states.values()))
            dtype = str(state.dtype).removeprefix("torch.")
            parts[0] += f" of {' × '.join(map(str, state.shape))} ({dtype})"
        for label, tensor in (("logits", self.logits), ("gate", self.gate_lambda)):
            if tensor is not None:
                parts.append(f"{label} {' × '.join(map(str, tensor.shape))}")
        return f"{', '.join(parts)}: {human_bytes(self.nbytes)}"

    def __repr__(self) -> str:
        return f"Capture({self.model_name}: {self.summary()})"

    def _repr_html_(self) -> str:
        depths = [str(coordinate) for coordinate in self.states]
        if len(depths) > 8:
            depths = [*depths[:4], "…", *depths[-3:]]
        return (
            f"<div><b>Capture</b> of {escape(self.model_name)}<br>{escape(self.summary())}"
            f"<br><code>{escape(' '.join(depths))}</code></div>"
        )


class DepthCache(Mapping[str, Tensor]):
    """States by name, as TransformerLens' users know it, with a name for every loop.

    Keys are names such as "blocks.0.hook_resid_post" or "loops.2.blocks.1.hook_resid_post"; a `Coordinate`
    serves as well, and so does ("resid_post", 0) in an ordinary transformer, ("resid_post", 2, 1) for the second layer
    of the third loop. Values are those of `Capture.states`.
    """

    def __init__(self, capture: Capture) -> None:
        self._owner = capture.model_name
        self._by_name = {capture.names.get(c, str(c)): state for c, state in capture.states.items()}
        self._by_coordinate = dict(capture.states)

    def __getitem__(self, key: str | Coordinate | tuple[str, int] | tuple[str, int, int]) -> Tensor:
        key = _full_name(key)
        if isinstance(key, Coordinate):
            if key in self._by_coordinate:
                return self._by_coordinate[key]
            raise KeyError(f"{key} was not captured")
        if key in self._by_name:
            return self._by_name[key]
        near = difflib.get_close_matches(str(key), self._by_name, n=3)
        raise KeyError(f"'{key}' was not captured" + (f"; near to it: {', '.join(near)}" if near else ""))

    def __contains__(self, key: object) -> bool:
        key = _full_name(key)
        return key in (self._by_coordinate if isinstance(key, Coordinate) else self._by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def filtered(self, names_filter: NamesFilter) -> dict[str, Tensor]:
        """The states whose names a filter picks. Raises UserError if it picks nothing."""
        if not self._by_name:
            raise UserError("the cache is empty", remedy="capture at least one coordinate")
        return {name: self._by_name[name] for name in select_names(tuple(self._by_name), names_filter, self._owner)}

    def __repr__(self) -> str:
        names = list(self._by_name)
        shown = ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])
        return f"DepthCache({len(names)} states: {shown})"


def _full_name(key: Any) -> Any:
    """("resid_post", 0) → "blocks.0.hook_resid_post", as TransformerLens' caches have it; with a loop likewise."""
    if isinstance(key, Coordinate) or not isinstance(key, tuple) or len(key) not in (2, 3):
        return key
    site, *place = key
    group = f"loops.{place[0]}." if len(place) == 2 else ""
    return f"{group}blocks.{place[-1]}.hook_{site}"


def human_bytes(count: int) -> str:
    """1536 → "1.5 KiB"."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
