"""`effective_depth`: the table `effective` for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import polars as pl

from depthprobe.depth import DepthModel
from depthprobe.depth.arguments import flag, memory, whole
from depthprobe.depth.resume import MAX_BYTES
from depthprobe.effective.table import effective_rows, spared_of
from depthprobe.errors import UserError
from depthprobe.lens.table import items_of, prepare_items
from depthprobe.tasks.items import Item

#: A smaller KL (nats) than its text shows is not told as something that the output rests on.
LEAST_SHOWN = 0.005


@dataclass(frozen=True, slots=True, repr=False)
class EffectiveDepth:
    """What each layer and loop of a model adds, and what is lost without it.

    Attributes:
        model_name: whose.
        frame: the table `effective`, one row an item and part; `analysis.effective_by_hops` takes it.
        too_long: ids of the items that were left out because they do not fit the context.
        spared: tokens at the front of each prompt that were never skipped.
    """

    model_name: str
    frame: pl.DataFrame
    too_long: tuple[str, ...] = ()
    spared: int = 0

    def profile(self, task: str | None = None) -> pl.DataFrame:
        """Means over items, one line a part, in order: depth, loop, layer, site and the measures of `frame`."""
        rows = self.frame if task is None else self.frame.filter(pl.col("task") == task)
        keys = ["depth", "loop", "layer", "site"]
        measures = rows.columns[rows.columns.index("contribution") :]
        means = rows.group_by(keys).agg(pl.col(measures).cast(pl.Float64).mean())
        return means.sort("depth", pl.col("site") == "loop")

    def __repr__(self) -> str:
        layers = self.profile().filter(pl.col("site") != "loop")
        loops = self.profile().height - layers.height
        most = layers.sort("skip_kl", descending=True).row(0, named=True)
        n_items = self.frame["item"].n_unique()
        parts = f"{layers.height} layers" + (f" and {loops} loops" if loops else "")
        said = (
            f"the output rests most on loop {most['loop']} layer {most['layer']}, KL {most['skip_kl']:.2f} without it"
            if most["skip_kl"] >= LEAST_SHOWN
            else f"without any one layer the output is the same (KL below {LEAST_SHOWN})"
        )
        spared = f" ({self.spared} spared at the front)" if self.spared else ""
        return f"EffectiveDepth({self.model_name}: {n_items} items × {parts}; {said}{spared}; .frame, .profile())"

    def _repr_html_(self) -> str:
        return f"<div><b>{escape(repr(self))}</b></div>{self.profile()._repr_html_()}"


def effective_depth(
    model: DepthModel,
    items: Sequence[Item] | Item,
    *,
    batch_size: int = 8,
    spared: int | None = None,
    skip_too_long: bool = False,
    bos: str = "tokenizer",
    chat: bool = False,
    max_bytes: int = MAX_BYTES,
) -> EffectiveDepth:
    """Contributions, skips and lens of every layer and loop (Csordás, Manning and Potts 2025, 2505.13898).

    Args:
        model: opened by `depthprobe.load`.
        items: questions of `depthprobe.tasks`.
        batch_size: prompts whose lens is read together; skips are batched within an item.
        spared: so many tokens at the front that are never skipped; None: one, or none in a model with loops; why,
            `spared_of` says.
        skip_too_long, bos, chat: as `lens.prepare_items` takes them.
        max_bytes: memory for the changed forwards, beyond the model; one runs at a time where no more fit. The states
            that they start from are read in pieces of at most a quarter of it (one part at a time where no more fit).

    Raises:
        UserError: items that do not fit the model or each other; a model whose states cannot be changed; NaN.
    """
    if not isinstance(model, DepthModel):
        remedy = "open it with depthprobe.load or depthprobe.wrap"
        raise UserError(f"a {type(model).__name__} has no depth axis", remedy=remedy)
    listed = items_of(items)
    batch_size = whole(batch_size, "batch_size", 1)
    spared = None if spared is None else whole(spared, "spared", 0)
    skip_too_long, chat = flag(skip_too_long, "skip_too_long"), flag(chat, "chat")
    max_bytes = memory(max_bytes)
    prepared = prepare_items(model, listed, skip_too_long=skip_too_long, bos=bos, chat=chat)
    spared = spared_of(model, prepared.targets, spared)
    batches = effective_rows(model, prepared.targets, batch_size, spared=spared, max_bytes=max_bytes)
    return EffectiveDepth(model.name, pl.concat([rows for _, rows in batches]), prepared.too_long, spared)
