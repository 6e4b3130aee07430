"""The questions of a run, and the baselines that stand beside the model's answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from depthprobe.errors import UserError
from depthprobe.pipeline.config import OWN_LENGTHS, AnalyzeConfig
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.io import read_data
from depthprobe.tasks.items import Item
from depthprobe.tasks.shortcuts import default_shortcuts
from depthprobe.tasks.solver import wrong_answers

__all__ = ["digest", "questions", "shortcut_rows"]

#: Stories that the baselines which learn are fitted on: with more the strongest gain a point at most.
TRAINING_STORIES = 1200


def questions(config: AnalyzeConfig, *, remark: Callable[[str], None] | None = None) -> list[Item]:
    """Items in a fixed order: story by story, and within one by hops.

    Args:
        remark: is called with a line for each row of a data file that is left out, and where stories are longer than
            those that an embedded model was trained on.

    Raises:
        UserError: a setting that no story can meet, or a data file that is missing, malformed or has no such
            items, or an item whose facts give another answer than its own.
    """
    if config.data is None:
        return [
            item
            for task in config.task
            for item in _generator(config, task, remark).items(config.n or 1)
            if item.hops in config.hops
        ]
    items = read_data(config.data, remark=remark)
    if wrong := list(wrong_answers(items).values()):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        remedy = f"`depthprobe tasks check {config.data}` names every such item"
        raise UserError(wrong[0] + more, where=config.data, remedy=remedy)
    if config.hops:
        kept = [item for item in items if item.hops in config.hops]
        if not kept:
            there = ", ".join(map(str, sorted({item.hops for item in items})))
            raise UserError("no item has the hops asked for", where=config.data, remedy=f"it has {there}")
        items = kept
    if config.n is not None:
        stories = list(dict.fromkeys((item.task, item.story_id) for item in items))[: config.n]
        chosen = set(stories)
        items = [item for item in items if (item.task, item.story_id) in chosen]
    return items


def _generator(config: AnalyzeConfig, task: str, remark: Callable[[str], None] | None) -> Generator:
    hops = config.hops
    if length := OWN_LENGTHS.get((config.model, task)):
        if max(hops) > length and remark is not None:
            remark(f"{config.model} has seen stories of {length} facts, and is asked in stories of {max(hops)}")
        hops = tuple(range(1, max(length, *hops) + 1))
    split = None if config.split == "any" else config.split
    settings: dict[str, Any] = {
        "orders": config.order,
        "distractors": config.distractors,
        "fact_template": config.template,
        "form": config.form,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return Generator(task, hops=hops, split=split, seed=config.seed, **given)


def digest(items: Sequence[Item]) -> str:
    """SHA-256 (hex) of all items: another data file of the same name is another run."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps(item.to_dict(), sort_keys=True, ensure_ascii=False).encode())
    return total.hexdigest()


def shortcut_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Rows of the `shortcuts` table: baselines that do not follow the chain, on these items."""
    return default_shortcuts(items, n_stories=TRAINING_STORIES)
