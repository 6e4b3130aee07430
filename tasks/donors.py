"""Donor stories for causal patching: the same question about a story that differs in one fact.

    found = find_donors(items, seed=0)
    found.donors[0].item           # an item with the same question, another story, and its own answer
    found.counts                   # how many items of each task and length have one, and at which hop

| kind            | what differs                                               | answer  |
|-----------------|------------------------------------------------------------|---------|
| relation        | the relation word of one fact of the chain                 | another |
| name            | follow: the name that one fact of the chain leads to       | another |
| distractor      | control: the relation word of a fact beside the chain      | same    |
| distractor_name | control, follow: the name a fact beside the chain leads to | same    |
| same_answer     | control: the relation word of one fact of the chain        | same    |

The changed hop is spread evenly over the chain: of the hops of an item that have a donor, the one that came
up least so far is taken. (Early hops of long chains have few: the rest of the chain must stay defined.) Every
donor has exactly one answer by the solver, so its facts contradict each other in nothing, gender included; by
default the person whose relation changes also keeps the gender ("son" becomes "nephew", never "niece").

In follow a changed word takes its fact out of the question's path, and the facts that are left never *state*
another answer: they would have given the unchanged story two. What one changed word can do there is to
*entail* another ("Ann's wife" found because a son's mother is one), which exists for a minority of items and
asks for more than looking up. So follow has "name" donors too: one name in one fact sends the path over to
the story's decoys.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from .items import Item, Span
from .kinship import GENDER, RELATIONS, fold
from .labels import entailed_genders, entailed_levels, label_facts, plausible_people, plausible_relations
from .solver import ContradictionError, Knowledge
from .stories import render_story

__all__ = ["CONTROLS", "KINDS", "Donor", "Donors", "Kind", "donors_of", "find_donors"]

Kind = Literal["relation", "name", "distractor", "distractor_name", "same_answer"]
Triple = tuple[str, str, str]

#: What is looked for by default: for each task the donors, then their controls.
KINDS: dict[str, tuple[Kind, ...]] = {
    "kinship": ("relation", "distractor", "same_answer"),
    "follow": ("relation", "name", "distractor", "distractor_name"),
}
CONTROLS: frozenset[Kind] = frozenset({"distractor", "distractor_name", "same_answer"})  # same answer
ON_CHAIN: frozenset[Kind] = frozenset({"relation", "name", "same_answer"})  # a fact of the chain changes
BY_NAME: frozenset[Kind] = frozenset({"name", "distractor_name"})  # a name changes, not a relation word


@dataclass(frozen=True, slots=True)
class Donor:
    """One changed story.

    Attributes:
        item: the changed story with the same question and its own answer; facts are in the same order, so
            that fact n of one is fact n of the other.
        base_id: of the item it belongs to.
        kind: see the module.
        fact: which of the facts differs, from 0.
        hop: of the chain, from 1; None where the changed fact is not on it.
        before, after: the word that differs.
        base_span, donor_span: where it stands in either text.
    """

    item: Item
    base_id: str
    kind: Kind
    fact: int
    hop: int | None
    before: str
    after: str
    base_span: Span
    donor_span: Span


@dataclass(frozen=True, slots=True)
class Donors:
    """What `find_donors` found.

    Attributes:
        donors: at most `per_item` for each item and kind, in the order of the items.
        counts: a row for each task, hops and kind: items asked for, items with a donor ("found"), and
            "by_hop", a dict from the changed hop (0: beside the chain) to the number of donors.
    """

    donors: tuple[Donor, ...]
    counts: tuple[dict[str, Any], ...]


def find_donors(
    items: Iterable[Item],
    kinds: Sequence[Kind] | None = None,
    *,
    per_item: int = 1,
    same_gender: bool = True,
    length_of: Callable[[str], int] | None = None,
    seed: int = 0,
) -> Donors:
    """Donors for many items, and how many there are.

    Args:
        kinds: default `KINDS` of each item's task.
        per_item: at most so many of each kind for an item.
        same_gender: the person whose relation changes keeps the gender. Controls of kind "same_answer" are
            exempt: "mother" for "father" is most of what keeps an answer.
        length_of: of a word, for instance in tokens of a model; only words of equal length then replace each
            other, so that both texts have their positions in common.
        seed: with the item's id it decides which donor is taken.
    """
    donors: list[Donor] = []
    asked: Counter[tuple[str, int, Kind]] = Counter()
    found: Counter[tuple[str, int, Kind]] = Counter()
    hops: defaultdict[tuple[str, int, Kind], Counter[int]] = defaultdict(Counter)
    for item in items:
        for kind in KINDS.get(item.task, ()) if kinds is None else kinds:
            key = (item.task, item.hops, kind)
            asked[key] += 1
            by_fact = _by_fact(item, kind, same_gender, length_of, seed)
            if kind in ON_CHAIN:  # the hop that has had the fewest comes first; ties in random order
                firsts = [(donor, rest) for rest in by_fact if (donor := next(rest, None)) is not None]
                firsts.sort(key=lambda pair: hops[key][pair[0].hop or 0])
                by_fact = [chain([donor], rest) for donor, rest in firsts]
            some = list(islice(_in_turn(by_fact), per_item))
            found[key] += bool(some)
            hops[key].update(donor.hop or 0 for donor in some)
            donors.extend(some)
    counts = [
        {"task": task, "hops": k, "kind": kind, "asked": asked[task, k, kind], "found": found[task, k, kind]}
        | {"by_hop": dict(sorted(hops[task, k, kind].items()))}
        for task, k, kind in sorted(asked)
    ]
    return Donors(tuple(donors), tuple(counts))


def donors_of(
    item: Item,
    kind: Kind,
    *,
    same_gender: bool = True,
    length_of: Callable[[str], int] | None = None,
    seed: int = 0,
) -> Iterator[Donor]:
    """The donors of one kind for one item, in random order; every fact has its turn before any has a second.

    Nothing comes for an item without facts (your own data, CLUTRR).
    """
    yield from _in_turn(_by_fact(item, kind, same_gender, length_of, seed))


def _by_fact(
    item: Item, kind: Kind, same_gender: bool, length_of: Callable[[str], int] | None, seed: int
) -> list[Iterator[Donor]]:
    """The donors that change each fact, the facts in random order; worked out as they are asked for."""
    if kind in BY_NAME and item.task != "follow":
        return []
    rng = random.Random(f"donor/{seed}/{kind}/{item.id}")
    facts = [n for n, f in enumerate(item.facts) if f.object and (f.role == "chain") == (kind in ON_CHAIN)]
    rng.shuffle(facts)
    changes = _names if kind in BY_NAME else _relations
    gender = same_gender and kind != "same_answer"
    return [_donors(item, kind, n, changes(item, n, gender, length_of, rng)) for n in facts]


def _donors(item: Item, kind: Kind, n: int, changes: Iterator[Triple]) -> Iterator[Donor]:
    for change in changes:
        donor = _donor(item, kind, n, change)
        if donor is not None:
            yield donor


def _in_turn(sources: Iterable[Iterator[Donor]]) -> Iterator[Donor]:
    """One of each, then the next of each, until all are used up."""
    waiting = deque(sources)
    while waiting:
        source = waiting.popleft()
        donor = next(source, None)
        if donor is not None:
            yield donor
            waiting.append(source)


def _relations(
    item: Item, n: int, same_gender: bool, length_of: Callable[[str], int] | None, rng: random.Random
) -> Iterator[Triple]:
    """Fact n with other relation words."""
    fact = item.facts[n]
    others = [word for word in RELATIONS if word != fact.relation]
    rng.shuffle(others)
    gender = GENDER[fact.relation]
    for word in others:
        if same_gender and None not in (gender, GENDER[word]) and GENDER[word] != gender:
            continue
        if length_of is not None and length_of(word) != length_of(fact.relation):
            continue
        yield fact.subject, word, fact.object


def _names(
    item: Item, n: int, same_gender: bool, length_of: Callable[[str], int] | None, rng: random.Random
) -> Iterator[Triple]:
    """Fact n about other people of the story."""
    fact = item.facts[n]
    genders = entailed_genders((f.subject, f.relation, f.object) for f in item.facts)
    others = [name for name in item.candidates if name not in (fact.subject, fact.object)]
    rng.shuffle(others)
    for name in others:
        if same_gender and genders.get(name, GENDER[fact.relation]) != GENDER[fact.relation]:
            continue
        if length_of is not None and length_of(name) != length_of(fact.subject):
            continue
        yield name, fact.relation, fact.object


def _donor(item: Item, kind: Kind, n: int, change: Triple) -> Donor | None:
    """The item with fact n changed, if it has exactly one answer, and the same or another as wanted."""
    fact, keeps = item.facts[n], kind in CONTROLS
    triples = [(f.subject, f.relation, f.object) for f in item.facts]
    triples[n] = change
    relations = list(item.chain_relations)
    if item.task == "kinship":
        if fact.hop is not None:
            relations[fact.hop - 1] = change[1]
            folded = fold(relations)  # the solver would find it too, a thousand times slower
            if folded is None or (folded == item.answer) != keeps:
                return None
    elif kind == "name" and not _leads_on(triples, item, fact.hop or 0, change[0]):
        return None
    try:
        knowledge = Knowledge.of(triples)
    except ContradictionError:
        return None
    if item.task == "kinship":
        people: tuple[str, ...] | None = item.chain_people
        answers = knowledge.between(people[-1], people[0])
    else:
        answers = knowledge.follow(item.chain_people[0], relations)
        people = None
    if len(answers) != 1 or (item.answer in answers) != keeps:
        return None
    (answer,) = answers
    if people is None:
        people = _path(knowledge, item.chain_people[0], relations, answer)
    changed = _rewrite(item, triples, people, tuple(relations), answer)
    part = "relation_span" if change[1] != fact.relation else "subject_span"
    return Donor(
        item=replace(changed, id=f"{item.id}/{kind}{n}-{'-'.join(change[:2]).replace(' ', '_')}"),
        base_id=item.id,
        kind=kind,
        fact=n,
        hop=fact.hop,
        before=fact.relation if part == "relation_span" else fact.subject,
        after=change[1] if part == "relation_span" else change[0],
        base_span=getattr(fact, part),
        donor_span=getattr(changed.facts[n], part),
    )


def _leads_on(triples: Sequence[Triple], item: Item, hop: int, person: str) -> bool:
    """Whether the stated facts lead from `person` over the words after `hop` to a new answer."""
    here = {person}
    for word in item.chain_relations[hop:]:
        here = {s for s, r, o in triples if r == word and o in here}
    return bool(here - {item.answer})


def _path(knowledge: Knowledge, start: str, relations: Sequence[str], answer: str) -> tuple[str, ...]:
    """Some people over whom the relations lead from start to answer."""
    steps = [frozenset({start})]
    for relation in relations:
        steps.append(frozenset().union(*(knowledge.follow(person, [relation]) for person in steps[-1])))
    path = [answer]
    for number in range(len(relations) - 1, -1, -1):
        relation = relations[number]
        path.append(min(p for p in steps[number] if path[-1] in knowledge.follow(p, [relation])))
    return tuple(reversed(path))


def _rewrite(
    item: Item, triples: Sequence[Triple], people: tuple[str, ...], relations: tuple[str, ...], answer: str
) -> Item:
    """The item with other facts and another answer; the question stays and moves with the story's length."""
    story, spans = render_story(triples, item.template)
    by = len(story) - len(item.story)

    def moved(old: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(Span(span.start + by, span.end + by) for span in old)

    if item.task == "kinship":
        plausible = plausible_relations(answer)
    else:
        genders, levels = entailed_genders(triples), entailed_levels(triples, people[0])
        plausible = plausible_people(answer, item.candidates, genders, levels)
    return replace(
        item,
        text=f"{story} {item.question}",
        story=story,
        answer=answer,
        plausible=plausible,
        facts=label_facts(triples, spans, people, relations),
        chain_people=people,
        chain_relations=relations,
        question_people_spans=moved(item.question_people_spans),
        question_relation_spans=moved(item.question_relation_spans),
        story_id=f"{item.story_id}/donor",
    )
