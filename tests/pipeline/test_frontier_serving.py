"""Thresholds from a mean depth, permuted exits, and oracles, on tiny random models."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.pipeline.frontier_serving import (
    Serving,
    _mean_depth,
    _nearest,
    _steps,
    calibrated,
    oracle_exits,
    permuted,
    served,
    target_of,
    with_exits,
)
from depthprobe.runtime import Request, Sampling

U, VOCABULARY = 4, 17


def tiny(**fields: int) -> LoopedForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2, "n_core": 1, "n_loops": U} | fields
    model = LoopedForCausalLM(LoopedConfig(vocab_size=VOCABULARY, initializer_range=0.4, **shape)).eval().double()
    with torch.no_grad():
        if model.gate is not None:
            model.gate.bias.fill_(-0.5)
    return model


@pytest.fixture(scope="module")
def model() -> LoopedForCausalLM:
    return tiny()


def asked(n: int, most: int = 2) -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(tuple(rng.integers(0, VOCABULARY, int(rng.integers(2, 8))).tolist()),
                Sampling(max_new_tokens=most, ignore_eos=True), f"r{i}", about={"answer_ids": [0], "hops": 1})
        for i in range(n)
    ]  # fmt: skip


def test_a_mean_depth_is_told_from_a_threshold() -> None:
    assert target_of("q:0.5") is None and target_of("l2:0.1,min=2") is None
    assert target_of("q:mean=2.5,min=2") == ("q", 2.5, ",min=2")
    assert target_of(" Entropy-Change : mean = 3") == ("entropy-change", 3.0, "")
    with pytest.raises(UserError, match="not a number"):
        target_of("q:mean=deep")
    with pytest.raises(UserError, match="no threshold"):
        target_of("ponder:mean=2")


@given(st.integers(0, 1000), st.booleans(), st.floats(1, U))
def test_the_threshold_with_the_nearest_mean_depth_is_found(seed: int, later: bool, target: float) -> None:
    criteria = np.random.default_rng(seed).random((7, U))
    steps = _steps(criteria, later)
    assert (np.diff(steps) > 0).all()
    depths = [_mean_depth(criteria, step, later, 1) for step in steps]
    assert sorted(depths, reverse=not later) == depths and {min(depths), max(depths)} == {1, U}
    found = depths[_nearest(len(steps), target, later, depths.__getitem__)]
    assert abs(found - target) <= min(abs(depth - target) for depth in depths) + 1e-12


@pytest.mark.parametrize("name", ["q", "confidence", "entropy", "l2"])
@pytest.mark.parametrize("prefill", ["dense", "ragged"])
def test_a_calibrated_rule_has_its_mean_depth(model: LoopedForCausalLM, name: str, prefill: str) -> None:
    requests, options = asked(40), {"width": 8, "prefill": prefill}

    def serve(rule: str, criteria: bool = False) -> Serving:
        return served(model, requests, rule, options, criteria=criteria)

    found = calibrated(name, "", 2.5, serve)
    assert found.target == 2.5 and found.reached == serve(found.rule).mean_exit
    assert abs(found.reached - 2.5) < (0.1 if prefill == "dense" else 0.2)
    with pytest.raises(UserError, match="not within 1 to 4"):
        calibrated(name, "", 9.0, serve)


def test_a_serving_counts_readouts_and_every_pass(model: LoopedForCausalLM) -> None:
    requests = asked(9, 1)
    quiet = served(model, requests, "q:0.6", {"width": 4})
    prompts = sum(len(request.prompt) - 1 for request in requests)
    assert quiet.read_rows == 0 and quiet.criteria is None
    assert quiet.all_rows == sum(sum(one.exit_depths) for one in quiet.completions) + U * prompts
    assert [one.id for one in quiet.completions] == [request.id for request in requests]
    loud = served(model, requests, "confidence:0.3", {"width": 4}, criteria=True)
    assert loud.read_rows > 0 and loud.criteria is not None and loud.criteria.shape == (9, U)


@given(st.integers(0, 99), st.lists(st.lists(st.integers(1, U), min_size=1, max_size=3), min_size=1, max_size=6))
def test_permuted_exits_are_the_same_exits(seed: int, exits: list[list[int]]) -> None:
    given_exits = [(tuple(own), tuple(own[1:])) for own in exits]
    found = permuted(given_exits, [len(own) for own in exits], seed)
    for part in (0, 1):
        before, after = ([one[part] for one in some] for some in (given_exits, found))
        assert [len(one or ()) for one in before] == [len(one or ()) for one in after]
        assert Counter(d for one in before for d in one or ()) == Counter(d for one in after for d in one or ())
    more = permuted([(tuple(own), None) for own in exits], [5] * len(exits), seed)
    assert all(len(own) == 5 and prompt is None for own, prompt in more)


@pytest.mark.parametrize("shape", [{}, {"n_prelude": 1, "n_coda": 1}])
@pytest.mark.parametrize("ragged", [False, True])
def test_oracles_leave_where_full_depth_says(shape: dict[str, int], ragged: bool) -> None:
    model, requests = tiny(**shape), asked(12, 1)
    options = {"width": 4, "prefill": "ragged" if ragged else "dense"}
    full = served(model, requests, f"fixed:{U}", options)
    tokens = [one.tokens for one in full.completions]
    settling, earliest = oracle_exits(model, requests, tokens, U, ragged)
    for request, (deep, prompt), (soon, _) in zip(requests, settling, earliest, strict=True):
        assert 1 <= soon[0] <= deep[0] <= U
        assert (prompt is None) != ragged and (prompt is None or len(prompt) == len(request.prompt) - 1)
    if not shape:  # by hand: the readout after each loop, everything at full depth
        for request, (deep, _), (soon, _) in zip(requests, settling, earliest, strict=True):
            with torch.inference_mode():
                ran = model(torch.tensor([request.prompt]), output_loop_states=True)
                top = [int(model.lm_head(model.normed(x[:, -1])).argmax()) for x in ran.loop_states]
            assert soon[0] == top.index(top[-1]) + 1
            assert deep[0] == next(d for d in range(1, U + 1) if all(t == top[-1] for t in top[d - 1 :]))
    if not ragged:  # prompts keep their keys, so the word cannot change
        for exits in (settling, earliest):
            again = served(model, with_exits(requests, exits), "replay", options)
            assert [one.tokens for one in again.completions] == tokens
            assert [tuple(one.exit_depths) for one in again.completions] == [own[0] for own in exits]
