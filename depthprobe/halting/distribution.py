"""Stopping distributions: from the stop probability of each loop to the depth at which a token leaves.

A gate gives λ_d, the probability of stopping after loop d given that no earlier loop was the last, d = 1…U
(PonderNet, arXiv 2107.05407; Ouro, arXiv 2510.25741). The last loop takes all the mass that is left, whatever
λ_U says:

    p_d = λ_d ∏_{j<d}(1 − λ_j)  for d < U,      p_U = ∏_{j<U}(1 − λ_j),      Σ p = 1.

Depths are counted from 1. Everything here acts on the last axis and is differentiable where that has a
meaning. Prefer logits to probabilities: 1 − σ(z) rounds to 0 in float32 from z ≈ 17, while log(1 − σ(z)) =
logsigmoid(−z) stays exact.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.errors import UserError


def log_survival(gate_logits: Tensor) -> Tensor:
    """Log-probability that a token has not stopped by the end of each loop, log ∏_{j≤d}(1 − λ_j).

    The gate of the last loop counts here like any other; the rule that the last loop stops for certain
    belongs to the functions below.

    Args:
        gate_logits: float `[..., U]`, λ = σ(logit).

    Returns:
        float `[..., U]`, in float32 at least.
    """
    return F.logsigmoid(-_wide(gate_logits)).cumsum(-1)


def log_stopping_distribution(gate_logits: Tensor) -> Tensor:
    """Log of `stopping_distribution`, from logits; finite for all finite logits. `[..., U]` → `[..., U]`."""
    logits = _wide(gate_logits)
    survived = F.pad(log_survival(logits)[..., :-1], (1, 0))  # log ∏_{j<d}(1 − λ_j): 0 before the first loop
    log_stop = F.logsigmoid(logits)
    return torch.cat([survived[..., :-1] + log_stop[..., :-1], survived[..., -1:]], dim=-1)


def stopping_distribution(lambdas: Tensor) -> Tensor:
    """Probability of leaving after each loop, from stop probabilities; the last loop takes the rest.

    Args:
        lambdas: float `[..., U]` in [0, 1]; the value of the last loop does not matter.

    Returns:
        p, float `[..., U]`, non-negative, sums to 1. λ = (0.2, 0.5, ·) gives (0.2, 0.4, 0.4).
    """
    lambdas = _wide(lambdas)
    survived = F.pad((1.0 - lambdas[..., :-1]).cumprod(-1), (1, 0), value=1.0)
    return torch.cat([lambdas[..., :-1] * survived[..., :-1], survived[..., -1:]], dim=-1)


def cdf(p: Tensor) -> Tensor:
    """Probability of having left by the end of each loop, from p `[..., U]`; the last is 1."""
    summed = p.cumsum(-1)[..., :-1]
    return torch.cat([summed, torch.ones_like(p[..., -1:])], dim=-1)


def expected_depth(p: Tensor) -> Tensor:
    """Mean number of loops, Σ d·p_d, of a stopping distribution `[..., U]` → `[...]`, between 1 and U."""
    return p @ torch.arange(1, p.shape[-1] + 1, dtype=p.dtype, device=p.device)


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats of a stopping distribution `[..., U]` → `[...]`; 0·log 0 counts as 0."""
    return -torch.xlogy(p, p).sum(-1)


def q_exit(
    lambdas: Tensor | None = None,
    q: float = 0.5,
    min_depth: int = 1,
    *,
    cdf: Tensor | None = None,
    gate_logits: Tensor | None = None,
) -> Tensor:
    """The first depth whose CDF reaches q (Ouro's Q-exit, arXiv 2510.25741), but no less than `min_depth`.

    It is a quantile of the stopping distribution, not its mean: on λ = (0.2, 0.5, ·) it is 2 for q = 0.5
    and 3 for q = 0.9, while the mean is 2.2. Give exactly one of `lambdas`, `cdf` and `gate_logits`, each
    float `[..., U]`.

    Returns:
        int64 `[...]`, depths 1…U.

    Raises:
        UserError: q outside (0, 1], a least depth below 1 or above U, or not exactly one input.
    """
    if sum(x is not None for x in (lambdas, cdf, gate_logits)) != 1:
        raise UserError("q_exit needs exactly one of lambdas, cdf and gate_logits")
    check_q(q)
    if gate_logits is not None:
        left = reached(log_survival(gate_logits), q)
    elif cdf is not None:
        left = cdf >= q
    else:
        assert lambdas is not None
        left = stopping_distribution(lambdas).cumsum(-1) >= q
    n_loops = left.shape[-1]
    check_min_depth(min_depth, n_loops)
    left = left.clone()
    left[..., : min_depth - 1] = False
    left[..., -1] = True  # the last loop stops for certain
    return left.to(torch.uint8).argmax(-1) + 1  # argmax gives the first of equal values


def reached(log_survival: Tensor, q: float) -> Tensor:
    """Whether 1 − survival ≥ q, in logs: CDF values that round to 1 are still told apart. Returns bool."""
    return log_survival <= (math.log1p(-q) if q < 1.0 else -math.inf)


def check_q(q: float) -> None:
    """Refuse a quantile outside (0, 1] (`UserError`)."""
    if not 0.0 < q <= 1.0:
        raise UserError(f"q is {q}, not in (0, 1]", where="exit quantile q")


def check_min_depth(min_depth: int, n_loops: int | None = None, where: str = "min_depth") -> None:
    """Refuse a least depth that is not in 1…U (`UserError`); without U only the lower end is known."""
    if min_depth < 1 or (n_loops is not None and min_depth > n_loops):
        top = "" if n_loops is None else f" to {n_loops}"
        raise UserError(f"the least depth is {min_depth}, not 1{top or ' or more'}", where=where)


def _wide(x: Tensor) -> Tensor:
    # half-precision gates are common and a product of several of them is not representable
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
