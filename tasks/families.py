"""Family graphs: who is whose parent, who is married to whom, who is male.

Every graph here is a *family tree* in the strict sense: couples are monogamous, both parents of a child are
the couple, and a marriage never joins two people who are connected already (the graph of people and families
has no cycle). So any two people are connected in at most one way and can stand in at most one relation, and a
composition of relations can be checked exhaustively (`full_ball`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOBODY = -1


@dataclass(frozen=True, slots=True, eq=False)
class FamilyGraph:
    """n people, numbered.

    Attributes:
        male: bool [n].
        father, mother, spouse: int64 [n], `NOBODY` (-1) where there is none in the graph.
    """

    male: NDArray[np.bool_]
    father: NDArray[np.int64]
    mother: NDArray[np.int64]
    spouse: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.male)


class FamilyBuilder:
    """Grows a family tree person by person; every verb keeps the rules of this module."""

    def __init__(self) -> None:
        self.male: list[bool] = []
        self.father: list[int] = []
        self.mother: list[int] = []
        self.spouse: list[int] = []

    def person(self, male: bool, father: int = NOBODY, mother: int = NOBODY) -> int:
        """A new person; with parents, these are a couple."""
        self.male.append(male)
        self.father.append(father)
        self.mother.append(mother)
        self.spouse.append(NOBODY)
        return len(self.male) - 1

    def wed(self, person: int) -> int:
        """The person's spouse, a new outsider if there was none."""
        if self.spouse[person] == NOBODY:
            other = self.person(not self.male[person])
            self.spouse[person], self.spouse[other] = other, person
        return self.spouse[person]

    def child(self, person: int, male: bool) -> int:
        """A new child of the person and the person's spouse."""
        other = self.wed(person)
        father, mother = (person, other) if self.male[person] else (other, person)
        return self.person(male, father, mother)

    def parents(self, person: int) -> tuple[int, int]:
        """Father and mother, a new couple if they were not in the graph."""
        if self.father[person] == NOBODY:
            father = self.person(True)
            self.father[person], self.mother[person] = father, self.wed(father)
        return self.father[person], self.mother[person]

    def build(self) -> FamilyGraph:
        return FamilyGraph(
            np.array(self.male, bool),
            np.array(self.father, np.int64),
            np.array(self.mother, np.int64),
            np.array(self.spouse, np.int64),
        )


def random_family(
    rng: random.Random, *, generations: int = 4, children: tuple[int, int] = (1, 3), outsiders: float = 0.5
) -> FamilyGraph:
    """One random family tree, about 30 to 90 people at the defaults.

    Args:
        rng: the only source of chance.
        generations: of blood descendants of the founding couple, the couple included.
        children: fewest and most children of a couple.
        outsiders: chance that somebody who marries in brings parents and siblings along.
    """
    tree = FamilyBuilder()
    line = [tree.person(rng.random() < 0.5)]
    for depth in range(1, generations + 1):
        below: list[int] = []
        for person in line:
            if depth > 1 and rng.random() < 0.25:
                continue  # stays single
            spouse = tree.wed(person)
            if depth > 1 and rng.random() < outsiders:
                _bring_family(tree, rng, spouse, grand=depth >= 3)
            if depth < generations:
                below.extend(tree.child(person, rng.random() < 0.5) for _ in range(rng.randint(*children)))
        line = below or line
        if not below:
            break
    return tree.build()


def _bring_family(tree: FamilyBuilder, rng: random.Random, person: int, grand: bool) -> None:
    """Parents and up to two siblings for somebody who married in, now and then grandparents too."""
    couple = tree.parents(person)
    for _ in range(rng.randint(0, 2)):
        tree.child(couple[0], rng.random() < 0.5)
    if grand and rng.random() < 0.5:
        elders = tree.parents(rng.choice(couple))
        if rng.random() < 0.5:
            tree.child(elders[0], rng.random() < 0.5)


def full_ball(male: bool, brood: int = 2) -> tuple[FamilyGraph, int]:
    """A family tree around one person in which all that can happen among their relatives does happen.

    Everybody in a named relation to the centre is there, and every family on the way has `brood` sons and
    `brood` daughters besides the one on the path; with two, "the same one" and "another one" of either
    gender both occur. Two relatives of the centre are connected by a path inside their two paths to the
    centre; so the ball holds every way in which two relations can meet at a person.

    Args:
        male: gender of the centre.
        brood: sons, and daughters, of every couple (great-grandchildren at most two of each).

    Returns:
        The graph and the number of the centre.
    """
    tree = FamilyBuilder()
    centre = tree.person(male)

    def children(person: int, each: int = brood) -> list[int]:
        return [tree.child(person, m) for m in (True, False) for _ in range(each)]

    def siblings(person: int) -> list[int]:
        return children(tree.parents(person)[0])

    for sibling in siblings(centre):
        children(sibling)
    siblings(tree.wed(centre))
    for parent in tree.parents(centre):
        for uncle in siblings(parent):
            children(uncle)
        for grandparent in tree.parents(parent):
            tree.parents(grandparent)
    for child in children(centre):
        for grandchild in children(child):
            children(grandchild, min(brood, 2))
    return tree.build(), centre
