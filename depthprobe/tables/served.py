"""Schemas of what a runtime served, of its replay through whole forwards, and of the agreement of the two.

The first three are a trace's record (its JSON lines) as tables. A *row* of the runtime stands at position
len(prompt) − 1 + index and predicts the token of that index, so index 0 is the prompt's last token. Depths are loops,
1 … U.
"""

from __future__ import annotations

import polars as pl

from depthprobe.tables.reading import ITEM_KEYS

__all__ = ["NULLABLE", "SCHEMAS"]

_TOKEN: dict[str, pl.DataType] = {"request": pl.String(), "index": pl.Int32()}
_TERMS: dict[str, pl.DataType] = {
    name: pl.Int32()
    for name in ("gate", "cache_prompt", "cache_decode", "lookahead", "delay", "cap_floor", "numerics")
}
_HOW: dict[str, pl.DataType] = {
    "rule": pl.String(),  # the exit rule's text
    "layout": pl.String(),  # of keys and values
    "prefill": pl.String(),  # "dense" | "ragged"
}
_CHAIN: dict[str, pl.DataType] = {
    name: pl.Int32() for name in ("g_full", "g_prompt", "g_served", "predicted", "delayed", "capped")
}

SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    # a request of a trace; what a killed process did not write of it is null
    "served_requests": {
        "request": pl.String(),
        **ITEM_KEYS,  # null where the request asks no item
        "prompt": pl.List(pl.Int32()),
        "tokens": pl.List(pl.Int32()),  # generated
        "exits": pl.List(pl.Int32()),  # of each generated token's row
        "prompt_exits": pl.List(pl.Int32()),  # of prompt[:-1]
        "answer_ids": pl.List(pl.Int32()),  # of the item's answer
        "temperature": pl.Float64(),  # 0: the most probable token is taken
        "finish_reason": pl.String(),
        "arrival": pl.Float64(),  # seconds since the engine began, as are the next two
        "first_token": pl.Float64(),
        "finished": pl.Float64(),
        "preemptions": pl.Int32(),
    },
    # a generated token, as the runtime wrote it down when it left
    "served_tokens": {
        **_TOKEN,
        "position": pl.Int32(),
        "token": pl.Int64(),
        "exit": pl.Int32(),
        "executed": pl.Int32(),  # core passes of the row, recomputed ones apart
        "selected": pl.Int32(),  # where the rule by itself would have let it leave; null: nowhere
        "reason": pl.String(),  # "rule" | "floor" | "cap" | "planned" | "replay" | "full"
        "decided_at": pl.Int32(),
        "lookahead": pl.Int32(),  # loops between the decision and the exit
        "waited": pl.Int32(),  # ticks in which it was ready and did not run
        "run": pl.Int32(),
        "pages": pl.Int32(),  # core pages that its request held
        "logprob": pl.Float64(),
        "margin": pl.Float64(),  # between the two largest logits
        "start": pl.Float64(),
        "finished": pl.Float64(),
        "gate_lambda": pl.List(pl.Float64()),  # at each loop that it ran, as are the next three
        "gate_cdf": pl.List(pl.Float64()),
        "criterion": pl.List(pl.Float64()),
        "lens": pl.List(pl.List(pl.Int64())),  # best tokens of the readout, if the tap was on
    },
    "served_ticks": {
        "tick": pl.Int64(),
        "stage": pl.String(),
        "rows": pl.Int32(),
        "depths": pl.List(pl.Int32()),  # rows at loop 1 … U
        "frozen": pl.Int32(),  # of them computed past their exit
        "start": pl.Float64(),
        "duration": pl.Float64(),
        "free_core": pl.Int64(),
        "free_outer": pl.Int64(),
        "ahead": pl.Int32(),  # ticks planned and not yet committed
        "replay": pl.Boolean(),
        "preempted": pl.Int32(),
    },
    # a served token's row at one loop, under one state of the other tokens' keys:
    # "full": every token ran all loops; "prompt": the prompt as served, decoded tokens all loops (only where the
    # prompt was served ragged); "served": all as served. Past its own exit a row runs on in the shadow.
    "replayed": {
        **_TOKEN,
        "token": pl.Int64(),  # what was served
        "exit": pl.Int32(),  # where the row left
        "loop": pl.Int32(),
        "kv": pl.String(),
        "top1": pl.Int64(),  # of the readout here, through the coda if there is one
        "equals_final": pl.Boolean(),  # top1 is that of loop U under the same keys
        "logprob": pl.Float64(),  # of the served token
        "margin": pl.Float64(),  # between the two largest logits
        "gate_lambda": pl.Float64(),
        "gate_cdf": pl.Float64(),
        # the rule's own number, whether it is met, least depths apart, and how far the number is from its threshold
        # (relative to it, see `replay.rules`); null for planned rules
        "criterion": pl.Float64(),
        "met": pl.Boolean(),
        "distance": pl.Float64(),
        # the same of what the runtime asked after this loop: of a rule that looks ahead, about the loop to come
        "asked": pl.Float64(),
        "marked": pl.Boolean(),
        "asked_distance": pl.Float64(),
    },
    # rows of several traces may stand together; rule, layout and prefill tell them apart
    # exit − s_full = gate + cache_prompt + cache_decode + lookahead + delay + cap_floor + numerics, exactly
    "agreement": {
        **_HOW,
        **_TOKEN,
        **ITEM_KEYS,
        "token": pl.Int64(),
        "prompt_token": pl.Boolean(),  # the row is the prompt's last token
        "s_full": pl.Int32(),  # from this loop on top-1 stays that of loop U, all keys at full depth
        "s_served": pl.Int32(),  # the same under the keys as served
        **_CHAIN,  # null, as are the terms, where the exit was not decided by a rule
        "exit": pl.Int32(),
        **_TERMS,
        "top1_full": pl.Int64(),  # at loop U under full keys
        "top1_served": pl.Int64(),  # at the exit under the keys as served
        "changed": pl.Boolean(),  # they differ
        "margin": pl.Float64(),  # at the exit
    },
    # the mean of a term, or of "total" (exit − s_full), "s_full", "s_served", "exit", "changed"
    "agreement_by_hops": {
        **_HOW,
        "task": pl.String(),
        "hops": pl.Int32(),  # null: all
        "term": pl.String(),
        "mean": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "nonzero": pl.Float64(),  # share of the tokens at which it is not 0
        "n_tokens": pl.Int64(),
        "n_items": pl.Int64(),
        "n_clusters": pl.Int64(),
    },
}

NULLABLE: dict[str, frozenset[str]] = {
    "served_requests": frozenset({
        *ITEM_KEYS, "prompt_exits", "answer_ids", "finish_reason", "first_token", "finished", "preemptions",
    }),
    "served_tokens": frozenset({
        "selected", "decided_at", "logprob", "margin", "gate_lambda", "gate_cdf", "criterion", "lens",
    }),
    "served_ticks": frozenset(),
    "replayed": frozenset({
        "gate_lambda", "gate_cdf", "criterion", "met", "distance", "asked", "marked", "asked_distance",
    }),
    "agreement": frozenset({"task", "hops", *_CHAIN, *_TERMS}),
    "agreement_by_hops": frozenset({"task", "hops", "low", "high"}),
}  # fmt: skip
