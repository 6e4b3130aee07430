"""Family graphs made ready for sampling: a pool of them per seed, with all relations looked up once."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np

from .families import FamilyGraph, random_family
from .kinship import N_RELATIONS, relation_matrix

POOL_SIZE = 48
SMALLEST = 40  # people; smaller families have few long chains and hardly a decoy
LARGEST = 110


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
    relation = np.maximum(relation_matrix(graph), -1).astype(int).tolist()
    n = len(relation)
    reach: list[dict[int, list[int]]] = [{} for _ in range(n)]
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(N_RELATIONS)]
    for s in range(n):
        for o in range(n):
            r = relation[s][o]
            if r >= 0:
                reach[o].setdefault(r, []).append(s)
                pairs[r].append((o, s))
    return World(graph, relation, reach, pairs)


@functools.lru_cache(maxsize=8)
def world_pool(seed: int, size: int = POOL_SIZE) -> tuple[World, ...]:
    """The families from which a generator with this seed tells its stories; the same at every call."""
    rng = random.Random(f"worlds/{seed}")
    worlds: list[World] = []
    while len(worlds) < size:
        graph = random_family(rng, generations=4, children=(1, 3), outsiders=0.6)
        if SMALLEST <= len(graph) <= LARGEST:
            worlds.append(make_world(graph))
    return tuple(worlds)
