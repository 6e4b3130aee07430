"""From facts to text: templates of sentences, forms of questions, and a span for every name and relation
word.

    subject-first   Bob is the son of Ann.
    object-first    Ann's son is Bob.
    has             Ann has a son named Bob.

A question ends right before its answer; the space in front of the answer belongs to the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .items import GENDER_WORDS, Span, Task

_SUBJECT, _RELATION, _OBJECT, _ARTICLE = range(4)

FACT_TEMPLATES: dict[str, tuple[int | str, ...]] = {
    "subject-first": (_SUBJECT, " is the ", _RELATION, " of ", _OBJECT, "."),
    "object-first": (_OBJECT, "'s ", _RELATION, " is ", _SUBJECT, "."),
    "has": (_OBJECT, " has ", _ARTICLE, " ", _RELATION, " named ", _SUBJECT, "."),
}
_GENDER_TEMPLATE: tuple[int | str, ...] = (_SUBJECT, " is ", _ARTICLE, " ", _RELATION, ".")

# Slots of a kinship question: the first and the last person of the chain.
_FIRST, _LAST = 0, 1
KINSHIP_FORMS: dict[str, tuple[int | str, ...]] = {
    "statement": (_LAST, " is ", _FIRST, "'s"),
    "question": ("How is ", _LAST, " related to ", _FIRST, "? ", _LAST, " is ", _FIRST, "'s"),
    "qa": ("Question: How is ", _LAST, " related to ", _FIRST, "? Answer: ", _FIRST, "'s"),
}
# (before, after, is it possessive: "Ann's son's wife" rather than "wife of the son of Ann")
FOLLOW_FORMS: dict[str, tuple[str, str, bool]] = {
    "possessive": ("", " is", True),
    "of": ("The ", " is", False),
    "question": ("Who is the ", "? It is", False),
    "possessive-question": ("Who is ", "? It is", True),
}
FORMS: dict[Task, tuple[str, ...]] = {"kinship": tuple(KINSHIP_FORMS), "follow": tuple(FOLLOW_FORMS)}


class FactSpans(NamedTuple):
    """Where one fact stands in the story."""

    span: Span
    subject: Span
    relation: Span
    object: Span


@dataclass(frozen=True, slots=True)
class Question:
    """A rendered question; spans are offset by the length of the story and the space before the question."""

    text: str
    people: tuple[Span, ...]
    relations: tuple[Span, ...]


def article(word: str) -> str:
    """ "an" before a vowel, "a" elsewhere."""
    return "an" if word[0] in "aeiou" else "a"


def render_story(
    facts: Iterable[tuple[str, str, str]], template: str = "subject-first"
) -> tuple[str, list[FactSpans]]:
    """Sentences for (subject, relation, object) triples in the order given, one space between them.

    Returns:
        The text and, for each fact, its spans in it. A gender fact ("man", "woman") has an empty object span.
    """
    parts: list[str] = []
    spans: list[FactSpans] = []
    at = 0
    pieces = FACT_TEMPLATES[template]
    for subject, relation, obj in facts:
        if at:
            parts.append(" ")
            at += 1
        start = at
        where: list[Span | None] = [None, None, None]
        words = (subject, relation, obj)
        for piece in _GENDER_TEMPLATE if relation in GENDER_WORDS else pieces:
            if isinstance(piece, str):
                word = piece
            elif piece == _ARTICLE:
                word = article(relation)
            else:
                word = words[piece]
                where[piece] = Span(at, at + len(word))
            parts.append(word)
            at += len(word)
        nothing = Span(at, at)
        spans.append(
            FactSpans(Span(start, at), where[0] or nothing, where[1] or nothing, where[2] or nothing)
        )
    return "".join(parts), spans


def render_kinship_question(form: str, first: str, last: str, offset: int = 0) -> Question:
    """How `last` is related to `first`, up to the relation word."""
    parts: list[str] = []
    people: list[Span] = []
    at = offset
    for piece in KINSHIP_FORMS[form]:
        word = piece if isinstance(piece, str) else (first, last)[piece]
        if not isinstance(piece, str):
            people.append(Span(at, at + len(word)))
        parts.append(word)
        at += len(word)
    return Question("".join(parts), tuple(people), ())


def render_follow_question(form: str, first: str, relations: Sequence[str], offset: int = 0) -> Question:
    """Who is reached from `first` over the relations in their order, up to the name.

    `Question.relations` are in the order of the text: that of the hops in the possessive forms, the reverse
    in the forms with "of".
    """
    before, after, possessive = FOLLOW_FORMS[form]
    parts = [before]
    at = offset + len(before)
    relation_spans: list[Span] = []

    def put(word: str) -> Span:
        nonlocal at
        parts.append(word)
        at += len(word)
        return Span(at - len(word), at)

    if possessive:
        person = put(first)
        for relation in relations:
            put("'s ")
            relation_spans.append(put(relation))
    else:
        for number, relation in enumerate(reversed(relations)):
            if number:
                put("the ")
            relation_spans.append(put(relation))
            put(" of ")
        person = put(first)
    put(after)
    return Question("".join(parts), (person,), tuple(relation_spans))
