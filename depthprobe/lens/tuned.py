"""The tuned lens: an affine map per depth in front of the model's own norm and head.

    lens = TunedLens.load("smollm2.tuned.safetensors", model)     # refused unless it is of this model's head
    logits = model.readout(lens(state, coordinate), coordinate)
    logit_lens(model, text, lens="tuned", tuned=lens)

A state x becomes x + A·x + b, with A and b of its depth, and is then read as any state is; A = 0 and b = 0 is the
logit lens (Belrose et al. 2023, 2303.08112). The last depth has no translator: it is what the model says. A state
that a norm has already left is translated as it stands and not normed again. `lens.tuned_train` finds A and b.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthprobe.depth import Capture, Coordinate, DepthModel
from depthprobe.errors import UserError
from depthprobe.files import atomic_write

#: Version 2 brought the checksum.
FORMAT, VERSION = "depthprobe-tuned-lens", 2
_KEYS = ("weight", "bias")
_AGAIN = "train it again with `depthprobe lens train`"


@dataclass(frozen=True, slots=True, repr=False)
class TunedLens:
    """Translators of one model.

    Attributes:
        model_name: the model that it was trained on, as the user called it.
        coordinates: the T depths that have a translator: the axis but its last.
        weight: A, float32 [T, d, d]; acts on columns, so that of states in rows it is x @ A.mT.
        bias: b, float32 [T, d].
        head: `head_digest` of the model.
        about: how it was made (data, license, seed, steps, …), JSON-ready.
    """

    model_name: str
    coordinates: tuple[Coordinate, ...]
    weight: Tensor
    bias: Tensor
    head: str
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def identity(cls, model: DepthModel) -> TunedLens:
        """The lens before any training, which is the logit lens."""
        places, d = len(model.axis) - 1, model.width
        weight, bias = torch.zeros(places, d, d), torch.zeros(places, d)
        return cls(model.name, model.axis[:-1], weight, bias, head_digest(model))

    def __call__(self, state: Tensor, coordinate: Coordinate) -> Tensor:
        """A state [..., d] as it is to be read at `coordinate`: float32 [..., d]; one without a translator as it is.

        Raises:
            UserError: the lens has no such depth, or the state another width.
        """
        state = state.float()
        if coordinate not in self.coordinates:
            raise UserError(f"the tuned lens has no depth {coordinate}", remedy=f"it has {self._span}")
        if state.shape[-1] != self.bias.shape[-1]:
            what = f"the tuned lens is {self.bias.shape[-1]} wide and the state {state.shape[-1]}"
            raise UserError(what, where=str(coordinate), remedy=_AGAIN)
        place = self.coordinates.index(coordinate)
        return state + torch.nn.functional.linear(state, self.weight[place], self.bias[place])

    def translated(self, states: Mapping[Coordinate, Tensor], last: Coordinate) -> dict[Coordinate, Tensor]:
        """States by depth, all but `last` (the model's own) translated."""
        return {c: state if c == last else self(state, c) for c, state in states.items()}

    def capture(self, capture: Capture, last: Coordinate) -> Capture:
        """A capture whose states are translated; its logits and gate are the model's own."""
        return replace(capture, states=self.translated(capture.states, last))

    def to(self, device: torch.device) -> TunedLens:
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    @property
    def _span(self) -> str:
        return f"{self.coordinates[0]} … {self.coordinates[-1]}"

    def digest(self) -> str:
        """SHA-256 (hex) of the translators and the head that they belong to: two runs with one digest read alike."""
        total = hashlib.sha256(self.head.encode())
        for tensor in (self.weight, self.bias):
            total.update(_bytes(tensor))
        return total.hexdigest()

    def __repr__(self) -> str:
        data = self.about.get("data")
        return f"TunedLens({self.model_name}, {self._span}, width {self.bias.shape[-1]}{f', {data}' if data else ''})"

    # -- its file

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; it appears under its name only when it is whole.

        Raises:
            UserError: a translator is not finite, or the place cannot be written.
        """
        from safetensors.torch import save

        if not (bool(self.weight.isfinite().all()) and bool(self.bias.isfinite().all())):
            raise UserError("the tuned lens is not finite", where=str(path), remedy="train it with a smaller --rate")
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model_name,
            "width": self.bias.shape[-1],
            "coordinates": [list(c) for c in self.coordinates],
            "head": self.head,
            "about": dict(self.about),
        }
        tensors = {"weight": self.weight.cpu().contiguous(), "bias": self.bias.cpu().contiguous()}
        header["sha256"] = _checksum(header, tensors)
        # one entry, because safetensors writes several in an order that differs from run to run
        data = save(tensors, metadata={"depthprobe": json.dumps(header, sort_keys=True, ensure_ascii=False)})
        atomic_write(Path(path), data, what="the tuned lens cannot be written")

    @classmethod
    def load(cls, path: str | Path, model: DepthModel | None = None) -> TunedLens:
        """Read a lens and, given a model, check that it belongs to it and move it to its device.

        Raises:
            UserError: no such file, not a tuned lens, a format, tensor or value that is not expected, bytes that are
                not those that were saved, or a lens of another head or other depths.
        """
        from safetensors import SafetensorError, safe_open

        if not isinstance(path, str | Path):
            remedy = "give a TunedLens, or the path of one"
            raise UserError(f"a {type(path).__name__} is no tuned lens", where="tuned", remedy=remedy)
        where = str(path)
        if not Path(path).is_file():
            raise UserError("there is no such tuned lens", where=where, remedy="make it with `depthprobe lens train`")
        try:
            with safe_open(where, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the tuned lens cannot be read: {error}", where=where, remedy=_AGAIN) from None
        lens = _checked(metadata, tensors, where)
        return lens if model is None else lens.check(model, where)

    def check(self, model: DepthModel, where: str | None = None) -> TunedLens:
        """The lens on the model's device. Raises UserError unless it was made for this head and these depths."""
        found: str | None = None
        if self.bias.shape[-1] != model.width:
            found = f"width {self.bias.shape[-1]}, and {model.name} has {model.width}"
        elif self.coordinates != model.axis[:-1]:
            found = f"depths {self._span}, and {model.name} has {model.axis[0]} … {model.axis[-2]} before its last"
        elif self.head != (own := head_digest(model)):
            found = f"head {self.head[:12]}, and that of {model.name} is {own[:12]}"
        if found is not None:
            what = f"the tuned lens was made for another model, '{self.model_name}': it has {found}"
            raise UserError(what, where=where, remedy="train one with `depthprobe lens train`, or take lens 'plain'")
        return self.to(model.device)


def as_lens(tuned: TunedLens | str | Path, model: DepthModel) -> TunedLens:
    """A lens, or the path of one, checked against the model it is to read."""
    return tuned.check(model) if isinstance(tuned, TunedLens) else TunedLens.load(tuned, model)


def head_digest(model: DepthModel) -> str:
    """SHA-256 (hex) of what a translated state is read with: final norm, head and logit transform in float32, whole."""
    tail = model.tail32
    total = hashlib.sha256(f"{tail.scale!r} {tail.softcap!r} {tail.vocab_size}".encode())
    for module in (*tail.norms, tail.head, *tail.transforms):
        seen: set[int] = set()  # a wrapper may list a weight twice
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                total.update(repr(value).encode())
            elif name.endswith("bias") and not bool(value.any()):
                continue  # or add one of zeros
            elif value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                total.update(f"{tuple(value.shape)} {value.dtype}".encode())
                total.update(_bytes(value))
    return total.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """A tensor's values as a buffer, without a copy on a CPU."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def _checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of a file's header, but for the checksum itself, and of the bytes of its tensors."""
    plain = {name: value for name, value in header.items() if name != "sha256"}
    total = hashlib.sha256(json.dumps(plain, sort_keys=True, ensure_ascii=False).encode())
    for key in _KEYS:
        total.update(_bytes(tensors[key]))
    return total.hexdigest()


def _checked(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], where: str) -> TunedLens:
    """The lens that a file holds. Raises UserError for anything that is not as `save` writes it."""

    def refuse(what: str) -> UserError:
        return UserError(what, where=where, remedy=_AGAIN)

    try:
        header = json.loads(metadata["depthprobe"])
        kind, version = header["format"], header["version"]
    except (KeyError, TypeError, ValueError):
        raise refuse("the file is not a tuned lens of depthprobe") from None
    if (kind, version) != (FORMAT, VERSION):
        raise refuse(f"the file is '{kind}' version {version}, and this depthprobe reads '{FORMAT}' version {VERSION}")
    try:
        name, width, head, about = header["model"], header["width"], header["head"], header["about"]
        checksum = header["sha256"]
        coordinates = tuple(Coordinate(int(loop), int(layer), str(site)) for loop, layer, site in header["coordinates"])
    except (KeyError, TypeError, ValueError):
        raise refuse("the header of the tuned lens is damaged") from None
    if odd := sorted(set(tensors) ^ set(_KEYS)):
        kind = "an unknown tensor" if odd[0] in tensors else "no tensor"
        raise refuse(f"the tuned lens has {kind} '{odd[0]}'")
    shapes = {"weight": (len(coordinates), width, width), "bias": (len(coordinates), width)}
    for key, shape in shapes.items():
        tensor = tensors[key]
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            got = f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
            raise refuse(f"the tensor '{key}' of the tuned lens is {got}, and {shape} in float32 is expected")
        if not bool(tensor.isfinite().all()):
            raise refuse(f"the tensor '{key}' of the tuned lens holds values that are not finite")
    if checksum != (found := _checksum(header, tensors)):
        raise refuse(f"the tuned lens is damaged: its checksum is {found[:12]}, and {str(checksum)[:12]} was saved")
    return TunedLens(str(name), coordinates, tensors["weight"], tensors["bias"], str(head), about)
