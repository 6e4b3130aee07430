"""The replay against a forward for every token and loop, and against what engines of every kind wrote down."""

from __future__ import annotations

import tempfile
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.halting import parse_rule
from depthprobe.models import LoopedForCausalLM
from depthprobe.pipeline import agree
from depthprobe.replay import ServedRequest, check_replayable, read_served, replay
from depthprobe.runtime.record import read_meta
from tests.replay.served_cases import RULES, asked, rule_of, serve, tiny
from tests.runtime.helpers import configs, random_model

SHAPES = {
    "plain": {},
    "coda": {"n_prelude": 1, "n_coda": 2, "input_injection": "add"},
    "ouro": {"norm": "sandwich", "norm_per_loop": True, "num_key_value_heads": 2, "n_previous_tokens": 2},
}


def one_by_one(model: LoopedForCausalLM, request: ServedRequest, kv: str, loop: int, index: int) -> dict[str, float]:
    """A row's readout and gate at a loop, by a forward of its own in which it left there."""
    loops, at = model.config.n_loops, len(request.prompt) - 1 + index
    before = list(request.prompt_exits) if kv != "full" else [loops] * (len(request.prompt) - 1)
    exits = before + (list(request.exits) if kv == "served" else [loops] * len(request.exits))
    exits[at] = loop
    with torch.inference_mode():
        out = model(torch.tensor([request.ids]), exits=torch.tensor([exits]), output_gate_logits=model.gate is not None)
    logits = out.logits[0, at]
    best = logits.topk(2).values
    found = {"top1": int(logits.argmax()), "margin": float(best[0] - best[1]),
             "logprob": float(logits.log_softmax(-1)[request.tokens[index]])}  # fmt: skip
    if model.gate is not None:
        found["gate_lambda"] = float(out.gate_logits[0, at, loop - 1].sigmoid())
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_every_row_is_that_of_a_forward_of_its_own(tmp_path: Path, shape: str, batch_tokens: int) -> None:
    model = tiny(3, **SHAPES[shape])
    folder = serve(tmp_path / "t", model, "q:0.5", asked(5, 4, 3), prefill="ragged")
    requests = read_served(folder, read_meta(folder)).requests
    rule = parse_rule("q:0.5")
    table = replay(model, requests, rule, batch_tokens=batch_tokens)
    named = {request.id: request for request in requests}
    assert table["request"].unique(maintain_order=True).to_list() == list(named)
    for row in table.iter_rows(named=True):
        expected = one_by_one(model, named[row["request"]], row["kv"], row["loop"], row["index"])
        assert row["top1"] == expected.pop("top1")
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
        assert row["criterion"] == pytest.approx(row["gate_cdf"], abs=1e-6) or row["loop"] == 5
        assert row["met"] == row["marked"] == (row["criterion"] >= 0.5)


def test_dense_prompts_have_full_keys(tmp_path: Path) -> None:
    model = tiny(3, n_coda=1)
    folder = serve(tmp_path / "t", model, "hazard:0.4", asked(6, 4, 3))
    requests = read_served(folder, read_meta(folder)).requests
    dense = replay(model, requests, parse_rule("hazard:0.4"), ragged_prefill=False)
    both = replay(model, requests, parse_rule("hazard:0.4"), ragged_prefill=True)
    assert set(dense["kv"]) == {"full", "served"}
    keys = ["request", "index", "loop"]
    pair = both.filter(kv="full").join(both.filter(kv="prompt"), on=keys)
    assert (pair["top1"] == pair["top1_right"]).all()
    assert (pair["logprob"] - pair["logprob_right"]).abs().to_numpy().max() < 1e-9


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("prefill", ["dense", "ragged"])
def test_every_rule_is_explained(tmp_path: Path, text: str, prefill: str) -> None:
    output = text.rpartition("lookahead:")[2].split(":")[0] in ("kl", "entropy", "entropy-change", "confidence")
    coda = 1 if prefill == "dense" or not output else 0
    model = tiny(1, n_coda=coda, n_prelude=1)
    rule = rule_of(text if prefill == "ragged" else text.replace(",min_prompt=1", ""), model)
    kv = "last-exited" if prefill == "ragged" else "ragged"
    folder = serve(tmp_path / "t", model, rule, asked(2, 8), prefill=prefill, kv=kv, policy="refill", spare=1)
    found = agree(folder, model=model, rule=rule, resamples=50)
    table = found.tables["agreement"]
    assert (table["numerics"] == 0).all() and found.ties == 0 and found.gap < 1e-6
    assert found.about["dtype"] == "float64" and table.height == found.tables["served_tokens"].height
    assert (table["delay"] >= 0).all() if rule.horizon else (table["delay"] == 0).all()
    assert (table["cap_floor"] >= 0).all() and (table["exit"] >= min(rule.min_depth, 5)).all()
    if not rule.needs_lookahead:
        assert (table["lookahead"] == 0).all()
    if prefill == "dense":
        assert (table["cache_prompt"] == 0).all()
    assert table.filter("prompt_token")["cache_decode"].to_list() == [0] * 8


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_engine(data: st.DataObject, seed: int) -> None:
    """Any architecture, policy, width, page budget; float64, so that nothing is a tie."""
    model = random_model(data.draw(configs(exit_gate=True)), seed)
    loops = model.config.n_loops
    text = data.draw(st.sampled_from(["q:0.5", "q:0.7", "hazard:0.45", "l2:0.5", "kl:0.02", "lookahead:q:0.6"]))
    policy = data.draw(st.sampled_from(["refill", "no-refill", "lockstep"]))
    ragged = data.draw(st.booleans()) and not (text.startswith("kl") and model.config.n_coda)
    requests = asked(seed, 5, 4, temperature=data.draw(st.sampled_from([0.0, 1.0])))
    rule = rule_of(text, model)
    with tempfile.TemporaryDirectory() as place:
        folder = serve(
            Path(place) / "t", model, rule, requests, prefill="ragged" if ragged else "dense", policy=policy,
            kv=data.draw(st.sampled_from(["ragged", "last-exited"])), width=data.draw(st.integers(1, 4)),
            kv_pages=loops * data.draw(st.integers(12, 40)), prefill_tokens=data.draw(st.integers(1, 9)),
        )  # fmt: skip
        found = agree(folder, model=model, rule=rule, resamples=20)
    assert (found.tables["agreement"]["numerics"] == 0).all()
    assert found.tables["agreement"].height == sum(len(r) for r in found.tables["served_requests"]["tokens"])


