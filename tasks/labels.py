"""What the facts of a story say about its people and about the answer: roles, genders, generations, types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .items import GENDER_WORDS, Fact, Role
from .kinship import GENDER, GENERATION, RELATIONS
from .stories import FactSpans


def label_facts(
    triples: Sequence[tuple[str, str, str]],
    spans: Sequence[FactSpans],
    people: Sequence[str],
    relations: Sequence[str],
) -> tuple[Fact, ...]:
    """Facts with the roles they have for the question whose chain is (people, relations)."""
    hops = {(people[j + 1], relations[j], people[j]): j + 1 for j in range(len(relations))}
    on_chain = set(people)
    words = set(relations)
    facts: list[Fact] = []
    for triple, where in zip(triples, spans, strict=True):
        subject, relation, obj = triple
        hop = hops.get(triple)
        role: Role
        if hop is not None:
            role = "chain"
        elif relation in GENDER_WORDS:
            role = "gender"
        elif relation in words:
            role = "decoy"
        elif subject in on_chain or obj in on_chain:
            role = "branch"
        else:
            role = "offchain"
        facts.append(
            Fact(subject, relation, obj, role, hop, where.span, where.subject, where.relation, where.object)
        )
    return tuple(facts)


def entailed_genders(triples: Iterable[tuple[str, str, str]]) -> dict[str, bool]:
    """Who is male (True) or female (False) by the facts: by a word that tells it, or as a spouse."""
    genders: dict[str, bool] = {}
    for subject, relation, obj in triples:
        if relation in GENDER_WORDS:
            genders[subject] = relation == GENDER_WORDS[1]
            continue
        male = GENDER[relation]
        if male is not None:
            genders[subject] = male
        if relation in ("husband", "wife"):
            genders[obj] = relation == "wife"
    return genders


def entailed_levels(triples: Iterable[tuple[str, str, str]], start: str) -> dict[str, int]:
    """How many generations above `start` each person is whom the facts connect with `start`."""
    near: dict[str, list[tuple[str, int]]] = {}
    for subject, relation, obj in triples:
        if relation in GENERATION:
            near.setdefault(obj, []).append((subject, GENERATION[relation]))
            near.setdefault(subject, []).append((obj, -GENERATION[relation]))
    levels = {start: 0}
    line = [start]
    for person in line:
        for other, up in near.get(person, ()):
            if other not in levels:
                levels[other] = levels[person] + up
                line.append(other)
    return levels


def plausible_relations(answer: str) -> tuple[str, ...]:
    """The relations of the answer's generation and gender ("cousin" fits either gender)."""
    return tuple(
        word
        for word in RELATIONS
        if GENERATION[word] == GENERATION[answer]
        and (GENDER[word] == GENDER[answer] or GENDER[word] is None or GENDER[answer] is None)
    )


def plausible_people(
    answer: str, people: Iterable[str], genders: dict[str, bool], levels: dict[str, int]
) -> tuple[str, ...]:
    """People of the answer's gender by the facts, and not known to be of another generation."""
    gender, level = genders.get(answer), levels.get(answer)
    return tuple(
        person
        for person in people
        if person == answer
        or ((gender is None or genders.get(person) == gender) and levels.get(person, level) == level)
    )
