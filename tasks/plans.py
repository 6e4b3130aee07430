"""What a story will tell, before it has names and words: a chain through a family, and the facts around it.

A plan is drawn from a world (a family graph with its relations looked up), so that everything a story says is
true in one family at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from .chains import draw_chain
from .kinship import RELATIONS
from .splits import HASHED_RELATIONS, Split, split_of
from .worlds import World, kinship_worlds, world_pool

Triple = tuple[int, int, int]  # (subject, relation, object): people of the world, an index into RELATIONS

DISTRACTORS: tuple[str, ...] = ("none", "offchain", "branch", "decoy")


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain and the facts of its story.

    Attributes:
        world: the family.
        people: x_0 ... x_K.
        relations: r_1 ... r_K; people[j + 1] is the relations[j] of people[j].
        facts: all of the story's facts; the first K are the chain's, in order.
    """

    world: World
    people: tuple[int, ...]
    relations: tuple[int, ...]
    facts: tuple[Triple, ...]


def plan_kinship(
    rng: random.Random, length: int, n_facts: int, distractors: str, split: Split | None
) -> Plan | None:
    """One attempt at a kinship story; None if no family can have this chain.

    The chain is a simple path whose left fold is defined at every prefix. No two people of a family tree
    stand in two relations, so the fold is also what the family says.
    """
    relations = draw_chain(rng, length)
    while not _fits(relations, split):
        relations = draw_chain(rng, length)
    world, centre = rng.choice(kinship_worlds())
    path = [centre]
    if not _extend(rng, world, relations, path):
        return None
    facts = _chain_facts(path, relations)
    if not _add_distractors(rng, world, path, relations, facts, n_facts, distractors, lambda person: True):
        return None
    return Plan(world, tuple(path), relations, tuple(facts))


def plan_follow(
    rng: random.Random, seed: int, length: int, n_facts: int, distractors: str, split: Split | None
) -> Plan | None:
    """One attempt at a follow story; None if it did not work out.

    Every hop of the chain is unique among all people of the story, stated or not. With "decoy" distractors a
    second path of other people goes through the same relation words in the same order, so that no run of
    words of the question, up to all of them, tells the answer without the person it starts from.
    """
    world = rng.choice(world_pool(seed))
    here = rng.randrange(len(world))
    path, relations = [here], []
    barred: set[int] = set()  # would make an earlier hop ambiguous
    for _ in range(length):
        ways = [(r, people) for r, people in world.reach[here].items()]
        relation, people = rng.choice(ways) if ways else (-1, [])
        free = [p for p in people if p not in path and p not in barred]
        if not free:
            return None
        there = rng.choice(free)
        if any(p != there and p in people for p in path):
            return None
        barred.update(p for p in people if p != there)
        path.append(there)
        relations.append(relation)
        here = there
        if len(relations) == HASHED_RELATIONS and not _fits(relations, split):
            return None
    facts = _chain_facts(path, relations)

    def allowed(person: int) -> bool:
        return person not in barred

    if distractors == "decoy":
        second = _second_path(rng, world, path, relations, barred)
        if second is None:
            return None
        for fact in _chain_facts(second, relations):
            if fact not in facts:
                facts.append(fact)
        if len(facts) > n_facts:
            return None
        _branch_out(rng, world, path, relations, facts, n_facts, barred)
    if not _add_distractors(rng, world, path, relations, facts, n_facts, distractors, allowed):
        return None
    return Plan(world, tuple(path), tuple(relations), tuple(facts))


def _fits(relations: Sequence[int], split: Split | None) -> bool:
    return split is None or split_of([RELATIONS[r] for r in relations]) == split


def _chain_facts(path: Sequence[int], relations: Sequence[int]) -> list[Triple]:
    return [(path[j + 1], relations[j], path[j]) for j in range(len(relations))]


