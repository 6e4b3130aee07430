"""Training and testing a tuned lens on a named corpus, as `depthprobe lens` does.

    lens = train_lens(model, "pydoc", steps=100)
    table = evaluate_lens(model, lens, "pydoc")       # one row a depth: KL of both lenses, with intervals
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import torch

from depthprobe.analysis.bootstrap import by_cluster, ratio_draws, within
from depthprobe.depth import DepthModel
from depthprobe.errors import UserError
from depthprobe.lens.corpus import Corpus, Split, TokenRow, open_corpus, token_rows
from depthprobe.lens.tuned import TunedLens
from depthprobe.lens.tuned_kl import divergences
from depthprobe.lens.tuned_train import Recipe, train_tuned
from depthprobe.pipeline.config import OWN_DEFAULTS, OWN_LENGTHS

#: A KL of so few nats is rounding: such a depth says what the model says.
EXACT = 1e-5

__all__ = ["EXACT", "corpus_of", "evaluate_lens", "train_lens"]


def corpus_of(model: DepthModel, data: str) -> Corpus:
    """A corpus by name; "stories" of an embedded model are those that it was trained on, told as they were told."""
    own = OWN_DEFAULTS.get(model.name, {})
    if not own:
        return open_corpus(data)
    tasks = own["task"]
    longest = OWN_LENGTHS.get((model.name, tasks[0]), 6)
    return open_corpus(data, order=own.get("order"), tasks=tasks, longest=longest)


def train_lens(
    model: DepthModel,
    data: str,
    recipe: Recipe | None = None,
    *,
    length: int = 128,
    progress: Callable[[int, int, float], None] | None = None,
) -> TunedLens:
    """A tuned lens from the training documents of a corpus.

    Args:
        length: tokens of a row, at most.
        progress: as `train_tuned` takes it.

    Raises:
        UserError: as `open_corpus`, `token_rows` and `train_tuned`; a corpus without training documents.
    """
    recipe = recipe or Recipe()
    corpus = corpus_of(model, data)
    rows = (row.ids for row in _rows(model, corpus, "train", length))
    about = {"data": corpus.name, "license": corpus.license, "split": "train", "length": length}
    return train_tuned(model, rows, recipe, about=about, progress=progress)


def evaluate_lens(
    model: DepthModel,
    lens: TunedLens,
    data: str,
    *,
    split: Split = "heldout",
    tokens: int = 4096,
    length: int = 128,
    reads: int = 32,
    seed: int = 0,
    resamples: int = 2000,
    progress: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """KL from the model's final output to each depth's readout by the logit lens and by the tuned lens.

    Args:
        split: of the corpus: "heldout", or "all" for a text that has nothing to do with the training.
        tokens: positions to read, about so many.
        length: tokens of a row, at most.
        reads: positions of a row, drawn at random, at most.
        seed: of the positions and of the bootstrap.
        resamples: bootstrap draws; the unit that is drawn is a group of documents (a topic, a file, a story).
        progress: called with positions read and asked for.

    Returns:
        One row a depth: depth, loop, layer, site; logit, tuned and difference (tuned − logit), nats a position, each
        with _low and _high (95 %; null from few groups); below: whether tuned is below; exact: whether the logit lens
        already says what the model says (KL ≤ `EXACT`), so that nothing can be below; positions, groups.

    Raises:
        UserError: as `open_corpus` and `token_rows`; a corpus without such documents; states that are not numbers.
    """
    corpus = corpus_of(model, data)
    draw = torch.Generator().manual_seed(seed)
    groups: dict[str, int] = {}
    owners: list[int] = []
    found: list[np.ndarray[Any, Any]] = []
    count = 0
    rows = _rows(model, corpus, split, length)
    while count < tokens and (batch := list(islice(rows, 8))):
        values, of_row = divergences(model, lens, [row.ids for row in batch], reads, draw)  # [2, N, D], [N]
        found.append(values)
        owners += [groups.setdefault(batch[number].group, len(groups)) for number in of_row]
        count += values.shape[1]
        if progress is not None:
            progress(min(count, tokens), tokens)
    if not found:
        raise UserError("there is no held-out text", where=data, remedy="give more: one document in five is held out")
    return _table(model, np.concatenate(found, axis=1), np.array(owners), seed, resamples)


def _rows(model: DepthModel, corpus: Corpus, split: Split, length: int) -> Iterator[TokenRow]:
    limit = model.context_length
    return token_rows(model, corpus.documents(split), length if limit is None else min(length, limit))


def _table(
    model: DepthModel, values: np.ndarray[Any, Any], clusters: np.ndarray[Any, Any], seed: int, resamples: int
) -> pl.DataFrame:
    """values: [2, N, D], KL of the logit and of the tuned lens; clusters: int [N]."""
    three = np.stack([values[0], values[1], values[1] - values[0]], axis=1)  # [N, 3, D]
    sizes = by_cluster(np.ones(len(clusters)), clusters)
    draws = ratio_draws(by_cluster(three, clusters), resamples=resamples, seed=seed)
    sized = ratio_draws(sizes, resamples=resamples, seed=seed)
    low, high = within(draws / sized[:, None, None], len(sizes))
    mean = three.mean(axis=0)
    columns: dict[str, Any] = {
        "depth": range(len(model.axis)),
        "loop": [c.loop for c in model.axis],
        "layer": [c.layer for c in model.axis],
        "site": [c.site for c in model.axis],
    }
    for number, name in enumerate(("logit", "tuned", "difference")):
        columns |= {name: mean[number], f"{name}_low": low[number], f"{name}_high": high[number]}
    exact = mean[0] <= EXACT
    columns |= {"below": (mean[1] < mean[0]) & ~exact, "exact": exact}
    columns |= {"positions": [len(clusters)] * len(exact), "groups": [len(sizes)] * len(exact)}
    return pl.DataFrame(columns).with_columns(pl.selectors.float().fill_nan(None))
