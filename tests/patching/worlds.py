"""Tiny random models with stories that their tokenizers know."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tiny_models import byte_tokenizer, depth_model, word_tokenizer
from transformers import PreTrainedTokenizerFast

from depthprobe.depth.tapped import TappedModel
from depthprobe.lens.targets import Target, resolve
from depthprobe.patching import Subject, subjects
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """ "word" or "byte": one token a word, or several."""
    items = [item for task in ("kinship", "follow") for item in Generator(task, seed=5).items(60)]
    texts = [f"{item.text} {word}" for item in items for word in item.candidates]
    return word_tokenizer(texts) if kind == "word" else byte_tokenizer([item.text for item in items], 400)


def items(task: str = "kinship", n: int = 2, hops: Sequence[int] = (1, 2), seed: int = 3) -> list[Item]:
    return list(Generator(task, hops=tuple(hops), seed=seed).items(n))


@cache
def opened(kind: str, words: str = "word") -> TappedModel:
    model = depth_model(kind, tokenizer(words))
    assert isinstance(model, TappedModel)
    return model


def targets(model: TappedModel, asked: Sequence[Item]) -> list[Target]:
    return list(resolve(model.tokenizer, asked))


def subject(model: TappedModel, item: Item, **options: object) -> Subject:
    return subjects(model.tokenizer, targets(model, [item]), **options).found[0]  # type: ignore[arg-type]


def with_donor(model: TappedModel, task: str, hops: int = 2, control: bool = False) -> Item:
    """The first item of a task that has a real donor under the model's tokenizer (and a control)."""
    for item in items(task, n=40, hops=(hops,)):
        found = subjects(model.tokenizer, targets(model, [item, *items(n=1)])).found
        if found[0].item.id == item.id and (len(found[0].pairs) > 1 or not control):
            return item
    raise AssertionError("no item has a donor")
