"""What a gate is trained on when the language model is frozen.

Ouro's second stage (arXiv 2510.25741) labels a loop by the gain that it has just brought. A task that needs several
loops before anything becomes readable shows no gain for a while, and such a gate leaves before the answer is there. The
label here asks instead what is still to come: whether any later loop is better by more than a margin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHARPNESS = 50.0  # of the step from 0 to 1, per nat; Ouro's


def future_gain_labels(losses: Tensor, margin: float, sharpness: float = SHARPNESS) -> Tensor:
    """How much each loop's successors are worth waiting for: w_d = σ(s · (L_d − min_{t>d} L_t − margin)).

    Args:
        losses: float `[..., U]`, the loss of a token read after each loop, nats.
        margin: by how much a later loop must be better, nats.

    Returns:
        float `[..., U]` in [0, 1]; 0 at the last loop, which has no successor.
    """
    later = losses.flip(-1).cummin(-1).values.flip(-1)[..., 1:]  # min over t ≥ d + 1
    waiting = torch.sigmoid(sharpness * (losses[..., :-1] - later - margin))
    return F.pad(waiting, (0, 1))


def gate_loss(gate_logits: Tensor, waiting: Tensor, weights: Tensor | None = None) -> Tensor:
    """−mean[w_d · log(1 − λ_d) + (1 − w_d) · log λ_d] over tokens and over loops d < U (Ouro's form).

    Args:
        gate_logits: float `[n, U]`, λ = σ(logit).
        waiting: float `[n, U]`, w, detached; the last loop's does not count, since it stops for certain.
        weights: float `[n]` of the tokens; equal if None.

    Returns:
        scalar, nats.
    """
    per_token = F.binary_cross_entropy_with_logits(
        gate_logits[..., :-1], 1.0 - waiting[..., :-1], reduction="none"
    ).mean(-1)
    if weights is None:
        return per_token.mean()
    return (per_token * weights).sum() / weights.sum()
