"""Four ways to keep test questions out of training, and what exactly is new in each.

| way       | held out                         | new at test                 | not new at test               |
|-----------|----------------------------------|-----------------------------|-------------------------------|
| chains    | a tenth of the chains of three   | the chain as a whole, and   | each relation, each pair,     |
|           | or more relations, by the hash   | its first three relations   | later pieces; names, wording, |
|           | of the first three (`split_of`)  |                             | lengths                       |
| templates | facts told by `TEMPLATES`,       | the wording of the facts or | chains, names, lengths        |
|           | questions asked in `FORMS`       | of the question             |                               |
| lengths   | more than `MAX_HOPS` hops: the   | how many facts are combined | relations, names, wording; a  |
|           | rungs above the default ladder   |                             | ladder's story is as long     |
| names     | a tenth of the ordered pairs of  | who stand first and second  | either name, and both of them |
|           | names, by hash, as x_0 and x_1   | on a chain together         | elsewhere in a story; chains  |

The `chains` way is the one that generators take (`split=`) and that the embedded model was trained by. The
others sort items that exist (`heldout_by`), for a training set of your own; whatever it was, `Seen` says what
of an item is new against it, and `depthprobe tasks check FILE --against TRAINING_FILE` counts that by hops.

A story is made from (settings, seed, number), so another seed alone gives stories whose people never stood
together in training; `names` makes sure of it for the two people that a question starts from. Names
themselves are not held out: a name without a trained embedding measures the embedding, not the composition.

There are few distinct short chains (27 of one relation, 166 of two, some hundreds of three). Chains of one
and two are never held out, and intervals have the chain or the story as unit (intervals.py), not the item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .items import Item
from .splits import HELDOUT_FRACTION, Split, split_of, stable_unit

__all__ = ["FORMS", "MAX_HOPS", "NOVELTIES", "TEMPLATES", "WAYS", "Seen", "heldout_by", "novelty_counts"]

#: what can be new of an item, as `Seen.novelty` names it
NOVELTIES = ("chain", "relation", "pair", "template", "form", "length", "names")
TEMPLATES = frozenset({"has"})
FORMS = frozenset({"qa", "question", "possessive-question"})
MAX_HOPS = 6  # the default ladder, in training as in analysis, has six rungs; longer ones go to eight


def _chains(item: Item) -> bool:
    return split_of(item.chain_relations) == "heldout"


def _templates(item: Item) -> bool:
    return item.template in TEMPLATES or item.form in FORMS


def _lengths(item: Item) -> bool:
    return item.hops > MAX_HOPS


def _names(item: Item) -> bool:
    return stable_unit("names", *item.chain_people[:2]) < HELDOUT_FRACTION


#: way -> whether an item is held out by it
WAYS: dict[str, Callable[[Item], bool]] = {
    "chains": _chains,
    "templates": _templates,
    "lengths": _lengths,
    "names": _names,
}


def heldout_by(way: str, item: Item) -> Split:
    """On which side of one of the `WAYS` an item stands; a function of the item alone.

    Raises:
        ValueError: no such way.
    """
    if way not in WAYS:
        raise ValueError(f"no way {way!r} of holding out: one of {', '.join(WAYS)}")
    return "heldout" if WAYS[way](item) else "train"


@dataclass(slots=True)
class Seen:
    """What a training set holds, to say of a test item what of it is new: a check that nothing leaked.

        seen = Seen.of(training_items)
        seen.novelty(item)        # e.g. frozenset({"chain", "names"})
    """

    chains: set[tuple[str, ...]] = field(default_factory=set)
    relations: set[str] = field(default_factory=set)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    templates: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    names: set[tuple[str, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, items: Iterable[Item]) -> Seen:
        """What a set of items holds."""
        seen = cls()
        for item in items:
            chain = item.chain_relations
            seen.chains.add(chain)
            seen.relations.update(chain)
            seen.pairs.update(pairwise(chain))
            seen.templates.add(item.template)
            seen.forms.add(item.form)
            seen.lengths.add(item.hops)
            seen.names.add(item.chain_people[:2])
        return seen

    def novelty(self, item: Item) -> frozenset[str]:
        """Which of chain, relation, pair (two neighbouring relations), template, form, length, names are new.

        "names": the two people that the chain starts with never stood there together.
        """
        chain = item.chain_relations
        new = {
            "chain": chain not in self.chains,
            "relation": not self.relations.issuperset(chain),
            "pair": not self.pairs.issuperset(pairwise(chain)),
            "template": item.template not in self.templates,
            "form": item.form not in self.forms,
            "length": item.hops not in self.lengths,
            "names": item.chain_people[:2] not in self.names,
        }
        return frozenset(name for name, is_new in new.items() if is_new)


def novelty_counts(items: Iterable[Item], training: Iterable[Item]) -> list[dict[str, Any]]:
    """How many items are new against a training set, by task and hops.

    Items are compared with training items of their own task, on what they say of their chain; items that do
    not state one (your own data) are left out.

    Returns:
        Rows with task, hops, items, new (a dict from each word of `Seen.novelty` to the number of items of
        which that is new) and nothing_new (the number of items of which all of it was seen).
    """
    trained: dict[str, list[Item]] = {}
    for item in training:
        if item.chain_relations:
            trained.setdefault(item.task, []).append(item)
    seen = {task: Seen.of(own) for task, own in trained.items()}
    found: dict[tuple[str, int], list[frozenset[str]]] = {}
    for item in items:
        if item.chain_relations:
            new = seen.get(item.task, Seen()).novelty(item)
            found.setdefault((item.task, item.hops), []).append(new)
    return [
        {
            "task": task,
            "hops": hops,
            "items": len(news),
            "new": {way: sum(way in new for new in news) for way in NOVELTIES},
            "nothing_new": sum(not new for new in news),
        }
        for (task, hops), news in sorted(found.items())
    ]
