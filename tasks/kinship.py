"""The 27 relations, defined as predicates over parent, spouse and gender, and what follows from the
definitions.

Nothing about composition is written down: `algebra()` looks at every way in which two relations can meet at a
person of a family tree (`families.full_ball`) and notes which third relations come out.

    compose("son", "brother")   -> "son"       "x is the brother of the son of me" : x is my son
    compose("uncle", "sister")  -> None        mother or aunt: not one and the same relation in every family
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .families import NOBODY, FamilyGraph, full_ball

# (kind, word for a male, word for a female, generations above the object). "cousin" does not tell the gender.
_KINDS: tuple[tuple[str, str, str, int], ...] = (
    ("parent", "father", "mother", 1),
    ("child", "son", "daughter", -1),
    ("sibling", "brother", "sister", 0),
    ("spouse", "husband", "wife", 0),
    ("grandparent", "grandfather", "grandmother", 2),
    ("grandchild", "grandson", "granddaughter", -2),
    ("great-grandparent", "great-grandfather", "great-grandmother", 3),
    ("great-grandchild", "great-grandson", "great-granddaughter", -3),
    ("uncle-aunt", "uncle", "aunt", 1),
    ("nephew-niece", "nephew", "niece", -1),
    ("parent-in-law", "father-in-law", "mother-in-law", 1),
    ("child-in-law", "son-in-law", "daughter-in-law", -1),
    ("sibling-in-law", "brother-in-law", "sister-in-law", 0),
    ("cousin", "cousin", "cousin", 0),
)

RELATIONS: tuple[str, ...] = tuple(
    dict.fromkeys(word for _, male, female, _ in _KINDS for word in (male, female))
)
INDEX: dict[str, int] = {word: n for n, word in enumerate(RELATIONS)}
GENERATION: dict[str, int] = {w: up for _, male, female, up in _KINDS for w in (male, female)}
GENDER: dict[str, bool | None] = {  # True: male; None: the word does not tell
    w: None if male == female else w == male for _, male, female, _ in _KINDS for w in (male, female)
}
N_RELATIONS = len(RELATIONS)

UNRELATED = "unrelated"  # two different people in none of the named relations
OTHER_BIT = 1 << N_RELATIONS
ANY_MASK = (1 << (N_RELATIONS + 1)) - 1
MALE_MASK = sum(1 << n for n, w in enumerate(RELATIONS) if GENDER[w] is not False) | OTHER_BIT
FEMALE_MASK = sum(1 << n for n, w in enumerate(RELATIONS) if GENDER[w] is not True) | OTHER_BIT


def relation_matrix(graph: FamilyGraph) -> NDArray[np.int8]:
    """Who is what to whom.

    Returns:
        int8 [n, n]: entry [s, o] is the index in `RELATIONS` such that s is that relation of o, -1 for none
        (and on the diagonal). Pairs with two relations at once (possible only in graphs with cycles) are -2.
    """
    n = len(graph)
    everyone = np.arange(n)
    parent = np.zeros((n, n), np.float32)  # [s, o]: s is a parent of o
    for column in (graph.father, graph.mother):
        known = column != NOBODY
        parent[column[known], everyone[known]] = 1
    married = graph.spouse != NOBODY
    spouse = np.zeros((n, n), np.float32)
    spouse[graph.spouse[married], everyone[married]] = 1
    child = parent.T
    couple = graph.father * n + graph.mother
    sibling = ((couple[:, None] == couple) & (graph.father != NOBODY)).astype(np.float32)
    np.fill_diagonal(sibling, 0)
    grandparent = parent @ parent
    # Read right to left: (sibling @ parent)[s, o] counts the p with s a sibling of p and p a parent of o.
    predicates = {
        "parent": parent,
        "child": child,
        "sibling": sibling,
        "spouse": spouse,
        "grandparent": grandparent,
        "grandchild": grandparent.T,
        "great-grandparent": parent @ grandparent,
        "great-grandchild": (parent @ grandparent).T,
        "uncle-aunt": sibling @ parent,
        "nephew-niece": child @ sibling,
        "parent-in-law": parent @ spouse,
        "child-in-law": spouse @ child,
        "sibling-in-law": sibling @ spouse + spouse @ sibling,
        "cousin": child @ (sibling @ parent),
    }
    matrix = np.full((n, n), -1, np.int8)
    for kind, male, female, _ in _KINDS:
        holds = predicates[kind] > 0
        np.fill_diagonal(holds, False)
        word = np.where(graph.male, INDEX[male], INDEX[female]).astype(np.int8)[:, None]
        matrix = np.where(holds, np.where(matrix == -1, word, np.int8(-2)), matrix)
    return matrix


@dataclass(frozen=True, slots=True)
class Algebra:
    """What the definitions entail; relations are indices, sets of relations are bit masks.

    Attributes:
        weak: weak[r1][r2] is the mask of all relations (with `OTHER_BIT`) in which a third, different person
            can stand who is r2 of an r1 of somebody; 0 if no such three people exist.
        strict: strict[r1][r2] is the one relation that always comes out, -1 if there is no such one.
        inverse: inverse[r] is the mask of what o can be to s when s is r of o.
    """

    weak: tuple[tuple[int, ...], ...]
    strict: tuple[tuple[int, ...], ...]
    inverse: tuple[int, ...]


@functools.cache
def algebra() -> Algebra:
    """The composition table, derived once per process (some 0.1 s)."""
    weak = np.zeros((N_RELATIONS, N_RELATIONS), np.int64)
    inverse = np.zeros(N_RELATIONS, np.int64)
    for male in (True, False):
        graph, centre = full_ball(male)
        matrix = relation_matrix(graph).astype(np.int64)
        if (matrix == -2).any():
            raise AssertionError("a family tree gave two relations to one pair")
        first = np.flatnonzero(matrix[centre] >= 0)  # x0, to whom the centre is r1
        last = np.flatnonzero(matrix[:, centre] >= 0)  # x2, who is r2 of the centre
        r1, r2 = np.meshgrid(matrix[centre, first], matrix[last, centre], indexing="ij")
        r3 = matrix[np.ix_(last, first)].T
        bits = np.where(r3 >= 0, 1 << np.maximum(r3, 0), OTHER_BIT)
        different = first[:, None] != last
        np.bitwise_or.at(weak, (r1[different], r2[different]), bits[different])
        np.bitwise_or.at(inverse, matrix[centre, first], 1 << matrix[first, centre])
    table = [[int(m) for m in row] for row in weak]
    single = {1 << n: n for n in range(N_RELATIONS)}
    return Algebra(
        tuple(tuple(row) for row in table),
        tuple(tuple(single.get(m, -1) for m in row) for row in table),
        tuple(int(m) for m in inverse),
    )


def compose(first: str, second: str) -> str | None:
    """What "the `second` of my `first`" is to me, or None unless it is the same in every family."""
    result = algebra().strict[INDEX[first]][INDEX[second]]
    return RELATIONS[result] if result >= 0 else None


def possible(first: str, second: str) -> frozenset[str]:
    """Everything that "the `second` of my `first`" can be to me (if not myself), `UNRELATED` included."""
    return names_of(algebra().weak[INDEX[first]][INDEX[second]])


def inverses(relation: str) -> frozenset[str]:
    """What I can be to my `relation`."""
    return names_of(algebra().inverse[INDEX[relation]])


def fold(relations: Iterable[str]) -> str | None:
    """Left fold of a chain: x_{j+1} is the relations[j] of x_j; the result says what the last one is to x_0.

    None if the fold is undefined at some prefix.
    """
    current: str | None = None
    for number, relation in enumerate(relations):
        current = relation if number == 0 else compose(current or "", relation)
        if current is None:
            return None
    return current


def compositions() -> Iterator[tuple[str, str, str]]:
    """All (first, second, result) of `compose`."""
    for first in RELATIONS:
        for second in RELATIONS:
            result = compose(first, second)
            if result is not None:
                yield first, second, result


def names_of(mask: int) -> frozenset[str]:
    """The relation words in a bit mask, `UNRELATED` for the bit of no relation."""
    words = [w for n, w in enumerate(RELATIONS) if mask >> n & 1]
    return frozenset([*words, UNRELATED] if mask & OTHER_BIT else words)


def mask_of(words: Iterable[str]) -> int:
    """Inverse of `names_of`."""
    mask = 0
    for word in words:
        mask |= OTHER_BIT if word == UNRELATED else 1 << INDEX[word]
    return mask