@pytest.mark.parametrize(("kv", "text"), [("depth-indexed", "full"), ("ragged", "fixed:2"), ("ragged", "full")])
def test_planned_exits_have_no_terms(tmp_path: Path, kv: str, text: str) -> None:
    model = tiny(4)
    policy = "full" if text == "full" else "refill"
    folder = serve(tmp_path / "t", model, text, asked(1), kv=kv, policy=policy)
    table = agree(folder, model=model, resamples=20).tables["agreement"]
    assert table["gate"].null_count() == table["numerics"].null_count() == table.height
    if text == "full":
        assert not table["changed"].any() and (table["s_full"] == table["s_served"]).all()
    terms = agree(folder, model=model, resamples=20).tables["agreement_by_hops"]["term"].unique().to_list()
    assert sorted(terms) == ["changed", "exit", "s_full", "s_served", "total"]


@pytest.mark.parametrize("text", ["ponder", "random:.2/.2/.2/.2/.2"])
def test_drawn_exits_are_excluded_by_name(tmp_path: Path, text: str) -> None:
    model = tiny(4)
    folder = serve(tmp_path / "t", model, text, asked(1))
    with pytest.raises(UserError, match=rf"exits are drawn.*exit rule {text.split(':')[0]}"):
        agree(folder, model=model)
    requests = read_served(folder, read_meta(folder)).requests
    assert replay(model, requests, parse_rule(text))["criterion"].null_count() > 0  # the readouts are still there


@pytest.mark.parametrize(
    ("kv", "text"), [("shared", "q:0.5"), ("first-then-shared", "q:0.5"), ("state-copied", "act:0.2")]
)
def test_what_has_no_parallel_forward_is_refused_by_name(tmp_path: Path, kv: str, text: str) -> None:
    model = tiny(4)
    folder = serve(tmp_path / "t", model, text, asked(1), kv=kv)
    with pytest.raises(UserError, match=f"layout {kv} has no forward"):
        agree(folder, model=model)
    with pytest.raises(UserError, match=f"layout {kv} has no forward"):
        replay(model, [], parse_rule("q:0.5"), kv=kv)
    with pytest.raises(UserError, match="ACT"):
        check_replayable("ragged", parse_rule("act:0.2"))


def test_fewer_loops_and_no_gate(tmp_path: Path) -> None:
    model = tiny(4, exit_gate=False)
    folder = serve(tmp_path / "t", model, "l2:0.5", asked(1), n_loops=3)
    found = agree(folder, model=model, resamples=20)
    assert found.tables["replayed"]["loop"].to_numpy().max() == 3
    assert found.tables["replayed"]["gate_lambda"].null_count() == found.tables["replayed"].height
    with pytest.raises(UserError, match="no exit gate"):
        replay(model, [], parse_rule("q:0.5"))
    assert replay(model, [], parse_rule("l2:0.5")).equals(tables.empty("replayed"))


def test_float32_stays_below_its_epsilon(tmp_path: Path) -> None:
    model = tiny(2, torch.float32, n_coda=1)
    folder = serve(tmp_path / "t", model, "q:0.5", asked(3, 12), prefill="ragged")
    found = agree(folder, model=model, resamples=20)
    assert found.epsilon.criterion == 1e-4 and found.gap < 1e-5
    assert (found.tables["agreement"].filter(pl.col("numerics") != 0).height) == 0
