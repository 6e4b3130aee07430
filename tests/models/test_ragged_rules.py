"""Every rule that a forward over all positions can follow: its exits are those that the rule gives when it is asked
about the states of a forward with these very exits; the others are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.halting import (
    ACT,
    Confidence,
    EntropyChange,
    ExitRule,
    FixedDepth,
    FullDepth,
    HazardThreshold,
    Lookahead,
    LookaheadHead,
    OutputEntropy,
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
from tests.halting.loops import exits as exits_of
from tests.models.helpers import configs, pad, random_model, random_rows

SEEDS = st.integers(0, 2**31)


def head_of(model: LoopedForCausalLM) -> LookaheadHead:
    """A head that is not the gate."""
    head = LookaheadHead.start(model)
    generator = torch.Generator().manual_seed(1)
    return replace(head, weight=head.weight + 0.3 * torch.randn(head.weight.shape, generator=generator))


def rules(model: LoopedForCausalLM) -> list[ExitRule]:
    head, n_loops = head_of(model), model.config.n_loops
    plain: list[ExitRule] = [
        QExit(0.6), HazardThreshold(0.45, 1, min(2, n_loops)), SampledExit(), RelativeL2(0.9), SecondOrder(0.9),
        FullDepth(), FixedDepth(1), RandomExit((1 / n_loops,) * n_loops),
    ]  # fmt: skip
    if not len(model.coda):
        plain += [OutputKL(0.5), OutputEntropy(2.6), EntropyChange(0.2), Confidence(0.2)]
    return plain + [Lookahead(rule, head if rule.needs_gate else None) for rule in plain]


@settings(max_examples=25, deadline=None)
@given(configs(), SEEDS, st.sampled_from(["left", "right"]), st.data())
def test_exits_are_those_of_the_rule_on_the_states_as_served(
    config: LoopedConfig, seed: int, side: str, data: st.DataObject
) -> None:
    model = random_model(config, seed)
    head = head_of(model)
    ids, mask = pad(random_rows(seed, 3), side)
    seeds = torch.tensor([5, 6, seed])
    prompt = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    real = mask.bool()
    positions = (mask.cumsum(-1) - 1)[real]
    uniform = uniforms(seeds[:, None].expand(ids.shape)[real], positions, Purpose.EXIT)
    for rule in data.draw(st.lists(st.sampled_from(rules(model)), min_size=3, max_size=3)):
        with torch.no_grad():
            bare = model(ids, mask, exits=rule, exit_seed=seeds, is_prompt=prompt)
            assert bare.exit_depths is not None
            served = model(ids, mask, exits=bare.exit_depths.clamp_min(1), output_loop_states=True)
            full = model(ids, mask, exits=rule, exit_seed=seeds, is_prompt=prompt, output_loop_states=True)
            states = torch.stack(served.loop_states, dim=2)[real]
            seen = {"states": states, "gates": served.gate_logits[real], "predicted": head(model.normed(states))}
            expected = exits_of(
                rule, **seen, outputs=model.readout(states), uniform=uniform, is_prompt=prompt[real]
            )
        assert torch.equal(bare.exit_depths, full.exit_depths)
        assert torch.equal(bare.exit_depths[real], expected), rule.spec()
        assert torch.equal(bare.logits[real], served.logits[real]) or torch.allclose(
            bare.logits[real], served.logits[real], rtol=0, atol=1e-9
        )


@settings(max_examples=10, deadline=None)
@given(configs(n_prelude=1), SEEDS)
def test_draws_do_not_depend_on_company(config: LoopedConfig, seed: int) -> None:
    model = random_model(config, seed)
    rows = random_rows(seed, 3)
    ids, mask = pad(rows, "left")
    seeds = torch.tensor([3, 4, 5])
    with torch.no_grad():
        together = model(ids, mask, exits=SampledExit(), exit_seed=seeds).exit_depths
        for i, row in enumerate(rows):
            alone = model(torch.tensor([row]), exits=SampledExit(), exit_seed=int(seeds[i])).exit_depths
            assert torch.equal(alone[0], together[i][mask[i].bool()])


def small(**options: object) -> LoopedForCausalLM:
    shape = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2,
             "n_core": 2, "n_loops": 4, "initializer_range": 0.4}  # fmt: skip
    return random_model(LoopedConfig(**{**shape, **options}), 0)


def test_a_rule_that_looks_ahead_lets_nobody_leave_at_once() -> None:
    model = small()
    ids = torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for rule, least in (
            (Lookahead(QExit(1e-6), LookaheadHead.start(model)), 2), (Lookahead(RelativeL2(1e9)), 3),
            (Lookahead(SecondOrder(1e9)), 4), (Lookahead(FixedDepth(1)), 2), (Lookahead(RelativeL2(1e9, 4)), 4),
        ):  # fmt: skip
            assert rule.least_depth() == least
            out = model(ids, exits=rule)
            assert out.exit_depths.tolist() == [[least] * 8] * 2 and int(out.executed_core_rows) == 16 * least


@pytest.mark.parametrize(
    ("rule", "more", "named"),
    [
        (ACT(), {}, "act.*state-copied"),
        (OutputKL(), {}, "exit rule kl.*coda|coda.*exit rule kl"),
        (Lookahead(Confidence(0.9)), {}, "coda"),
        (Replay(), {}, "recorded depths"),
        (RandomExit((0.25,) * 4), {}, "exit_seed"),
        (RandomExit((0.5, 0.5)), {"exit_seed": 1}, "2 probabilities and 4 loops"),
        (QExit(0.5, 1, 2), {}, "is_prompt"),
        (QExit(0.5, 1, 2), {"is_prompt": torch.ones(1, 4, dtype=torch.bool)}, "is_prompt"),
        (QExit(0.5, 1, 2), {"is_prompt": torch.ones(1, 5)}, "not bool"),
        (QExit(0.5, 1, 5), {"is_prompt": torch.ones(1, 5, dtype=torch.bool)}, "min_depth_prompt"),
        (SampledExit(), {"exit_seed": torch.ones(2, dtype=torch.long)}, "exit_seed"),
        (SampledExit(generator=torch.Generator()), {"exit_seed": 1}, "generator"),
        (None, {"exit_seed": 1}, "without exits"),
        (None, {"is_prompt": torch.ones(1, 5, dtype=torch.bool)}, "without exits"),
        (Lookahead(QExit(0.5), LookaheadHead.start(small(n_coda=1, rms_norm_eps=1e-5))), {}, "another gate"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    rule: ExitRule | None, more: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        small(n_coda=1)(torch.ones(1, 5, dtype=torch.long), exits=rule, **more)


def test_without_a_gate_only_late_rules_look_ahead() -> None:
    model = small(exit_gate=False)
    ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(UserError, match="exit_gate"):
        model(ids, exits=Lookahead(QExit(0.5), LookaheadHead.start(small())))
    assert int(model(ids, exits=Lookahead(RelativeL2(1e9))).exit_depths.max()) == 3
