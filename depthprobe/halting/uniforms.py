"""Random numbers that depend on who asks and not on when: a hash of (seed, position, purpose).

    u = uniforms(seeds, positions, Purpose.EXIT)      # float64 in (0, 1), shape of the arguments broadcast

A request's draws must not change with the width of a batch, its company or a preemption, so no generator is carried
along: every number is computed anew from integers, in whole-number arithmetic alone, and is the same on every device.
The mixing is that of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), once for each of the three words.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a number is for: draws for different purposes are independent."""

    TOKEN = 1  # which token is sampled
    EXIT = 2  # at which depth a token leaves
    LOOP = 3  # one draw for each loop, made of a token's EXIT number


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def uniforms(seed: Tensor | int, position: Tensor | int, purpose: Tensor | int = Purpose.TOKEN) -> Tensor:
    """Independent uniform numbers, one for each (seed, position, purpose).

    Args:
        seed: int64 of any value, of the request.
        position: int64, the token's index in its sequence.
        purpose: a `Purpose`, or any other int64.
            Tensors are broadcast; they have to be on one device.

    Returns:
        float64 in the open interval (0, 1): whole multiples of 2^-53, the same on CPU and CUDA.
    """
    device = next((x.device for x in (seed, position, purpose) if isinstance(x, Tensor)), None)
    words = [
        x.to(torch.int64) if isinstance(x, Tensor) else torch.tensor(_signed(int(x) % (1 << 64)), device=device)
        for x in (seed, position, purpose)
    ]
    state = torch.zeros((), dtype=torch.int64, device=device)
    for word in words:
        state = _mix((state ^ word) + _GOLDEN)
    # 52 bits and a half: neither 0 nor 1 can come out, and the product is exact
    return (_shifted(state, 12).to(torch.float64) + 0.5) * 2.0**-52


def for_loop(uniform: Tensor, depth: Tensor | int) -> Tensor:
    """A number of its own for every loop, made of the one number of a token.

    Args:
        uniform: float `[...]` in (0, 1), as `uniforms` gives it.
        depth: the loop, from 1: int, or int64 `[...]`.

    Returns:
        float64 `[...]` in (0, 1).
    """
    bits = uniform.to(torch.float64).view(torch.int64)
    return uniforms(bits, depth, Purpose.LOOP)


def _mix(x: Tensor) -> Tensor:
    # int64 products wrap around, on every device
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by without the sign: torch has no unsigned 64-bit shift on every device."""
    return (x >> by) & ((1 << (64 - by)) - 1)
