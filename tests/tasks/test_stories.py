from __future__ import annotations

import pytest

from depthprobe.tasks.items import GENDER_WORDS
from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.names import NAMES, check_names
from depthprobe.tasks.stories import render_follow_question, render_kinship_question, render_story


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("subject-first", "Bob is the son of Ann. Al is the uncle of Bob. Ann is a woman."),
        ("object-first", "Ann's son is Bob. Bob's uncle is Al. Ann is a woman."),
        ("has", "Ann has a son named Bob. Bob has an uncle named Al. Ann is a woman."),
    ],
)
def test_fact_templates(template: str, text: str) -> None:
    facts = [("Bob", "son", "Ann"), ("Al", "uncle", "Bob"), ("Ann", "woman", "")]
    story, spans = render_story(facts, template)
    assert story == text
    for fact, where in zip(facts, spans, strict=True):
        assert (where.subject.of(story), where.relation.of(story), where.object.of(story)) == fact


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("statement", "Carl is Ann's"),
        ("question", "How is Carl related to Ann? Carl is Ann's"),
        ("qa", "Question: How is Carl related to Ann? Answer: Ann's"),
    ],
)
def test_kinship_forms(form: str, text: str) -> None:
    question = render_kinship_question(form, "Ann", "Carl", offset=4)
    assert question.text == text
    assert {s.of("    " + text) for s in question.people} == {"Ann", "Carl"}


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("possessive", "Ann's son's wife is", ["son", "wife"]),
        ("of", "The wife of the son of Ann is", ["wife", "son"]),
        ("question", "Who is the wife of the son of Ann? It is", ["wife", "son"]),
        ("possessive-question", "Who is Ann's son's wife? It is", ["son", "wife"]),
    ],
)
def test_follow_forms(form: str, text: str, words: list[str]) -> None:
    question = render_follow_question(form, "Ann", ["son", "wife"], offset=7)
    assert question.text == text
    assert [s.of("       " + text) for s in question.relations] == words
    assert [s.of("       " + text) for s in question.people] == ["Ann"]


def test_names_can_be_told_apart() -> None:
    assert len(NAMES) == 96 and check_names(NAMES, 96) == NAMES
    assert not {n.lower() for n in NAMES} & {*RELATIONS, *GENDER_WORDS}
    assert [(a, b) for a in NAMES for b in NAMES if a != b and b.startswith(a)] == []
