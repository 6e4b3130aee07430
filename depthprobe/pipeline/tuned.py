"""Training and testing a tuned lens on a named corpus, as `depthprobe lens` does.

    lens = train_lens(model, "pydoc", steps=100)
    table = evaluate_lens(model, lens, "pydoc")       # one row a depth: KL of both lenses, with intervals
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import torch

from depthprobe.analysis.bootstrap import by_cluster, ratio_draws, within
from depthprobe.depth import DepthModel
from depthprobe.errors import UserError
from depthprobe.lens.corpus import Corpus, Document, Split, open_corpus, token_rows
from depthprobe.lens.tuned import TunedLens
from depthprobe.lens.tuned_kl import divergences
from depthprobe.lens.tuned_train import Recipe, train_tuned
from depthprobe.pipeline.config import OWN_DEFAULTS, OWN_LENGTHS

#: A KL of so few nats is rounding: such a depth says what the model says.
EXACT = 1e-5
#: Tokens of a row, or as many as the model's context has.
LENGTH = 128
#: What a lens says of the documents that it was trained on, and the bytes by which one is known again.
DOCUMENTS, _KNOWN = "documents", 8

__all__ = ["DOCUMENTS", "EXACT", "LENGTH", "corpus_of", "evaluate_lens", "train_lens"]


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
    length: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> TunedLens:
    """A tuned lens from the training documents of a corpus. It carries a mark of each of them, so that an evaluation
    knows them again, whatever they are called there.

    Args:
        length: tokens of a row, at most; None: `LENGTH`, or the model's context if that is shorter.
        progress: as `train_tuned` takes it.

    Raises:
        UserError: as `open_corpus`, `token_rows` and `train_tuned`; a corpus without training documents.
    """
    recipe = recipe or Recipe()
    corpus = corpus_of(model, data)
    length, seen = _length(model, length), set[bytes]()

    def documents() -> Iterator[Document]:
        for document in corpus.documents("train"):
            seen.add(_mark(document))
            yield document

    rows = (row.ids for row in token_rows(model, documents(), length))
    about = {"data": corpus.name, "license": corpus.license, "split": "train", "length": length}
    lens = train_tuned(model, rows, recipe, about=about, progress=progress)
    marks = base64.b64encode(b"".join(sorted(seen))).decode()
    return replace(lens, about={**lens.about, DOCUMENTS: marks})


def evaluate_lens(
    model: DepthModel,
    lens: TunedLens,
    data: str,
    *,
    split: Split = "heldout",
    tokens: int = 4096,
    length: int | None = None,
    reads: int = 32,
    seed: int = 0,
    resamples: int = 2000,
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[str], None] | None = None,
) -> pl.DataFrame:
    """KL from the model's final output to each depth's readout by the logit lens and by the tuned lens.

    Args:
        split: of the corpus: "heldout", or "all" for a text that has nothing to do with the training.
        tokens: positions to read, about so many.
        length: tokens of a row, at most; None: as in `train_lens`.
        reads: positions of a row, drawn at random, at most.
        seed: of the positions and of the bootstrap.
        resamples: bootstrap draws; the unit that is drawn is a group of documents (a topic, a file, a story).
        progress: called with positions read and asked for.
        remark: called with a line about documents that are left out because the lens was trained on them.

    Returns:
        One row a depth: depth, loop, layer, site; logit, tuned and difference (tuned − logit), nats a position, each
        with _low and _high (95 %; null from few groups); below: whether tuned is below; exact: whether the logit lens
        already says what the model says (KL ≤ `EXACT`), so that nothing can be below; positions, groups.

    Raises:
        UserError: as `open_corpus` and `token_rows`; a corpus without such documents; with split "all" one that has a
            document of the training; states that are not numbers.
    """
    corpus = corpus_of(model, data)
    draw = torch.Generator().manual_seed(seed)
    groups: dict[str, int] = {}
    owners: list[int] = []
    found: list[np.ndarray[Any, Any]] = []
    count = 0
    marks, dropped = _marks(lens.about), set[bytes]()

    def documents() -> Iterator[Document]:
        for document in corpus.documents(split):
            if (mark := _mark(document)) not in marks:
                yield document
            elif split == "all":
                remedy = "leave out --all: the documents that were held out are read then"
                raise UserError("the lens was trained on this text", where=data, remedy=remedy)
            else:
                dropped.add(mark)

    rows = token_rows(model, documents(), _length(model, length))
    while count < tokens and (batch := list(islice(rows, 8))):
        values, of_row = divergences(model, lens, [row.ids for row in batch], reads, draw)  # [2, N, D], [N]
        found.append(values)
        owners += [groups.setdefault(batch[number].group, len(groups)) for number in of_row]
        count += values.shape[1]
        if progress is not None:
            progress(min(count, tokens), tokens)
    if dropped and not found:
        raise UserError("the lens was trained on all of this text", where=data, remedy="give another text")
    if dropped and remark is not None:
        remark(f"{len(dropped)} documents of {data} are left out: the lens was trained on them")
    if not found:
        raise UserError("there is no held-out text", where=data, remedy="give more: one document in five is held out")
    return _table(model, np.concatenate(found, axis=1), np.array(owners), seed, resamples)


def _length(model: DepthModel, asked: int | None) -> int:
    """Only what nobody asked for is cut to the context; `token_rows` refuses the rest."""
    limit = model.context_length
    return asked if asked is not None else LENGTH if limit is None else min(LENGTH, limit)


def _mark(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()[:_KNOWN]


def _marks(about: Mapping[str, Any]) -> frozenset[bytes]:
    """Of the documents that a lens was trained on; none of a lens that was trained on rows of one's own."""
    try:
        packed = base64.b64decode(about.get(DOCUMENTS, ""), validate=True)
    except (TypeError, ValueError):
        what = "what the tuned lens says of its documents cannot be read"
        raise UserError(what, remedy="train it again with `depthprobe lens train`") from None
    return frozenset(packed[at : at + _KNOWN] for at in range(0, len(packed), _KNOWN))


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
