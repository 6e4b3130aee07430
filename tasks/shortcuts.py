"""Baselines that do not follow the chain, to stand beside every accuracy.

A model that scores .75 on a question of four hops is not composing if a table indexed by the first and the
last relation scores .75 as well. Each baseline below reads less than the whole chain, or reads it without
its order.

Kinship (the answer is a relation); tables are learnt from training items, separately for each number of hops:
    majority             the commonest answer
    last_fact            ... given the relation of the fact that the story tells last
    last_relation        ... given the last relation of the chain
    first_last           ... given the first and the last relation of the chain
    generation_last      ... given the sum of generations along the chain and the last relation
    multiset_last        ... given all relations of the chain without their order, and the last relation
    word_in_story        the likeliest answer among the relation words that stand in the story
A table that has not seen its key falls back on the next coarser one, down to the majority.

Follow (the answer is a person); no training, the expected accuracy of a uniform choice among
    random_person        everybody but the person asked about
    right_gender         ... those not known to have the wrong gender for the last word
    last_mentioned       the person whom the story names last
    random_walk          where k random steps along stated facts end, from the person asked about
    last_word            everybody who is said to be somebody's "<last word>"
    last_two_words       everybody who is said to be the last word of somebody's last word but one

Both: bag_of_words       logistic regression on the words of story and question (bag_of_words.py)
Anything else (your own data): random_candidate, and bag_of_words where there are training items.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError
from .bag_of_words import BagOfWords
from .generate import MOST_HOPS, generate_items
from .intervals import cluster_of, clustered_interval
from .items import GENDER_WORDS, Fact, Item
from .kinship import GENDER, GENERATION
from .splits import HASHED_RELATIONS
from .stories import FACT_TEMPLATES

__all__ = ["SHORTCUTS", "best_shortcut", "default_shortcuts", "shortcut_scores", "shortcut_table"]

Feature = Callable[[Item], Hashable]
_Key = TypeVar("_Key", str, int, tuple[str, int])

#: What reads the story's facts and says nothing where an item has none (CLUTRR).
NEED_FACTS = frozenset({"last_fact", "word_in_story"})


def relation_facts(item: Item) -> list[Fact]:
    """The facts that relate two people, in the order of the story."""
    return [fact for fact in item.facts if fact.object]


# ------------------------------------------------ kinship: tables learnt from training items


def _majority(item: Item) -> Hashable:
    return ()


def _last_relation(item: Item) -> Hashable:
    return item.chain_relations[-1]


def _last_fact(item: Item) -> Hashable:
    facts = relation_facts(item)
    return facts[-1].relation if facts else None


def _first_last(item: Item) -> Hashable:
    return item.chain_relations[0], item.chain_relations[-1]


def _generation_last(item: Item) -> Hashable:
    return sum(GENERATION.get(r, 0) for r in item.chain_relations), item.chain_relations[-1]


def _multiset_last(item: Item) -> Hashable:
    return tuple(sorted(item.chain_relations)), item.chain_relations[-1]


#: name -> what the table is indexed by, then what it falls back on
TABLES: dict[str, tuple[Feature, ...]] = {
    "majority": (_majority,),
    "last_fact": (_last_fact, _majority),
    "last_relation": (_last_relation, _majority),
    "first_last": (_first_last, _last_relation, _majority),
    "generation_last": (_generation_last, _last_relation, _majority),
    "multiset_last": (_multiset_last, _generation_last, _last_relation, _majority),
}


def _table(features: tuple[Feature, ...], train: Sequence[Item], test: Sequence[Item]) -> list[float]:
    seen: list[dict[Hashable, Counter[str]]] = [defaultdict(Counter) for _ in features]
    for item in train:
        for counts, feature in zip(seen, features, strict=True):
            counts[feature(item)][item.answer] += 1

    def guess(item: Item) -> str | None:
        for counts, feature in zip(seen, features, strict=True):
            if found := counts.get(feature(item)):
                return _commonest(found)
        return None

    return [float(guess(item) == item.answer) for item in test]


def _commonest(counts: Counter[str]) -> str:
    # ties by the alphabet, not by the order of training
    return min(counts, key=lambda word: (-counts[word], word))


def _word_in_story(train: Sequence[Item], test: Sequence[Item]) -> list[float]:
    # how likely a word is the answer, given that it stands in the story
    present, right = Counter[str](), Counter[str]()
    for item in train:
        words = {fact.relation for fact in relation_facts(item)}
        present.update(words)
        right.update({item.answer} & words)
    scores: list[float] = []
    for item in test:
        words = sorted({fact.relation for fact in relation_facts(item)})
        best = max(words, key=lambda word: right[word] / max(present[word], 1), default=None)
        scores.append(float(best == item.answer))
    return scores


# ------------------------------------------------ follow: expected accuracy of a uniform choice


def _choice(item: Item, among: Iterable[str]) -> float:
    pool = set(among)
    return 1 / len(pool) if item.answer in pool else 0.0


def _others(item: Item) -> list[str]:
    return [person for person in item.candidates if person != item.chain_people[0]]


def known_genders(item: Item) -> dict[str, bool]:
    """Who is known to be male (True) or female (False) from the stated facts alone."""
    genders: dict[str, bool] = {}
    for fact in item.facts:
        if fact.relation in GENDER_WORDS:
            genders[fact.subject] = fact.relation == GENDER_WORDS[1]
        elif (male := GENDER.get(fact.relation)) is not None:
            genders[fact.subject] = male
            if fact.relation in ("husband", "wife"):
                genders.setdefault(fact.object, not male)
    return genders


def _right_gender(item: Item) -> float:
    wanted, known = GENDER.get(item.chain_relations[-1]), known_genders(item)
    return _choice(item, (p for p in _others(item) if wanted is None or known.get(p, wanted) == wanted))


def _last_mentioned(item: Item) -> float:
    mentions = [
        (span.end, name)
        for fact in item.facts
        for span, name in ((fact.subject_span, fact.subject), (fact.object_span, fact.object))
        if name
    ]
    return float(bool(mentions) and max(mentions)[1] == item.answer)


def _random_walk(item: Item) -> float:
    """Walks that cannot go on before k steps are made count as lost and the others share their weight."""
    steps: dict[str, list[str]] = defaultdict(list)
    for fact in relation_facts(item):
        steps[fact.object].append(fact.subject)
    where = {item.chain_people[0]: 1.0}
    for _ in range(item.hops):
        moved: dict[str, float] = defaultdict(float)
        for person, weight in where.items():
            for other in steps.get(person, ()):
                moved[other] += weight / len(steps[person])
        where = moved
    total = sum(where.values())
    return where.get(item.answer, 0.0) / total if total else 1 / len(item.candidates)


def _last_word(item: Item) -> float:
    word = item.chain_relations[-1]
    return _choice(item, (fact.subject for fact in relation_facts(item) if fact.relation == word))


def _last_two_words(item: Item) -> float:
    if item.hops == 1:
        return _last_word(item)
    first, second = item.chain_relations[-2:]
    reached = {fact.subject for fact in relation_facts(item) if fact.relation == first}
    pool = (
        fact.subject for fact in relation_facts(item) if fact.relation == second and fact.object in reached
    )
    return _choice(item, pool)


CHOICES: dict[str, Callable[[Item], float]] = {
    "random_person": lambda item: _choice(item, _others(item)),
    "right_gender": _right_gender,
    "last_mentioned": _last_mentioned,
    "random_walk": _random_walk,
    "last_word": _last_word,
    "last_two_words": _last_two_words,
}

# ------------------------------------------------ both


MOST_TEXTS = 700  # more do not raise it by more than its interval, and it is what takes the time


def _bag_of_words(train: Sequence[Item], test: Sequence[Item]) -> list[float]:
    train = train[:MOST_TEXTS]
    model = BagOfWords().fit([item.text for item in train], [item.answer for item in train])
    column = {name: i for i, name in enumerate(model.classes)}
    scores: list[float] = []
    for item, odds in zip(test, model.log_odds([item.text for item in test]), strict=True):
        known = [word for word in item.candidates if word in column]
        if not known:
            scores.append(1 / len(item.candidates))
        else:
            scores.append(float(known[int(np.argmax([odds[column[word]] for word in known]))] == item.answer))
    return scores


#: the baselines of each task, in the order in which tables show them
SHORTCUTS: dict[str, tuple[str, ...]] = {
    "kinship": (*TABLES, "word_in_story", "bag_of_words"),
    "follow": (*CHOICES, "bag_of_words"),
}


def shortcut_scores(name: str, train: Sequence[Item], test: Sequence[Item]) -> list[float]:
    """Score of each test item under one baseline: 0 or 1, or the expected accuracy of a random choice.

    Args:
        name: one of `SHORTCUTS`, or "random_candidate".
        train, test: items of one task and one number of hops; `train` may be empty for baselines that learn
            nothing.

    Raises:
        ValueError: an unknown name, or no training items for a baseline that learns.
    """
    if name in CHOICES:
        return [CHOICES[name](item) for item in test]
    if name == "random_candidate":
        return [1 / len(item.candidates) for item in test]
    if not train:
        raise ValueError(f"the shortcut {name} needs training items")
    if name in TABLES:
        return _table(TABLES[name], train, test)
    if name == "word_in_story":
        return _word_in_story(train, test)
    if name == "bag_of_words":
        return _bag_of_words(train, test)
    raise ValueError(f"no shortcut named {name}")


def shortcut_table(train_items: Iterable[Item], test_items: Iterable[Item]) -> list[dict[str, Any]]:
    """Accuracy of every baseline by task and hops, fitted on one set of items and measured on the other.

    Returns:
        Rows of the table `shortcuts`: task, hops, shortcut, accuracy, low, high, n. Intervals are 95 %,
        over the chains of relations for kinship (a shortcut is right or wrong on a whole chain) and over
        stories otherwise. Baselines that learn are left out where no training item has the same task and
        hops.
    """
    train = _by_task_and_hops(train_items)
    rows: list[dict[str, Any]] = []
    for (task, hops), items in sorted(_by_task_and_hops(test_items).items()):
        known = train.get((task, hops), [])
        for name in _names_for(task, items):
            if known or name in CHOICES or name == "random_candidate":
                rows.append(_row(task, hops, name, items, shortcut_scores(name, known, items)))
    return rows


def _names_for(task: str, items: Sequence[Item]) -> list[str]:
    names = SHORTCUTS.get(task, ("random_candidate", "bag_of_words"))
    facts = any(item.facts for item in items)
    return [name for name in names if facts or name not in NEED_FACTS]


def _row(task: str, hops: int, name: str, items: Sequence[Item], scores: Sequence[float]) -> dict[str, Any]:
    accuracy, low, high = clustered_interval(scores, [cluster_of(item) for item in items])
    row = {"task": task, "hops": hops, "shortcut": name}
    return {**row, "accuracy": accuracy, "low": low, "high": high, "n": len(items)}


def default_shortcuts(
    items: Iterable[Item], *, n_stories: int = 1200, seed: int | None = None
) -> list[dict[str, Any]]:
    """`shortcut_table` for items that come without training items; some seconds for 600 items.

    For items that the generator made, training items are generated under the same settings with another seed
    (from chains that are not held out, where all items of three hops or more are). Items from elsewhere are
    judged by baselines fitted on the other items of the same length, in five folds over stories.

    Args:
        n_stories: to train on (a third of them for follow, where the bag of words alone learns).
        seed: of the training stories; default: one that none of the items has.
    """
    rows: list[dict[str, Any]] = []
    for task, group in sorted(_by(items, lambda item: item.task).items()):
        if task in SHORTCUTS and all(item.template in FACT_TEMPLATES for item in group):
            rows.extend(shortcut_table(_training_items(task, group, n_stories, seed), group))
        else:
            rows.extend(_in_folds(task, group))
    return rows


def _training_items(task: str, items: Sequence[Item], n_stories: int, seed: int | None) -> list[Item]:
    long = [item for item in items if item.hops >= HASHED_RELATIONS]
    hops, distractors = {item.hops for item in items}, {item.distractors for item in items}
    n_facts = max(len(relation_facts(item)) for item in items)
    # the items may be some rungs of longer ladders; their stories have the facts of the longest rung
    if distractors == {"none"}:
        hops.add(min(n_facts, MOST_HOPS))
    elif task == "follow" and distractors == {"decoy"}:
        hops.add(min(n_facts // 2, MOST_HOPS))
    settings: dict[str, Any] = {
        "hops": sorted(hops - {0}),
        "orders": sorted({item.order for item in items}),
        "distractors": sorted(distractors),
        "fact_template": sorted({item.template for item in items}),
        "form": sorted({item.form for item in items}),
        "gender_facts": any(fact.role == "gender" for item in items for fact in item.facts),
        "split": "train" if long and all(item.split == "heldout" for item in long) else None,
        "seed": max(item.seed for item in items) + 1_000_003 if seed is None else seed,
    }
    stories = n_stories if task == "kinship" else n_stories // 3
    try:
        return generate_items(task, stories, n_facts=n_facts, **settings)
    except UserError:  # stories of several sizes
        return generate_items(task, stories, **settings)


def _in_folds(task: str, items: Sequence[Item], folds: int = 5) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for hops, group in sorted(_by(items, lambda item: item.hops).items()):
        stories = {story: n % folds for n, story in enumerate(dict.fromkeys(i.story_id for i in group))}
        parts = [[item for item in group if stories[item.story_id] == fold] for fold in range(folds)]
        for name in _names_for(task, group):
            if len(stories) < folds and name not in CHOICES and name != "random_candidate":
                continue
            scores = [
                shortcut_scores(name, [i for other in parts if other is not part for i in other], part)
                for part in parts
                if part
            ]
            row = _row(task, hops, name, [i for part in parts for i in part], [x for s in scores for x in s])
            rows.append(row)
    return rows


def best_shortcut(rows: Iterable[dict[str, Any]], task: str, hops: int) -> dict[str, Any] | None:
    """The row of the most accurate baseline for a task and hops; None if there is none."""
    rules = [r for r in rows if r["task"] == task and r["hops"] == hops]
    return max(rules, key=lambda row: row["accuracy"], default=None)


def _by_task_and_hops(items: Iterable[Item]) -> dict[tuple[str, int], list[Item]]:
    return _by(items, lambda item: (item.task, item.hops))


def _by(items: Iterable[Item], key: Callable[[Item], _Key]) -> dict[_Key, list[Item]]:
    groups: defaultdict[_Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
