from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.tasks import kinship
from depthprobe.tasks.generate import MOST_HOPS, ORDERS, Generator, generate_items
from depthprobe.tasks.items import Item, Span
from depthprobe.tasks.plans import DISTRACTORS
from depthprobe.tasks.solver import Knowledge, verify
from depthprobe.tasks.splits import HELDOUT_FRACTION, split_of
from depthprobe.tasks.stories import FACT_TEMPLATES, FORMS

TASKS = ("kinship", "follow")
SETTINGS = [
    pytest.param(
        task, order, distractors, template, form, id="-".join((task, order, distractors, template, form))
    )
    for task in TASKS
    for order, distractors, template, form in itertools.product(
        ORDERS, DISTRACTORS, FACT_TEMPLATES, FORMS[task]
    )
]


def _check_spans(item: Item) -> None:
    text = item.text
    assert text == f"{item.story} {item.question}" and not text.endswith(" ")
    for fact in item.facts:
        assert (fact.subject_span.of(text), fact.relation_span.of(text), fact.object_span.of(text)) == (
            fact.subject,
            fact.relation,
            fact.object,
        )
        sentence = fact.span.of(text)
        assert sentence.endswith(".") and sentence.count(".") == 1
        for part in (fact.subject_span, fact.relation_span, fact.object_span):
            assert fact.span.start <= part.start <= part.end <= fact.span.end
    # the sentences and the spaces between them are the whole story
    assert " ".join(f.span.of(text) for f in item.facts) == item.story
    start = len(item.story) + 1
    for span in (*item.question_people_spans, *item.question_relation_spans):
        assert start <= span.start < span.end <= len(text)
    words = [span.of(text) for span in item.question_relation_spans]
    people = {span.of(text) for span in item.question_people_spans}
    if item.task == "kinship":
        assert not words and people == {item.chain_people[0], item.chain_people[-1]}
    else:
        assert people == {item.chain_people[0]}
        assert item.chain_relations in (tuple(words), tuple(reversed(words)))


def _check_item(item: Item) -> None:
    k = item.hops
    chain = [f for f in item.facts if f.role == "chain"]
    assert sorted(f.hop or 0 for f in chain) == list(range(1, k + 1))
    for fact in chain:
        hop = fact.hop or 0
        assert (fact.subject, fact.relation, fact.object) == (
            item.chain_people[hop],
            item.chain_relations[hop - 1],
            item.chain_people[hop - 1],
        )
    assert len(set(item.chain_people)) == k + 1
    assert item.answer in item.plausible and set(item.plausible) <= set(item.candidates)
    assert len(set(item.candidates)) == len(item.candidates)
    if item.task == "kinship":
        assert item.answer == kinship.fold(item.chain_relations)
        assert item.candidates == kinship.RELATIONS
        assert {kinship.GENERATION[r] for r in item.plausible} == {kinship.GENERATION[item.answer]}
    else:
        assert item.answer == item.chain_people[-1]
        assert set(item.candidates) == {p for f in item.facts for p in (f.subject, f.object) if p}
    assert item.split == split_of(item.chain_relations)
    assert Item.from_dict(json.loads(json.dumps(item.to_dict()))) == item


@pytest.mark.parametrize(("task", "order", "distractors", "template", "form"), SETTINGS)
def test_every_setting_gives_items_with_one_answer_and_true_spans(
    task: str, order: str, distractors: str, template: str, form: str
) -> None:
    generator = Generator(
        task, orders=order, distractors=distractors, fact_template=template, form=form, seed=11
    )  # fmt: skip
    items = generator.story(0) + generator.questions(0, 5)
    assert verify(items) == []
    for item in items:
        _check_item(item)
        _check_spans(item)
        assert (item.order, item.distractors, item.template, item.form) == (
            order,
            distractors,
            template,
            form,
        )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("hops", range(1, MOST_HOPS + 1))
def test_every_number_of_hops(task: str, hops: int) -> None:
    items = generate_items(task, 12, hops=hops, seed=2)
    assert [item.hops for item in items] == [hops] * 12
    assert verify(items) == []
    for item in items:
        _check_item(item)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(TASKS),
    st.integers(0, 2),  # a pool of families is made once per seed
    st.integers(0, 10**9),
    st.integers(1, 6),
    st.booleans(),
    st.data(),
)  # fmt: skip
def test_any_story_of_any_seed(
    task: str, seed: int, i: int, longest: int, gender_facts: bool, data: st.DataObject
) -> None:
    generator = Generator(
        task,
        hops=range(1, longest + 1),
        orders=ORDERS,
        distractors=data.draw(st.sampled_from([None, DISTRACTORS, ("branch", "decoy")])),
        fact_template=tuple(FACT_TEMPLATES),
        form=FORMS["kinship" if task == "kinship" else "follow"],
        gender_facts=gender_facts,
        seed=seed,
    )
    items = generator.story(i) + generator.questions(i, 4)
    assert verify(items) == []
    for item in items:
        _check_item(item)
        _check_spans(item)


