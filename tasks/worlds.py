"""Family graphs made ready for sampling: a pool of them per seed, with all relations looked up once."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np

from .families import FamilyGraph, full_ball, random_family
from .kinship import N_RELATIONS, relation_matrix

POOL_SIZE = 48
SMALLEST = 40  # people; smaller families have few long chains and hardly a decoy
LARGEST = 200


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """One family and its relations, in plain lists: sampling looks up single entries.

    Attributes:
        graph: the family.
        relation: relation[s][o] is the index of the relation that s is of o, -1 for none.
        reach: reach[o] maps a relation to all s who are that relation of o.
        pairs: pairs[r] is every (o, s) with s the r of o.
    """

    graph: FamilyGraph
    relation: list[list[int]]
    reach: list[dict[int, list[int]]]
    pairs: list[list[tuple[int, int]]]

    def __len__(self) -> int:
        return len(self.relation)


def make_world(graph: FamilyGraph) -> World:
    """Look up all relations. Pairs with two relations at once (none in family trees) count as unrelated."""
    matrix = np.maximum(relation_matrix(graph), -1)
    relation: list[list[int]] = matrix.tolist()
    n = len(relation)
    reach: list[dict[int, list[int]]] = [{} for _ in range(n)]
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(N_RELATIONS)]
    subjects, objects = np.nonzero(matrix >= 0)
    for s, o in zip(subjects.tolist(), objects.tolist(), strict=True):
        r = relation[s][o]
        reach[o].setdefault(r, []).append(s)
        pairs[r].append((o, s))
    return World(graph, relation, reach, pairs)


@functools.cache
def kinship_worlds() -> tuple[tuple[World, int], ...]:
    """The families of kinship stories, each with its centre, from whom every chain starts.

    Every person of a kinship chain is in a named relation to the first. So a ball around the first that is
    full of relatives holds nearly every chain there can be, where random families lack most of the long
    ones. Three sons and three daughters to a couple leave room for walks among siblings.
    """
    balls = (full_ball(male, brood=3) for male in (True, False))
    return tuple((make_world(graph), centre) for graph, centre in balls)


@functools.lru_cache(maxsize=8)
def world_pool(seed: int, size: int = POOL_SIZE) -> tuple[World, ...]:
    """The families of follow stories for this seed; the same at every call."""
    rng = random.Random(f"worlds/{seed}")
    worlds: list[World] = []
    while len(worlds) < size:
        graph = random_family(rng, generations=4, children=(1, 4), outsiders=0.6)
        if SMALLEST <= len(graph) <= LARGEST:
            worlds.append(make_world(graph))
    return tuple(worlds)
