"""Schemas of causal patching, attention knock-out and effective depth, and of what analysis makes of them.

`depth` is the index on the model's axis; of a site beside the axis, that of its layer's resid_post. Rows of the sweep
"resid_post" begin with the embedding, at depth 0 of loop 0 and layer 0.
"""

from __future__ import annotations

import polars as pl

from depthprobe.tables.reading import ITEM_KEYS

__all__ = ["NULLABLE", "SCHEMAS"]

_PLACE: dict[str, pl.DataType] = {"loop": pl.Int32(), "layer": pl.Int32(), "depth": pl.Int32()}

#: Which sweep a row belongs to.
_SWEEP: dict[str, pl.DataType] = {
    "donor_kind": pl.String(),  # "relation" | "name" | controls: "distractor" | "distractor_name" | "same_answer"
    "control": pl.Boolean(),  # what was changed does not change the answer
    # whose states go into whose run: "donor_to_item" | "item_to_donor"
    "direction": pl.String(),
    "kind": pl.String(),  # "set": the other run's states | "zero" | "mean"
    "span": pl.String(),  # "one": this depth alone | "window": so many layers from here | "later": all later loops too
    "site": pl.String(),  # "resid_pre" | "resid_post" | "attn_out" | "mlp_out" | "loop_state"
    "role": pl.String(),  # "changed_word" | "changed_fact" | "other_facts" | "question_names" | "last" | "all"
}

_INTERVAL: dict[str, pl.DataType] = {"low": pl.Float64(), "high": pl.Float64()}

SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    # a pair of stories that differ in one word: an item and its donor
    "donors": {
        **ITEM_KEYS,
        "donor_kind": pl.String(),
        "control": pl.Boolean(),
        "donor": pl.String(),  # id of the donor's item
        "hop": pl.Int32(),  # of the changed fact; null beside the chain
        "before": pl.String(),  # the word that differs, in the item and in the donor
        "after": pl.String(),
        "answer": pl.String(),  # the item's
        "donor_answer": pl.String(),  # what it is measured against; of a control that of the item's real donor
        "text": pl.String(),  # the donor's prompt
        "tokens": pl.List(pl.String()),  # of the item's prompt, with BOS if there is one
        "roles": pl.List(pl.String()),  # of each token: a role, or "" where it has none
        "item_right": pl.Boolean(),
        "donor_right": pl.Boolean(),
    },
    "patching": {
        **ITEM_KEYS,
        **_SWEEP,
        "hop": pl.Int32(),  # of the changed fact; null beside the chain
        "window": pl.Int32(),  # coordinates that were patched together
        "position": pl.Int32(),  # a single token; null: all tokens of the role at once
        "n_positions": pl.Int32(),
        **_PLACE,
        "both_right": pl.Boolean(),  # the model answers both stories right
        # log p(own answer) − log p(the other's answer), whole answers teacher-forced, in the run that is patched
        "ld_clean": pl.Float32(),
        "ld_donor": pl.Float32(),  # the same contrast in the run that the states come from
        "ld_patched": pl.Float32(),
        "effect": pl.Float32(),  # (clean − patched) / (clean − donor): 0 nothing moved, 1 the other's answer
        "p_answer": pl.Float32(),  # of the run that is patched, after patching; whole answer
        "p_donor": pl.Float32(),
        "flip": pl.Boolean(),  # the best candidate was the answer and is now the donor's
    },
    # attention from the last token to a role's tokens cut in some layers
    "knockout": {
        **ITEM_KEYS,
        "role": pl.String(),
        **_PLACE,  # the first layer of the window
        "window": pl.Int32(),
        "ld_clean": pl.Float32(),
        "ld_cut": pl.Float32(),
        "logprob_clean": pl.Float32(),  # of the whole answer
        "logprob_cut": pl.Float32(),
        "p_answer": pl.Float32(),  # after the cut
        "correct": pl.Boolean(),  # after the cut the answer is the best candidate
        "flip": pl.Boolean(),  # it was before and is no longer
    },
    # where information leaves the changed word ("source") and reaches the last token ("destination")
    "windows": {
        **ITEM_KEYS,
        "end": pl.String(),
        "site": pl.String(),
        "depth_crossed": pl.Float32(),  # where the effect first crosses one half, linear between depths; null: censored
        "relative": pl.Float32(),  # the same as a share of the model's depth
        "loop_crossed": pl.Float32(),  # the same in loops, read at their ends; null without loops
        "area": pl.Float32(),  # under the effect clipped to 0 … 1, over the depths that were swept as 0 … 1
        "censored": pl.Boolean(),
        "monotone": pl.Boolean(),
        "effect_first": pl.Float32(),
        "effect_last": pl.Float32(),
    },
    "patching_by_role": {
        "task": pl.String(),
        "hops": pl.Int32(),  # null: all
        **_SWEEP,
        "depth": pl.Int32(),
        "effect": pl.Float64(),
        **_INTERVAL,
        "flip": pl.Float64(),
        "n_items": pl.Int64(),
        "n_clusters": pl.Int64(),
    },
    "window_slopes": {
        "task": pl.String(),
        # source_crossed, destination_crossed, source_area, destination_area; *_crossed_relative and *_crossed_loop;
        # source_needed_loop where all later loops are patched: loops before the end that need the changed word
        "quantity": pl.String(),
        "slope": pl.Float64(),
        **_INTERVAL,
        "n_items": pl.Int64(),
        "n_stories": pl.Int64(),
        "n_clusters": pl.Int64(),
        "reason": pl.String(),  # why there is no slope; null where there is one
        "share_censored": pl.Float64(),
        "share_nonmonotone": pl.Float64(),
        "n_pairs": pl.Int64(),  # both stories right, control donors left out
    },
    # change per hop of the depth around which cuts do their harm, paired by story; as in `slopes`
    "knockout_slopes": {
        "task": pl.String(),
        "quantity": pl.String(),  # "centre", in steps of the axis
        "slope": pl.Float64(),
        **_INTERVAL,
        "n_items": pl.Int64(),
        "n_stories": pl.Int64(),
        "n_clusters": pl.Int64(),
        "reason": pl.String(),
        "window": pl.Int32(),
        "n_harmed": pl.Int64(),  # items that cuts harm enough to have a centre
        "n_asked": pl.Int64(),
    },
    "knockout_by_depth": {
        "task": pl.String(),
        "hops": pl.Int32(),  # null: all
        "role": pl.String(),
        "depth": pl.Int32(),
        "window": pl.Int32(),
        "drop": pl.Float64(),  # of the answer's log-probability
        **_INTERVAL,
        "accuracy": pl.Float64(),  # after the cut
        "n": pl.Int64(),
    },
    # one row per item and part of the model that can be left out, read at the position that predicts the answer: every
    # layer (site "resid_post") and, of a looped model, every whole loop (site "loop", at the depth where it ends)
    "effective": {
        **ITEM_KEYS,
        "depth": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "site": pl.String(),
        "contribution": pl.Float32(),  # ‖Δ‖ / ‖h‖: what the part adds to what it got
        "cosine": pl.Float32(),  # of Δ and h; 0 where either is 0
        "contribution_all": pl.Float32(),  # the same two, averaged over the tokens of the prompt
        "cosine_all": pl.Float32(),
        "skip_kl": pl.Float32(),  # KL(final ‖ final with the part skipped at all tokens), nats
        "skip_top5": pl.Float32(),  # share of the best 5 tokens that both have
        "skip_logprob": pl.Float32(),  # of the whole answer, teacher-forced, with the part skipped
        "skip_correct": pl.Boolean(),  # the answer is still the best candidate
        # relative change of later layers' contributions at this token, averaged over those layers: with the part
        # skipped at this token alone, and at the tokens before it alone; null where no layer (or no token) is left
        "later_same": pl.Float32(),
        "later_others": pl.Float32(),
        "lens_kl": pl.Float32(),  # KL(final ‖ plain lens behind the part)
        "lens_top5": pl.Float32(),
    },
    # the mean of a column of `effective` at one hop count and depth
    "effective_by_hops": {
        "task": pl.String(),
        "hops": pl.Int32(),
        "depth": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "site": pl.String(),
        "quantity": pl.String(),
        "mean": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "n": pl.Int64(),  # items that have it
    },
    # the mean of one number an item about its whole depth (analysis/effective.py says which) at one hop count
    "effective_depths": {
        "task": pl.String(),
        "hops": pl.Int32(),
        "quantity": pl.String(),
        "mean": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "n_items": pl.Int64(),
        "n_clusters": pl.Int64(),
    },
    # change of such a number per hop, paired by story; columns as in `slopes`
    "effective_slopes": {
        "task": pl.String(),
        "quantity": pl.String(),
        "slope": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "n_clusters": pl.Int64(),
        "n_stories": pl.Int64(),
        "n_items": pl.Int64(),
        "reason": pl.String(),
    },
}

NULLABLE: dict[str, frozenset[str]] = {
    "donors": frozenset({"hop"}),
    "patching": frozenset({"hop", "position", "effect"}),  # no effect where both runs say the same, to rounding
    "knockout": frozenset(),
    "windows": frozenset({"depth_crossed", "relative", "loop_crossed"}),
    "patching_by_role": frozenset({"hops", "low", "high"}),
    "window_slopes": frozenset({"slope", "low", "high", "reason", "share_censored", "share_nonmonotone"}),
    "knockout_slopes": frozenset({"slope", "low", "high", "reason"}),
    "knockout_by_depth": frozenset({"hops", "low", "high"}),
    "effective": frozenset({"later_same", "later_others"}),
    "effective_by_hops": frozenset({"low", "high"}),
    "effective_depths": frozenset({"low", "high"}),
    "effective_slopes": frozenset({"slope", "low", "high", "reason"}),
}
