"""What can be asked of a model beside the lens: one entry a probe, each with its tables, in parts.

    work = PROBES["patching"].prepare(model, prepared, config, max_bytes, remark)
    for number, frames in work.rows(done): ...      # the tables of one part, all of them
    work.cost(number)                               # what a part takes, for --dry-run

A part's rows depend on the model, the configuration and the whole set of items, not on what ran before: a run that was
killed computes the parts that it lacks and ends with the same tables. (Under another --max-memory batches are split
elsewhere, and float32 rounds otherwise: the tables then agree to some 1e-5.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from depthprobe.pipeline.config import AnalyzeConfig

if TYPE_CHECKING:
    from depthprobe.depth import DepthModel
    from depthprobe.lens import Prepared

__all__ = ["PROBES", "Cost", "Probe", "Work"]

#: (what is left out) → nothing.
Remark = Callable[[str], None]


class Cost(NamedTuple):
    """What a part takes: changed forwards, floating-point operations, bytes beyond the model."""

    cells: int
    flops: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """A prepared probe.

    Attributes:
        n_parts: parts, one item each.
        rows: numbers of the parts that are there → (number, table → its rows) of the others, in order.
        cost: number of a part → what it takes.
        counts: for the manifest.
    """

    n_parts: int
    rows: Callable[[Collection[int]], Iterator[tuple[int, Mapping[str, pl.DataFrame]]]]
    cost: Callable[[int], Cost]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Probe:
    """Attributes:
    tables: what it writes.
    prepare: (model, prepared items, configuration, bytes allowed, remark) → `Work`.
    """

    tables: tuple[str, ...]
    prepare: Callable[[DepthModel, Prepared, AnalyzeConfig, int, Remark], Work]


def _patching(model: DepthModel, prepared: Prepared, config: AnalyzeConfig, max_bytes: int, remark: Remark) -> Work:
    from depthprobe import patching

    work = patching.prepare_patching(
        model, prepared.targets, n_stories=config.probe_items, sites=config.sites,
        by_token=config.patch_tokens, max_bytes=max_bytes, seed=config.seed, bos=config.bos, chat=config.chat,
        remark=remark,
    )  # fmt: skip

    def cost(number: int) -> Cost:
        found = patching.part_cost(work, number)
        return Cost(found.cells, found.flops, found.bytes)

    counts: dict[str, Any] = patching.describe(work)
    return Work(work.n_parts, lambda done: patching.patching_rows(work, done=done), cost, counts)


def _effective(model: DepthModel, prepared: Prepared, config: AnalyzeConfig, max_bytes: int, remark: Remark) -> Work:
    from depthprobe import effective
    from depthprobe.patching.table import first_stories, tapped_model

    opened = tapped_model(model)
    targets = first_stories(prepared.targets, config.probe_items)
    spared = effective.spared_of(model, targets, config.spare_first)
    if spared:
        first = "token is" if spared == 1 else f"{spared} tokens are"
        remark(f"the first {first} never skipped; --spare-first 0 skips layers at all tokens")

    def cost(number: int) -> Cost:
        found = effective.part_cost(opened, targets[number], spared=spared, max_bytes=max_bytes)
        return Cost(found.cells, found.flops, found.bytes)

    def rows(done: Collection[int]) -> Iterator[tuple[int, Mapping[str, pl.DataFrame]]]:
        for number, found in effective.effective_rows(model, targets, 1, done=done, spared=spared, max_bytes=max_bytes):
            yield number, {"effective": found}

    return Work(len(targets), rows, cost, {"effective_items": len(targets), "spared_first": spared})


#: Name, as --probes takes it → probe. The lens is no entry: everything else stands beside it.
PROBES: dict[str, Probe] = {
    "patching": Probe(("donors", "patching", "knockout"), _patching),
    "effective": Probe(("effective",), _effective),
}
