"""Deciding a loop ahead: with a head that is right, late without one; and the head's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from depthprobe.errors import UserError
from depthprobe.halting import (
    ACT,
    ExitRule,
    FixedDepth,
    HazardThreshold,
    Lookahead,
    LookaheadHead,
    OutputKL,
    Purpose,
    QExit,
    RandomExit,
    RelativeL2,
    Replay,
    SampledExit,
    SecondOrder,
    uniforms,
)
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from tests.halting.loops import exits, signal

N, U = 40, 6
HEAD = LookaheadHead(*(torch.zeros(shape) for shape in ((3,), (), (3,), (), (3,))), norm_eps=0.0)


def perfect(gates: torch.Tensor) -> torch.Tensor:
    """What a head that is right predicts at each depth: the logit one loop on."""
    return torch.cat([gates[:, 1:], torch.zeros_like(gates[:, :1])], dim=1)


def test_the_worked_example() -> None:
    # CDF = (0.2, 0.6, 1): known after loop 1 that 0.5 will be reached after loop 2
    gates, states = torch.logit(torch.tensor([[0.2, 0.5, 0.9]])), torch.ones(1, 3, 3)
    rule = Lookahead(QExit(0.5), HEAD)
    seen = signal(1, states=states, gates=gates, predicted=perfect(gates))
    assert rule(seen).tolist() == [True] and rule.criterion(seen).item() == pytest.approx(0.6)
    wrong = signal(1, states=states, gates=gates, predicted=torch.full((1, 3), -9.0))
    assert rule(wrong).tolist() == [False]
    assert rule.horizon == 1 and rule.needs_gate and rule.needs_lookahead and rule.least_depth() == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.integers(1, U), st.integers(0, 2))
def test_a_head_that_is_right_gives_the_rules_own_exits_from_depth_two(
    seed: int, threshold: float, least: int, kind: int
) -> None:
    gates = torch.randn(N, U, generator=torch.Generator().manual_seed(seed)) - 0.5
    make = [lambda m: QExit(threshold, m), lambda m: HazardThreshold(threshold, m), lambda m: SampledExit(m)][kind]
    everything = {
        "states": torch.ones(N, U, 3), "gates": gates, "uniform": uniforms(seed, torch.arange(N), Purpose.EXIT),
    }  # fmt: skip
    ahead = exits(Lookahead(make(least), HEAD), **everything, predicted=perfect(gates))
    assert torch.equal(ahead, exits(make(max(least, 2)), **everything))


@pytest.mark.parametrize("rule", [RelativeL2(0.3), RelativeL2(0.3, 4), SecondOrder(0.4), OutputKL(0.2)])
def test_rules_without_a_gate_are_a_loop_late(rule: ExitRule) -> None:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(N, U, 3, generator=generator).cumsum(1) + 2.0
    outputs = torch.randn(N, U, 5, generator=generator).cumsum(1)
    free = replace(rule, min_depth=1)  # type: ignore[type-var]
    own = exits(free, states, outputs=outputs)
    late = exits(Lookahead(rule), states, outputs=outputs)
    # the least depth is that of leaving, and a rule that has been met stays so only where it is met again
    if rule.min_depth == 1:
        assert torch.equal(late, (own + 1).clamp_max(U))
    assert int(late.min()) == Lookahead(rule).least_depth() == max(rule.first_depth + 1, rule.min_depth)
    assert not Lookahead(rule).needs_lookahead


def test_planned_rules_know_anyway() -> None:
    given_exits = torch.arange(N) % U + 1
    states = torch.ones(N, U, 3)
    assert torch.equal(exits(Lookahead(Replay()), states, given=given_exits), given_exits.clamp_min(2))
    uniform = uniforms(1, torch.arange(N), Purpose.EXIT)
    random = RandomExit((0.0, 0.3, 0.3, 0.2, 0.1, 0.1))
    assert torch.equal(exits(Lookahead(random), states, uniform=uniform), exits(random, states, uniform=uniform))
    assert Lookahead(random).sampled and not Lookahead(FixedDepth(3)).sampled


def test_least_depths_are_of_the_loop_in_which_a_token_leaves() -> None:
    gates = torch.full((N, U), 20.0)
    prompt = torch.arange(N) % 2 == 0
    rule = Lookahead(QExit(0.5, 4, 1), HEAD)
    left = exits(rule, torch.ones(N, U, 3), gates=gates, predicted=gates, is_prompt=prompt)
    assert set(left[prompt].tolist()) == {2} and set(left[~prompt].tolist()) == {4}
    assert (rule.least_depth(), rule.least_depth(prompt=True)) == (4, 2)


def test_what_cannot_look_ahead_is_refused() -> None:
    for make, named in (
        (lambda: Lookahead(QExit(0.5)), "train lookahead"),
        (lambda: Lookahead(Lookahead(FixedDepth(2))), "already"),
        (lambda: Lookahead(ACT(), HEAD), "ACT"),
    ):
        with pytest.raises(UserError, match=named):
            make()
    with pytest.raises(UserError, match="least depth is 7"):
        Lookahead(RelativeL2(0.1, 7)).check(U)


def model(seed: int = 0, **options: object) -> LoopedForCausalLM:
    torch.manual_seed(seed)
    made = LoopedForCausalLM(LoopedConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, **options))
    with torch.no_grad():
        made.norm.weight.uniform_(0.5, 1.5)
    return made


def test_a_head_is_saved_whole_and_read_again(tmp_path: Path) -> None:
    teacher = model()
    head = replace(LookaheadHead.start(teacher), about={"q": 0.9})
    states = torch.randn(4, 5, 8)
    assert torch.allclose(head(states), teacher.gate(states)[..., 0])  # it begins as the gate
    head.save(tmp_path / "lookahead.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["lookahead.safetensors"]
    for place in (tmp_path, tmp_path / "lookahead.safetensors"):
        again = LookaheadHead.load(place, teacher)
        assert torch.equal(again(states), head(states)) and again.about == {"q": 0.9} and again.digest == head.digest
    first = (tmp_path / "lookahead.safetensors").read_bytes()
    head.save(tmp_path / "lookahead.safetensors")
    assert (tmp_path / "lookahead.safetensors").read_bytes() == first


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_head_follows_its_model_into_other_precisions(tmp_path: Path, dtype: torch.dtype) -> None:
    teacher = model()
    LookaheadHead.start(teacher).save(tmp_path / "head.safetensors")
    head = LookaheadHead.load(tmp_path / "head.safetensors", teacher.to(dtype))
    assert head.weight.dtype == dtype and head(torch.ones(2, 8, dtype=dtype)).dtype == dtype


def test_a_head_of_another_gate_or_norm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    LookaheadHead.start(model()).save(file)
    others = [model(), model(), model(rms_norm_eps=1e-4)]
    with torch.no_grad():
        others[0].gate.bias.add_(0.1)
        others[1].norm.weight[3] += 0.1
    for other in (*others, model(1)):
        with pytest.raises(UserError, match="another gate or norm"):
            LookaheadHead.load(file, other)
    with pytest.raises(UserError, match="no exit gate"):
        LookaheadHead.load(file, model(exit_gate=False))
    with pytest.raises(UserError, match="8 wide and the state 9"):
        LookaheadHead.load(file)(torch.ones(9))


def test_files_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    with pytest.raises(UserError, match="no such lookahead head"):
        LookaheadHead.load(tmp_path)
    bad.write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        LookaheadHead.load(bad)
    head = LookaheadHead.start(model())
    head.save(good)
    tensors = load_file(good)
    save_file(tensors, bad)
    with pytest.raises(UserError, match="not a lookahead head"):
        LookaheadHead.load(bad)
    from safetensors import safe_open

    with safe_open(good, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({**tensors, "gate_bias": tensors["gate_bias"] + 1}, bad, metadata)
    with pytest.raises(UserError, match="hash"):
        LookaheadHead.load(bad)
    save_file({key: value for key, value in tensors.items() if key != "bias"}, bad, metadata)
    with pytest.raises(UserError, match="'bias'"):
        LookaheadHead.load(bad)
    with pytest.raises(UserError, match="not finite"):
        replace(head, bias=torch.tensor(float("nan"))).save(bad)
