"""Schemas of the frontier: what a model that leaves early gets right, and what that costs, way by way.

A *setting* is a way of serving: an exit rule, or what stands beside one. Depths are loops, 1 … U; rows are core passes.
"""

from __future__ import annotations

import polars as pl

from depthprobe.tables.reading import ITEM_KEYS

__all__ = ["NULLABLE", "SCHEMAS"]

_SETTING: dict[str, pl.DataType] = {
    "setting": pl.String(),  # its name, unique within a layout
    # "rule" | "fixed" | "permuted" | "confidence" | "settling" | "earliest"
    "kind": pl.String(),
    "kv": pl.String(),  # layout of keys and values
    "rule": pl.String(),  # the exit rule as the engine was told it
    "beside": pl.String(),  # the setting that a permuted or a confidence setting stands beside
}

SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    # a request under one setting
    "frontier_answers": {
        **_SETTING,
        "seed": pl.Int32(),  # of a permutation; 0 elsewhere
        **ITEM_KEYS,
        "correct": pl.Boolean(),  # the whole answer
        "tokens": pl.Int32(),  # generated
        "mean_exit": pl.Float64(),  # over them
        "decode_rows": pl.Int64(),  # core passes of the prompt's last token and of generated ones
        "prompt_rows": pl.Int64(),  # of prompt[:-1]
        "latency": pl.Float64(),  # seconds from its arrival to its end, for each generated token
        "predicted": pl.List(pl.Int32()),
        "exits": pl.List(pl.Int32()),
        "prompt_exits": pl.List(pl.Int32()),  # null where the prompt ran all loops
    },
    # one serving of all questions of a task
    "frontier_served": {
        **_SETTING,
        "seed": pl.Int32(),
        "task": pl.String(),
        "n_loops": pl.Int32(),
        "questions": pl.Int64(),
        "tokens": pl.Int64(),
        "decode_rows": pl.Int64(),
        "all_rows": pl.Int64(),  # with prompts, and passes that were recomputed
        "read_rows": pl.Int64(),  # readouts that the rule asked for, through the coda if there is one
        "seconds": pl.Float64(),
        "peak_kv_bytes": pl.Int64(),  # most that was taken at a time, reservations included
        # a threshold that was set on other questions: the mean depth asked for, that which came out there, how many
        "target": pl.Float64(),
        "calibrated": pl.Float64(),
        "n_calibration": pl.Int64(),
    },
    # a setting over the questions of a task, or of one hop count. Permutations of several seeds are one setting.
    "frontier": {
        **_SETTING,
        "task": pl.String(),
        "hops": pl.Int32(),  # null: all
        "n": pl.Int64(),
        "n_clusters": pl.Int64(),
        "accuracy": pl.Float64(),
        "accuracy_low": pl.Float64(),
        "accuracy_high": pl.Float64(),
        "mean_exit": pl.Float64(),
        "mean_exit_low": pl.Float64(),
        "mean_exit_high": pl.Float64(),
        "decode_rows": pl.Float64(),
        "all_rows": pl.Float64(),
        "decode_share": pl.Float64(),  # of U for each generated token
        "all_share": pl.Float64(),  # of U for each token, prompts included
        "read_rows": pl.Float64(),  # null by hops, as are the next two and the peak
        "seconds": pl.Float64(),
        "tokens_per_s": pl.Float64(),
        "latency_p50": pl.Float64(),  # seconds a token
        "latency_p90": pl.Float64(),
        "peak_kv_bytes": pl.Int64(),
        # of a random mixture of the two nearest fixed depths with the same mean depth, in the same layout
        "mixture_accuracy": pl.Float64(),
        "gain": pl.Float64(),
        "gain_low": pl.Float64(),
        "gain_high": pl.Float64(),
        # of that with the same core passes in all; another one where prompts leave early, too
        "mixture_all_accuracy": pl.Float64(),
        "gain_all": pl.Float64(),
        "gain_all_low": pl.Float64(),
        "gain_all_high": pl.Float64(),
        "reason": pl.String(),  # why there is no interval
    },
    # a rule minus what stands beside it, question by question
    "frontier_differences": {
        **_SETTING,
        "against": pl.String(),  # "full" | "permuted" | "confidence" | "settling" | "earliest"
        "task": pl.String(),
        "hops": pl.Int32(),
        "n": pl.Int64(),
        "n_clusters": pl.Int64(),
        "accuracy": pl.Float64(),  # the difference
        "accuracy_low": pl.Float64(),
        "accuracy_high": pl.Float64(),
        "mean_exit": pl.Float64(),  # likewise, in loops
        "mean_exit_low": pl.Float64(),
        "mean_exit_high": pl.Float64(),
        "reason": pl.String(),
    },
}



def _bounds(*names: str) -> frozenset[str]:
    return frozenset(f"{name}_{end}" for name in names for end in ("low", "high"))


NULLABLE: dict[str, frozenset[str]] = {
    "frontier_answers": frozenset({"beside", "prompt_exits"}),
    "frontier_served": frozenset({"beside", "target", "calibrated", "n_calibration"}),
    "frontier": frozenset({
        "beside", "hops", "read_rows", "seconds", "tokens_per_s", "peak_kv_bytes", "gain", "gain_all", "reason",
    }) | _bounds("accuracy", "mean_exit", "gain", "gain_all"),
    "frontier_differences": frozenset({"beside", "hops", "reason"}) | _bounds("accuracy", "mean_exit"),
}  # fmt: skip
