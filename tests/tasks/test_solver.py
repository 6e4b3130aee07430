from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.tasks.families import random_family
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.solver import ContradictionError, Knowledge, answers, verify
from depthprobe.tasks.worlds import make_world


def test_what_follows_from_two_facts() -> None:
    knowledge = Knowledge.of([("Bob", "son", "Ann"), ("Carl", "brother", "Bob")])
    assert knowledge.between("Carl", "Ann") == {"son"}
    assert knowledge.between("Ann", "Carl") == {"father", "mother"}
    assert knowledge.gender("Ann") is None and knowledge.gender("Carl") is True
    assert knowledge.follow("Ann", ["son"]) == {"Bob", "Carl"}  # told of one, entailed of the other
    assert knowledge.between("Zoe", "Ann") == knowledge.between("Ann", "Ann") == frozenset()


def test_gender_facts_and_spouses_decide() -> None:
    open_ = [("Bob", "son", "Ann"), ("Carl", "brother", "Bob")]
    assert Knowledge.of([*open_, ("Ann", "woman", "")]).between("Ann", "Carl") == {"mother"}
    assert Knowledge.of([*open_, ("Dan", "husband", "Ann")]).between("Dan", "Carl") == {"father"}


def test_unknown_stays_open() -> None:
    knowledge = Knowledge.of([("Bob", "uncle", "Ann"), ("Cleo", "sister", "Bob")])
    assert knowledge.between("Cleo", "Ann") == {"mother", "aunt"}
    knowledge = Knowledge.of([("Bob", "uncle", "Ann"), ("Cleo", "son", "Dan")])
    assert len(knowledge.between("Cleo", "Ann")) > 2


@pytest.mark.parametrize(
    "facts",
    [
        [("Bob", "son", "Ann"), ("Bob", "brother", "Ann")],
        [("Bob", "son", "Ann"), ("Bob", "woman", "")],
        [("Bob", "man", ""), ("Bob", "woman", "")],
        [("Bob", "husband", "Ann"), ("Cleo", "wife", "Bob")],
        [("Bob", "father", "Ann"), ("Carl", "father", "Bob"), ("Ann", "mother", "Carl")],
    ],
)
def test_contradictions(facts: list[tuple[str, str, str]]) -> None:
    with pytest.raises(ContradictionError):
        Knowledge.of(facts)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 14))
def test_the_truth_of_the_family_is_never_excluded(seed: int, n: int) -> None:
    """Any true facts of any family: for every two people, what they are to each other stays possible."""
    rng = random.Random(seed)
    world = make_world(random_family(rng, children=(1, 3)))
    pairs = [(o, s) for pairs in world.pairs for o, s in pairs]
    if not pairs:
        return
    facts = {(s, world.relation[s][o], o) for o, s in (rng.choice(pairs) for _ in range(n))}
    knowledge = Knowledge.of((str(s), RELATIONS[r], str(o)) for s, r, o in facts)
    people = sorted({p for s, _, o in facts for p in (s, o)})
    for s in people:
        for o in people:
            if s != o:
                r = world.relation[s][o]
                assert (RELATIONS[r] if r >= 0 else "unrelated") in knowledge.between(str(s), str(o))
        assert knowledge.gender(str(s)) in (None, bool(world.graph.male[s]))


@pytest.mark.parametrize("task", ["kinship", "follow"])
def test_a_changed_answer_or_a_lost_fact_is_noticed(task: str) -> None:
    ladder = Generator(task, hops=(2, 3, 4), seed=4).story(7)
    assert verify(ladder) == []
    other = next(c for c in ladder[0].candidates if c != ladder[0].answer)
    assert verify([dataclasses.replace(ladder[0], answer=other), ladder[1]])[0].id == ladder[0].id
    item = ladder[-1]
    lost = tuple(f for f in item.facts if f.hop != 2)
    assert answers(dataclasses.replace(item, facts=lost)) != {item.answer}


def test_contradicting_facts_have_no_answer() -> None:
    item = Generator("kinship", hops=(2,), seed=0).story(0)[0]
    fact = item.facts[0]
    upside = dataclasses.replace(fact, relation="father", subject=fact.object, object=fact.subject)
    again = dataclasses.replace(fact, relation="father")
    assert answers(dataclasses.replace(item, facts=(upside, again))) == frozenset()
