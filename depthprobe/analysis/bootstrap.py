"""Intervals in which a cluster of questions, not the question, is the unit that was drawn.

A ladder asks one story at every k, and those answers stand or fall together; in kinship so do those of stories
that chain the same relations, of which there are few (100 held-out stories hold 12 chains of one relation and
41 of three). Means and slopes are resampled by cluster; proportions get a Wilson interval whose size counts
clusters, because a bootstrap of 100 right answers out of 100 would say that the accuracy is certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from statistics import NormalDist

import numpy as np

__all__ = ["LEVEL", "by_cluster", "mean_interval", "proportion", "ratio_draws", "t_quantile", "within"]

#: Coverage of every interval.
LEVEL = 0.95

#: From fewer clusters no bootstrap interval is given: it cannot reach beyond the clusters that there are, and of two
#: that happen to agree it would say that all do. From here on the coverage is a test.
FEWEST = 6

_CELLS = 4_000_000  # resampling weights held at once: 32 MB


@lru_cache(maxsize=16)
def _counts(n_clusters: int, resamples: int, seed: int) -> np.ndarray:
    """[resamples, n_clusters] float64: how often each cluster is drawn; kept, so all quantities share it."""
    rng = np.random.default_rng((seed, n_clusters))
    drawn = np.empty((resamples, n_clusters))
    for row in range(resamples):
        drawn[row] = np.bincount(rng.integers(0, n_clusters, n_clusters), minlength=n_clusters)
    drawn.setflags(write=False)
    return drawn


def _chunks(n_clusters: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    if n_clusters * resamples <= _CELLS:
        yield _counts(n_clusters, resamples, seed)
        return
    # each chunk has a seed of its own and is not kept: memory stays flat however many stories there are
    rows = max(1, _CELLS // n_clusters)
    for at in range(0, resamples, rows):
        yield _counts.__wrapped__(n_clusters, min(rows, resamples - at), seed + 1_000_003 * at)


def by_cluster(values: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums within clusters: values [I, …], clusters [I] int (0 … S−1) → [S, …] float64."""
    flat = np.asarray(values, dtype=np.float64).reshape(len(clusters), -1)
    size = int(clusters.max()) + 1 if len(clusters) else 0
    sums = np.zeros((size, flat.shape[1]))
    np.add.at(sums, clusters, flat)
    return sums.reshape((size, *np.shape(values)[1:]))


def ratio_draws(sums: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """Resampled totals: sums [S, …] → [resamples, …], clusters drawn with replacement."""
    flat = sums.reshape(len(sums), -1)
    parts = [counts @ flat for counts in _chunks(len(sums), resamples, seed)]
    return np.concatenate(parts).reshape((resamples, *sums.shape[1:]))


def within(draws: np.ndarray, n_clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Expanded percentile interval: draws [B, …] → low […], high […]; NaN from fewer than `FEWEST` clusters.

    The plain percentile interval is too narrow for few clusters (it misses the factor n/(n−1) and the t
    quantile); the levels are moved out by just that (Hesterberg 2015, 1411.5279).
    """
    if n_clusters < FEWEST:
        nothing = np.full(draws.shape[1:], np.nan)
        return nothing, nothing.copy()
    reach = t_quantile(0.5 + LEVEL / 2, n_clusters - 1) * (n_clusters / (n_clusters - 1)) ** 0.5
    tail = NormalDist().cdf(-reach)
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return low, high


def mean_interval(
    values: np.ndarray, clusters: np.ndarray, *, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over items, interval over clusters: values [I, …], clusters [I] → mean, low, high, each […]."""
    codes = np.unique(clusters, return_inverse=True)[1]
    sums = by_cluster(values, codes)
    sizes = by_cluster(np.ones(len(codes)), codes)
    draws = ratio_draws(sums, resamples=resamples, seed=seed)
    sized = ratio_draws(sizes, resamples=resamples, seed=seed)
    low, high = within(draws / sized.reshape((-1, *([1] * (draws.ndim - 1)))), len(sizes))
    return np.asarray(values, dtype=np.float64).mean(axis=0), low, high


def proportion(flags: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of true flags, Wilson interval over clusters: flags [I, …] bool → share, low, high, each […].

    The number of answers is replaced by the effective number n / design effect, never more than n, and the
    normal quantile by Student's with (clusters − 1) degrees (Korn and Graubard 1998; Dean and Pagano 2015).
    Where all answers are equal the design effect is unknown: the number of clusters is used, which is the
    cautious end. NaN bounds with fewer than two clusters.
    """
    codes = np.unique(clusters, return_inverse=True)[1]
    y = np.asarray(flags, dtype=np.float64)
    share = y.mean(axis=0)
    n, n_clusters = len(codes), int(codes.max()) + 1
    if n_clusters < 2:
        nothing = np.full(share.shape, np.nan)
        return share, nothing, nothing.copy()
    spread = by_cluster(y - share, codes)
    variance = n_clusters / (n_clusters - 1) * (spread**2).sum(axis=0) / n**2
    plain = share * (1 - share) / n
    mixed = plain > 0
    effect = np.where(mixed, variance / np.where(mixed, plain, 1.0), n / n_clusters)
    size = np.minimum(n / np.maximum(effect, 1e-12), n)
    z2 = t_quantile(0.5 + LEVEL / 2, n_clusters - 1) ** 2 / size
    centre = (share + z2 / 2) / (1 + z2)
    half = np.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return share, np.clip(centre - half, 0.0, 1.0), np.clip(centre + half, 0.0, 1.0)


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t, by four terms of the Cornish–Fisher expansion; exact for df 1 and 2.

    Within 0.5 % at p = 0.975 from df = 3 on.
    """
    if df == 1:
        return float(np.tan(np.pi * (p - 0.5)))
    if df == 2:
        return float((2 * p - 1) * np.sqrt(2 / (4 * p * (1 - p))))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df ** (power + 1) for power, term in enumerate(terms))
