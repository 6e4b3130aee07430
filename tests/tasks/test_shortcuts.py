"""Baselines, worked out by hand on stories small enough to see."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from depthprobe.tasks.generate import generate_items
from depthprobe.tasks.items import Item
from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.labels import label_facts
from depthprobe.tasks.shortcuts import (
    SHORTCUTS,
    best_shortcut,
    default_shortcuts,
    shortcut_scores,
    shortcut_table,
)
from depthprobe.tasks.stories import render_follow_question, render_kinship_question, render_story

Triple = tuple[str, str, str]


def make_item(
    task: str,
    triples: Sequence[Triple],
    people: Sequence[str],
    relations: Sequence[str],
    answer: str,
    name: str = "i",
) -> Item:
    """An item of hand-written facts; the story tells them in the order given."""
    story, spans = render_story(triples)
    kinship = task == "kinship"
    if kinship:
        question = render_kinship_question("statement", people[0], people[-1], len(story) + 1)
    else:
        question = render_follow_question("possessive", people[0], relations, len(story) + 1)
    everybody = tuple(sorted({p for s, _, o in triples for p in (s, o)}))
    data = {
        "id": name, "story_id": name, "task": task, "hops": len(relations),
        "text": f"{story} {question.text}", "story": story, "question": question.text, "answer": answer,
        "candidates": RELATIONS if kinship else everybody, "plausible": (answer,),
        "chain_people": tuple(people), "chain_relations": tuple(relations),
        "question_people_spans": question.people, "question_relation_spans": question.relations,
        "form": "statement", "template": "subject-first", "order": "forward", "distractors": "none",
        "split": None, "seed": 0, "facts": label_facts(triples, spans, people, relations),
    }  # fmt: skip
    return Item(**data)


FAMILY: tuple[Triple, ...] = (
    ("Bo", "son", "Ann"),
    ("Cy", "wife", "Bo"),
    ("Di", "son", "Eve"),
    ("Flo", "wife", "Di"),
    ("Gus", "daughter", "Ann"),
    ("Hal", "wife", "Ira"),
)


def follow(relations: Sequence[str], people: Sequence[str]) -> Item:
    return make_item("follow", FAMILY, people, relations, people[-1])


@pytest.mark.parametrize(
    ("name", "relations", "people", "score"),
    [
        ("random_person", ["son"], ["Ann", "Bo"], 1 / 8),  # nine people, Ann is asked about
        ("last_word", ["son"], ["Ann", "Bo"], 1 / 2),  # Bo, Di
        ("last_word", ["son", "wife"], ["Ann", "Bo", "Cy"], 1 / 3),  # Cy, Flo, Hal
        ("last_two_words", ["son", "wife"], ["Ann", "Bo", "Cy"], 1 / 2),  # Cy, Flo: Ira is nobody's son
        ("last_two_words", ["son"], ["Ann", "Bo"], 1 / 2),
        ("random_walk", ["son"], ["Ann", "Bo"], 1 / 2),  # Bo, Gus
        ("random_walk", ["son", "wife"], ["Ann", "Bo", "Cy"], 1.0),  # from Gus nothing leads on
        ("right_gender", ["son"], ["Ann", "Bo"], 1 / 4),  # Bo, Di, and as a wife's spouse Ira; Eve is open
        ("last_mentioned", ["son"], ["Ann", "Bo"], 0.0),
    ],
)
def test_follow_baselines(name: str, relations: list[str], people: list[str], score: float) -> None:
    assert shortcut_scores(name, [], [follow(relations, people)]) == [pytest.approx(score)]


def test_the_last_mentioned_person_is_the_last_in_the_text() -> None:
    item = make_item("follow", [("Bo", "son", "Ann"), ("Ann", "wife", "Cy")], ["Ann", "Bo"], ["son"], "Bo")
    other = make_item(
        "follow", [("Ann", "wife", "Cy"), ("Ann", "mother", "Bo")], ["Cy", "Ann"], ["wife"], "Ann"
    )
    assert shortcut_scores("last_mentioned", [], [item, other]) == [0.0, 0.0]
    told_last = make_item(
        "follow", [("Ann", "wife", "Cy"), ("Bo", "son", "Ann")], ["Bo", "Ann"], ["mother"], "Ann"
    )
    assert shortcut_scores("last_mentioned", [], [told_last]) == [1.0]


def kinship(relations: Sequence[str], answer: str, name: str) -> Item:
    people = ["Ann", "Bo", "Cy", "Di"][: len(relations) + 1]
    triples = [(people[j + 1], relations[j], people[j]) for j in range(len(relations))]
    return make_item("kinship", triples, people, relations, answer, name)


TRAIN = [
    kinship(["son", "son"], "grandson", "a"),
    kinship(["daughter", "son"], "grandson", "b"),
    kinship(["brother", "son"], "nephew", "c"),
    kinship(["son", "brother"], "son", "d"),
]


@pytest.mark.parametrize(
    ("name", "relations", "answer", "score"),
    [
        ("majority", ["father", "son"], "grandson", 1),
        ("majority", ["brother", "son"], "nephew", 0),
        ("last_relation", ["daughter", "son"], "grandson", 1),
        ("last_fact", ["son", "brother"], "son", 1),
        ("first_last", ["brother", "son"], "nephew", 1),
        ("first_last", ["father", "son"], "grandson", 1),  # not seen: falls back on the last relation
        ("generation_last", ["sister", "son"], "nephew", 1),  # the sum of generations is that of brother, son
        ("multiset_last", ["brother", "son"], "nephew", 1),  # not "son", though the multiset is the same
        ("word_in_story", ["son", "brother"], "son", 1),
        ("word_in_story", ["brother", "son"], "nephew", 0),
    ],
)
def test_kinship_baselines(name: str, relations: list[str], answer: str, score: float) -> None:
    assert shortcut_scores(name, TRAIN, [kinship(relations, answer, "t")]) == [score]


def test_a_baseline_that_learns_needs_something_to_learn_from() -> None:
    with pytest.raises(ValueError, match="needs training items"):
        shortcut_scores("majority", [], TRAIN)
    with pytest.raises(ValueError, match="no shortcut named"):
        shortcut_scores("guess", TRAIN, TRAIN)


def test_the_bag_of_words_finds_an_answer_that_a_word_gives_away() -> None:
    train = [
        kinship([first, "son"], a, f"{n}") for n in range(6) for first, a in (("son", "x"), ("brother", "y"))
    ]
    train = [Item(**{**_fields(item), "candidates": ("x", "y")}) for item in train]
    assert shortcut_scores("bag_of_words", train, train[:4]) == [1.0] * 4


def _fields(item: Item) -> dict[str, object]:
    return {name: getattr(item, name) for name in Item.__dataclass_fields__}


@pytest.mark.parametrize("task", ["kinship", "follow"])
def test_the_table_has_every_baseline_for_every_number_of_hops(task: str) -> None:
    train, test = (generate_items(task, n, hops=(1, 2, 3), seed=seed) for n, seed in ((40, 8), (20, 9)))
    rows = shortcut_table(train, test)
    assert [(r["hops"], r["shortcut"]) for r in rows] == [(k, s) for k in (1, 2, 3) for s in SHORTCUTS[task]]
    for row in rows:
        assert list(row) == ["task", "hops", "shortcut", "accuracy", "low", "high", "n"]
        assert 0 <= row["low"] <= row["accuracy"] + 1e-9 <= row["high"] + 1e-8 <= 1 + 1e-8
        assert (row["task"], row["n"]) == (task, 20)
    best = best_shortcut(rows, task, 2)
    assert best is not None
    assert best["accuracy"] == max(row["accuracy"] for row in rows if row["hops"] == 2)
    assert best_shortcut(rows, task, 7) is None


def test_order_free_lookups_do_well_on_kinship_and_decoys_hold_follow_down() -> None:
    table = default_shortcuts(
        [*generate_items("kinship", 40, hops=(3,), seed=3), *generate_items("follow", 40, hops=(3,), seed=3)],
        n_stories=300,
    )
    score = {(row["task"], row["shortcut"]): row["accuracy"] for row in table}
    assert score["kinship", "multiset_last"] > 0.8 > score["kinship", "majority"]
    assert score["follow", "last_two_words"] <= 0.5 + 1e-9


def test_items_that_nobody_can_make_again_are_judged_in_folds() -> None:
    own: list[Item] = []
    for n in range(20):
        word, answer = (("odd", "a"), ("even", "b"))[n % 2]
        fields = _fields(kinship(["son", "son"], answer, f"{n}"))
        changes = {"task": "data", "template": "data", "text": word, "candidates": ("a", "b")}
        own.append(Item(**{**fields, **changes}))
    rows = {row["shortcut"]: row for row in default_shortcuts(own)}
    assert set(rows) == {"random_candidate", "bag_of_words"}
    assert rows["random_candidate"]["accuracy"] == 0.5
    assert rows["bag_of_words"]["accuracy"] == 1.0
    assert [row["shortcut"] for row in default_shortcuts(own[:3])] == ["random_candidate"]


def test_training_items_of_the_default_table_are_others() -> None:
    from depthprobe.tasks.shortcuts import _training_items

    items = generate_items("kinship", 3, hops=(3,), n_facts=5, distractors="branch", split="heldout", seed=4)
    train = _training_items("kinship", items, 5, None)
    assert {i.split for i in train} == {"train"}
    assert {i.distractors for i in train} == {"branch"}
    assert {len(i.facts) for i in train} == {5}
    assert not {i.id for i in items} & {i.id for i in train}
    rungs = [item for item in generate_items("kinship", 3, hops=(1, 2, 4), seed=4) if item.hops == 2]
    assert {len(i.facts) for i in _training_items("kinship", rungs, 5, None)} == {4}
    assert math.isfinite(sum(row["accuracy"] for row in default_shortcuts(rungs, n_stories=20)))
