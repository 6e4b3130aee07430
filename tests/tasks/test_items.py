from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item, Span


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return Generator("follow", hops=3, gender_facts=True, seed=1).story(0)[0].to_dict()


def test_json_round_trip(data: dict[str, Any]) -> None:
    item = Item.from_dict(json.loads(json.dumps(data)))
    assert item.to_dict() == data and isinstance(item.facts[0].span, Span)


def test_continuation_owns_its_space(data: dict[str, Any]) -> None:
    item = Item.from_dict(data)
    assert item.continuation() == " " + item.answer and item.continuation("Bob") == " Bob"


def _set(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("answer"), "item: field 'answer' is missing"),
        (lambda d: d.update(colour="red"), "unknown field 'colour'"),
        (_set("hops", to="3"), "field 'hops': expected a whole number"),
        (_set("hops", to=True), "field 'hops'"),
        (_set("hops", to=2), "field 'hops': 2 does not fit"),
        (_set("task", to="chess"), "field 'task'"),
        (_set("text", to="x"), "field 'text'"),
        (_set("story", to=None), "field 'story': expected text"),
        (_set("candidates", to="Ann"), "field 'candidates': expected a list"),
        (_set("candidates", to=[]), "field 'candidates': the answer"),
        (_set("facts", 0, to=3), "facts[0]: expected an object"),
        (_set("facts", 1, "role", to="hero"), "field 'facts[1].role'"),
        (_set("facts", 2, "subject", to="Zoe"), "field 'facts[2].subject_span'"),
        (_set("facts", 2, "span", to=[5]), "field 'facts[2].span': a span is"),
        (_set("facts", 2, "span", to=[5, 4]), "is not a span"),
        (_set("question_people_spans", 0, to=["a", 2]), "question_people_spans[0]"),
        (_set("question_people_spans", 0, to=[0, 99999]), "field 'question_people_spans[0]'"),
        (_set("question_people_spans", 0, to=[0, 1]), "is not on the chain"),
        (_set("facts", 0, "span", to=[0, 99999]), "field 'facts[0].span': [0, 99999] reaches beyond the story"),
        (_set("facts", 0, "span", to=[0, 1]), "is not within the fact"),
    ],
)
def test_what_is_wrong_is_named(
    data: dict[str, Any], change: Callable[[dict[str, Any]], None], words: str
) -> None:
    broken = copy.deepcopy(data)
    change(broken)
    with pytest.raises(ValueError) as caught:
        Item.from_dict(broken)
    assert words in str(caught.value) and "\n" not in str(caught.value)
