"""The word tokenizer: every text of the generator is in its vocabulary, and an answer is one more token."""

from __future__ import annotations

from itertools import product

import pytest

from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item
from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.names import NAMES
from depthprobe.tasks.stories import (
    FACT_TEMPLATES,
    FORMS,
    render_follow_question,
    render_kinship_question,
    render_story,
)
from depthprobe.training.family_tokenizer import UNKNOWN, family_tokenizer

WORDS = family_tokenizer()
UNKNOWN_ID = WORDS.get_vocab()[UNKNOWN]


def ids(text: str) -> list[int]:
    found: list[int] = WORDS(text).input_ids
    assert UNKNOWN_ID not in found, WORDS.tokenize(text)
    assert WORDS.decode(found) == text
    return found


def items(task: str, form: str, template: str) -> list[Item]:
    generator = Generator(task, form=form, fact_template=template, gender_facts=True, seed=5)
    return [item for i in range(3) for item in generator.story(i) + generator.questions(i, 4)]


@pytest.mark.parametrize(("task", "form"), [(task, form) for task, forms in FORMS.items() for form in forms])
def test_a_text_is_its_story_its_question_and_one_token_of_answer(task: str, form: str) -> None:
    for template in FACT_TEMPLATES:
        for item in items(task, form, template):
            told, asked = ids(item.story), ids(item.question)
            assert ids(item.text) == told + asked
            for word in item.candidates:
                answer = WORDS.get_vocab()[item.continuation(word)]
                assert ids(item.text + item.continuation(word)) == [*told, *asked, answer], word


@pytest.mark.parametrize("template", FACT_TEMPLATES)
def test_every_relation_name_and_gender_in_every_template(template: str) -> None:
    facts = [(NAMES[0], relation, NAMES[1]) for relation in RELATIONS]
    facts += [(name, RELATIONS[0], other) for name, other in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)]
    ids(render_story([*facts, (NAMES[2], "man", ""), (NAMES[3], "woman", "")], template)[0])


def test_every_relation_and_name_in_every_form() -> None:
    for form, relation in product(FORMS["follow"], RELATIONS):
        asked = render_follow_question(form, "Kim", [relation, relation]).text
        for name in NAMES:
            assert ids(f"{asked} {name}")[:-1] == ids(asked)
    for form, name in product(FORMS["kinship"], NAMES):
        asked = render_kinship_question(form, name, "Kim").text
        for relation in RELATIONS:
            assert ids(f"{asked} {relation}")[:-1] == ids(asked)


def test_the_tokens_that_the_embedded_model_was_trained_on() -> None:
    text = "Bobby is the mother-in-law of Kim. Kim's son's wife is Lee"
    assert WORDS.tokenize(text) == [
        " Bobby", " is the mother-in-law of", " Kim", ".", " Kim", "'s son", "'s wife", " is", " Lee"
    ]  # fmt: skip
    assert WORDS.tokenize("Lee is Kim's nephew") == [" Lee", " is", " Kim's", " nephew"]


def test_other_words_are_unknown() -> None:
    assert WORDS("Kim is the boss of Zoltan.").input_ids.count(UNKNOWN_ID) == 2
