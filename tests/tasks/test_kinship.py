from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.tasks import families, kinship
from depthprobe.tasks.families import NOBODY, FamilyBuilder
from depthprobe.tasks.kinship import INDEX, OTHER_BIT, RELATIONS, relation_matrix


def _slow_relations(graph: families.FamilyGraph, s: int, o: int) -> set[str]:
    """The definitions once more, in words and one pair at a time."""

    def parents(x: int) -> set[int]:
        return {int(p) for p in (graph.father[x], graph.mother[x]) if p != NOBODY}

    def children(x: int) -> set[int]:
        return {y for y in range(len(graph)) if x in parents(y)}

    def spouses(x: int) -> set[int]:
        return set() if graph.spouse[x] == NOBODY else {int(graph.spouse[x])}

    def siblings(x: int) -> set[int]:
        return {y for p in parents(x) for y in children(p)} - {x}

    def of(*steps: object) -> set[int]:
        here = {o}
        for step in steps:
            here = {y for x in here for y in step(x)}  # type: ignore[operator]
        return here

    found = {
        ("father", "mother"): of(parents),
        ("son", "daughter"): of(children),
        ("brother", "sister"): of(siblings),
        ("husband", "wife"): of(spouses),
        ("grandfather", "grandmother"): of(parents, parents),
        ("grandson", "granddaughter"): of(children, children),
        ("great-grandfather", "great-grandmother"): of(parents, parents, parents),
        ("great-grandson", "great-granddaughter"): of(children, children, children),
        ("uncle", "aunt"): of(parents, siblings),
        ("nephew", "niece"): of(siblings, children),
        ("father-in-law", "mother-in-law"): of(spouses, parents),
        ("son-in-law", "daughter-in-law"): of(children, spouses),
        ("brother-in-law", "sister-in-law"): of(spouses, siblings) | of(siblings, spouses),
        ("cousin", "cousin"): of(parents, siblings, children),
    }
    return {words[0 if graph.male[s] else 1] for words, people in found.items() if s in people and s != o}


def test_there_are_27_relations() -> None:
    assert len(RELATIONS) == len(set(RELATIONS)) == 27


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_matrix_is_the_definitions_read_one_pair_at_a_time(seed: int) -> None:
    graph = families.random_family(random.Random(seed), generations=3)
    matrix = relation_matrix(graph)
    for s in range(len(graph)):
        for o in range(len(graph)):
            words = _slow_relations(graph, s, o)
            assert words == ({RELATIONS[matrix[s, o]]} if matrix[s, o] >= 0 else set())


@pytest.mark.parametrize("seed", [*range(6), "ball of a man", "ball of a woman"])
def test_families_keep_the_rules(seed: int | str) -> None:
    """Random ones, and the balls too: so what comes out of a ball does happen in a family."""
    if isinstance(seed, str):
        graph = families.full_ball(seed.endswith(" man"))[0]
    else:
        graph = families.random_family(random.Random(seed))
    for x in range(len(graph)):
        assert (graph.father[x] == NOBODY) == (graph.mother[x] == NOBODY)
        if graph.father[x] != NOBODY:
            assert graph.spouse[graph.father[x]] == graph.mother[x]
            assert graph.male[graph.father[x]] and not graph.male[graph.mother[x]]
        if graph.spouse[x] != NOBODY:
            assert graph.spouse[graph.spouse[x]] == x and graph.male[graph.spouse[x]] != graph.male[x]
    # no cycle: people + families - memberships is the number of connected pieces, which is one
    couples = {
        tuple(sorted((x, int(graph.spouse[x])))) for x in range(len(graph)) if graph.spouse[x] != NOBODY
    }
    memberships = 2 * len(couples) + int((graph.father != NOBODY).sum())
    assert len(graph) + len(couples) - memberships == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_composition_holds_in_families_it_was_not_read_from(seed: int) -> None:
    """Weak: nothing comes out that the algebra does not know. Strict: what it promises does come out."""
    graph = families.random_family(random.Random(seed), children=(1, 4))
    algebra = kinship.algebra()
    matrix = relation_matrix(graph).astype(int)
    assert not (matrix == -2).any()
    weak, strict, inverse = (np.array(t) for t in (algebra.weak, algebra.strict, algebra.inverse))
    for x1 in range(len(graph)):
        x0, x2 = np.flatnonzero(matrix[x1] >= 0), np.flatnonzero(matrix[:, x1] >= 0)
        pair = matrix[x1, x0][:, None], matrix[x2, x1][None, :]
        result = matrix[np.ix_(x2, x0)].T
        bit = np.where(result >= 0, 1 << np.maximum(result, 0), OTHER_BIT)
        different = x0[:, None] != x2
        assert ((weak[pair] & bit) > 0)[different].all()
        assert ((strict[pair] == result) | (strict[pair] < 0))[different].all()
        assert ((inverse[matrix[x1, x0]] >> matrix[x0, x1]) & 1).all()


