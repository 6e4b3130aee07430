"""The tables that probes write and analysis reads: one schema per name, and a check.

Every probe turns (model, items) into one of these tables, and every figure is drawn from them, so a number in
a report can be followed to rows of a Parquet file. A new column is added here first.

    import polars as pl
    from depthprobe import tables
    lens = tables.check("lens", pl.read_parquet("run/tables/lens.parquet"))

Depth is always the *index on the model's depth axis* (0 = the embedding, the last index = the state that the
model's own head reads); `loop` and `layer` say which coordinate that is. Probabilities are in [0, 1],
entropies and divergences in nats, log-probabilities natural.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from depthprobe.errors import UserError

__all__ = ["NULLABLE", "SCHEMAS", "check", "conform", "empty"]

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

_ITEM_KEYS: dict[str, pl.DataType] = {
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
        **_ITEM_KEYS,
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
        **_ITEM_KEYS,
        "depth": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "site": pl.String(),  # "embed" | "resid_post" | "loop_state"
        "lens": pl.String(),  # "plain": the model's own final norm and head
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
        **_ITEM_KEYS,
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
    # one row per item, donor and changed place of one forward; without a position: all positions of the role at once
    "patching": {
        **_ITEM_KEYS,
        "donor_kind": pl.String(),
        "control": pl.Boolean(),  # the donor has the same answer
        "hop": pl.Int32(),  # that the donor changes; null beside the chain
        "direction": pl.String(),  # whose state goes into whose run: "donor_to_item" | "item_to_donor"
        "kind": pl.String(),  # "set" | "zero" | "mean"
        "span": pl.String(),  # "one": this loop alone | "window": of layers | "later": this and all later loops
        "window": pl.Int32(),
        "site": pl.String(),
        "role": pl.String(),  # "changed_word" | "changed_fact" | "other_facts" | "question_names" | "last" | "all"
        "position": pl.Int32(),
        "n_positions": pl.Int32(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "depth": pl.Int32(),
        "both_right": pl.Boolean(),  # the model is right on both stories
        **dict.fromkeys(("ld_clean", "ld_donor", "ld_patched"), pl.Float32()),  # answer against donor's, whole answers
        "effect": pl.Float32(),  # (ld_clean - ld_patched) / (ld_clean - ld_donor): 1 is the donor's answer
        "p_answer": pl.Float32(),
        "p_donor": pl.Float32(),
        "flip": pl.Boolean(),  # the best candidate changes from the answer to the donor's
    },
    # one row per item, role whose tokens the last one may not look at, and first layer of the window
    "knockout": {
        **_ITEM_KEYS,
        "role": pl.String(),
        "loop": pl.Int32(),
        "layer": pl.Int32(),
        "depth": pl.Int32(),
        "window": pl.Int32(),
        **dict.fromkeys(("ld_clean", "ld_cut", "logprob_clean", "logprob_cut", "p_answer"), pl.Float32()),
        "correct": pl.Boolean(),
        "flip": pl.Boolean(),
    },
    # where an item's normalised effect crosses one half; pairs of donors that change the answer, both right
    "windows": {
        **_ITEM_KEYS,
        "end": pl.String(),  # "source": the changed word | "destination": the last token
        "site": pl.String(),
        "depth_crossed": pl.Float32(),  # linear between depths; null: censored
        "relative": pl.Float32(),
        "loop_crossed": pl.Float32(),
        "area": pl.Float32(),  # under the clipped curve, over relative depth
        "censored": pl.Boolean(),
        "monotone": pl.Boolean(),
        "effect_first": pl.Float32(),
        "effect_last": pl.Float32(),
    },
    "patching_by_role": {
        "task": pl.String(),
        "hops": pl.Int32(),  # null: all
        "donor_kind": pl.String(),
        "control": pl.Boolean(),
        "direction": pl.String(),
        "kind": pl.String(),
        "span": pl.String(),
        "site": pl.String(),
        "role": pl.String(),
        "depth": pl.Int32(),
        **dict.fromkeys(("effect", "low", "high", "flip"), pl.Float64()),
        "n_items": pl.Int64(),
        "n_clusters": pl.Int64(),
    },
    # change per hop of a quantity of `windows`; refused as in `slopes`
    "window_slopes": {
        "task": pl.String(),
        "quantity": pl.String(),
        **dict.fromkeys(("slope", "low", "high"), pl.Float64()),
        **dict.fromkeys(("n_items", "n_stories", "n_clusters"), pl.Int64()),
        "reason": pl.String(),
        "share_censored": pl.Float64(),
        "share_nonmonotone": pl.Float64(),
        "n_pairs": pl.Int64(),
    },
    "knockout_by_depth": {
        "task": pl.String(),
        "hops": pl.Int32(),  # null: all
        "role": pl.String(),
        "depth": pl.Int32(),
        "window": pl.Int32(),
        **dict.fromkeys(("drop", "low", "high", "accuracy"), pl.Float64()),  # drop: of the answer's log-probability
        "n": pl.Int64(),
    },
    # one row per item and part of the model that can be left out, read at the position that predicts the answer: every
    # layer (site "resid_post") and, of a looped model, every whole loop (site "loop", at the depth where it ends)
    "effective": {
        **_ITEM_KEYS,
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
        # relative change of later layers' contributions at this token, averaged over those layers: with the part skipped
        # at this token alone, and at the tokens before it alone; null where no layer (or no token) is left
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
    "patching": frozenset({"hop", "position", "ld_donor", "effect"}),
    "knockout": frozenset({"ld_clean", "ld_cut"}),
    "windows": frozenset({"depth_crossed", "relative", "loop_crossed", "area", "effect_first", "effect_last"}),
    "patching_by_role": frozenset({"hops", "effect", "low", "high"}),
    "window_slopes": frozenset({"slope", "low", "high", "reason", "share_censored", "share_nonmonotone"}),
    "knockout_by_depth": frozenset({"hops", "low", "high"}),
    "effective": frozenset({"later_same", "later_others"}),
    "effective_by_hops": frozenset({"low", "high"}),
    "effective_depths": frozenset({"low", "high"}),
    "effective_slopes": frozenset({"slope", "low", "high", "reason"}),
}


def empty(name: str) -> pl.DataFrame:
    """A table of that name without rows."""
    return pl.DataFrame(schema=_schema(name))


def conform(
    name: str, rows: pl.DataFrame | Mapping[str, object] | Iterable[Mapping[str, object]]
) -> pl.DataFrame:
    """Columns, lists or row dicts → the checked table, in the order and the types of the schema."""
    schema = _schema(name)
    if isinstance(rows, pl.DataFrame):
        df = rows
    elif isinstance(rows, Mapping):
        df = pl.DataFrame(dict(rows), schema_overrides=schema, strict=False)
    else:
        df = pl.DataFrame(list(rows), schema=schema, strict=False)
    _names(name, df)
    return check(name, df.select([pl.col(column).cast(kind) for column, kind in schema.items()]))


def check(name: str, df: pl.DataFrame) -> pl.DataFrame:
    """The same frame, if its columns, types and nulls are those of the table `name`.

    Raises:
        UserError: an unknown table, a missing or unknown column, another type, or a null where none may be.
    """
    schema = _schema(name)
    _names(name, df)
    for column, kind in schema.items():
        if df.schema[column] != kind:
            raise UserError(
                f"column '{column}' is {df.schema[column]}, expected {kind}",
                where=f"table {name}",
                remedy="write it with the same version of depthprobe, or run `depthprobe analyze` again",
            )
    for column in schema.keys() - NULLABLE[name]:
        nulls = df[column].null_count()
        if nulls:
            raise UserError(
                f"column '{column}' has {nulls} null values and may have none",
                where=f"table {name}",
                remedy="run `depthprobe analyze` again",
            )
    return df


def _schema(name: str) -> dict[str, pl.DataType]:
    if name not in SCHEMAS:
        raise UserError(f"there is no table '{name}'", remedy=f"known tables: {', '.join(SCHEMAS)}")
    return SCHEMAS[name]


def _names(name: str, df: pl.DataFrame) -> None:
    expected, got = set(SCHEMAS[name]), set(df.columns)
    for what, columns in (("lacks", expected - got), ("has unknown", got - expected)):
        if columns:
            raise UserError(
                f"the table {what} column{'s' if len(columns) > 1 else ''} {', '.join(sorted(columns))}",
                where=f"table {name}",
                remedy="write it with the same version of depthprobe, or run `depthprobe analyze` again",
            )
