"""The end of a model, from a residual to logits: final norm, head, and what is done to logits after it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Tail:
    """logits = softcap(scale · head(norms(state))).

    Attributes:
        norms: applied in order; whatever the model runs between its last layer and its head.
        head: [d] → [V]; a bias, if any, is its own.
        scale: factor on the logits (logit_scale of Cohere, 1 / logits_scaling of Granite).
        softcap: c of c · tanh(logits / c) (Gemma 2), applied after the scale; None without.
        vocab_size: V.
        head_dtype: what the head must be given; None: whatever the norms give. A quantised head cannot be
            cast, so it reads in the dtype in which the model calls it.
        transforms: modules that the model runs on its logits, last.
    """

    norms: Sequence[nn.Module]
    head: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int = 0
    head_dtype: torch.dtype | None = None
    transforms: Sequence[nn.Module] = ()

    def __call__(self, state: Tensor, *, normed: bool = False) -> Tensor:
        """[..., d] → [..., V]; `normed`: the norms have been applied already."""
        if not normed:
            for norm in self.norms:
                state = norm(state)
        logits = self.head(state if self.head_dtype is None else state.to(self.head_dtype))
        if state.dtype == torch.float32:
            logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        for transform in self.transforms:
            logits = transform(logits)
        return logits

    def for_model(self, dtype: torch.dtype) -> Tail:
        """The tail of a model that computes in `dtype`."""
        return replace(self, head_dtype=dtype) if is_quantised(self.head) else self

    def float32(self) -> Tail:
        """A copy with float32 weights, for reading half-precision models without rounding the logits.

        A quantised head is called as it is.
        """
        norms = [copy.deepcopy(norm).float() for norm in self.norms]
        if is_quantised(self.head):
            return replace(self, norms=norms)
        return replace(self, norms=norms, head=copy.deepcopy(self.head).float())


def is_quantised(head: nn.Module) -> bool:
    """Whether a head holds its weights packed: as integers, in fewer than 16 bits, or not as a tensor."""
    weight = getattr(head, "weight", None)
    weights = [weight] if isinstance(weight, Tensor) else [*head.parameters(), *head.buffers()]
    return not weights or any(tensor.dtype not in _PLAIN for tensor in weights)


def logit_transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) that a transformers configuration asks for after the head.

    A transform that is not named here is not missed silently: the readout identity fails.
    """
    scale = 1.0
    for key, invert in (("logit_scale", False), ("output_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, key, None)
        if isinstance(value, int | float) and value:
            scale *= 1.0 / float(value) if invert else float(value)
    softcap = getattr(config, "final_logit_softcapping", None)
    return scale, float(softcap) if softcap else None
