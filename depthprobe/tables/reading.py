"""Schemas of what is asked, of what the lenses read, and of what analysis makes of that."""

from __future__ import annotations

import polars as pl

__all__ = ["FACT", "ITEM_KEYS", "NULLABLE", "SCHEMAS"]

#: One stated fact of a story. Spans are half-open character offsets into `items.text`; `hop` is 1-based and
#: null for a fact that lies off the question's chain; `role` is chain, branch, decoy, offchain or gender.
FACT = pl.Struct(
    {
        "subject": pl.String(),
        "relation": pl.String(),
        "object": pl.String(),
        "role": pl.String(),
        "hop": pl.Int32(),
        "start": pl.Int32(),
        "end": pl.Int32(),
    }
)

ITEM_KEYS: dict[str, pl.DataType] = {
    "item": pl.String(),
    "story": pl.String(),  # all rungs of one ladder share it: what slopes and differences are paired by
    # What intervals are taken over. Kinship: the first three relations of the question's chain; else the story.
    # Where several hop counts enter, a story belongs to the cluster of its longest question.
    "cluster": pl.String(),
    "task": pl.String(),  # "kinship" | "follow"
    "hops": pl.Int32(),
}

SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    "items": {
        **ITEM_KEYS,
        "split": pl.String(),
        "form": pl.String(),
        "template": pl.String(),
        "order": pl.String(),
        "distractors": pl.String(),
        "question": pl.String(),
        "answer": pl.String(),
        "plausible": pl.List(pl.String()),
        "candidates": pl.List(pl.String()),
        "chance": pl.Float32(),  # 1 / candidates: what guessing among them gets right
        "chain_relations": pl.List(pl.String()),
        "text": pl.String(),  # the prompt; the answer's leading space belongs to the answer
        "facts": pl.List(FACT),
        "n_tokens": pl.Int32(),  # of the prompt, with BOS if the tokenizer adds one
        "bos": pl.Boolean(),  # the prompt begins with a BOS token
        "text_start": pl.Int32(),  # the first token of `text` in the prompt, behind BOS and a chat template's words
        "prompt_ids": pl.List(pl.Int32()),
        "answer_ids": pl.List(pl.Int32()),  # the answer's tokens after this prompt
        "n_collisions": pl.Int32(),  # candidates whose first token another candidate shares
        # True: the first tokens tell all candidates apart and scores read those alone. False: some candidates
        # share a first token, and candidate scores multiply in the later tokens at which they part.
        "first_token_only": pl.Boolean(),
        "seed": pl.Int64(),
    },
    # accuracy of a baseline that does not follow the chain, on the items of this run
    "shortcuts": {
        "task": pl.String(),
        "hops": pl.Int32(),
        "shortcut": pl.String(),
        "accuracy": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "n": pl.Int64(),
    },
    # one row per item and depth, read at the position that predicts the answer
    "lens": {
        **ITEM_KEYS,
        "depth": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "site": pl.String(),  # "embed" | "resid_post" | "loop_state"
        "lens": pl.String(),  # "plain": own final norm and head; "tuned": behind translators; "coda": behind the coda
        "target_logit": pl.Float32(),  # of the answer's first token
        "target_logprob": pl.Float32(),  # over the whole vocabulary
        "target_prob": pl.Float32(),
        "target_rank": pl.Int64(),  # 0 = best: the tokens with a larger logit, counted
        "p_plausible": pl.Float32(),  # mass on the plausible answers
        "p_candidates": pl.Float32(),  # mass on the candidate answers
        "candidate_prob": pl.Float32(),  # the answer's share of p_candidates
        "candidate_correct": pl.Boolean(),  # the answer has the largest share
        "candidate_plausible": pl.Boolean(),  # a plausible answer has the largest share
        "answer_logprob": pl.Float32(),  # whole answer, teacher-forced; at the last depth alone
        "top1_id": pl.Int64(),
        "top1": pl.String(),
        "equals_final": pl.Boolean(),  # top-1 is that of the last depth
        "entropy": pl.Float32(),
        "kl_final": pl.Float32(),  # KL(last depth ‖ this depth)
        "top5": pl.List(pl.String()),
        "top5_probs": pl.List(pl.Float32()),
        "is_loop_end": pl.Boolean(),  # a depth at which a gate could exit
        "gate_lambda": pl.Float32(),  # at loop ends of a model with a gate, null elsewhere
        "gate_cdf": pl.Float32(),
    },
    # one row per item, position of its prompt and depth, for the items that the report's browser shows in full; a run
    # may have none. The depths may be a selection of the axis (loop ends, say).
    "tokens": {
        "item": pl.String(),
        "position": pl.Int32(),  # in the unpadded prompt, with BOS if there is one
        "token": pl.String(),
        "token_id": pl.Int64(),
        "depth": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "site": pl.String(),
        "top1": pl.String(),
        "top1_prob": pl.Float32(),
        "top5": pl.List(pl.String()),
        "top5_probs": pl.List(pl.Float32()),
        "gate_lambda": pl.Float32(),  # at loop ends of a model with a gate, null elsewhere
        "gate_cdf": pl.Float32(),
    },
    # one row per item; *_depth index the axis, *_loop count loops and are null for a model without loops
    "settling": {
        **ITEM_KEYS,
        "settling_depth": pl.Int32(),  # from here on top-1 stays that of the last depth
        "correct_depth": pl.Int32(),  # from here on the answer stays the best candidate; else null
        "plausible_depth": pl.Int32(),
        "earliest_equal_depth": pl.Int32(),  # the first depth with the final top-1, kept or not
        "final_correct": pl.Boolean(),
        "settling_loop": pl.Int32(),
        "correct_loop": pl.Int32(),
        "plausible_loop": pl.Int32(),
        "earliest_equal_loop": pl.Int32(),
        # the same as a share of the model's depth, 0 … 1: at loop ends (r/R, if nothing stands before or behind the
        # loops), and behind the last, for a model with loops; at every layer (l/L) else
        "settling_relative": pl.Float64(),
        "correct_relative": pl.Float64(),
        "plausible_relative": pl.Float64(),
        "earliest_equal_relative": pl.Float64(),
        "gate_exit": pl.Int32(),  # Q-exit loop at the model's own q
        "expected_depth": pl.Float32(),  # in loops, under the gate's stopping distribution
        "all_rungs": pl.Boolean(),  # the story was asked at every hop count of its task and is answered right at each
    },
    # the mean of a quantity of `settling` at one hop count, over the items that have it
    "settling_by_hops": {
        "task": pl.String(),
        "hops": pl.Int32(),
        "quantity": pl.String(),
        "group": pl.String(),  # "all" | "correct" | "all_rungs": the last two are selected by the outcome
        "mean": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "never": pl.Float64(),  # share of the group's items that do not have it
        "n_items": pl.Int64(),  # of the group, with it or without
        "n_clusters": pl.Int64(),
    },
    "accuracy": {
        "task": pl.String(),
        "hops": pl.Int32(),
        "depth": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "relative_depth": pl.Float64(),  # depth / last depth: 0 is the embedding, 1 what the model's head reads
        "accuracy": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "p_correct": pl.Float64(),
        "p_correct_low": pl.Float64(),
        "p_correct_high": pl.Float64(),
        "p_plausible": pl.Float64(),
        "p_plausible_low": pl.Float64(),
        "p_plausible_high": pl.Float64(),
        "n": pl.Int64(),
    },
    # change of a quantity per hop, paired by story; refused (null, with a reason) from too few clusters
    "slopes": {
        "task": pl.String(),
        "quantity": pl.String(),
        "group": pl.String(),  # "all" | "correct" | "all_rungs": the last two are selected by the outcome
        "slope": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "n_clusters": pl.Int64(),
        "n_stories": pl.Int64(),
        "n_items": pl.Int64(),
        "reason": pl.String(),  # why there is no slope; null where there is one
    },
    # a difference of two quantities on the same items, averaged within stories and then over them
    "differences": {
        "task": pl.String(),
        "quantity": pl.String(),  # e.g. "accuracy: loop 1 - full depth"
        "min_hops": pl.Int32(),
        "max_hops": pl.Int32(),
        "difference": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "n_clusters": pl.Int64(),
        "n_stories": pl.Int64(),
        "n_items": pl.Int64(),
    },
    # Q-exit over a sweep of q, each beside a random mixture of the two nearest fixed loops of the same mean
    "exits": {
        "task": pl.String(),
        "q": pl.Float64(),
        "mean_exit": pl.Float64(),
        "accuracy": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "mixture_accuracy": pl.Float64(),
        "gain": pl.Float64(),  # accuracy - mixture_accuracy, on the same items
        "gain_low": pl.Float64(),
        "gain_high": pl.Float64(),
    },
    # every item leaves after the same loop
    "fixed_exits": {
        "task": pl.String(),
        "loop": pl.Int32(),
        "accuracy": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
    },
    "exits_by_hops": {
        "task": pl.String(),
        "hops": pl.Int32(),
        "mean_exit": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "expected_depth": pl.Float64(),
    },
}

