"""The engine over random models, arrivals, widths, budgets and aborts: each request as if it were served alone.

Two oracles: the slow loop (tests/runtime/reference.py), which decides for itself, and the model's own forward over
whole sequences on the exits that are on record. In float64 no decision is a tie.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from depthprobe.halting import ACT, Lookahead, LookaheadHead, QExit, parse_rule
from depthprobe.models import LoopedForCausalLM
from depthprobe.runtime.engine import Engine
from depthprobe.runtime.layouts import layout
from depthprobe.runtime.requests import Completion, Request, Sampling
from depthprobe.runtime.sampling import sample
from tests.runtime.helpers import VOCABULARY, configs, random_model
from tests.runtime.reference import SlowRequest

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])

RULES = ["q:0.5", "q:0.8,min=2", "hazard:0.45", "fixed:1", "fixed:2", "full", "ponder", "l2:0.4", "second:0.5",
         "kl:0.01", "entropy:2.0", "confidence:0.2", "act:0.2", "lookahead:q:0.6", "lookahead:l2:0.4"]  # fmt: skip


@dataclass
class Case:
    """A served case: the engine after its run, what each request asked and got."""

    engine: Engine
    model: LoopedForCausalLM
    requests: list[Request]
    done: list[Completion]


def rule_of(text: str, model: LoopedForCausalLM, seed: int):
    if text.startswith("lookahead:q"):
        torch.manual_seed(seed)
        head = LookaheadHead.start(model)
        with torch.no_grad():
            head.weight.normal_(std=0.3)
        return Lookahead(QExit(0.6), head)
    return parse_rule(text)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    many = draw(st.integers(1, 7))
    asked = []
    for i in range(many):
        prompt = tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=7)))
        sampling = Sampling(
            max_new_tokens=draw(st.integers(1, 4)),
            temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
            top_p=draw(st.sampled_from([1.0, 0.7])),
            seed=draw(st.integers(0, 9)),
            stop_tokens=draw(st.sampled_from([(), (3,), (1, 2)])),
            logprobs=0,
        )
        asked.append(Request(prompt, sampling, id=f"q{i}"))
    return asked


def serve(model: LoopedForCausalLM, asked: list[Request], rng: random.Random, aborts: bool, **options) -> Case:
    """Add requests between ticks, abort some; check the books after every tick."""
    engine = Engine(model, **options)
    waiting = list(asked)
    alive: list[str] = []
    for _ in range(10_000):
        while waiting and (rng.random() < 0.5 or not alive):
            alive.append(engine.add(waiting.pop(0)))
        for made in engine.step():
            if made.finish_reason is not None:
                alive.remove(made.request)
        if aborts and alive and rng.random() < 0.1:
            gone = rng.choice(alive)
            assert engine.abort(gone)
            alive.remove(gone)
        engine.check_integrity()
        if not waiting and not alive and engine.scheduler.idle:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    done = [engine.take(request.id) for request in asked]
    assert all(one is not None for one in done)
    return Case(engine, model, asked, [one for one in done if one is not None])


def check_books(case: Case, aborts: bool) -> None:
    """Oracle 5: executed core rows, and every page free."""
    engine, settings_ = case.engine, case.engine.options.scheduler
    assert (engine.pool.free_core, engine.pool.free_outer) == (settings_.core_pages, settings_.outer_pages)
    counters, work = engine.scheduler.counters, engine.runner.work
    ran = work.core + work.core_prefill
    told = sum(counters[f"core_rows_{kind}"] for kind in ("decode", "prefill", "recomputed", "frozen", "aborted"))
    assert told == ran
    if not aborts:
        assert counters["core_rows_decode"] == sum(sum(one.exit_depths) for one in case.done)
        assert counters["core_rows_prefill"] == sum(sum(one.prompt_exit_depths) for one in case.done)


def check_against_slow_loop(case: Case, kv: str, rule, prompt_rule) -> None:
    for request, one in zip(case.requests, case.done, strict=True):
        ids = [*request.prompt, *one.tokens]
        slow = SlowRequest(case.model, ids, kv, rule, prompt_rule, request.sampling.seed)
        if len(request.prompt) > 1:
            prompt_exits = slow.prefill(0, len(request.prompt) - 1)
            if one.finish_reason != "aborted":
                assert one.prompt_exit_depths == prompt_exits
        for index, token in enumerate(one.tokens):
            at = len(request.prompt) - 1 + index
            logits = slow.decode(at)
            assert slow.exits[at] == one.exit_depths[index]
            assert one.logprobs is not None
            assert one.logprobs[index] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=2e-6)  # as float32
            if request.sampling.temperature == 0:
                assert token == int(logits.argmax())
            else:
                s, drawn_at = request.sampling, [at + 1]
                drawn = sample(logits[None], [s.temperature], [s.top_p], [s.seed], drawn_at)
                assert token == int(drawn.tokens[0])


def check_against_forward(case: Case, margin: float = 0.0) -> None:
    """Oracle 3 on the recorded exits; a token may differ where another is within `margin`."""
    for request, one in zip(case.requests, case.done, strict=True):
        if not one.tokens:
            continue
        ids = [*request.prompt, *one.tokens[:-1]]
        with torch.inference_mode():
            exits = torch.tensor([[*one.prompt_exit_depths, *one.exit_depths]])
            logits = case.model(torch.tensor([ids]), exits=exits).logits[0, len(request.prompt) - 1 :]
        tokens = torch.tensor(one.tokens)[:, None]
        expected = logits.log_softmax(-1).gather(-1, tokens)[:, 0].tolist()
        assert one.logprobs == pytest.approx(expected, rel=1e-5, abs=1e-5)
        if request.sampling.temperature == 0:
            behind = logits.amax(-1) - logits.gather(-1, tokens)[:, 0]
            assert float(behind.max()) <= margin


def run_case(
    config, asked, data, seed: int, text: str, policy: str, prefill: str, aborts: bool, tight: bool = False
) -> None:
    model = random_model(config, seed)
    model.config.exit_gate = True
    rule = rule_of(text, model, seed)
    if policy == "full":
        rule, text, prefill = parse_rule("full"), "full", "dense"
    if (rule.name == "lookahead" and config.n_loops < 2) or (rule.name == "fixed" and rule.depth > config.n_loops):
        rule, text = parse_rule("full"), "full"
    if rule.min_depth > config.n_loops:
        rule, text = parse_rule("q:0.5"), "q:0.5"
    if (rule.needs_output and config.n_coda) or isinstance(rule, ACT):
        prefill = "dense"
    early = ["ragged", "last-exited"] if tight else ["ragged", "last-exited", "shared", "first-then-shared"]
    early = ["state-copied"] if isinstance(rule, ACT) else early
    kv = data.draw(st.sampled_from([*early, "depth-indexed"] if policy == "full" and prefill == "dense" else early))
    lone = max(len(r.prompt) + r.sampling.max_new_tokens - 1 for r in asked) * layout(kv).reserve(config.n_loops)
    rng = random.Random(seed)
    case = serve(
        model, asked, rng, aborts, exit=None if policy == "full" else rule, kv=kv, policy=policy, prefill=prefill,
        width=data.draw(st.integers(3 if tight else 1, 5)), spare=data.draw(st.integers(0, 4)),
        coda_share=data.draw(st.sampled_from([0.0, 0.5, 1.0])), prefill_tokens=data.draw(st.integers(1, 9)),
        kv_pages=lone + data.draw(st.integers(0, config.n_loops if tight else 30)), max_len=12,
    )  # fmt: skip
    event(f"preempted: {case.engine.scheduler.counters['preemptions'] > 0}")
    event(f"recomputed: {case.engine.scheduler.counters['core_rows_recomputed'] > 0}")
    check_books(case, aborts)
    own = None if policy == "full" or rule.name == "full" else rule
    check_against_slow_loop(case, kv, own, own if prefill == "ragged" else None)
    if layout(kv).parallel and kv != "state-copied" and not aborts:
        check_against_forward(case)


@quick
@given(
    config=configs(exit_gate=True), asked=requests(), data=st.data(), seed=st.integers(0, 10**6),
    text=st.sampled_from(RULES), policy=st.sampled_from(["refill", "no-refill", "lockstep", "full"]),
    prefill=st.sampled_from(["dense", "ragged"]), aborts=st.booleans(),
)  # fmt: skip
def test_each_request_as_if_alone(config, asked, data, seed, text, policy, prefill, aborts) -> None:
    run_case(config, asked, data, seed, text, policy, prefill, aborts)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs(exit_gate=True), asked=requests(), data=st.data(), seed=st.integers(0, 10**6),
    text=st.sampled_from(["q:0.5", "hazard:0.45", "l2:0.4", "random:0.5/0.5"]),
    prefill=st.sampled_from(["dense", "ragged"]),
)  # fmt: skip
def test_in_float32_logits_are_those_of_the_forward(config, asked, data, seed, text, prefill) -> None:
    model = random_model(config, seed, torch.float32)
    rule = parse_rule(text)
    if rule.name == "random" and config.n_loops != 2:
        rule = parse_rule("q:0.5")
    if rule.least_depth() > config.n_loops:
        rule = parse_rule("full")
    lone = max(len(r.prompt) + r.sampling.max_new_tokens for r in asked) * config.n_loops
    case = serve(
        model, asked, random.Random(seed), False, exit=rule, prefill=prefill, width=data.draw(st.integers(1, 5)),
        spare=data.draw(st.integers(0, 4)), kv_pages=lone + data.draw(st.integers(0, 2 * config.n_loops)), max_len=12,
    )  # fmt: skip
    check_books(case, False)
    check_against_forward(case, margin=1e-3)


@quick
@given(
    config=configs(exit_gate=True), asked=st.lists(requests(), min_size=2, max_size=2).map(lambda two: two[0] + two[1]),
    data=st.data(), seed=st.integers(0, 10**6), text=st.sampled_from(RULES),
    policy=st.sampled_from(["refill", "no-refill", "lockstep"]), prefill=st.sampled_from(["dense", "ragged"]),
    aborts=st.booleans(),
)  # fmt: skip
def test_preempted_requests_decide_nothing_anew(config, asked, data, seed, text, policy, prefill, aborts) -> None:
    asked = [dataclasses.replace(request, id=f"q{i}") for i, request in enumerate(asked)]
    run_case(config, asked, data, seed, text, policy, prefill, aborts, tight=True)


@pytest.mark.long
@many
@given(
    config=configs(exit_gate=True), asked=requests(), data=st.data(), seed=st.integers(0, 10**6),
    text=st.sampled_from(RULES), policy=st.sampled_from(["refill", "no-refill", "lockstep", "full"]),
    prefill=st.sampled_from(["dense", "ragged"]), aborts=st.booleans(),
)  # fmt: skip
def test_each_request_as_if_alone_at_length(config, asked, data, seed, text, policy, prefill, aborts) -> None:
    run_case(config, asked, data, seed, text, policy, prefill, aborts)
