"""Where a served token left, beside where its readout settles: the difference as a sum of causes, in whole loops.

    table = agreement_table(replayed, requests, ExitFacts("q:0.5", n_loops=8), epsilon_of("float32"))
    agreement_by_hops_table(table)

For every token, e being the loop at which it left,

    e − s_full = (g_full − s_full)       gate            the rule by itself, under full keys
               + (g_prompt − g_full)     cache_prompt    what keys of a prompt that left early change in that
               + (g_served − g_prompt)   cache_decode    what keys of decoded tokens that left early change
               + (predicted − g_served)  lookahead       the head's error
               + (delayed − predicted)   delay           a rule that looks ahead lets nobody leave at loop 1
               + (capped − delayed)      cap_floor       the least depth
               + (e − capped)            numerics        rounding: refused unless the rule's number was at its threshold

* s_full: the settling depth, the smallest loop from which on top-1 stays that of loop U, every key at full depth.
* g: the first loop at which the rule is met, least depths apart, U if none: under full keys, with the prompt's keys as
  served, with all keys as served.
* predicted: g_served, unless a head looks ahead: then 1 where the rule is met at loop 1, else the first loop at which
  the head says that it is.
* delayed: the first loop at which the rule as served lets it leave. A rule on states or outputs that "looks ahead" is
  only late by a loop, which is all delay.
* capped: the same at or above the least depth. For rules that once met stay met, min(U, max(delayed, least depth)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from depthprobe import tables
from depthprobe.analysis.bootstrap import mean_interval
from depthprobe.analysis.grid import with_clusters
from depthprobe.analysis.settling import first_true, stays_true
from depthprobe.errors import UserError

__all__ = [
    "MEASURES", "TERMS", "Epsilon", "ExitFacts", "agreement_by_hops_table", "agreement_table", "check_sum",
    "epsilon_of", "refuse_sampled",
]  # fmt: skip

#: The terms of the sum, in its order; each is a difference of neighbours in the chain from s_full to the exit.
TERMS = ("gate", "cache_prompt", "cache_decode", "lookahead", "delay", "cap_floor", "numerics")
_CHAIN = ("g_full", "g_prompt", "g_served", "predicted", "delayed", "capped")
#: What `agreement_by_hops` has besides them.
MEASURES = ("total", "s_full", "s_served", "exit", "changed")

_AGAIN = "serve the requests again, or replay them with the model and rule that served them"


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """What has to be known of a rule to read a replay: no rule is asked here.

    Fields:
        rule: its text.
        n_loops: U.
        horizon: loops between a decision and the exit.
        predicts: a head says what the rule will be met by (else a rule with a horizon is merely late).
        floor: no decoded token leaves before this loop.
        sampled, planned: as of `halting.ExitRule`.
        layout, prefill: how it was served; they name the rows.
    """

    rule: str
    n_loops: int
    horizon: int = 0
    predicts: bool = False
    floor: int = 1
    sampled: bool = False
    planned: bool = False
    layout: str = "ragged"
    prefill: str = "dense"


@dataclass(frozen=True, slots=True)
class Epsilon:
    """What counts as rounding.

    Fields:
        criterion: distance of a rule's number from its threshold, relative to it.
        margin: difference of the two largest logits.
    """

    criterion: float
    margin: float


#: Batches of another shape round differently; the record has seven digits.
_EPSILON = {
    "float64": Epsilon(1e-6, 1e-6), "float32": Epsilon(1e-4, 1e-3), "float16": Epsilon(1e-2, 0.05),
    "bfloat16": Epsilon(5e-2, 0.5),
}  # fmt: skip


def epsilon_of(dtype: str) -> Epsilon:
    """The default of a dtype, as torch names it without "torch."."""
    return _EPSILON.get(dtype, _EPSILON["bfloat16"])


def agreement_table(
    replayed: pl.DataFrame, requests: pl.DataFrame, facts: ExitFacts, epsilon: Epsilon
) -> pl.DataFrame:
    """The `agreement` table: one row for each served token.

    Args:
        replayed: the table of that name.
        requests: the table `served_requests`, for items, hops and clusters. A request without an item is a story and a
            cluster of its own.

    Raises:
        UserError: a sampled rule, by name; an exit that the rule does not explain, naming request and token.
    """
    refuse_sampled(facts)
    replayed = tables.check("replayed", replayed)
    if not replayed.height:
        return tables.empty("agreement")
    keys = {name: _Columns(part, facts.n_loops) for name, part in _by_kv(replayed).items()}
    full, served = keys["full"], keys["served"]
    prompt = keys.get("prompt", full)  # a dense prompt has full keys
    for other in (prompt, served):
        if not other.keys.equals(full.keys):
            raise UserError("the passes of the replay have different tokens", where="table replayed", remedy=_AGAIN)
    exits = served.keys["exit"].to_numpy().astype(np.int64)
    s_full, s_served = (stays_true(one.flags("equals_final")) + 1 for one in (full, served))
    left = exits - 1
    found: dict[str, np.ndarray] = {
        "s_full": s_full, "s_served": s_served,
        "top1_full": full.numbers("top1")[:, -1].astype(np.int64),
        "top1_served": _at(served.numbers("top1"), left).astype(np.int64),
        "margin": _at(served.numbers("margin"), left),
    }  # fmt: skip
    if not facts.planned:
        chain = _chain(full, prompt, served, facts)
        _explained(served, chain["capped"], facts, epsilon)
        steps = [s_full, *(chain[name] for name in _CHAIN), exits]
        found |= chain | {name: b - a for name, a, b in zip(TERMS, steps, steps[1:], strict=False)}
    table = full.keys.with_columns(
        *(pl.Series(name, values) for name, values in found.items()),
        rule=pl.lit(facts.rule),
        layout=pl.lit(facts.layout),
        prefill=pl.lit(facts.prefill),
        prompt_token=pl.col("index") == 0,
        changed=pl.Series(found["top1_full"]) != pl.col("token"),
    )
    missing = [pl.lit(None, pl.Int32).alias(name) for name in (*_CHAIN, *TERMS) if name not in found]
    named = table.with_columns(missing).join(_named(requests), on="request", how="left", maintain_order="left")
    return check_sum(tables.conform("agreement", named))


def refuse_sampled(facts: ExitFacts) -> None:
    """Raise `UserError` for a rule that draws its exits, by name."""
    if facts.sampled:
        what = "its exits are drawn, so there is no one loop at which it lets a token leave"
        raise UserError(what, where=f"exit rule {facts.rule}", remedy="agreement is for rules that decide")


def check_sum(agreement: pl.DataFrame) -> pl.DataFrame:
    """The same table, if the terms of every token add up to exit − s_full.

    Raises:
        UserError: naming the first request and token of which they do not.
    """
    told = agreement.filter(pl.col("gate").is_not_null())
    wrong = told.filter(pl.sum_horizontal(TERMS) != pl.col("exit") - pl.col("s_full"))
    if wrong.height:
        row = wrong.row(0, named=True)
        what = f"the terms add up to {sum(row[t] for t in TERMS)}, exit − settling is {row['exit'] - row['s_full']}"
        raise UserError(what, where=_where(row), remedy="run `depthprobe agree` again")
    return agreement


def agreement_by_hops_table(agreement: pl.DataFrame, *, seed: int = 0, resamples: int = 2000) -> pl.DataFrame:
    """The `agreement_by_hops` table: means over tokens of the terms and of `MEASURES`, by task and hops and over all.
    What was served in different ways stays apart.

    Intervals (95 %) draw clusters; terms that no rule decided are left out.
    """
    rows: list[dict[str, object]] = []
    numbers = agreement.with_columns(total=pl.col("exit") - pl.col("s_full"))
    ways = ["rule", "layout", "prefill", "task"]
    for way, of_task in numbers.partition_by(ways, as_dict=True, maintain_order=True).items():
        same = dict(zip(ways, way, strict=True))
        marked = _clustered(of_task)
        parts = marked.sort("hops").partition_by("hops", as_dict=True, maintain_order=True)
        cells = [(k, part, "cell") for (k,), part in parts.items() if k is not None]
        for hops, cell, drawn in (*cells, (None, marked, "whole")):
            clusters = np.unique(cell[drawn].to_numpy(), return_inverse=True)[1]
            size = {"n_tokens": cell.height, "n_items": cell["item"].n_unique(), "n_clusters": int(clusters.max()) + 1}
            for term in (*TERMS, *MEASURES):
                if cell[term].null_count():
                    continue
                values = cell[term].to_numpy().astype(np.float64)
                bounds = mean_interval(values, clusters, resamples=resamples, seed=seed)
                mean, low, high = (None if np.isnan(value) else float(value) for value in bounds)
                rows.append({**same, "hops": hops, "term": term, "mean": mean, "low": low, "high": high,
                             "nonzero": float((values != 0).mean()), **size})  # fmt: skip
    return tables.conform("agreement_by_hops", rows)


# -- inside ------------------------------------------------------------------------------------------------------------


class _Columns:
    """The rows of one kind of keys as arrays `[T, U]`, tokens in the order of the table."""

    def __init__(self, part: pl.DataFrame, n_loops: int) -> None:
        loops = part["loop"].to_numpy()
        if part.height % n_loops or (loops.reshape(-1, n_loops) != np.arange(1, n_loops + 1)).any():
            raise UserError(f"not every token has loops 1 to {n_loops}", where="table replayed", remedy=_AGAIN)
        self.part, self.n_loops = part, n_loops
        self.keys = part.filter(pl.col("loop") == 1).select("request", "index", "token", "exit")

    def numbers(self, name: str) -> np.ndarray:
        return self.part[name].cast(pl.Float64).fill_null(np.nan).to_numpy().reshape(-1, self.n_loops)

    def flags(self, name: str) -> np.ndarray:
        return self.part[name].fill_null(False).to_numpy().astype(bool).reshape(-1, self.n_loops)


def _by_kv(replayed: pl.DataFrame) -> Mapping[str, pl.DataFrame]:
    return {str(key[0]): part for key, part in replayed.partition_by("kv", as_dict=True, maintain_order=True).items()}


def _first(flags: np.ndarray) -> np.ndarray:
    """The first loop with a true flag, U if there is none: `[T, U]` → `[T]`."""
    return np.minimum(first_true(flags) + 1, flags.shape[1])


def _chain(full: _Columns, prompt: _Columns, served: _Columns, facts: ExitFacts) -> dict[str, np.ndarray]:
    own = {f"g_{name}": _first(one.flags("met")) for name, one in
           (("full", full), ("prompt", prompt), ("served", served))}  # fmt: skip
    lets = np.zeros_like(served.flags("marked"))  # [t, d − 1]: the rule as served lets token t leave after loop d
    lets[:, facts.horizon :] = served.flags("marked")[:, : facts.n_loops - facts.horizon]
    delayed = _first(lets)
    predicted = own["g_served"]
    if facts.predicts:
        predicted = np.where(served.flags("met")[:, 0], 1, delayed)
    lets[:, : facts.floor - 1] = False
    return own | {"predicted": predicted, "delayed": delayed, "capped": _first(lets)}


def _explained(served: _Columns, capped: np.ndarray, facts: ExitFacts, epsilon: Epsilon) -> None:
    """Refuse exits that differ from what the rule says, unless its number was at the threshold when they parted."""
    exits = served.keys["exit"].to_numpy()
    distance = served.numbers("asked_distance")
    for token in np.flatnonzero(exits != capped):
        parted = min(exits[token], capped[token]) - facts.horizon
        near = parted >= 1 and distance[token, parted - 1] < epsilon.criterion
        if not near or min(exits[token], capped[token]) < facts.floor:
            what = f"it left at loop {exits[token]}, and by {facts.rule} it leaves at {capped[token]}"
            raise UserError(what, where=_where(served.keys.row(int(token), named=True)), remedy=_AGAIN)


def _named(requests: pl.DataFrame) -> pl.DataFrame:
    return requests.select(
        "request", "task", "hops",
        item=pl.coalesce("item", "request"),
        story=pl.coalesce("story", "item", "request"),
        cluster=pl.coalesce("cluster", "story", "item", "request"),
    )  # fmt: skip


def _clustered(agreement: pl.DataFrame) -> pl.DataFrame:
    """With the columns `whole` and `cell` of `with_clusters`, which counts questions, not tokens."""
    items = agreement.unique("item", keep="first", maintain_order=True)
    drawn = with_clusters(items.with_columns(pl.col("hops").fill_null(0))).select("item", "whole", "cell")
    return agreement.join(drawn, on="item", how="left", maintain_order="left")


def _at(values: np.ndarray, column: Sequence[int] | np.ndarray) -> np.ndarray:
    return values[np.arange(len(values)), column]


def _where(row: Mapping[str, object]) -> str:
    return f"request {row['request']}, token {row['index']}"
