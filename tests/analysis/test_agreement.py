"""The telescoped sum: exact on any replay, equal to a token-by-token reading, refused where it does not hold."""

from __future__ import annotations

from itertools import pairwise

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe import tables
from depthprobe.analysis.agreement import (
    TERMS,
    Epsilon,
    ExitFacts,
    agreement_by_hops_table,
    agreement_table,
    check_sum,
    epsilon_of,
)
from depthprobe.analysis.served_checks import check_against_lens
from depthprobe.errors import UserError

NEAR = Epsilon(1e-4, 1e-3)


def replayed(rows: list[dict], loops: int) -> pl.DataFrame:
    """The table of tokens, each {request, index, exit, kv: {top1, met, marked}} with lists over loops."""
    lines = []
    for row in rows:
        for kv in ("full", "prompt", "served"):
            if kv not in row:
                continue
            own = row[kv]
            for d in range(loops):
                lines.append({
                    "request": row["request"], "index": row["index"], "token": 7, "exit": row["exit"], "loop": d + 1,
                    "kv": kv, "top1": own["top1"][d], "equals_final": own["top1"][d] == own["top1"][-1],
                    "logprob": -1.0, "margin": 1.0, "met": own["met"][d], "marked": own["marked"][d],
                    "criterion": 0.7, "distance": 0.4, "asked": 0.7, "asked_distance": row.get("distance", 0.4),
                })  # fmt: skip
    return tables.conform("replayed", lines)


def requests(names: list[str], **columns: list) -> pl.DataFrame:
    empty = {"prompt": [[1]] * len(names), "tokens": [[7]] * len(names), "exits": [[1]] * len(names)}
    fixed = {"request": names, "temperature": [0.0] * len(names), "arrival": [0.0] * len(names), **empty}
    frame = pl.DataFrame(fixed | columns)
    missing = [pl.lit(None).alias(c) for c in tables.SCHEMAS["served_requests"] if c not in frame.columns]
    return tables.conform("served_requests", frame.with_columns(missing))


def first(flags: list[bool], start: int, loops: int) -> int:
    return next((d for d in range(start, loops + 1) if flags[d - 1]), loops)


