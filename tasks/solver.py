"""Finds the answers of a question from the stated facts alone, by another way than the generator makes them.

The generator walks one path through one family and composes along it. The solver knows neither: it takes the
facts and the question's words and narrows down, for every two people of the story, what they can be to each
other, until nothing changes any more (path consistency over the weak compositions of `kinship.algebra`). All
masks are sets of relations that are possible in some family; so what is left as the only one is true in every
family in which the facts are.

    knowledge = Knowledge.of([("Bob", "son", "Ann"), ("Carl", "brother", "Bob")])
    knowledge.between("Carl", "Ann")        -> {"son"}
    knowledge.follow("Ann", ["son", "brother"])

Different names are different people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .items import GENDER_WORDS, Item
from .kinship import ANY_MASK, FEMALE_MASK, INDEX, MALE_MASK, N_RELATIONS, algebra, names_of

_SINGLE = {1 << n: n for n in range(N_RELATIONS)}
_ONLY_MALE = MALE_MASK & ~FEMALE_MASK
_ONLY_FEMALE = FEMALE_MASK & ~MALE_MASK


class ContradictionError(ValueError):
    """No family has all of the stated facts."""


class _Masks:
    """Compositions and inverses of sets of relations, remembered."""

    def __init__(self) -> None:
        self.composed: dict[tuple[int, int], int] = {}
        self.inverted: dict[int, int] = {}

    def compose(self, first: int, second: int) -> int:
        """Everything that the `second` of my `first` can be to me."""
        key = (first, second)
        found = self.composed.get(key)
        if found is None:
            found = self.composed[key] = self._compose(first, second)
        return found

    def _compose(self, first: int, second: int) -> int:
        if (first | second) >> N_RELATIONS & 1:  # through somebody unrelated anything is possible
            return ANY_MASK
        weak = algebra().weak
        mask = 0
        for r1 in _indices(first):
            row = weak[r1]
            for r2 in _indices(second):
                mask |= row[r2]
        return mask

    def invert(self, mask: int) -> int:
        """Everything that I can be to one who is `mask` to me."""
        found = self.inverted.get(mask)
        if found is None:
            inverse = algebra().inverse
            found = mask & (1 << N_RELATIONS)
            for r in _indices(mask):
                found |= inverse[r]
            self.inverted[mask] = found
        return found


_MASKS = _Masks()


def _indices(mask: int) -> list[int]:
    return [n for n in range(N_RELATIONS) if mask >> n & 1]


class Knowledge:
    """Everything that follows from a list of facts.

    Attributes:
        people: the names, in the order of their first mention.
    """

    def __init__(self, people: Sequence[str]) -> None:
        self.people = tuple(people)
        self._number = {name: n for n, name in enumerate(self.people)}
        size = len(self.people)
        self._can = [[ANY_MASK] * size for _ in range(size)]  # [o][s]: what s can be to o
        self._sex = [ANY_MASK] * size  # what a person can be to anybody, by gender
        self._known: list[set[int]] = [set() for _ in range(size)]  # with whom something is known
        self._changed: list[tuple[int, int]] = []

    @classmethod
    def of(cls, facts: Iterable[tuple[str, str, str]]) -> Knowledge:
        """What follows from (subject, relation, object) facts, gender facts ("man", "woman") among them.

        Raises:
            ContradictionError: the facts cannot all be true.
        """
        facts = list(facts)
        knowledge = cls(list(dict.fromkeys(n for s, _, o in facts for n in (s, o) if n)))
        for subject, relation, obj in facts:
            if relation not in GENDER_WORDS:
                knowledge._narrow(knowledge._number[obj], knowledge._number[subject], 1 << INDEX[relation])
        for subject, relation, _ in facts:
            if relation in GENDER_WORDS:
                male = relation == GENDER_WORDS[1]
                knowledge._state_gender(knowledge._number[subject], MALE_MASK if male else FEMALE_MASK)
        knowledge._settle()
        return knowledge

    def between(self, person: str, of: str) -> frozenset[str]:
        """What `person` can be to `of`: relation words and perhaps "unrelated"."""
        if person == of or person not in self._number or of not in self._number:
            return frozenset()
        subject, obj = self._number[person], self._number[of]
        return names_of(self._can[obj][subject] & self._sex[subject])

    def follow(self, start: str, relations: Iterable[str]) -> frozenset[str]:
        """Everybody who is known to be reached from `start` over the relations in their order."""
        here = {self._number[start]} if start in self._number else set()
        for relation in relations:
            bit = 1 << INDEX[relation]
            here = {s for o in here for s in self._known[o] if self._can[o][s] == bit}
        return frozenset(self.people[n] for n in here)

    def gender(self, person: str) -> bool | None:
        """True for a man, False for a woman, None if the facts leave it open."""
        sex = self._sex[self._number[person]]
        return None if sex == ANY_MASK else sex == MALE_MASK

    def _state_gender(self, s: int, mask: int) -> None:
        if self._sex[s] == mask:
            return
        if self._sex[s] != ANY_MASK:
            raise ContradictionError(f"{self.people[s]} cannot be a man and a woman")
        self._sex[s] = mask
        for o in tuple(self._known[s]):  # all others are narrowed when something gets known
            self._narrow(o, s, mask)

    def _narrow(self, o: int, s: int, mask: int) -> None:
        """Keep of what s can be to o only what is in `mask`, and the same the other way round."""
        old = self._can[o][s]
        new = old & mask & self._sex[s]
        if new == old:
            return
        if not new:
            raise ContradictionError(f"{self.people[s]} cannot be anything to {self.people[o]}")
        back = self._can[s][o] & _MASKS.invert(new) & self._sex[o]
        if not back:
            raise ContradictionError(f"{self.people[o]} cannot be anything to {self.people[s]}")
        self._can[o][s], self._can[s][o] = new, back
        self._known[o].add(s)
        self._known[s].add(o)
        self._changed.append((o, s))
        for person, can in ((s, new), (o, back)):
            if not can & ~_ONLY_MALE:
                self._state_gender(person, MALE_MASK)
            elif not can & ~_ONLY_FEMALE:
                self._state_gender(person, FEMALE_MASK)

    def _settle(self) -> None:
        """Compose what changed with everything known next to it, until nothing changes."""
        can, known, changed = self._can, self._known, self._changed
        compose, invert = _MASKS.compose, _MASKS.invert
        while changed:
            a, b = changed.pop()
            for x, y in ((a, b), (b, a)):  # y is can[x][y] to x; whoever z is to y is something to x
                first = can[x][y]
                for z in tuple(known[y]):
                    if z == x:
                        continue
                    old = can[x][z]
                    new = old & compose(first, can[y][z])
                    # the way back is looked at too: an inverse may know less than the pair
                    new &= invert(can[z][x])
                    if new != old:
                        self._narrow(x, z, new)


def answers(item: Item) -> frozenset[str]:
    """Every answer that the item's facts allow; empty if they contradict each other.

    Of the chain only the question is used: who is asked about, and for follow the relation words of the
    question.
    """
    return ask(facts_of(item), item)


def facts_of(item: Item) -> Knowledge | None:
    """What follows from the item's facts, or None if they contradict each other."""
    try:
        return Knowledge.of((f.subject, f.relation, f.object) for f in item.facts)
    except ContradictionError:
        return None


