"""The end of a model, from a residual to logits: final norm, head, and what is done to logits after it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
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
        state = state if normed else self.normed(state)
        logits = self.head(state if self.head_dtype is None else state.to(self.head_dtype))
        return self._transformed(logits.float() if state.dtype == torch.float32 else logits)

    def normed(self, state: Tensor) -> Tensor:
        """[..., d] → [..., d'], what the head is given."""
        for norm in self.norms:
            state = norm(state)
        return state

    @property
    def plain(self) -> bool:
        """Whether columns of the logits can be computed one by one: the head is a bare linear map."""
        head = self.head
        hooked = "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks
        return type(head) is nn.Linear and not hooked and not self.transforms and self.head_dtype is None

    def tiles(self, normed: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """(first column, logits [..., width or fewer]) of normed states; all columns at once unless `plain`."""
        if not self.plain:
            yield 0, self(normed, normed=True)
            return
        weight, bias = _linear(self.head)
        for start in range(0, weight.shape[0], width):
            part = slice(start, start + width)
            yield start, self._transformed(F.linear(normed, weight[part], bias[part] if bias is not None else None))

    def columns(self, normed: Tensor, ids: Tensor) -> Tensor:
        """Logits [N, D, T] of normed states [N, D, d] at token ids, int64 [N, T]; a `plain` head alone."""
        weight, bias = _linear(self.head)
        logits = normed @ weight[ids].transpose(-1, -2)
        return self._transformed(logits if bias is None else logits + bias[ids][:, None])

    def _transformed(self, logits: Tensor) -> Tensor:
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


def _linear(head: Any) -> tuple[Tensor, Tensor | None]:
    return head.weight, head.bias


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
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, float(softcap) if softcap else None
