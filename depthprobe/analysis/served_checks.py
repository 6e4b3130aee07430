"""Whether a replay is the replay of what was served, and its settling that which the lens saw: tables in, or a refusal.

Each check names the first request and token, or item, at which two things differ by more than rounding.
"""

from __future__ import annotations

import polars as pl

from depthprobe.analysis.agreement import Epsilon
from depthprobe.errors import UserError

__all__ = ["check_against_lens", "check_numbers", "check_tokens"]

_AGAIN = "the trace was changed, or served by another model: serve the requests again"
_TOKEN = ["request", "index"]


def check_tokens(replayed: pl.DataFrame, requests: pl.DataFrame, epsilon: Epsilon) -> int:
    """Every greedy token must be what its row says at its exit, under the keys as served.

    Returns:
        tokens that differ where the two largest logits are nearer than `epsilon.margin`.

    Raises:
        UserError: one that differs elsewhere.
    """
    greedy = requests.filter(pl.col("temperature") == 0).select("request")
    here = replayed.filter((pl.col("kv") == "served") & (pl.col("loop") == pl.col("exit")))
    wrong = here.join(greedy, on="request", how="semi", maintain_order="left").filter(pl.col("top1") != pl.col("token"))
    clear = wrong.filter(pl.col("margin") >= epsilon.margin)
    if clear.height:
        row = clear.row(0, named=True)
        what = f"token {row['token']} was served, and at its exit {row['exit']} the model says {row['top1']}"
        raise UserError(what, where=_where(row), remedy=_AGAIN)
    return wrong.height


def check_numbers(replayed: pl.DataFrame, tokens: pl.DataFrame, epsilon: Epsilon) -> float:
    """λ and the rule's number on record must be those of the replay at every loop that was run.

    Args:
        tokens: the table `served_tokens`; what it does not have is not compared.

    Returns:
        the largest difference (0 where there is nothing to compare), relative to the number or to 1 if that is more.

    Raises:
        UserError: one of more than `epsilon.criterion`.
    """
    served = replayed.filter(pl.col("kv") == "served")
    most = 0.0
    for column, of_replay, name in (("gate_lambda", "gate_lambda", "λ"), ("criterion", "asked", "the rule's number")):
        kept = tokens.filter(pl.col(column).is_not_null()).select(*_TOKEN, "exit", recorded=column)
        short = kept.filter(pl.col("recorded").list.len() != pl.col("exit"))
        if short.height:
            row = short.row(0, named=True)
            what = f"{name} is on record for {len(row['recorded'])} loops, and it left at {row['exit']}"
            raise UserError(what, where=_where(row), remedy=_AGAIN)
        loops = kept.drop("exit").with_columns(
            loop=pl.int_ranges(1, pl.col("recorded").list.len() + 1, dtype=pl.Int32)
        ).explode("loop", "recorded")  # fmt: skip
        both = served.select(*_TOKEN, "loop", now=of_replay).join(
            loops, on=[*_TOKEN, "loop"], maintain_order="left"
        ).filter(pl.col("now").is_not_null() & pl.col("recorded").is_not_null())  # fmt: skip
        scale = pl.max_horizontal(pl.lit(1.0), pl.col("now").abs())
        both = both.with_columns(gap=(pl.col("now") - pl.col("recorded")).abs() / scale)
        if not both.height:
            continue
        far = both.filter(pl.col("gap") > epsilon.criterion)
        if far.height:
            row = far.row(0, named=True)
            what = f"{name} at loop {row['loop']} is {row['recorded']:.6g} on record and {row['now']:.6g} in the replay"
            raise UserError(what, where=_where(row), remedy=_AGAIN)
        most = max(most, float(both["gap"].to_numpy().max()))
    return most


def check_against_lens(
    agreement: pl.DataFrame,
    replayed: pl.DataFrame,
    requests: pl.DataFrame,
    settling: pl.DataFrame,
    items: pl.DataFrame,
    epsilon: Epsilon,
) -> int:
    """s_full of an item's first answer token must be the loop at which the lens saw it settle.

    Args:
        settling, items: tables of a run of the lens. Items are compared whose prompts were served as they were there.

    Returns:
        items that were compared; 0 if the lens counts no loops, as behind a coda.

    Raises:
        UserError: an item at which they differ and no readout is as near to a tie as `epsilon.margin`.
    """
    first = agreement.filter(pl.col("prompt_token")).select("request", "item", "s_full")
    ties = replayed.filter((pl.col("kv") == "full") & (pl.col("index") == 0)).group_by("request").agg(
        tie=pl.col("margin").min()
    )  # fmt: skip
    both = (
        first.join(requests.select("request", "prompt"), on="request", maintain_order="left")
        .join(items.select("item", "prompt_ids"), on="item", maintain_order="left")
        .filter(pl.col("prompt") == pl.col("prompt_ids"))
        .join(settling.select("item", "settling_loop"), on="item", maintain_order="left")
        .filter(pl.col("settling_loop").is_not_null())
        .join(ties, on="request", maintain_order="left")
    )
    wrong = both.filter((pl.col("s_full") != pl.col("settling_loop")) & (pl.col("tie") >= epsilon.margin))
    if wrong.height:
        row = wrong.row(0, named=True)
        what = f"the lens saw it settle at loop {row['settling_loop']}, the replay at {row['s_full']}"
        remedy = "compare a run and a trace of one model, with the plain lens"
        raise UserError(what, where=f"item {row['item']}", remedy=remedy)
    return both.height


def _where(row: dict[str, object]) -> str:
    return f"request {row['request']}, token {row['index']}"
