"""The plain forward: packing, padding, causality, loss, what is returned on request, and bad arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from tests.models.helpers import VOCABULARY, close, configs, random_model

SEEDS = st.integers(0, 2**31)


def make(**options: object) -> LoopedForCausalLM:
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4,
             "num_key_value_heads": 2, "n_prelude": 1, "n_core": 2, "n_coda": 1, "n_loops": 3,
             "initializer_range": 0.25, "n_previous_tokens": 2, "partial_rotary_factor": 0.5}  # fmt: skip
    return random_model(LoopedConfig(**{**shape, **options}), 0, torch.float32)


@settings(max_examples=15, deadline=None)
@given(configs(), SEEDS, st.booleans())
def test_packed_questions_equal_each_alone(config: LoopedConfig, seed: int, ragged: bool) -> None:
    """Two rows, each a story of 4 tokens and questions of 3, 2 and 1 tokens; the last row is padded."""
    model = random_model(config, seed)
    story, lengths = 4, (3, 2, 1)
    total = story + sum(lengths)
    ids = torch.randint(0, VOCABULARY, (2, total))
    exits = torch.randint(1, config.n_loops + 1, ids.shape) if ragged else None
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    see = torch.zeros(total, total, dtype=torch.bool)
    see[:, :story] = True
    positions = torch.arange(total)
    spans, start = [], story
    for n in lengths:
        see[start : start + n, start : start + n] = True
        positions[start : start + n] = torch.arange(story, story + n)
        spans.append(slice(start, start + n))
        start += n
    with torch.no_grad():
        packed = model(
            ids, mask, positions[None], block_mask=see[None, None], exits=exits, output_loop_states=True
        )
        for row in range(2):
            for span in spans[: 3 - row]:
                take = [*range(story), *range(span.start, span.stop)]
                own_exits = None if exits is None else exits[row : row + 1, take]
                alone = model(ids[row : row + 1, take], exits=own_exits, output_loop_states=True)
                close(packed.logits[row, take], alone.logits[0])
                for a, b in zip(packed.loop_states, alone.loop_states, strict=True):
                    close(a[row, take], b[0])


def test_given_previous_ids_equal_computed_ones() -> None:
    model = make()
    ids = torch.randint(0, VOCABULARY, (2, 6))
    one = torch.cat([torch.full((2, 1), -1), ids[:, :-1]], 1)
    two = torch.cat([torch.full((2, 2), -1), ids[:, :-2]], 1)
    with torch.no_grad():
        close(model(ids, previous_ids=torch.stack([one, two], -1)).logits, model(ids).logits, 1e-6)


def test_no_token_sees_a_later_one() -> None:
    model = make()
    ids = torch.randint(0, VOCABULARY, (1, 8))
    other = ids.clone()
    other[0, 5] = (ids[0, 5] + 1) % VOCABULARY
    with torch.no_grad():
        a, b = model(ids).logits, model(other).logits
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.equal(a[:, 5:], b[:, 5:])


def test_loss_is_shifted_cross_entropy() -> None:
    model = make()
    ids = torch.randint(0, VOCABULARY, (2, 6))
    labels = ids.clone()
    labels[0, :3] = -100
    out = model(ids, labels=labels)
    log_p = out.logits.log_softmax(-1)
    terms = [-log_p[b, s - 1, ids[b, s]] for b in range(2) for s in range(1, 6) if labels[b, s] != -100]
    assert torch.allclose(out.loss, torch.stack(terms).mean())
    with pytest.raises(UserError, match="logits of all tokens"):
        model(ids, labels=labels, logits_to_keep=1)


def test_what_is_returned_on_request() -> None:
    model = make(n_coda=0)
    ids = torch.randint(0, VOCABULARY, (2, 6))
    with torch.no_grad():
        bare = model(ids)
        assert bare.loop_states is None and bare.gate_logits is None and bare.exit_depths is None
        assert int(bare.executed_core_rows) == 2 * 6 * 3
        out = model(ids, output_loop_states=True)
        assert [tuple(s.shape) for s in out.loop_states] == [(2, 6, 16)] * 3
        assert out.gate_logits.shape == (2, 6, 3)
        assert torch.equal(model.readout(out.loop_states[-1]), bare.logits)
        assert torch.equal(model.gate_logit(out.loop_states[1]), out.gate_logits[..., 1])
        for d in (1, 2, 5):
            assert len(model(ids, n_loops=d, output_loop_states=True).loop_states) == d
        close(model(ids, n_loops=2).logits, model.readout(out.loop_states[1]), 1e-6)
        assert model(ids, skip_logits=True).logits is None
        close(model(ids, logits_to_keep=2).logits, bare.logits[:, -2:], 1e-6)
        close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, bare.logits[:, [0, 3]], 1e-6)


def test_a_normed_loop_is_normed_once() -> None:
    model = make(n_coda=0, norm_per_loop=True)
    ids = torch.randint(0, VOCABULARY, (1, 5))
    with torch.no_grad():
        out = model(ids, output_loop_states=True)
        assert torch.equal(model.lm_head(out.loop_states[-1]), out.logits)
        rms = out.loop_states[0].div(model.norm.weight).square().mean(-1)
        assert torch.allclose(rms, torch.ones_like(rms), atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_and_a_row_of_it_stay_finite(side: str) -> None:
    model = make().train()
    ids = torch.randint(0, VOCABULARY, (3, 6))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0 if side != "right" else 1
    mask[0, 4:] = 0 if side != "left" else 1
    mask[2] = 0
    out = model(ids, mask, labels=ids)
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_bf16_autocast_is_near_fp32_and_its_gradients_too() -> None:
    model = make(hidden_size=64, n_coda=0).train()
    ids = torch.randint(0, VOCABULARY, (4, 24))
    grads = []
    for amp in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(ids, labels=ids, output_loop_states=True)
        assert out.loop_states[-1].dtype == torch.float32  # the residual is not rounded
        out.loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.98


def test_bf16_weights_run() -> None:
    model = make().bfloat16()
    ids = torch.randint(0, VOCABULARY, (2, 9))
    assert model(ids).logits.dtype == torch.bfloat16
    out = model(ids, exits=torch.randint(1, 4, ids.shape), output_loop_states=True)
    assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_loops": 0}, "n_loops is 0"),
        ({"return_dict": False}, "returns no tuple"),
        ({"block_mask": torch.ones(1, 1, 5, 5)}, "bool"),
        ({"block_mask": torch.ones(1, 1, 5, 4, dtype=torch.bool)}, r"\[2, 1, 5, 5\]"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, "block_mask"),
        ({"position_ids": torch.zeros(2, 4, dtype=torch.long)}, "position_ids"),
        ({"previous_ids": torch.zeros(2, 5, 1, dtype=torch.long)}, "previous_ids"),
        ({"labels": torch.zeros(2, 4, dtype=torch.long)}, "labels"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        make()(torch.zeros(2, 5, dtype=torch.long), **options)


@pytest.mark.parametrize("ids", [torch.zeros(5, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)])
def test_input_that_is_no_batch_of_tokens_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(UserError, match="input_ids"):
        make()(ids)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for bad in (VOCABULARY, -1):
        with pytest.raises(UserError, match="vocabulary"):
            make()(torch.tensor([[1, bad]]))
