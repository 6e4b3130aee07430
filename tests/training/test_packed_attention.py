"""Packed rows: attention equals dense attention under the block mask, and a question sees no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.models.attend import DenseAttend
from depthprobe.models.masks import build_mask
from depthprobe.training.family_demo import loop_states
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.packed import PackedAttend
from depthprobe.training.packing import Pool
from depthprobe.training.pools import make_pool
from depthprobe.training.recipes import RECIPES

WORDS = family_tokenizer()


@pytest.fixture(scope="module", params=["kinship", "follow"])
def pool(request: pytest.FixtureRequest) -> Pool:
    """Questions of one to three hops, so of several lengths."""
    return make_pool(3, replace(RECIPES[request.param], stories=3, questions=5), 4)


def blocks(told: int, n: int, length: int) -> Tensor:
    """bool `[S, S]`, written out token by token: who sees whom, causality apart."""
    owner = [-1] * told + [i // length for i in range(n * length)]
    return torch.tensor([[key == -1 or key == query for key in owner] for query in owner])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    told=st.integers(1, 9),
    n=st.integers(1, 4),
    length=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)]),
    width=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 999),
)
def test_equals_dense_attention_under_the_block_mask(
    rows: int, told: int, n: int, length: int, heads: tuple[int, int], width: int, seed: int
) -> None:
    size = told + n * length
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, h, size, width, generator=generator) for h in (heads[0], heads[1], heads[1]))
    dense = DenseAttend(build_mask(size, size, q.device, block_mask=blocks(told, n, length)[None, None]))
    torch.testing.assert_close(PackedAttend(told, n, length)(0, q, k, v), dense(0, q, k, v), rtol=1e-5, atol=1e-5)


def test_padding_at_a_questions_end_is_seen_by_none_of_its_tokens() -> None:
    told, n, length = 5, 3, 4
    real = torch.ones(told + n * length, dtype=torch.bool)
    real[[told + 3, told + 6, told + 7]] = False  # questions of three, two and four tokens
    q, k, v = (torch.randn(2, 2, len(real), 3, generator=torch.Generator().manual_seed(i)) for i in range(3))
    attend = PackedAttend(told, n, length)
    before = attend(0, q, k, v)[:, real]
    k[:, :, ~real], v[:, :, ~real] = 1e4, 1e4
    assert torch.equal(attend(0, q, k, v)[:, real], before)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("norm_per_loop", [False, True])
def test_a_packed_question_is_what_it_would_be_alone(pool: Pool, kv_heads: int, norm_per_loop: bool) -> None:
    torch.manual_seed(1)
    config = LoopedConfig(
        vocab_size=len(WORDS), hidden_size=20, intermediate_size=12, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=6, n_core=2, n_loops=3, partial_rotary_factor=0.67,
        n_previous_tokens=2, attention_bias=True, embedding_multiplier=3.0, norm_per_loop=norm_per_loop,
        input_injection="add", initializer_range=0.3,
    )  # fmt: skip
    model = LoopedForCausalLM(config).eval()
    batch = pool.draw(np.random.default_rng(2), 2, 3)
    told = batch.story_length
    length = (batch.ids.shape[1] - told) // batch.n_questions
    with torch.no_grad():
        packed = loop_states(model, batch, config.n_loops)
        lengths = set()
        for row in range(2):
            for question in range(batch.n_questions):
                slot = torch.arange(length) + told + question * length
                slot = slot[batch.ids[row, slot] != pool.pad]
                lengths.add(len(slot))
                here = torch.cat([torch.arange(told), slot])
                alone = model(batch.ids[row, here][None], output_loop_states=True).loop_states
                assert alone is not None and len(alone) == len(packed) == 3
                for ours, theirs in zip(packed, alone, strict=True):
                    torch.testing.assert_close(ours[row, here], model.normed(theirs)[0], rtol=1e-5, atol=1e-5)
    assert (len(lengths) > 1) == (length > 3)  # follow's questions are padded, kinship's all have three tokens


def test_forgetting_takes_previous_tokens_from_questions_only(pool: Pool) -> None:
    config = LoopedConfig(vocab_size=len(WORDS), hidden_size=8, n_core=1, n_loops=1, n_previous_tokens=2)
    model = LoopedForCausalLM(config)
    batch = pool.draw(np.random.default_rng(0), 1, 3)
    seen: list[Tensor] = []
    embed = model.embed
    model.embed = lambda ids, previous=None: seen.append(previous) or embed(ids, previous)  # type: ignore[method-assign]
    kept = batch.previous.clone()
    with torch.no_grad():
        loop_states(model, batch, 1, forget=1.0)
    told = batch.story_length
    assert torch.equal(seen[0][:, :told], batch.previous[:, :told]) and bool((seen[0][:, told:] == -1).all())
    assert torch.equal(batch.previous, kept)  # the batch itself is left as it is
