"""What a task item is: one story, one question, one answer, and where in the text everything stands.

Everything downstream (donors, shortcut baselines, lenses, patching) reads items and nothing else, so an item
carries its own ground truth: the facts with character spans, the chain that leads to the answer, the
candidate answers and the plausible ones.

    item.text                      "Bob is the son of Ann. Carl is the brother of Bob. Carl is Ann's"
    item.continuation(item.answer) " son"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, cast

Role = Literal["chain", "branch", "decoy", "offchain", "gender"]
Task = Literal["kinship", "follow"]

ROLES: tuple[Role, ...] = ("chain", "branch", "decoy", "offchain", "gender")
TASKS: tuple[Task, ...] = ("kinship", "follow")
GENDER_WORDS: tuple[str, str] = ("woman", "man")  # indexed by "is male"


class Span(NamedTuple):
    """Half-open range of character offsets into `Item.text`."""

    start: int
    end: int

    def of(self, text: str) -> str:
        """The piece of `text` under the span."""
        return text[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence: `subject` is the `relation` of `object`.

    Gender facts have relation "man" or "woman" and an empty object (and an empty object span).

    Roles are seen from the item's own question:
        chain     needed for the answer; `hop` counts from 1
        decoy     repeats a relation word of the question's chain
        branch    any other fact about a person of the chain
        offchain  touches nobody on the chain (or lies beyond the question's last hop)
        gender    states a gender
    """

    subject: str
    relation: str
    object: str
    role: Role
    hop: int | None
    span: Span
    subject_span: Span
    relation_span: Span
    object_span: Span


