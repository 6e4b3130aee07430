"""Which chains of relations kinship ladders are drawn from, and how likely each next relation is.

Two dangers lie in sampling. Walking at random through families favours a few short chains, because most
relations cannot be continued to the ladder's full length. And the first and the last relation of a chain
tell much about the answer, so that a model which looks at these two seems to compose. The weights here
work against both:

    continue    a relation counts by the number of chains that go on from it, to a power well below one, so
                that rare beginnings keep a share and no single chain gets a large one
    surprise    given the first relation and this one as the last, an answer counts by one over its
                probability (to a power, and within bounds), so that the two tell as little as may be

They are worked out over the algebra alone; that a chain must also exist in a family is seen to when it is
walked.
"""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
from numpy.typing import NDArray

from .kinship import N_RELATIONS, algebra

CONTINUE_POWER = 0.5
SURPRISE_POWER = 1.0
SURPRISE_BOUND = 20.0

# by (first relation, fold so far): the relations that may come next, and their cumulative weights
Weights = list[dict[tuple[int, int], tuple[list[int], list[float]]]]


def draw_chain(rng: random.Random, length: int) -> tuple[int, ...]:
    """Indices of relations whose left fold is defined at every prefix."""
    strict = algebra().strict
    tables = step_weights(length)
    chain: list[int] = []
    first = fold = -1
    for table in tables:
        relations, weights = table[first, fold]
        following = rng.choices(relations, cum_weights=weights)[0]
        chain.append(following)
        if first < 0:
            first = fold = following
        else:
            fold = strict[fold][following]
    return tuple(chain)


def continuations(length: int) -> NDArray[np.float64]:
    """float64 [length, 27]: entry [d, r] the number of chains of d further relations after a fold r."""
    strict = np.array(algebra().strict)
    counts = np.ones((length, N_RELATIONS))
    for d in range(1, length):
        counts[d] = np.where(strict >= 0, counts[d - 1][strict], 0).sum(1)
    return counts


@functools.cache
def step_weights(length: int) -> Weights:
    """How to draw the next relation of a chain of `length` relations.

    Returns:
        For each number of relations drawn before (0 ... length - 1) a dict: (first relation, fold so far) to
        next relations and their cumulative weights. At 0 the key is (-1, -1). Only relations from which the
        chain can reach its full length are there.
    """
    strict = np.array(algebra().strict)
    ahead = continuations(length)
    n = N_RELATIONS
    start = np.where(ahead[length - 1] > 0, ahead[length - 1] ** CONTINUE_POWER, 0.0)
    start /= start.sum()
    tables: Weights = [{(-1, -1): _row(start)}]
    mass = np.diag(start)  # [first, fold]: probability of the chains drawn so far
    fold, following = np.nonzero(strict >= 0)
    result = strict[fold, following]
    for step in range(1, length):
        worth = np.where(ahead[length - 1 - step] > 0, ahead[length - 1 - step] ** CONTINUE_POWER, 0.0)
        base = np.zeros((n, n, n))  # [first, fold, next]
        base[:, fold, following] = worth[result]
        surprise = np.ones((n, n, n))  # [first, next, result]
        if step >= 2:  # at two hops first and last are the whole chain
            for _ in range(4):  # the weights change the probabilities that they are made from
                joint = _joint(mass, _normalised(_weighted(base, surprise, fold, following, result)), fold,
                               following, result)  # fmt: skip
                share = joint / np.maximum(joint.sum(2, keepdims=True), 1e-300)
                surprise *= np.where(share > 0, np.maximum(share, 1e-3) ** -SURPRISE_POWER, 1.0)
                low = np.where(share > 0, surprise, np.inf).min(2, keepdims=True)
                surprise = np.clip(surprise / np.where(np.isfinite(low), low, 1.0), 1.0, SURPRISE_BOUND)
        chance = _normalised(_weighted(base, surprise, fold, following, result))
        tables.append(_as_tables(chance))
        mass = _joint(mass, chance, fold, following, result).sum(1)
    return tables


def _weighted(
    base: NDArray[np.float64],
    surprise: NDArray[np.float64],
    fold: NDArray[np.int64],
    following: NDArray[np.int64],
    result: NDArray[np.int64],
) -> NDArray[np.float64]:
    weights = np.zeros_like(base)
    weights[:, fold, following] = base[:, fold, following] * surprise[:, following, result]
    return weights


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    total = weights.sum(2, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def _joint(
    mass: NDArray[np.float64],
    chance: NDArray[np.float64],
    fold: NDArray[np.int64],
    following: NDArray[np.int64],
    result: NDArray[np.int64],
) -> NDArray[np.float64]:
    """[first, next, result]: probability of a chain with this first and last relation and this answer."""
    joint = np.zeros_like(chance)
    for f, r, a in zip(fold.tolist(), following.tolist(), result.tolist(), strict=True):
        joint[:, r, a] += mass[:, f] * chance[:, f, r]
    return joint


def _row(chance: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    likely = np.flatnonzero(chance)
    return likely.tolist(), list(itertools.accumulate(chance[likely].tolist()))


def _as_tables(chance: NDArray[np.float64]) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    firsts, folds = np.nonzero(chance.any(2))
    return {(a, b): _row(chance[a, b]) for a, b in zip(firsts.tolist(), folds.tolist(), strict=True)}