def _second_path(
    rng: random.Random, world: World, path: Sequence[int], relations: Sequence[int], barred: set[int]
) -> list[int] | None:
    """A simple path z_0 ... z_K through the same relations with z_j never x_j, or None if few starts led
    to one.

    It goes through people of the chain where it can: then these have more than one fact told from them, and
    walking k facts from x_0 without reading their words does not end at the answer.
    """
    pairs = world.pairs[relations[0]]
    crossing = [x for x in path[1:] if relations[0] in world.reach[x]]
    for attempt in range(12):
        start = rng.choice(crossing) if crossing and attempt < 6 else rng.choice(pairs)[0]
        if start not in barred and start != path[0]:
            trail = [start]
            if _extend(rng, world, relations, trail, barred, path):
                return trail
    return None


def _extend(
    rng: random.Random,
    world: World,
    relations: Sequence[int],
    trail: list[int],
    barred: Container[int] = (),
    other: Sequence[int] = (),
) -> bool:
    """Go on from the end of `trail` to a simple path through all relations; False (and `trail` as it was)
    if not.

    Nobody `barred` is on it, and its j-th person is not other[j]; otherwise it seeks the people of `other`.
    """
    at = len(trail)
    if at > len(relations):
        return True
    ahead = world.reach[trail[-1]].get(relations[at - 1], ())
    options = [p for p in ahead if p not in barred and p not in trail]
    if other:
        options = [p for p in options if p != other[at]]
        shared = [p for p in options if p in other]
        options = rng.sample(shared, min(len(shared), 2)) + rng.sample(options, min(len(options), 2))
    else:
        options = rng.sample(options, min(len(options), 2))
    for person in options:
        trail.append(person)
        if _extend(rng, world, relations, trail, barred, other):
            return True
        trail.pop()
    return False


def _branch_out(
    rng: random.Random,
    world: World,
    path: Sequence[int],
    relations: Sequence[int],
    facts: list[Triple],
    n_facts: int,
    barred: Container[int],
) -> None:
    """Tell another fact from people of the chain who have but one, from x_0 first, as far as `n_facts`
    allows.

    It leads where the story goes on if it can, and takes a relation word of the chain if it can: so
    neither the number of steps nor the set of words tells which way to go.
    """
    words = set(relations)
    told = {frozenset((s, o)) for s, _, o in facts}
    places = [path[0], *rng.sample(path[1:-1], len(path) - 2)] if len(path) > 2 else list(path[:1])
    for obj in places:
        ahead = {o for _, _, o in facts}
        if len(facts) >= n_facts or sum(o == obj for _, _, o in facts) > 1:
            continue
        options = [
            (s in ahead, r in words, rng.random(), (s, r, obj))
            for r, people in world.reach[obj].items()
            for s in people
            if s not in barred and frozenset((s, obj)) not in told
        ]
        if options:
            fact = max(options)[3]
            facts.append(fact)
            told.add(frozenset((fact[0], obj)))


def _add_distractors(
    rng: random.Random,
    world: World,
    path: Sequence[int],
    relations: Sequence[int],
    facts: list[Triple],
    n_facts: int,
    kind: str,
    allowed: Callable[[int], bool],
) -> bool:
    """Fill `facts` up to `n_facts` with true facts of the given kind; False if the family has too few.

    offchain: neither person is on the chain; branch: about a person of the chain, told of somebody else;
    decoy: a relation word of the chain between two people who are not a hop of it.
    """
    on_chain = set(path)
    # a pair is told once: a hop told again from the other end would give the chain away twice
    told = {frozenset((s, o)) for s, _, o in facts}
    for _ in range(8 * max(0, n_facts - len(facts))):
        if len(facts) >= n_facts:
            break
        if kind == "branch":
            obj = rng.choice(path)
            relation, people = rng.choice(list(world.reach[obj].items()))
            subject = rng.choice(people)
        elif kind == "decoy":
            relation = rng.choice(relations)
            obj, subject = rng.choice(world.pairs[relation])
        else:
            obj = rng.randrange(len(world))
            if not world.reach[obj]:
                continue
            relation, people = rng.choice(list(world.reach[obj].items()))
            subject = rng.choice(people)
        if subject in on_chain or (kind == "offchain" and obj in on_chain):
            continue
        if frozenset((subject, obj)) in told or not allowed(subject) or not (obj in on_chain or allowed(obj)):
            continue
        told.add(frozenset((subject, obj)))
        facts.append((subject, relation, obj))
    return len(facts) == n_facts
