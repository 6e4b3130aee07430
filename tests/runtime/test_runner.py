"""The runner driven by hand equals the model's own forward on the same exits, and the slow loop for every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.halting import (
    ACT,
    Confidence,
    FixedDepth,
    HazardThreshold,
    Lookahead,
    LookaheadHead,
    OutputKL,
    QExit,
    RandomExit,
    RelativeL2,
    SampledExit,
    SecondOrder,
)
from depthprobe.models import LoopedConfig
from depthprobe.runtime.runner import Runner
from tests.runtime.helpers import Drive, configs, draw_exits, draw_requests, make_pool, random_model
from tests.runtime.reference import SlowRequest

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((actual.double() - expected.double()).abs().max() / expected.abs().max().clamp_min(1e-12))
    assert error <= tolerance, f"relative error {error:.2e}"


@quick
@given(
    config=configs(), data=st.data(), seed=st.integers(0, 10**6), kv=st.sampled_from(["ragged", "last-exited"]),
    dense=st.booleans(), chunk=st.integers(1, 6), double=st.booleans(), sparse=st.booleans(), freeze=st.booleans(),
)  # fmt: skip
def test_equals_the_ragged_forward(
    config: LoopedConfig, data: st.DataObject, seed: int, kv: str, dense: bool, chunk: int, double: bool, sparse: bool,
    freeze: bool,
) -> None:  # fmt: skip
    model = random_model(config, seed, torch.float64 if double else torch.float32)
    sequences, prompts = draw_requests(data)
    exits = draw_exits(data, sequences, prompts, config.n_loops, dense)
    runner = Runner(model, make_pool(config, kv, len(sequences) + 2, 10, seed), sparse=sparse)
    drive = Drive(runner, sequences, prompts, exits, dense=dense, chunk=chunk, seed=seed, freeze=freeze)
    drive.run()
    for r, ids in enumerate(sequences):
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), exits=torch.tensor([exits[r]])).logits[0, prompts[r] - 1 :]
        assert drive.exits[r] == exits[r]
        close(torch.stack(drive.logits[r]), expected, 1e-10 if double else 1e-5)
    assert runner.work.core - runner.work.core_frozen == sum(
        sum(e[p - 1 :]) for e, p in zip(exits, prompts, strict=True)
    )
    assert runner.work.core_prefill == sum(sum(e[: p - 1]) for e, p in zip(exits, prompts, strict=True))
    runner.pool.check_integrity()
    for slot in drive.slots:
        runner.release(slot)
    assert (runner.pool.free_core, runner.pool.free_outer) == (runner.pool.n_core, runner.pool.n_outer)


@quick
@given(
    config=configs(), data=st.data(), seed=st.integers(0, 10**6),
    kv=st.sampled_from(["ragged", "last-exited", "shared", "first-then-shared", "depth-indexed"]), dense=st.booleans(),
)  # fmt: skip
def test_equals_the_slow_loop_in_every_layout(
    config: LoopedConfig, data: st.DataObject, seed: int, kv: str, dense: bool
) -> None:
    model = random_model(config, seed)
    sequences, prompts = draw_requests(data, longest=6)
    exits = draw_exits(data, sequences, prompts, config.n_loops, dense)
    if kv == "depth-indexed":
        exits = [[config.n_loops] * len(e) for e in exits]
    runner = Runner(model, make_pool(config, kv, len(sequences), 10, seed))
    drive = Drive(runner, sequences, prompts, exits, dense=dense, seed=seed)
    drive.run()
    for r, ids in enumerate(sequences):
        slow = SlowRequest(model, ids, kv)
        slow.prefill(0, prompts[r] - 1, exits[r][: prompts[r] - 1])
        expected = [slow.decode(i, exits[r][i]) for i in range(prompts[r] - 1, len(ids))]
        close(torch.stack(drive.logits[r]), torch.stack(expected), 1e-10)


RULES = {
    "q": QExit(0.6, min_depth=2),
    "hazard": HazardThreshold(0.4, min_depth_prompt=2),
    "ponder": SampledExit(),
    "random": RandomExit((0.2, 0.3, 0.3, 0.2)),
    "l2": RelativeL2(0.9),
    "second": SecondOrder(0.9),
    "kl": OutputKL(0.1),
    "confidence": Confidence(0.3),
    "fixed": FixedDepth(3),
    "act": ACT(0.3),
    "lookahead": "q",
    "late": Lookahead(RelativeL2(0.9)),
}


@pytest.mark.parametrize("name", RULES)
@settings(parent=quick, max_examples=8)
@given(config=configs(n_loops=4), data=st.data(), seed=st.integers(0, 10**6), dense=st.booleans())
def test_rules_decide_as_in_the_slow_loop(
    name: str, config: LoopedConfig, data: st.DataObject, seed: int, dense: bool
) -> None:
    model = random_model(config, seed)
    rule = RULES[name]
    if rule == "q":
        rule = Lookahead(QExit(0.6), LookaheadHead.start(model))
    assert not isinstance(rule, str)
    dense = dense or (rule.needs_output and config.n_coda > 0)
    prompt_rule = None if dense else rule
    kv = "state-copied" if name == "act" else "ragged"
    sequences, prompts = draw_requests(data, longest=6)
    seeds = [seed + r for r in range(len(sequences))]
    runner = Runner(model, make_pool(config, kv, len(sequences), 10, seed), rule, prompt_rule, tap=2)
    drive = Drive(runner, sequences, prompts, dense=dense, chunk=3, seed=seed, request_seeds=seeds)
    drive.run()
    for r, ids in enumerate(sequences):
        slow = SlowRequest(model, ids, kv, rule, prompt_rule, seeds[r])
        slow.prefill(0, prompts[r] - 1)
        expected = [slow.decode(i) for i in range(prompts[r] - 1, len(ids))]
        assert drive.exits[r] == [slow.exits[i] for i in range(len(ids))]
        close(torch.stack(drive.logits[r]), torch.stack(expected), 1e-10)


def test_what_does_not_go_together_is_refused() -> None:
    config = LoopedConfig(vocab_size=17, hidden_size=16, intermediate_size=12, n_coda=1, exit_gate=False)
    model = random_model(config, 0)
    pool = make_pool(config, "ragged", 1, 8, 0)
    with pytest.raises(UserError, match="no exit gate"):
        Runner(model, pool, QExit(0.5))
    with pytest.raises(UserError, match="least depth"):
        Runner(model, pool, RelativeL2(0.1, min_depth=9))
    with pytest.raises(UserError, match="dense prefill"):
        Runner(model, pool, prompt_rule=OutputKL(0.1))
    with pytest.raises(UserError, match="act alone"):
        Runner(model, make_pool(config, "state-copied", 1, 8, 0))
    gated = random_model(LoopedConfig(vocab_size=17, hidden_size=16, intermediate_size=12), 0)
    with pytest.raises(UserError, match="state-copied"):
        Runner(gated, make_pool(gated.config, "ragged", 1, 8, 0), ACT())
