"""Makes items: for each story number the hop ladder, the same story asked at every k.

    generator = Generator("kinship", hops=range(1, 7), seed=0)
    ladder = generator.story(0)            # six items, one text of the story, k = 1 ... 6
    more = generator.questions(0, 6)       # other questions about the very same text
    generate_items("follow", 100, hops=(1, 2, 3), split="heldout")

What a story is depends on (settings, seed, number) alone, whatever was asked before.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import UserError
from .items import GENDER_WORDS, TASKS, Item, Task
from .kinship import RELATIONS, algebra
from .labels import entailed_genders, entailed_levels, label_facts, plausible_people, plausible_relations
from .names import NAMES, check_names
from .plans import DISTRACTORS, Plan, plan_follow, plan_kinship
from .splits import HASHED_RELATIONS, SPLITS, Split, split_of
from .stories import (
    FACT_TEMPLATES,
    FORMS,
    FactSpans,
    render_follow_question,
    render_kinship_question,
    render_story,
)

ORDERS: tuple[str, ...] = ("forward", "reverse", "shuffled")
MOST_HOPS = 8
_ATTEMPTS = 20_000

Choice = str | Sequence[str]  # one setting for all stories, or several of which each story draws one


@dataclass(frozen=True, slots=True)
class _Story:
    """A story in words, with what is needed to ask about it."""

    plan: Plan
    id: str
    text: str
    triples: tuple[tuple[str, str, str], ...]  # (subject, relation, object) in the order of the text
    spans: list[FactSpans]
    names: dict[int, str]  # of the plan's people, in the order of their numbers
    order: str
    distractors: str
    template: str
    form: str
    genders: dict[str, bool]
    levels: dict[str, int]  # generation above x_0, of the people whom the facts connect with x_0


class Generator:
    """An endless, random-access sequence of stories.

    Args:
        task: "kinship" or "follow".
        hops: the rungs k of the ladder, within 1 ... 8. The chain is as long as the largest.
        n_facts: facts of every story, gender facts apart. Default for kinship: the largest k, with
            distractors four more. Default for follow: twice the largest k and two (14 for k up to
            6), for a chain, a second path through its words, and ways that lead off.
        orders: "forward" (the chain in order, distractors anywhere between), "reverse", "shuffled".
        distractors: "none", "offchain", "branch", "decoy"; default "none" for kinship, "decoy" for follow.
            Only with "decoy" does follow have its guarantees (see `plans.plan_follow`).
        fact_template, form: names from `stories.FACT_TEMPLATES` and `stories.FORMS[task]`.
        names: given names for the people; drawn anew for each story.
        gender_facts: also state the gender of everybody whose gender the facts leave open.
        split: only chains of this split (of the rungs with three or more hops; see `splits`).
        seed: of everything.

    orders, distractors, fact_template and form take one name or several, of which each story draws one.

    Raises:
        UserError: a setting that does not exist or cannot be met.
    """

    def __init__(
        self,
        task: Task | str,
        *,
        hops: int | Iterable[int] = (1, 2, 3, 4, 5, 6),
        n_facts: int | None = None,
        orders: Choice = "shuffled",
        distractors: Choice | None = None,
        fact_template: Choice = "subject-first",
        form: Choice | None = None,
        names: Sequence[str] = NAMES,
        gender_facts: bool = False,
        split: Split | str | None = None,
        seed: int = 0,
    ) -> None:
        if task not in TASKS:
            raise UserError(f"there is no task '{task}'", remedy="take kinship or follow")
        self.task: Task = "kinship" if task == "kinship" else "follow"
        self.hops = _hops(hops)
        self.longest = max(self.hops)
        self.orders = _chosen("order", orders, ORDERS)
        usual = "none" if self.task == "kinship" else "decoy"
        self.distractors = _chosen("kind of distractors", distractors or usual, DISTRACTORS)
        self.templates = _chosen("fact template", fact_template, tuple(FACT_TEMPLATES))
        self.forms = _chosen("question form", form or FORMS[self.task][0], FORMS[self.task])
        self.n_facts = n_facts
        if n_facts is not None:
            self._check_n_facts(n_facts)
        self.names = check_names(names, 2 * max(self.n_facts_with(kind) for kind in self.distractors))
        self.gender_facts = gender_facts
        if split is not None and split not in SPLITS:
            raise UserError(f"there is no split '{split}'", remedy=f"take one of {', '.join(SPLITS)}")
        if split == "heldout" and self.longest < HASHED_RELATIONS:
            raise UserError(
                "no chain of one or two relations is held out", remedy="ask for three hops or more"
            )
        self.split: Split | None = None if split is None else "heldout" if split == "heldout" else "train"
        self.seed = seed
        self._last: tuple[int, _Story] | None = None

    def story(self, i: int) -> list[Item]:
        """The ladder of story `i`: one item for each of `hops`, all about the same text."""
        story = self._story(i)
        return [self._item(story, f"{story.id}/k{k}", story.plan, k) for k in self.hops]

    def questions(self, i: int, n: int) -> list[Item]:
        """Up to `n` further questions about the text of story `i`, all different and none of its ladder.

        They start from any person and follow facts as stated, have their length among `hops`, exactly one
        answer, and a chain of the generator's split. Only the ladder's questions have the guarantees about
        decoys. Where a story has fewer, fewer come back.
        """
        story = self._story(i)
        plan = story.plan
        taken = {(plan.people[0], plan.relations[:k]) for k in self.hops}
        taken_pairs = {(plan.people[0], plan.people[k]) for k in self.hops}
        found: list[Plan] = []
        for walk in self._walks(plan):
            if self.task == "follow":
                new = (walk.people[0], walk.relations) not in taken
            else:
                new = (walk.people[0], walk.people[-1]) not in taken_pairs
                taken_pairs.add((walk.people[0], walk.people[-1]))
            if new:
                found.append(walk)
        rng = self._rng(i, "questions")
        rng.shuffle(found)
        return [
            self._item(story, f"{story.id}/q{number}", walk, len(walk.relations))
            for number, walk in enumerate(found[:n])
        ]

    def family(self, i: int) -> tuple[Plan, dict[int, str]]:
        """The truth behind story `i`: its plan in a family graph, and the names of the plan's people."""
        story = self._story(i)
        return story.plan, dict(story.names)

    def items(self, n_stories: int, first: int = 0) -> Iterator[Item]:
        """The ladders of stories first ... first + n_stories - 1, one item after the other."""
        for i in range(first, first + n_stories):
            yield from self.story(i)

    # -- how a story comes about -----------------------------------------------------------

    def n_facts_with(self, distractors: str) -> int:
        """Facts of a story with this kind of distractors, gender facts apart."""
        if self.n_facts is not None:
            return self.n_facts
        if self.task == "follow":
            return self.longest if distractors == "none" else 2 * self.longest + 2
        return self.longest + (0 if distractors == "none" else 4)

    def _check_n_facts(self, n_facts: int) -> None:
        for kind in self.distractors:
            least = self.longest
            if self.task == "follow" and kind == "decoy":
                least = 2 * self.longest
            if n_facts < least or (kind == "none" and n_facts != least):
                rule = "exactly" if kind == "none" else "at least"
                raise UserError(
                    f"{n_facts} facts do not fit {self.longest} hops with distractors '{kind}'",
                    remedy=f"take {rule} {least} facts",
                )

    def _rng(self, i: int, purpose: str) -> random.Random:
        # a text seed is hashed with SHA-512, so neighbouring stories have nothing in common
        return random.Random(f"{self.task}/{self.seed}/{i}/{purpose}")

    def _story(self, i: int) -> _Story:
        # the ladder and its further questions come together
        if self._last is not None and self._last[0] == i:
            return self._last[1]
        if i < 0:
            raise UserError(f"there is no story {i}", remedy="count stories from 0")
        rng = self._rng(i, "story")
        order, distractors = rng.choice(self.orders), rng.choice(self.distractors)
        template, form = rng.choice(self.templates), rng.choice(self.forms)
        plan = self._plan(rng, distractors)
        facts = _arranged(rng, plan, order)
        people = sorted({p for s, _, o in facts for p in (s, o)})
        names = dict(zip(people, rng.sample(self.names, len(people)), strict=True))
        triples = [(names[s], RELATIONS[r], names[o]) for s, r, o in facts]
        genders = entailed_genders(triples)
        if self.gender_facts:
            for person, name in names.items():
                if name not in genders:
                    genders[name] = bool(plan.world.graph.male[person])
                    triples.insert(rng.randint(0, len(triples)), (name, GENDER_WORDS[genders[name]], ""))
        text, spans = render_story(triples, template)
        story = _Story(
            plan, f"{self.task}-{self.seed}-{i}", text, tuple(triples), spans, names, order, distractors,
            template, form, genders, entailed_levels(triples, names[plan.people[0]]),
        )  # fmt: skip
        self._last = (i, story)
        return story

    def _plan(self, rng: random.Random, distractors: str) -> Plan:
        n_facts = self.n_facts_with(distractors)
        for _ in range(_ATTEMPTS):
            if self.task == "kinship":
                plan = plan_kinship(rng, self.longest, n_facts, distractors, self.split)
            else:
                plan = plan_follow(rng, self.seed, self.longest, n_facts, distractors, self.split)
            if plan is not None:
                return plan
        raise UserError(
            f"no {self.task} story with {self.longest} hops and {n_facts} facts was found",
            remedy="ask for fewer hops or fewer facts",
        )

    def _walks(self, plan: Plan) -> Iterator[Plan]:
        """Every simple walk along stated facts that makes a question, as a plan of its own."""
        onward: dict[int, list[tuple[int, int]]] = {}
        for s, r, o in plan.facts:
            onward.setdefault(o, []).append((r, s))
        people = {p for s, _, o in plan.facts for p in (s, o)}
        strict = algebra().strict
        stack: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [((o,), (), -1) for o in sorted(onward)]
        while stack:
            path, relations, folded = stack.pop()
            if len(relations) in self.hops and (
                self.split is None
                or len(relations) < 3
                or split_of([RELATIONS[r] for r in relations]) == self.split
            ):
                yield Plan(plan.world, path, relations, plan.facts)
            if len(relations) == self.longest:
                continue
            for r, s in onward.get(path[-1], ()):
                if s in path:
                    continue
                if self.task == "kinship":
                    fold = r if folded < 0 else strict[folded][r]
                    if fold < 0:
                        continue
                else:
                    fold = -1
                    if sum(p in people for p in plan.world.reach[path[-1]][r]) != 1:
                        continue
                stack.append((path + (s,), relations + (r,), fold))

    def _item(self, story: _Story, item_id: str, chain: Plan, k: int) -> Item:
        people = tuple(story.names[p] for p in chain.people[: k + 1])
        relations = tuple(RELATIONS[r] for r in chain.relations[:k])
        if self.task == "kinship":
            answer = RELATIONS[chain.world.relation[chain.people[k]][chain.people[0]]]
            candidates = RELATIONS
            plausible = plausible_relations(answer)
            question = render_kinship_question(story.form, people[0], people[k], len(story.text) + 1)
        else:
            answer = people[k]
            candidates = tuple(sorted(story.names.values()))
            levels = story.levels
            if chain.people[0] != story.plan.people[0]:
                levels = entailed_levels(story.triples, people[0])
            plausible = plausible_people(answer, candidates, story.genders, levels)
            question = render_follow_question(story.form, people[0], relations, len(story.text) + 1)
        return Item(
            id=item_id,
            story_id=story.id,
            task=self.task,
            hops=k,
            text=f"{story.text} {question.text}",
            story=story.text,
            question=question.text,
            answer=answer,
            candidates=candidates,
            plausible=plausible,
            facts=label_facts(story.triples, story.spans, people, relations),
            chain_people=people,
            chain_relations=relations,
            question_people_spans=question.people,
            question_relation_spans=question.relations,
            form=story.form,
            template=story.template,
            order=story.order,
            distractors=story.distractors,
            split=split_of(relations),
            seed=self.seed,
        )