@pytest.mark.parametrize("task", TASKS)
def test_a_story_depends_on_seed_and_number_alone(task: str) -> None:
    one, two = Generator(task, seed=3), Generator(task, seed=3)
    forth = {i: one.story(i) + one.questions(i, 6) for i in range(12)}
    numbers = list(range(12))
    random.Random(0).shuffle(numbers)
    for i in numbers:
        more = two.questions(i, 6)
        assert two.story(i) + more == forth[i]
    assert Generator(task, seed=4).story(0)[0].story != forth[0][0].story
    assert len({items[0].story for items in forth.values()}) == 12


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_text_for_ever(task: str) -> None:
    """Stored results name (seed, story); a change here makes them unrepeatable: say it in the changelog."""
    item = Generator(task, hops=(1, 2, 3), seed=0).story(0)[-1]
    assert f"{item.text} {item.answer}" == {"kinship": KINSHIP_0, "follow": FOLLOW_0}[task]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("distractors", DISTRACTORS)
def test_the_ladder_asks_about_one_text_of_one_size(task: str, distractors: str) -> None:
    sizes = set()
    generator = Generator(task, distractors=distractors, seed=5)
    for i in range(15):
        ladder = generator.story(i)
        assert [item.hops for item in ladder] == [1, 2, 3, 4, 5, 6]
        assert len({item.story for item in ladder}) == len({item.story_id for item in ladder}) == 1
        assert len({item.id for item in ladder}) == 6
        for short, long in itertools.pairwise(ladder):
            assert long.chain_people[: short.hops + 1] == short.chain_people
            assert [f.span for f in long.facts] == [f.span for f in short.facts]
        sizes.add(len(ladder[0].facts))
    assert sizes == {generator.n_facts_with(distractors)}


def test_orders() -> None:
    for order in ("forward", "reverse"):
        for item in generate_items("kinship", 10, hops=5, orders=order, distractors="offchain"):
            hops = [f.hop for f in item.facts if f.hop]
            assert hops == sorted(hops, reverse=order == "reverse")
    shuffled = [[f.hop for f in item.facts] for item in generate_items("kinship", 30, hops=5)]
    assert len({tuple(s) for s in shuffled}) > 15


def test_distractors_are_what_they_are_called() -> None:
    for item in generate_items("kinship", 20, hops=5, distractors="offchain"):
        extra = [f for f in item.facts if f.role != "chain"]
        assert len(extra) == 4
        assert not {p for f in extra for p in (f.subject, f.object)} & set(item.chain_people)
    for item in generate_items("kinship", 20, hops=5, distractors="branch"):
        extra = [f for f in item.facts if f.role != "chain"]
        assert len(extra) == 4 and all(f.object in item.chain_people for f in extra)
        assert not {f.subject for f in extra} & set(item.chain_people)
    for item in generate_items("kinship", 20, hops=5, distractors="decoy"):
        extra = [f for f in item.facts if f.role != "chain"]
        assert len(extra) == 4 and all(
            f.role == "decoy" and f.relation in item.chain_relations for f in extra
        )


def _told(item: Item) -> set[tuple[str, str, str]]:
    return {(f.subject, f.relation, f.object) for f in item.facts}


@pytest.mark.parametrize("longest", [1, 2, 4, 6, 8])
def test_follow_has_real_decoys(longest: int) -> None:
    generator = Generator("follow", hops=range(1, longest + 1), seed=9)
    for item in generator.items(25):
        told, people, words = _told(item), item.chain_people, item.chain_relations
        for j, word in enumerate(words):  # another person, reached by the same word from another person
            assert any(r == word and s != people[j + 1] and o != people[j] for s, r, o in told)
        for j in range(len(words) - 1):  # and by the same two words from yet another start
            ends = {
                (o, s2)
                for s1, r1, o in told
                for s2, r2, o2 in told
                if (r1, r2, o2) == (words[j], words[j + 1], s1)
            }
            assert any(start != people[j] and end != people[j + 2] for start, end in ends)


def test_each_hop_of_follow_is_unique_among_all_people_of_the_story() -> None:
    """In the family itself, so whether or not the facts tell; and the solver finds nobody else either."""
    generator = Generator("follow", seed=10)
    for i in range(40):
        item = generator.story(i)[-1]
        plan, names = generator.family(i)
        everyone = set(names)
        for j, relation in enumerate(plan.relations):
            reached = [p for p in plan.world.reach[plan.people[j]][relation] if p in everyone]
            assert reached == [plan.people[j + 1]]
        knowledge = Knowledge.of(_told(item))
        for j, word in enumerate(item.chain_relations):
            assert knowledge.follow(item.chain_people[j], [word]) == {item.chain_people[j + 1]}


