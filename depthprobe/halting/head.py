"""The lookahead head: a Linear(d, 1) that says from the state after loop d what the gate will say after loop d + 1.

    head = LookaheadHead.load("lookahead.safetensors", model)     # refused unless it is of this gate and norm
    rule = Lookahead(QExit(0.9), head)

Continuous depth batching (arXiv 2608.09444) decides exits one loop ahead with it, so that the next batch can be made
while the device works. `depthprobe train lookahead` trains one from a frozen model. Its file is one `.safetensors`
that also holds the gate and the norm that it was trained beside, and their hash: in half precision the model is
compared with what they become there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from depthprobe.errors import UserError
from depthprobe.files import atomic_write

#: Name of the file beside a model's weights.
FILE = "lookahead.safetensors"
FORMAT, VERSION = "depthprobe-lookahead-head", 2
_KEYS = ("weight", "bias", "gate_weight", "gate_bias", "norm_weight")
_AGAIN = "train it again with `depthprobe train lookahead`"
_CANNOT = "the lookahead head cannot be written"


class GatedModel(Protocol):
    """A model whose gate a head stands in for: `LoopedForCausalLM`."""

    @property
    def gate(self) -> nn.Linear | None: ...
    @property
    def norm(self) -> nn.Module: ...


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LookaheadHead:
    """A head and the gate that it belongs to; float32.

    Attributes:
        weight, bias: `[d]` and `[]`, of the head; it acts on the normed state, as the gate does.
        gate_weight, gate_bias, norm_weight: `[d]`, `[]` and `[d]`, of the model.
        norm_eps: of the model's final norm.
        about: how it was made and what it was measured at, JSON-ready.
    """

    weight: Tensor
    bias: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, model: GatedModel) -> LookaheadHead:
        """A head that repeats the gate: what training begins with.

        Raises:
            UserError: the model has no gate.
        """
        gate, norm, eps = _parts(model)
        weight, bias = gate.weight.detach().float()[0].clone(), gate.bias.detach().float()[0].clone()
        scale = norm.detach().float().clone()
        return cls(weight, bias, weight.clone(), bias.clone(), scale, eps)

    def __call__(self, normed: Tensor) -> Tensor:
        """Logit of λ one loop on, `[...]`, from a normed loop state `[..., d]` on the head's device, in its dtype.

        Raises:
            UserError: the state has another width.
        """
        if normed.shape[-1] != self.weight.shape[-1]:
            what = f"the lookahead head is {self.weight.shape[-1]} wide and the state {normed.shape[-1]}"
            raise UserError(what, remedy=_AGAIN)
        weight = self.weight.to(normed.device, normed.dtype)
        return torch.nn.functional.linear(normed, weight[None], self.bias.to(normed)[None]).squeeze(-1)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LookaheadHead:
        """The head where it is used, so that a call copies nothing. What it is compared by stays as it is."""
        return replace(self, weight=self.weight.to(device, dtype), bias=self.bias.to(device, dtype))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the gate and norm that the head belongs to, in float32."""
        total = hashlib.sha256(f"{self.norm_eps!r}".encode())
        for tensor in (self.gate_weight, self.gate_bias, self.norm_weight):
            total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def check(self, model: GatedModel, where: str | None = None) -> LookaheadHead:
        """The head on the model's device and in its dtype.

        Raises:
            UserError: it was made for another gate or norm.
        """
        gate, norm, eps = _parts(model)
        mine = (self.gate_weight[None], self.gate_bias[None], self.norm_weight)
        same = eps == self.norm_eps and all(
            a.shape == b.shape and torch.equal(a.to(b.dtype), b.detach().cpu())
            for a, b in zip(mine, (gate.weight, gate.bias, norm), strict=True)
        )
        if not same:
            what = f"the lookahead head was made for another gate or norm ({self.digest[:12]})"
            raise UserError(what, where=where, remedy="train one with `depthprobe train lookahead`")
        return self.to(gate.weight.device, gate.weight.dtype)

    def __repr__(self) -> str:
        return f"LookaheadHead(width {self.weight.shape[-1]}, gate {self.digest[:12]})"

    # -- its file

    def save(self, path: str | Path) -> None:
        """Write the file; it appears under its name only when it is whole.

        Raises:
            UserError: a number is not finite, or the place cannot be written.
        """
        from safetensors.torch import save

        tensors = {key: getattr(self, key).float().cpu().contiguous() for key in _KEYS}
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise UserError("the lookahead head is not finite", where=str(path), remedy=_AGAIN)
        header = {
            "format": FORMAT, "version": VERSION, "gate": self.digest, "norm_eps": self.norm_eps,
            "head": _checksum(tensors), "about": dict(self.about),
        }  # fmt: skip
        # one entry, because safetensors writes several in an order that differs from run to run
        data = save(tensors, metadata={"depthprobe": json.dumps(header, sort_keys=True)})
        atomic_write(Path(path), data, what=_CANNOT)

    @classmethod
    def load(cls, path: str | Path, model: GatedModel | None = None) -> LookaheadHead:
        """Read a head; given a model, check that it belongs to it and move it there.

        Args:
            path: the file, or a folder with a `lookahead.safetensors` in it.

        Raises:
            UserError: no such file, not a head, damaged, or of another gate.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        where = str(file)
        if not file.is_file():
            remedy = "make it with `depthprobe train lookahead`"
            raise UserError("there is no such lookahead head", where=where, remedy=remedy)
        try:
            with safe_open(where, framework="pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the lookahead head cannot be read: {error}", where=where, remedy=_AGAIN) from None
        head = _checked(metadata, tensors, where)
        return head if model is None else head.check(model, where)


def _parts(model: GatedModel) -> tuple[nn.Linear, Tensor, float]:
    gate, weight = model.gate, getattr(model.norm, "weight", None)
    if gate is None:
        remedy = "take a rule that is only delayed, such as l2"
        raise UserError("the model has no exit gate to look ahead of", where="config field exit_gate", remedy=remedy)
    assert isinstance(weight, Tensor)
    return gate, weight, float(getattr(model.norm, "eps", 0.0))


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of the head's own numbers; those of the gate have `digest`."""
    total = hashlib.sha256()
    for key in ("weight", "bias"):
        total.update(tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _checked(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], where: str) -> LookaheadHead:
    def refuse(what: str) -> UserError:
        return UserError(what, where=where, remedy=_AGAIN)

    try:
        header = json.loads(metadata["depthprobe"])
        kind, version = header["format"], header["version"]
    except (KeyError, TypeError, ValueError):
        raise refuse("the file is not a lookahead head of depthprobe") from None
    if (kind, version) != (FORMAT, VERSION):
        raise refuse(f"the file is '{kind}' version {version}, and this depthprobe reads '{FORMAT}' version {VERSION}")
    shapes = {key: (() if key.endswith("bias") else tensors["weight"].shape) for key in _KEYS if "weight" in tensors}
    for key in _KEYS:
        tensor = tensors.get(key)
        if tensor is None or tensor.shape != shapes[key] or tensor.dtype != torch.float32:
            raise refuse(f"the tensor '{key}' of the lookahead head is missing or misshapen")
        if not bool(tensor.isfinite().all()):
            raise refuse(f"the tensor '{key}' of the lookahead head holds values that are not finite")
    try:
        eps, digest, about = float(header["norm_eps"]), header["gate"], dict(header["about"])
        checksum = header["head"]
    except (KeyError, TypeError, ValueError):
        raise refuse("the header of the lookahead head is damaged") from None
    if checksum != _checksum(tensors):
        raise refuse("the lookahead head is not as it was written: its checksum differs")
    head = LookaheadHead(**{key: tensors[key] for key in _KEYS}, norm_eps=eps, about=about)
    if head.digest != digest:
        raise refuse("the hash of the lookahead head is not that of the gate in it")
    return head