def generate_items(task: Task | str, n_stories: int, **settings: object) -> list[Item]:
    """The ladders of the first `n_stories` stories; settings as for `Generator`."""
    return list(Generator(task, **settings).items(n_stories))  # pyright: ignore[reportArgumentType]


def _arranged(rng: random.Random, plan: Plan, order: str) -> list[tuple[int, int, int]]:
    """The plan's facts in the order of the story; distractors fall anywhere between the chain's."""
    k = len(plan.relations)
    chain, rest = list(plan.facts[:k]), list(plan.facts[k:])
    if order == "shuffled":
        facts = chain + rest
        rng.shuffle(facts)
        return facts
    if order == "reverse":
        chain.reverse()
    rng.shuffle(rest)
    slots = [True] * len(chain) + [False] * len(rest)
    rng.shuffle(slots)
    source: dict[bool, Iterator[tuple[int, int, int]]] = {True: iter(chain), False: iter(rest)}
    return [next(source[from_chain]) for from_chain in slots]


def _hops(hops: int | Iterable[int]) -> tuple[int, ...]:
    rungs = tuple(sorted({hops} if isinstance(hops, int) else set(hops)))
    if not rungs or rungs[0] < 1 or rungs[-1] > MOST_HOPS:
        raise UserError(f"hops {list(rungs)} are out of range", remedy=f"take numbers from 1 to {MOST_HOPS}")
    return rungs


def _chosen(what: str, choice: Choice, known: Sequence[str]) -> tuple[str, ...]:
    names = (choice,) if isinstance(choice, str) else tuple(choice)
    for name in names:
        if name not in known:
            raise UserError(f"there is no {what} '{name}'", remedy=f"take one of {', '.join(known)}")
    if not names:
        raise UserError(f"no {what} is given", remedy=f"take one of {', '.join(known)}")
    return names