def test_the_solver_agrees_with_the_family() -> None:
    generator = Generator("kinship", distractors="branch", seed=12)
    for i in range(40):
        item = generator.story(i)[-1]
        plan, names = generator.family(i)
        knowledge = Knowledge.of(_told(item))
        for (s, subject), (o, obj) in itertools.permutations(names.items(), 2):
            r = plan.world.relation[s][o]
            assert (kinship.RELATIONS[r] if r >= 0 else kinship.UNRELATED) in knowledge.between(subject, obj)


def test_order_of_the_words_matters_in_follow() -> None:
    """Of the questions with two different words, most have another answer or none if they change places."""
    changed = total = 0
    for item in generate_items("follow", 60, hops=2, seed=3):
        if len(set(item.chain_relations)) == 2:
            swapped = Knowledge.of(_told(item)).follow(item.chain_people[0], item.chain_relations[::-1])
            changed += item.answer not in swapped
            total += 1
    assert total > 40 and changed / total > 0.9


@pytest.mark.parametrize("task", TASKS)
def test_further_questions_differ_from_each_other_and_from_the_ladder(task: str) -> None:
    generator = Generator(task, seed=6, split="train")
    for i in range(10):
        ladder, more = generator.story(i), generator.questions(i, 8)
        assert len(more) == 8
        assert len({item.question for item in ladder + more}) == len(ladder) + 8
        assert {item.story for item in more} == {ladder[0].story}
        assert all(item.split == "train" and item.hops in generator.hops for item in more)


def test_genders_are_stated_where_asked_for() -> None:
    for item in generate_items("follow", 10, hops=3, gender_facts=True, seed=1):
        knowledge = Knowledge.of(_told(item))
        assert all(knowledge.gender(person) is not None for person in item.candidates)
        assert all(
            f.object == "" and f.relation in ("man", "woman") for f in item.facts if f.role == "gender"
        )


@pytest.mark.parametrize("task", TASKS)
def test_the_answers_gender_follows_from_the_facts(task: str) -> None:
    for item in generate_items(task, 20, seed=1):
        male = kinship.GENDER[item.chain_relations[-1]]
        assert Knowledge.of(_told(item)).gender(item.chain_people[-1]) == male or male is None
        if task == "kinship":
            assert male is None or kinship.GENDER[item.answer] in (male, None)


def test_splits_hold_out_whole_ladders() -> None:
    triples = list(itertools.product(kinship.RELATIONS, repeat=3))
    held = sum(split_of(t) == "heldout" for t in triples) / len(triples)
    assert abs(held - HELDOUT_FRACTION) < 0.01
    for task in TASKS:
        for item in generate_items(task, 8, split="heldout", seed=1):
            assert item.split == ("heldout" if item.hops >= 3 else "train")
        assert {item.split for item in generate_items(task, 20, split="train", seed=1)} == {"train"}


def test_names_of_several_words() -> None:
    names = [f"{a} {b}" for a in ("Mary Ann", "Jo", "Al") for b in "ABCDEFGHIJKLMNOP"]
    for item in generate_items("follow", 5, names=names, form="of"):
        assert set(item.candidates) <= set(names)
        assert verify([item]) == []
        _check_spans(item)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"task": "siblings"}, "no task 'siblings'"),
        ({"hops": 9}, "from 1 to 8"),
        ({"hops": ()}, "out of range"),
        ({"orders": "sideways"}, "no order 'sideways'"),
        ({"distractors": "many"}, "no kind of distractors"),
        ({"fact_template": "x"}, "no fact template"),
        ({"form": "of"}, "no question form"),
        ({"names": ["Ann", "Bob"]}, "too few"),
        ({"names": ["Ann", "Bob"] * 30}, "twice"),
        ({"names": [*(f"N{i}" for i in range(40)), "Son"]}, "a word of the task"),
        ({"names": [*(f"N{i}" for i in range(40)), "St. Ann"]}, "cannot be a name"),
        ({"n_facts": 9}, "exactly 6 facts"),
        ({"n_facts": 3, "distractors": "branch"}, "at least 6 facts"),
        ({"task": "follow", "n_facts": 8}, "at least 12 facts"),
        ({"split": "test"}, "no split 'test'"),
        ({"split": "heldout", "hops": (1, 2)}, "held out"),
    ],
)
def test_wrong_settings_are_named(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Generator(**{"task": "kinship", **settings_})  # type: ignore[arg-type]
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_span_of() -> None:
    assert Span(1, 3).of("abcd") == "bc"


KINSHIP_0 = (
    "Jules is the mother of Kyle. Logan is the grandmother of Sidney. Sidney is the daughter of Jules. "
    "Logan is Kyle's grandmother"
)
FOLLOW_0 = (
    "Finley is the wife of Haven. Haven is the brother-in-law of Noel. Briar is the mother of Haven. "
    "Finley is the mother of Casey. Winter is the mother-in-law of Briar. "
    "Casey is the brother-in-law of Kai. "
    "Briar is the mother-in-law of Finley. Briar is the mother-in-law of Noel. "
    "Noel's brother-in-law's mother's mother-in-law is Winter"
)