def test_a_larger_ball_adds_nothing() -> None:
    weak = np.array(kinship.algebra().weak)
    graph, centre = families.full_ball(True, brood=3)
    matrix = relation_matrix(graph).astype(int)
    x0, x2 = np.flatnonzero(matrix[centre] >= 0), np.flatnonzero(matrix[:, centre] >= 0)
    result = matrix[np.ix_(x2, x0)].T
    bit = np.where(result >= 0, 1 << np.maximum(result, 0), OTHER_BIT)
    known = weak[matrix[centre, x0][:, None], matrix[x2, centre][None, :]]
    assert ((known & bit) > 0)[x0[:, None] != x2].all()


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        ("son", "brother", "son"),
        ("son", "mother", "wife"),
        ("wife", "brother", "brother-in-law"),
        ("father", "father-in-law", "grandfather"),
        ("uncle", "mother", "grandmother"),
        ("aunt", "son", "cousin"),
        ("uncle", "sister", None),  # mother or aunt
        ("brother-in-law", "wife", None),  # a sister, or nobody with a name
        ("father", "cousin", None),
    ],
)
def test_compositions_that_anybody_can_check(first: str, second: str, result: str | None) -> None:
    assert kinship.compose(first, second) == result


def test_what_is_possible_is_told() -> None:
    assert kinship.possible("uncle", "sister") == {"mother", "aunt"}
    assert kinship.possible("husband", "wife") == frozenset()
    assert kinship.inverses("father") == {"son", "daughter"}
    assert kinship.names_of(kinship.mask_of({"cousin", "unrelated"})) == {"cousin", "unrelated"}


def test_number_of_compositions() -> None:
    assert len(list(kinship.compositions())) == 166


def test_fold_stops_where_it_is_undefined() -> None:
    assert kinship.fold(["son", "wife", "mother"]) is None
    assert kinship.fold(["son", "wife", "daughter"]) == "granddaughter"
    assert kinship.fold([]) is None


def test_generation_and_gender_of_a_word_are_those_of_the_family() -> None:
    graph, centre = families.full_ball(False)
    matrix = relation_matrix(graph)
    tree_up = {
        "father": 1,
        "mother": 1,
        "son": -1,
        "daughter": -1,
        "husband": 0,
        "wife": 0,
        "brother": 0,
        "sister": 0,
    }
    level = {centre: 0}
    line = [centre]
    for x in line:
        for y in range(len(graph)):
            if y not in level and matrix[y, x] >= 0 and RELATIONS[matrix[y, x]] in tree_up:
                level[y] = level[x] + tree_up[RELATIONS[matrix[y, x]]]
                line.append(y)
    for s, o in zip(*np.nonzero(matrix >= 0), strict=True):
        word = RELATIONS[matrix[s, o]]
        assert level[int(s)] - level[int(o)] == kinship.GENERATION[word]
        assert kinship.GENDER[word] in (None, bool(graph.male[s]))


def test_derivation_is_fast_and_always_the_same() -> None:
    first = kinship.algebra()
    kinship.algebra.cache_clear()
    start = time.process_time()
    assert kinship.algebra() == first
    assert time.process_time() - start < 1.0


def test_two_relations_at_once_are_marked() -> None:
    """Two brothers' wives being cousins is fine; a cousin as wife is two relations and marked -2."""
    tree = FamilyBuilder()
    elder = tree.person(True)
    a, b = tree.child(elder, True), tree.child(elder, True)
    he, she = tree.child(a, True), tree.child(b, False)
    tree.spouse[he], tree.spouse[she] = she, he
    assert relation_matrix(tree.build())[she, he] == -2
    assert INDEX["wife"] >= 0
