"""The ragged forward against a token-by-token reference, and against itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.halting import FixedDepth, QExit, SampledExit
from depthprobe.models import LoopedConfig, LoopedForCausalLM, LoopedOutput
from tests.models.helpers import close, configs, pad, random_model, random_rows
from tests.models.reference import Reference, Token

SEEDS = st.integers(0, 2**31)


def compare(
    out: LoopedOutput, mask: torch.Tensor, tokens: list[list[Token]], tolerance: float = 1e-10
) -> None:
    """Every real token of a batch against the reference: exit, logits, states and gates of all loops."""
    assert out.logits is not None
    for row, expected in enumerate(tokens):
        at = mask[row].bool()
        close(out.logits[row, at], torch.stack([t.logits for t in expected]), tolerance)
        if out.exit_depths is not None:
            assert out.exit_depths[row, at].tolist() == [t.exit for t in expected]
            assert not out.exit_depths[row, ~at].any()
        for d, state in enumerate(out.loop_states or ()):
            close(state[row, at], torch.stack([t.states[d] for t in expected]), tolerance)
        if out.gate_logits is not None:
            close(
                out.gate_logits[row, at],
                torch.tensor([t.gates for t in expected], dtype=torch.float64),
                tolerance,
            )


@settings(max_examples=40, deadline=None)
@given(configs(), SEEDS, st.integers(1, 3), st.sampled_from(["left", "right"]))
def test_given_exits_equal_the_reference(config: LoopedConfig, seed: int, n: int, side: str) -> None:
    model = random_model(config, seed)
    rows = random_rows(seed, n)
    ids, mask = pad(rows, side)
    exits = torch.randint(1, config.n_loops + 1, ids.shape)
    expected = [Reference(model).run(row, exits[i][mask[i].bool()].tolist()) for i, row in enumerate(rows)]
    with torch.no_grad():
        bare = model(ids, mask, exits=exits)
        full = model(ids, mask, exits=exits, output_loop_states=True)
    compare(bare, mask, expected)  # the loop ends when all have left
    compare(full, mask, expected)  # tokens run on in the shadow
    total = sum(t.exit for row in expected for t in row)
    assert int(bare.executed_core_rows) == int(full.executed_core_rows) == total
    assert full.loop_states is not None and len(full.loop_states) == config.n_loops


@settings(max_examples=25, deadline=None, derandomize=True)  # rounding: the same examples each time
@given(configs(), SEEDS, st.sampled_from(["left", "right"]))
def test_given_exits_in_float32(config: LoopedConfig, seed: int, side: str) -> None:
    model = random_model(config, seed, torch.float32)
    rows = random_rows(seed, 2)
    ids, mask = pad(rows, side)
    exits = torch.randint(1, config.n_loops + 1, ids.shape)
    expected = [Reference(model).run(row, exits[i][mask[i].bool()].tolist()) for i, row in enumerate(rows)]
    with torch.no_grad():
        compare(model(ids, mask, exits=exits), mask, expected, 1e-5)
        compare(model(ids, mask, exits=exits, output_loop_states=True), mask, expected, 1e-5)


@settings(max_examples=25, deadline=None)
@given(configs(), SEEDS, st.sampled_from([0.3, 0.5, 0.8]), st.sampled_from(["left", "right"]))
def test_a_gate_rule_equals_the_reference(config: LoopedConfig, seed: int, q: float, side: str) -> None:
    model = random_model(config, seed)
    rows = random_rows(seed, 2)
    ids, mask = pad(rows, side)
    expected = [Reference(model).run(row, q) for row in rows]
    for row in expected:
        for token in row:
            survival = torch.sigmoid(-torch.tensor(token.gates, dtype=torch.float64)).cumprod(0)
            if bool(((1.0 - survival - q).abs() < 1e-9).any()):
                return  # a tie within rounding: either side is right
    with torch.no_grad():
        compare(model(ids, mask, exits=QExit(q)), mask, expected)
        compare(model(ids, mask, exits=QExit(q), output_loop_states=True), mask, expected)


@settings(max_examples=25, deadline=None)
@given(configs(), SEEDS, st.integers(1, 3), st.sampled_from(["left", "right"]))
def test_all_exits_at_the_end_equal_the_plain_forward(
    config: LoopedConfig, seed: int, n: int, side: str
) -> None:
    model = random_model(config, seed)
    rows = random_rows(seed, n)
    ids, mask = pad(rows, side)
    with torch.no_grad():
        plain = model(ids, mask, output_loop_states=True)
        for exits in (torch.full_like(ids, config.n_loops), FixedDepth(config.n_loops), QExit(1.0)):
            ragged = model(ids, mask, exits=exits, output_loop_states=True)
            real = mask.bool()
            close(ragged.logits[real], plain.logits[real])
            for a, b in zip(ragged.loop_states, plain.loop_states, strict=True):
                close(a[real], b[real])
            assert (
                int(ragged.executed_core_rows)
                == int(plain.executed_core_rows)
                == int(mask.sum()) * config.n_loops
            )
    compare(plain, mask, [Reference(model).run(row, None) for row in rows])


@settings(max_examples=10, deadline=None)
@given(configs(), SEEDS)
def test_a_fixed_depth_equals_fewer_loops(config: LoopedConfig, seed: int) -> None:
    model = random_model(config, seed)
    ids = torch.tensor(random_rows(seed, 1))
    with torch.no_grad():
        for depth in range(1, config.n_loops + 1):
            close(model(ids, exits=FixedDepth(depth)).logits, model(ids, n_loops=depth).logits)


def small(**options: object) -> LoopedForCausalLM:
    shape = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2,
             "n_prelude": 1, "n_core": 2, "n_coda": 1, "n_loops": 4, "initializer_range": 0.4}  # fmt: skip
    return random_model(LoopedConfig(**{**shape, **options}), 0)


def test_an_exit_changes_later_tokens_only() -> None:
    model = small()
    ids = torch.randint(0, 17, (1, 8))
    exits = torch.full((1, 8), 4)
    early = exits.clone()
    early[0, 3] = 1
    with torch.no_grad():
        a, b = model(ids, exits=exits).logits, model(ids, exits=early).logits
    assert torch.equal(a[:, :3], b[:, :3])
    assert bool(((a - b)[:, 3:].abs().amax(-1) > 1e-6).all())


def test_a_shadow_runs_as_if_the_token_alone_had_stayed() -> None:
    model = small()
    ids = torch.randint(0, 17, (1, 8))
    exits = torch.randint(1, 4, (1, 8))
    stay = exits.clone()
    stay[0, 5] = 4
    with torch.no_grad():
        left = model(ids, exits=exits, output_loop_states=True)
        stayed = model(ids, exits=stay, output_loop_states=True)
    for a, b in zip(left.loop_states, stayed.loop_states, strict=True):
        close(a[0, 5], b[0, 5])


def test_sampled_exits_follow_the_stopping_distribution() -> None:
    from depthprobe.halting import stopping_distribution

    model = small()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(torch.logit(torch.tensor(0.4)).item())
        rule = SampledExit(generator=torch.Generator().manual_seed(0))
        depths = model(torch.randint(0, 17, (64, 32)), exits=rule).exit_depths
    share = torch.bincount(depths.flatten(), minlength=5)[1:] / depths.numel()
    assert torch.allclose(share, stopping_distribution(torch.full((4,), 0.4)), atol=0.03)


def test_gradients_reach_every_loop_through_ragged_keys() -> None:
    model = small().train()
    ids = torch.randint(0, 17, (2, 8))
    out = model(ids, labels=ids, exits=torch.randint(1, 5, (2, 8)), output_loop_states=True)
    (out.loss + out.loop_states[-1].square().mean()).backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "gate" not in n
    )


@pytest.mark.parametrize(
    ("exits", "named"),
    [
        (torch.zeros(1, 5, dtype=torch.long), "from 0 to 0"),
        (torch.full((1, 5), 5), "1 to 4"),
        (torch.ones(1, 4, dtype=torch.long), "shape"),
        (torch.ones(1, 5), "integers"),
        (3, "int"),
        (QExit(0.5, min_depth=5), "min_depth"),
        (FixedDepth(5), "min_depth"),
    ],
)
def test_impossible_exits_are_refused(exits: object, named: str) -> None:
    with pytest.raises(UserError, match=named):
        small()(torch.ones(1, 5, dtype=torch.long), exits=exits)


def test_a_rule_that_needs_a_gate_is_refused_without_one() -> None:
    model = small(exit_gate=False)
    ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(UserError, match="exit_gate"):
        model(ids, exits=QExit(0.5))
    with pytest.raises(UserError, match="exit_gate"):
        model(ids, output_gate_logits=True)
    assert model(ids, exits=FixedDepth(2), output_loop_states=True).gate_logits is None
