"""Intervals for accuracies whose items are not independent.

All rungs of a ladder share a story and many items share a relation chain (about 450 distinct chains exist
at three hops, a tenth of them held out), so the unit that is drawn anew is the cluster, not the item.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .items import Item
from .splits import HASHED_RELATIONS

__all__ = ["cluster_of", "clustered_interval", "wilson_interval"]


def cluster_of(item: Item) -> str:
    """The name of the questions that stand or fall with this one.

    Kinship with a known chain: the chain's first three relations (fewer in a shorter chain), which decide the
    split and, as names do not matter, most of the question. Otherwise: the story.
    """
    if item.task == "kinship" and item.chain_relations:
        return " ".join(item.chain_relations[:HASHED_RELATIONS])
    return item.story_id


def wilson_interval(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a share of n independent trials; (0, 1) when n is 0."""
    if n <= 0:
        return 0.0, 1.0
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def clustered_interval(
    scores: Sequence[float] | np.ndarray, clusters: Sequence[Hashable], *, draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of `scores` in [0, 1] with a 95 % percentile bootstrap interval over whole clusters.

    Args:
        scores: [n] a score per item, 0 or 1 or an expected accuracy in between.
        clusters: [n] the cluster of each item.

    Returns:
        mean, low, high. Where every item has the same score 0 or 1 a bootstrap has no width; then the
        interval is Wilson's over the number of clusters. NaN mean and (0, 1) for no items.
    """
    values = np.asarray(scores, np.float64)
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} scores but {len(clusters)} clusters")
    if not len(values):
        return float("nan"), 0.0, 1.0
    index: dict[Hashable, int] = {}
    members = np.array([index.setdefault(c, len(index)) for c in clusters])
    sums = np.bincount(members, values)
    counts = np.bincount(members).astype(np.float64)
    mean = float(values.mean())
    if len(index) == 1 or (values.min() == values.max() and values[0] in (0.0, 1.0)):
        low, high = wilson_interval(mean * len(index), len(index))
        return mean, low, high
    generator = np.random.default_rng(seed)
    # multinomial weights = drawing as many clusters as there are, with replacement
    weights = generator.multinomial(len(index), np.full(len(index), 1 / len(index)), size=draws)
    means = (weights @ sums) / (weights @ counts)
    low, high = np.quantile(means, [0.025, 0.975])
    return mean, float(low), float(high)
