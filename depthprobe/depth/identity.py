"""The readout identity: reading the last depth must give the model's own logits, or no lens can be trusted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from depthprobe.errors import UserError

#: Largest |readout − model's logits| allowed, as a share of the largest |logit|. Both sides run in the
#: model's dtype, on the same states, so only the order of summation differs.
IDENTITY_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
#: The float32 readout of half-precision states against logits rounded to that precision.
FLOAT32_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
#: Logits held at once, in elements (64 MiB of float32).
_CHUNK = 1 << 24


def check(
    name: str, state: Tensor, own: Tensor, dtype: torch.dtype, native: Callable[[Tensor], Tensor],
    readout: Callable[[Tensor], Tensor],
) -> float:  # fmt: skip
    """The largest relative difference of two readouts from the model's logits, the first of them returned.

    Args:
        name: whose, for the error.
        state: [..., d] at the last depth; a storage dtype coarser than the model's sets the tolerance.
        own: [..., V], the model's logits.
        dtype: the model's.
        native: state [n, d] → logits [n, V] in the model's dtype.
        readout: the same in float32.

    Raises:
        UserError: a difference above the tolerance of the dtype.
    """
    state, own = state.reshape(-1, state.shape[-1]), own.reshape(-1, own.shape[-1])
    kept = [dtype, state.dtype]
    found = [0.0, 0.0]
    rows = max(1, _CHUNK // own.shape[-1])
    for start in range(0, len(own), rows):
        theirs = own[start : start + rows].float()
        good = ~theirs.isnan().any(-1)
        if not bool(good.any()):
            continue
        part, theirs = state[start : start + rows][good], theirs[good]
        scale = theirs.abs().amax(-1, keepdim=True).clamp(min=1.0)
        for which, (tolerances, read) in enumerate(((IDENTITY_TOLERANCE, native), (FLOAT32_TOLERANCE, readout))):
            difference = float(((read(part).float() - theirs).abs() / scale).max())
            allowed = max(tolerances.get(kind, 1e-4) for kind in kept)
            if not difference <= allowed:
                raise identity_error(name, difference, allowed, max(kept, key=lambda k: tolerances.get(k, 0.0)))
            found[which] = max(found[which], difference)
    return found[0]


def identity_error(
    name: str, difference: float, allowed: float, dtype: torch.dtype, quantised: bool = False
) -> UserError:
    """The one line of a readout that does not reproduce the model; of a quantised head the cause is another."""
    remedy = "this architecture ends in a way that depthprobe does not know; please report it"
    if quantised:
        remedy = "its head is quantised with one scale for all rows that are read together: load it unquantised"
    return UserError(
        f"the readout of the last layer differs from the model's own logits by {difference:.1e} "
        f"of the largest logit; at most {allowed:.0e} is allowed in {str(dtype).removeprefix('torch.')}",
        where=name,
        remedy=remedy,
    )
