"""Weights laid out once for the processor's matrix product.

A served row count changes from tick to tick, and an ordinary product re-packs the weights on every call: with 7 rows
of width 768 that is two thirds of its time. oneDNN takes weights in its own layout; a row then costs nearly the same
whether it has company or not, so fewer rows save time in proportion. The price is a second copy of each weight, and
a copy that does not follow later changes of the model.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthprobe.models.modeling import LoopedForCausalLM

#: row count the layout is chosen for; it serves all others
_ROWS = 64
#: a gate's one column is left as it is
_LEAST = 8


class PackedLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference: float32 `[..., in]` → `[..., out]`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch packs weights of this kind; it is tried, since the operator is not public."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(8, 8)
    with torch.inference_mode():
        x = torch.ones(2, 8)
        try:
            return torch.allclose(PackedLinear(linear)(x), F.linear(x, linear.weight, linear.bias), atol=1e-5)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return False


def pack(model: LoopedForCausalLM) -> LoopedForCausalLM:
    """A copy of the model that shares its parameters, with the products packed; `can_pack` must hold."""
    shared: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    packed = copy.deepcopy(model, shared)
    for parent in list(packed.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child.out_features >= _LEAST:
                setattr(parent, name, PackedLinear(child))
    return packed
