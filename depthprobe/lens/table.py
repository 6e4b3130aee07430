"""Items → the tables `items` and `lens`.

    prepared = prepare_items(model, items)
    for number, rows in lens_rows(model, prepared.targets, batch_size=32):
        ...                                   # a polars frame with the columns of tables.SCHEMAS["lens"]

A batch's rows depend on the model and on the batch alone, so a run that was killed computes the batches it
lacks and ends with the same table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from depthprobe import tables
from depthprobe.depth import DepthModel
from depthprobe.errors import UserError
from depthprobe.lens.coda import coda_places, coda_reads
from depthprobe.lens.gate import gate_columns
from depthprobe.lens.reads import run_batch
from depthprobe.lens.scores import Scores, log_targets, score
from depthprobe.lens.targets import Target, resolve
from depthprobe.lens.tuned import TunedLens
from depthprobe.lens.words import Words
from depthprobe.tasks.intervals import cluster_of
from depthprobe.tasks.items import Item


@dataclass(frozen=True, slots=True)
class Prepared:
    """Items made ready for one model.

    Attributes:
        targets: what `lens_rows` reads, in the order of the items.
        table: the table `items`, one row a target.
        too_long: ids of the items that were left out because they do not fit the context.
    """

    targets: tuple[Target, ...]
    table: pl.DataFrame
    too_long: tuple[str, ...]


def prepare_items(
    model: DepthModel, items: Sequence[Item], *, skip_too_long: bool = False, bos: str = "tokenizer", chat: bool = False
) -> Prepared:
    """Resolve the targets of items under the model's tokenizer.

    Args:
        skip_too_long: leave out what exceeds the context.
        bos, chat: as `targets.resolve` takes them.

    Raises:
        UserError: no items; two items of one id; a question or answer that the tokenizer cannot express; an
            item longer than the context (unless `skip_too_long`); nothing left after skipping.
    """
    if not items:
        raise UserError("there are no items", remedy="ask for at least one story")
    distinct(items)
    targets: list[Target] = []
    too_long: list[str] = []
    limit = model.context_length
    for target in resolve(model.tokenizer, items, bos=bos, chat=chat):
        if limit is None or target.n_positions <= limit:
            targets.append(target)
        elif skip_too_long:
            too_long.append(target.item.id)
        else:
            remedy = "shorten the story or pass --skip-too-long"
            check_context(model, target.n_positions, f"item {target.item.id}", remedy)
    if not targets:
        what = f"all {len(too_long)} items exceed the context of {model.name}, {limit} tokens"
        raise UserError(what, remedy="give shorter stories")
    return Prepared(tuple(targets), _items_table(targets), tuple(too_long))


def check_context(model: DepthModel, tokens: int, where: str, remedy: str = "shorten the story") -> None:
    """Raises UserError for more tokens than the model was made for; `where`: whose they are."""
    limit = model.context_length
    if limit is not None and tokens > limit:
        what = f"its {tokens} tokens exceed the context of {model.name}, {limit} tokens"
        raise UserError(what, where=where, remedy=remedy)


def items_of(given: Any) -> list[Item]:
    """One item or several, as a list. Raises UserError for none, for what is no item, or for two of one id."""
    remedy = "give those of depthprobe.tasks"
    if given is None or isinstance(given, str | Mapping) or not isinstance(given, Item | Iterable):
        what = "there are no items" if given is None else f"a {type(given).__name__} is no item"
        raise UserError(what, remedy=remedy)
    listed = [given] if isinstance(given, Item) else list(given)
    if not listed:
        raise UserError("there are no items", remedy="give at least one")
    distinct(listed)
    return listed


def distinct(items: Sequence[Any]) -> None:
    """Raises UserError for something that is no item, or for two items of one id."""
    seen: dict[str, Item] = {}
    for item in items:
        if not isinstance(item, Item):
            what = f"a {type(item).__name__} is no item"
            raise UserError(what, remedy="give those of depthprobe.tasks")
        if item.id in seen:
            remedy = "it is the same item: give it once" if item == seen[item.id] else "give each its own id"
            raise UserError(f"two items have the id '{item.id}'", remedy=remedy)
        seen[item.id] = item


def n_batches(n_targets: int, batch_size: int) -> int:
    """How many batches `lens_rows` makes."""
    return -(-n_targets // batch_size)


def lens_rows(
    model: DepthModel,
    targets: Sequence[Target],
    batch_size: int = 32,
    *,
    done: Collection[int] = (),
    tuned: TunedLens | None = None,
    coda: bool = False,
) -> Iterator[tuple[int, pl.DataFrame]]:
    """(number of the batch, its lens rows) for every batch that is not in `done`; lenses as in `lens_batch`."""
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} is not positive", remedy="give at least 1")
    for number in range(n_batches(len(targets), batch_size)):
        if number not in done:
            yield number, lens_batch(model, targets[number * batch_size : (number + 1) * batch_size], tuned, coda)


@torch.inference_mode()
def lens_batch(
    model: DepthModel, targets: Sequence[Target], tuned: TunedLens | None = None, coda: bool = False
) -> pl.DataFrame:
    """The lens rows of one batch: items in order, and for each the depths in order.

    Args:
        tuned: a tuned lens that was checked against the model (`as_lens`); None: the plain lens.
        coda: read the end of each loop behind the coda, all tokens stopped there (`lens.coda`).

    Raises:
        UserError: NaN logits or lens (names the item), the readout identity fails, or `coda` of a model without one.
    """
    reads = run_batch(model, targets)
    if tuned is not None:  # the last depth stays the model's own, whose readout was compared with its logits
        last = model.axis[-1]
        reads = replace(reads, root=tuned.capture(reads.root, last), states=tuned.translated(reads.states, last))
    if coda:
        reads = coda_reads(model, targets, reads)
    places = coda_places(model) if coda else {}
    names = ["coda" if c in places else "plain" if tuned is None else "tuned" for c in model.axis]
    return _lens_table(model, targets, score(model, targets, reads, places), reads.root.gate_lambda, names)


def _lens_table(
    model: DepthModel,
    targets: Sequence[Target],
    scores: Scores,
    gate_lambda: Tensor | None,
    lenses: Sequence[str],
) -> pl.DataFrame:
    """Columns of [items × depths], items outermost."""
    n_items, n_depths = len(targets), len(model.axis)

    def said(values: Tensor | None) -> np.ndarray[Any, Any]:
        """[items · depths, …]"""
        assert values is not None
        return values.flatten(0, 1).cpu().numpy()

    def among(name: str) -> np.ndarray[Any, Any]:
        """[items · depths] of a score over the candidates."""
        return torch.stack([getattr(of_depth, name) for of_depth in scores.candidates], dim=1).cpu().numpy().ravel()

    def by_item(values: Sequence[object]) -> list[object]:
        return [value for value in values for _ in range(n_depths)]

    def by_depth(values: Sequence[object]) -> list[object]:
        return list(values) * n_items

    found = scores.said
    top_ids = found.top_ids.cpu().numpy()  # [items, depths, 5]
    words = Words(model.tokenizer)
    top_words = [[words(token) for token in row] for row in top_ids.reshape(-1, top_ids.shape[-1]).tolist()]
    logprob = said(log_targets(found)[..., 0])
    last = [depth == n_depths - 1 for depth in range(n_depths)]
    gate_l, gate_c = gate_columns(gate_lambda, model.loop_ends, model.axis, np.arange(n_items))
    columns: dict[str, Any] = {
        "item": by_item([target.item.id for target in targets]),
        "story": by_item([target.item.story_id for target in targets]),
        "cluster": by_item([cluster_of(target.item) for target in targets]),
        "task": by_item([target.item.task for target in targets]),
        "hops": by_item([target.item.hops for target in targets]),
        "depth": by_depth(range(n_depths)),
        "loop": by_depth([c.loop for c in model.axis]),
        "layer": by_depth([c.layer for c in model.axis]),
        "site": by_depth([c.site for c in model.axis]),
        "lens": by_depth(lenses),
        "target_logit": said(found.target_logit)[:, 0],
        "target_logprob": logprob,
        "target_prob": np.exp(logprob),
        "target_rank": said(found.target_rank)[:, 0],
        "p_plausible": among("p_plausible"),
        "p_candidates": among("p_candidates"),
        "candidate_prob": among("candidate_prob"),
        "candidate_correct": among("correct"),
        "candidate_plausible": among("plausible"),
        "answer_logprob": [value if end else None for value in scores.answers for end in last],
        "top1_id": top_ids[..., 0].ravel(),
        "top1": [row[0] for row in top_words],
        "equals_final": (top_ids[..., 0] == top_ids[:, -1:, 0]).ravel(),
        "entropy": said(found.entropy),
        "kl_final": said(found.kl_final),
        "top5": top_words,
        "top5_probs": said(found.top_logprobs.exp()).tolist(),
        "is_loop_end": by_depth([c in model.loop_ends for c in model.axis]),
        "gate_lambda": gate_l,
        "gate_cdf": gate_c,
    }
    return tables.conform("lens", columns)


def _items_table(targets: Sequence[Target]) -> pl.DataFrame:
    return tables.conform("items", [_item_row(target) for target in targets])


def _item_row(target: Target) -> dict[str, object]:
    item = target.item
    facts = [
        {
            "subject": fact.subject,
            "relation": fact.relation,
            "object": fact.object,
            "role": fact.role,
            "hop": fact.hop,
            "start": fact.span.start,
            "end": fact.span.end,
        }
        for fact in item.facts
    ]
    return {
        "item": item.id,
        "story": item.story_id,
        "cluster": cluster_of(item),
        "task": item.task,
        "hops": item.hops,
        "split": item.split,
        "form": item.form,
        "template": item.template,
        "order": item.order,
        "distractors": item.distractors,
        "question": item.question,
        "answer": item.answer,
        "plausible": list(item.plausible),
        "candidates": list(item.candidates),
        "chance": 1.0 / len(dict.fromkeys(item.candidates)),
        "chain_relations": list(item.chain_relations),
        "text": item.text,
        "facts": facts,
        "n_tokens": len(target.prompt_ids),
        "bos": target.bos,
        "text_start": target.text_start,
        "prompt_ids": list(target.prompt_ids),
        "answer_ids": list(target.answer_ids),
        "n_collisions": target.n_collisions,
        "first_token_only": target.first_token_only,
        "seed": item.seed,
    }