#: Columns that may be null; a null anywhere else is an error of the writer.
NULLABLE: dict[str, frozenset[str]] = {
    "items": frozenset({"split"}),
    "shortcuts": frozenset({"low", "high"}),
    "lens": frozenset({"answer_logprob", "gate_lambda", "gate_cdf"}),
    "tokens": frozenset({"gate_lambda", "gate_cdf"}),
    "settling": frozenset(
        {
            "correct_depth",
            "plausible_depth",
            "earliest_equal_depth",
            "settling_loop",
            "correct_loop",
            "plausible_loop",
            "earliest_equal_loop",
            "correct_relative",
            "plausible_relative",
            "earliest_equal_relative",
            "gate_exit",
            "expected_depth",
        }
    ),
    "accuracy": frozenset(
        {"low", "high", "p_correct_low", "p_correct_high", "p_plausible_low", "p_plausible_high"}
    ),
    "settling_by_hops": frozenset({"mean", "low", "high"}),
    "slopes": frozenset({"slope", "low", "high", "reason"}),
    "differences": frozenset({"difference", "low", "high"}),
    "exits": frozenset({"low", "high", "gain_low", "gain_high"}),
    "fixed_exits": frozenset({"low", "high"}),
    "exits_by_hops": frozenset({"low", "high"}),
}