def ask(knowledge: Knowledge | None, item: Item) -> frozenset[str]:
    """`answers`, with the item's facts worked out before (by `facts_of`)."""
    if knowledge is None:
        return frozenset()
    if item.task == "kinship":
        return knowledge.between(item.chain_people[-1], item.chain_people[0])
    return knowledge.follow(item.chain_people[0], item.chain_relations)


def wrong_answers(items: Iterable[Item]) -> dict[str, str]:
    """Id and a line for each item that has another answer, several or none; those without facts pass."""
    lines: dict[str, str] = {}
    for item in verify(item for item in items if item.facts):
        found = answers(item)
        what = " or ".join(sorted(found)) if found else "no answer"
        lines[item.id] = f"{item.id}: the facts give {what}, the item says {item.answer}"
    return lines


def verify(items: Iterable[Item]) -> list[Item]:
    """The items that do not have exactly their one answer, [] if all is well.

    Items of the same story that stand next to each other share the work.
    """
    wrong: list[Item] = []
    story: tuple[str, tuple[tuple[str, str, str], ...]] | None = None
    knowledge: Knowledge | None = None
    for item in items:
        this = (item.story, tuple((f.subject, f.relation, f.object) for f in item.facts))
        if this != story:
            story, knowledge = this, facts_of(item)
        if ask(knowledge, item) != {item.answer}:
            wrong.append(item)
    return wrong