@dataclass(frozen=True, slots=True)
class Item:
    """One question about one story.

    Attributes:
        id: unique within a generator's settings; `<story_id>/k<hops>` for the rungs of a ladder.
        story_id: shared by all questions about one story; the unit for clustered intervals.
        task: "kinship" (answer: a relation) or "follow" (answer: a person).
        hops: k, the number of facts that have to be combined.
        text: story, one space, question; ends right before the answer, without a trailing space.
        candidates: every answer that the task's form allows.
        plausible: the candidates of the right type, the answer among them.
        facts: in the order in which the story tells them.
        chain_people: x_0 ... x_k. "x_{j+1} is the chain_relations[j] of x_j".
        question_people_spans, question_relation_spans: in the order of the text.
        form, template, order, distractors: names of the settings under which it was made.
        split: of the question's chain of relations, or None where nobody decided.
        seed: with the story's number in `story_id` it makes the story again.
    """

    id: str
    story_id: str
    task: Task
    hops: int
    text: str
    story: str
    question: str
    answer: str
    candidates: tuple[str, ...]
    plausible: tuple[str, ...]
    facts: tuple[Fact, ...]
    chain_people: tuple[str, ...]
    chain_relations: tuple[str, ...]
    question_people_spans: tuple[Span, ...]
    question_relation_spans: tuple[Span, ...]
    form: str
    template: str
    order: str
    distractors: str
    split: str | None
    seed: int

    def continuation(self, word: str | None = None) -> str:
        """What follows `text` if `word` (default: the answer) is right; the space belongs to it."""
        return " " + (self.answer if word is None else word)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `Item.from_dict` is its inverse."""
        out: dict[str, Any] = {}
        for name in _ITEM_FIELDS:
            value = getattr(self, name)
            if name == "facts":
                value = [{f: _plain(getattr(fact, f)) for f in _FACT_FIELDS} for fact in self.facts]
            out[name] = _plain(value)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Item:
        """Read one item strictly.

        Raises:
            ValueError: one line that names the field which is missing, unknown or ill-formed.
        """
        _check_keys(data, _ITEM_FIELDS, "item")
        values: dict[str, Any] = {}
        for name in _TEXT_FIELDS:
            values[name] = _text(data[name], name)
        for name in _WORDS_FIELDS:
            values[name] = _words(data[name], name)
        for name in ("hops", "seed"):
            values[name] = _integer(data[name], name)
        for name in ("question_people_spans", "question_relation_spans"):
            values[name] = tuple(_span(s, f"{name}[{n}]") for n, s in enumerate(_list(data[name], name)))
        values["split"] = None if data["split"] is None else _text(data["split"], "split")
        values["facts"] = tuple(_fact(f, f"facts[{n}]") for n, f in enumerate(_list(data["facts"], "facts")))
        item = cls(**values)
        _check_item(item)
        return item

    def with_split(self, split: str | None) -> Item:
        """The same item under another split."""
        return replace(self, split=split)


_ITEM_FIELDS = tuple(f.name for f in fields(Item))
_FACT_FIELDS = tuple(f.name for f in fields(Fact))
_TEXT_FIELDS = (
    "id", "story_id", "task", "text", "story", "question", "answer", "form", "template", "order",
    "distractors",
)  # fmt: skip
_WORDS_FIELDS = ("candidates", "plausible", "chain_people", "chain_relations")


def _plain(value: Any) -> Any:
    """Tuples (spans among them) as lists, so that JSON gives back the same."""
    if isinstance(value, tuple):
        return [_plain(v) for v in cast("tuple[Any, ...]", value)]
    return value


def _check_keys(data: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    missing = [n for n in names if n not in data]
    if missing:
        raise ValueError(f"{where}: field '{missing[0]}' is missing")
    unknown = [str(k) for k in cast("Mapping[Any, Any]", data) if k not in names]
    if unknown:
        raise ValueError(f"{where}: unknown field '{unknown[0]}'")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field '{name}': expected text, got {type(value).__name__}")
    return value


def _integer(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"field '{name}': expected a whole number, got {type(value).__name__}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"field '{name}': expected a list, got {type(value).__name__}")
    return list(cast("list[Any]", value))


def _words(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_text(v, f"{name}[{n}]") for n, v in enumerate(_list(value, name)))


def _span(value: Any, name: str) -> Span:
    pair = _list(value, name)
    if len(pair) != 2:
        raise ValueError(f"field '{name}': a span is [start, end], got {len(pair)} numbers")
    start, end = _integer(pair[0], name), _integer(pair[1], name)
    if not 0 <= start <= end:
        raise ValueError(f"field '{name}': [{start}, {end}] is not a span")
    return Span(start, end)


def _fact(data: Any, where: str) -> Fact:
    _check_keys(data, _FACT_FIELDS, where)
    role = _text(data["role"], f"{where}.role")
    if role not in ROLES:
        raise ValueError(f"field '{where}.role': '{role}' is none of {', '.join(ROLES)}")
    hop = None if data["hop"] is None else _integer(data["hop"], f"{where}.hop")
    subject, relation, obj = (_text(data[n], f"{where}.{n}") for n in ("subject", "relation", "object"))
    spans = [_span(data[n], f"{where}.{n}") for n in ("span", "subject_span", "relation_span", "object_span")]
    return Fact(subject, relation, obj, role, hop, *spans)


def _check_item(item: Item) -> None:
    """What holds of every item, whoever wrote it."""
    if item.task not in TASKS:
        raise ValueError(f"field 'task': '{item.task}' is none of {', '.join(TASKS)}")
    if item.text != f"{item.story} {item.question}":
        raise ValueError("field 'text': is not story, one space, question")
    if len(item.chain_relations) != item.hops or len(item.chain_people) != item.hops + 1:
        raise ValueError(f"field 'hops': {item.hops} does not fit the lengths of the chain")
    for name in ("candidates", "plausible"):
        if item.answer not in getattr(item, name):
            raise ValueError(f"field '{name}': the answer '{item.answer}' is not in it")
    for name, allowed in (
        ("question_people_spans", item.chain_people),
        ("question_relation_spans", item.chain_relations),
    ):
        for number, span in enumerate(cast("tuple[Span, ...]", getattr(item, name))):
            if span.of(item.text) not in allowed:
                raise ValueError(f"field '{name}[{number}]': '{span.of(item.text)}' is not on the chain")
    for number, fact in enumerate(item.facts):
        if fact.span.end > len(item.story):
            raise ValueError(f"field 'facts[{number}].span': {list(fact.span)} reaches beyond the story")
        for part in ("subject", "relation", "object"):
            span = cast("Span", getattr(fact, f"{part}_span"))
            found, told = span.of(item.text), cast("str", getattr(fact, part))
            if found != told:
                raise ValueError(f"field 'facts[{number}].{part}_span': '{found}' is not '{told}'")
            if not fact.span.start <= span.start <= span.end <= fact.span.end:
                raise ValueError(f"field 'facts[{number}].{part}_span': {list(span)} is not within the fact")
