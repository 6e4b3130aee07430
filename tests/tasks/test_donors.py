"""Donors: one word of one fact differs, and the answer with it or not."""

from __future__ import annotations

import json

import pytest

from depthprobe.tasks.donors import BY_NAME, CONTROLS, KINDS, ON_CHAIN, Donor, donors_of, find_donors
from depthprobe.tasks.generate import generate_items
from depthprobe.tasks.items import Item
from depthprobe.tasks.kinship import GENDER
from depthprobe.tasks.solver import answers


@pytest.fixture(scope="module")
def bases() -> dict[str, Item]:
    items = [
        *generate_items("kinship", 8, hops=(2, 3, 4), seed=21),
        *generate_items("kinship", 3, hops=(3,), distractors="branch", fact_template="has", seed=22),
        *generate_items("follow", 3, hops=(2, 3), seed=23),
        *generate_items("follow", 1, hops=(3,), form="of", fact_template="object-first", seed=24),
    ]
    return {item.id: item for item in items}


@pytest.fixture(scope="module")
def found(bases: dict[str, Item]) -> tuple[Donor, ...]:
    return find_donors(bases.values()).donors


def test_exactly_one_word_of_one_fact_differs(bases: dict[str, Item], found: tuple[Donor, ...]) -> None:
    assert len(found) > 40
    for donor in found:
        base, item = bases[donor.base_id], donor.item
        pairs = list(zip(base.facts, item.facts, strict=True))
        triples = [[(f.subject, f.relation, f.object) for f in pair] for pair in pairs]
        assert [n for n, (one, other) in enumerate(triples) if one != other] == [donor.fact]
        one, other = triples[donor.fact]
        assert [a != b for a, b in zip(one, other, strict=True)].count(True) == 1
        assert (one[0] if donor.kind in BY_NAME else one[1]) == donor.before == donor.base_span.of(base.text)
        assert (
            (other[0] if donor.kind in BY_NAME else other[1]) == donor.after == donor.donor_span.of(item.text)
        )
        assert item.question == base.question
        assert item.id != base.id


def test_the_solver_finds_one_answer_and_it_is_another_or_the_same(
    bases: dict[str, Item], found: tuple[Donor, ...]
) -> None:
    for donor in found:
        assert answers(donor.item) == {donor.item.answer}
        assert (donor.item.answer == bases[donor.base_id].answer) == (donor.kind in CONTROLS)
        assert donor.item.answer in donor.item.plausible
        assert set(donor.item.plausible) <= set(donor.item.candidates)


def test_positions_on_and_beside_the_chain(bases: dict[str, Item], found: tuple[Donor, ...]) -> None:
    for donor in found:
        fact = bases[donor.base_id].facts[donor.fact]
        assert donor.hop == fact.hop
        assert (fact.role == "chain") == (donor.kind in ON_CHAIN)


def test_the_person_keeps_the_gender(bases: dict[str, Item], found: tuple[Donor, ...]) -> None:
    for donor in found:
        if donor.kind in ("relation", "distractor"):
            genders = {GENDER[donor.before], GENDER[donor.after]} - {None}
            assert len(genders) <= 1


def test_donors_are_items_like_any_other(found: tuple[Donor, ...]) -> None:
    for donor in found:  # from_dict checks every span
        assert Item.from_dict(json.loads(json.dumps(donor.item.to_dict()))) == donor.item
        for span in donor.item.question_relation_spans:
            assert span.of(donor.item.text) in donor.item.chain_relations
        for span in donor.item.question_people_spans:
            assert span.of(donor.item.text) in donor.item.chain_people


def test_counts_say_how_many_were_asked_and_found() -> None:
    items = generate_items("kinship", 20, hops=(3,), seed=30)
    result = find_donors(items)
    assert [(row["kind"], row["asked"]) for row in result.counts] == [
        (kind, 20) for kind in sorted(KINDS["kinship"])
    ]
    row = next(row for row in result.counts if row["kind"] == "relation")
    assert row["found"] == sum(row["by_hop"].values()) >= 18
    by_hop = [row["by_hop"].get(hop, 0) for hop in (1, 2, 3)]
    assert max(by_hop) - min(by_hop) <= 3  # spread evenly over the chain
    none = next(row for row in result.counts if row["kind"] == "distractor")
    assert (none["found"], none["by_hop"]) == (
        0,
        {},
    )  # a story of chain facts alone has nothing beside the chain


def test_follow_has_name_donors_at_every_hop() -> None:
    items = generate_items("follow", 10, hops=(3,), seed=31)
    result = find_donors(items, ["name"])
    assert sum(row["found"] for row in result.counts) >= 7
    assert {donor.hop for donor in result.donors} == {1, 2, 3}
    assert find_donors(generate_items("kinship", 2, hops=(2,)), ["name"]).donors == ()


def test_words_of_equal_length_only() -> None:
    items = generate_items("kinship", 10, hops=(2,), seed=32)
    result = find_donors(items, ["relation"], length_of=len)
    assert result.donors
    for donor in result.donors:
        assert len(donor.before) == len(donor.after)
        assert donor.base_span == donor.donor_span


def test_the_same_seed_gives_the_same_donors() -> None:
    items = generate_items("kinship", 4, hops=(3,), seed=33)
    assert find_donors(items, seed=1) == find_donors(items, seed=1)
    assert find_donors(items, seed=1).donors != find_donors(items, seed=2).donors


def test_several_donors_of_an_item_change_several_facts() -> None:
    (item,) = generate_items("kinship", 1, hops=(3,), seed=34)
    some = list(donors_of(item, "relation"))
    assert len({donor.item.id for donor in some}) == len(some) > 3
    hops = [donor.hop for donor in some]
    assert len(set(hops[: len(set(hops))])) == len(set(hops))  # every hop has its turn first
    assert len(find_donors([item], ["relation"], per_item=3).donors) == 3
