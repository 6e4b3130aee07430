"""The end of a model, from a residual to logits: final norm, head, and what is done to logits after it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Tail:
    """logits = softcap(scale · head(norms(state))).

    Attributes:
        norms: applied in order; whatever the model runs between its last layer and its head.
        head: [d] → [V]; a bias, if any, is its own.
        scale: factor on the logits (logit_scale of Cohere, 1 / logits_scaling of Granite).
        softcap: c of c · tanh(logits / c) (Gemma 2), applied after the scale; None without.
    """

    norms: Sequence[nn.Module]
    head: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, state: Tensor, *, normed: bool = False) -> Tensor:
        """[..., d] → [..., V]; `normed`: the norms have been applied already."""
        if not normed:
            for norm in self.norms:
                state = norm(state)
        logits = self.head(state)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])  # type: ignore[union-attr]

    def float32(self) -> Tail:
        """A copy with float32 weights, for reading half-precision models without rounding the logits."""
        norms = [copy.deepcopy(norm).float() for norm in self.norms]
        return Tail(norms, copy.deepcopy(self.head).float(), self.scale, self.softcap)


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