def slowly(row: dict, facts: ExitFacts) -> list[int]:
    """s_full, g_full, g_prompt, g_served, predicted, delayed, capped: as the definitions say, one token at a time."""
    loops, served = facts.n_loops, row["served"]
    top1 = row["full"]["top1"]
    settles = next(d for d in range(1, loops + 1) if all(t == top1[-1] for t in top1[d - 1 :]))
    own = [first(row[kv]["met"], 1, loops) for kv in ("full", "prompt", "served")]
    # after which loops the row may leave
    lets = [d > facts.horizon and served["marked"][d - 1 - facts.horizon] for d in range(1, loops + 1)]
    delayed = first(lets, 1, loops)
    predicted = own[2]
    if facts.predicts:
        predicted = 1 if served["met"][0] else delayed
    return [settles, *own, predicted, delayed, first(lets, facts.floor, loops)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[dict], ExitFacts]:
    loops = draw(st.integers(1, 5))
    horizon = draw(st.integers(0, 1))
    facts = ExitFacts("q:0.5", loops, horizon, bool(horizon) and draw(st.booleans()), draw(st.integers(1, loops)))

    def columns() -> st.SearchStrategy[dict]:
        flags = st.lists(st.booleans(), min_size=loops, max_size=loops)
        top1 = st.lists(st.integers(0, 2), min_size=loops, max_size=loops)
        return st.fixed_dictionaries({"top1": top1, "met": flags, "marked": flags})

    rows = draw(st.lists(st.fixed_dictionaries({"full": columns(), "prompt": columns(), "served": columns()}),
                         min_size=1, max_size=4))  # fmt: skip
    for i, row in enumerate(rows):
        row |= {"request": "abcd"[i // 2], "index": i % 2}
        row["exit"] = slowly(row, facts)[-1]
    return rows, facts


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_the_terms_are_the_differences_and_add_up(case: tuple[list[dict], ExitFacts]) -> None:
    rows, facts = case
    found = agreement_table(replayed(rows, facts.n_loops), requests(list("abcd")), facts, NEAR)
    for row, got in zip(rows, found.iter_rows(named=True), strict=True):
        chain = [*slowly(row, facts), row["exit"]]
        named = ("s_full", "g_full", "g_prompt", "g_served", "predicted", "delayed", "capped", "exit")
        assert [got[name] for name in named] == chain
        assert [got[term] for term in TERMS] == [b - a for a, b in pairwise(chain)]
        assert sum(got[term] for term in TERMS) == got["exit"] - got["s_full"]
        assert got["prompt_token"] == (got["index"] == 0) and got["top1_full"] == row["full"]["top1"][-1]
        assert got["top1_served"] == row["served"]["top1"][row["exit"] - 1]
        assert got["changed"] == (got["top1_full"] != 7)


@settings(max_examples=80, deadline=None)
@given(case=cases(), data=st.data())
def test_another_exit_is_rounding_or_refused(case: tuple[list[dict], ExitFacts], data: st.DataObject) -> None:
    rows, facts = case
    at = data.draw(st.integers(0, len(rows) - 1))
    before = rows[at]["exit"]
    rows[at]["exit"] = after = data.draw(st.integers(1, facts.n_loops))
    table, names = replayed(rows, facts.n_loops), requests(list("abcd"))
    if after == before:
        return
    where = rf"request {rows[at]['request']}, token {rows[at]['index']}\)"
    with pytest.raises(UserError, match=rf"left at loop {after}, and by q:0.5 it leaves at {before} \({where}"):
        agreement_table(table, names, facts, NEAR)
    near = table.with_columns(asked_distance=pl.lit(5e-5))
    if min(after, before) <= facts.horizon or min(after, before) < facts.floor:
        with pytest.raises(UserError):  # no decision was made there, so none was rounded
            agreement_table(near, names, facts, NEAR)
        return
    got = agreement_table(near, names, facts, NEAR).row(at, named=True)
    assert got["numerics"] == after - before and got["exit"] == after


def test_what_the_terms_mean() -> None:
    """U = 4: settles at 2; the gate alone waits for 3, with the served prompt for 4, and the head says 2."""
    full = {"top1": [1, 2, 2, 2], "met": [False, False, True, True], "marked": [False] * 4}
    prompt = {"top1": [2] * 4, "met": [False, False, False, True], "marked": [False] * 4}
    served = {"top1": [2] * 4, "met": [False, False, False, True], "marked": [True, True, True, True]}
    row = {"request": "a", "index": 0, "exit": 3, "full": full, "prompt": prompt, "served": served}
    facts = ExitFacts("lookahead:q:0.5,min=3", 4, horizon=1, predicts=True, floor=3)
    got = agreement_table(replayed([row], 4), requests(["a"]), facts, NEAR).row(0, named=True)
    assert [got[term] for term in TERMS] == [1, 1, 0, -2, 0, 1, 0] and got["exit"] - got["s_full"] == 1
    # dense: no pass with the prompt as served
    del row["prompt"]
    got = agreement_table(replayed([row], 4), requests(["a"]), facts, NEAR).row(0, named=True)
    assert [got[term] for term in TERMS] == [1, 0, 1, -2, 0, 1, 0]


def test_a_sum_that_was_changed_is_refused() -> None:
    own = {"top1": [1, 2], "met": [True, True], "marked": [True, True]}
    rows = [{"request": "a", "index": i, "exit": 1, "full": own, "served": own} for i in (0, 1)]
    found = agreement_table(replayed(rows, 2), requests(["a"]), ExitFacts("q:0.5", 2), NEAR)
    assert check_sum(found) is found
    bad = found.with_columns(gate=pl.when(pl.col("index") == 1).then(0).otherwise("gate").cast(pl.Int32))
    with pytest.raises(UserError, match=r"add up to 0, exit − settling is -1 \(request a, token 1\)"):
        check_sum(bad)
    with pytest.raises(UserError, match="exit rule ponder"):
        agreement_table(replayed(rows, 2), requests(["a"]), ExitFacts("ponder", 2, sampled=True), NEAR)
    with pytest.raises(UserError, match="not every token has loops 1 to 3"):
        agreement_table(replayed(rows, 2), requests(["a"]), ExitFacts("q:0.5", 3), NEAR)
    assert epsilon_of("bfloat16").criterion > epsilon_of("float32").criterion > epsilon_of("float64").criterion


def test_means_by_hops_draw_clusters() -> None:
    """Twelve stories at two hop counts in six clusters; the gate is late by one at k = 2, by nothing at k = 1."""
    rows, names, columns = [], [], {"item": [], "story": [], "cluster": [], "task": [], "hops": []}
    for story in range(12):
        for hops in (1, 2):
            met = [hops == 1, True, True]
            own = {"top1": [5, 5, 5], "met": met, "marked": met}
            names.append(f"r{story}-{hops}")
            rows.append({"request": names[-1], "index": 0, "exit": hops, "full": own, "served": own})
            for key, value in zip(columns, (names[-1], f"s{story}", f"c{story % 6}", "follow", hops), strict=True):
                columns[key].append(value)
    found = agreement_table(replayed(rows, 3), requests(names, **columns), ExitFacts("q:0.5", 3), NEAR)
    means = agreement_by_hops_table(found, resamples=100)
    of = {(row["hops"], row["term"]): row for row in means.iter_rows(named=True)}
    assert of[1, "gate"]["mean"] == 0 and of[2, "gate"]["mean"] == 1 and of[None, "gate"]["mean"] == 0.5
    assert of[2, "total"]["nonzero"] == 1 and of[None, "total"]["nonzero"] == 0.5 and of[2, "exit"]["mean"] == 2
    assert of[2, "gate"]["n_clusters"] == 6 and of[None, "gate"]["n_items"] == 24
    assert of[None, "gate"]["low"] == of[None, "gate"]["high"] == 0.5  # every cluster has both
    assert of[1, "changed"]["mean"] == 1  # 7 was served, full depth says 5
    planned = agreement_table(replayed(rows, 3), requests(names), ExitFacts("fixed:2", 3, planned=True), NEAR)
    assert planned["gate"].null_count() == 24 and planned["task"].null_count() == 24
    means = agreement_by_hops_table(planned, resamples=50)
    assert set(means["term"]) == {"total", "s_full", "s_served", "exit", "changed"}
    empty = agreement_table(tables.empty("replayed"), requests([]), ExitFacts("q:0.5", 3), NEAR)
    assert empty.height == 0 and agreement_by_hops_table(empty).height == 0


def test_the_lens_must_agree_on_the_same_prompts() -> None:
    own = {"top1": [4, 5, 5], "met": [True] * 3, "marked": [True] * 3}
    rows = [{"request": name, "index": 0, "exit": 1, "full": own, "served": own} for name in "ab"]
    replay, asked = replayed(rows, 3), requests(["a", "b"], item=["x", "y"], prompt=[[1, 2], [3]])
    found = agreement_table(replay, asked, ExitFacts("q:0.5", 3), NEAR)
    kinds = {"prompt_ids": pl.List(pl.Int32), "settling_loop": pl.Int32}
    columns = {"item": ["x", "y"], "prompt_ids": [[1, 2], [3, 4]], "settling_loop": [2, 1]}
    frame = pl.DataFrame(columns, schema_overrides=kinds)
    items, settling = frame.drop("settling_loop"), frame.drop("prompt_ids")
    later = settling.with_columns(settling_loop=pl.lit(3, pl.Int32))
    assert check_against_lens(found, replay, asked, settling, items, NEAR) == 1  # y was asked in other words
    with pytest.raises(UserError, match=r"settle at loop 3, the replay at 2 \(item x\)"):
        check_against_lens(found, replay, asked, later, items, NEAR)
    tie = replay.with_columns(margin=pl.lit(1e-5))
    assert check_against_lens(found, tie, asked, later, items, NEAR) == 1
