"""The start of the weights does what its docstring says, to a fresh model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from depthprobe.models import LoopedForCausalLM
from depthprobe.models.core import Block, Rotary
from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.names import NAMES
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.recipes import FOLLOW, KINSHIP, Recipe, demo_config
from depthprobe.training.starts import BACK, SHARE, start_associative

WORDS = family_tokenizer()


@pytest.fixture(scope="module")
def model() -> LoopedForCausalLM:
    torch.manual_seed(0)
    made = LoopedForCausalLM(demo_config(FOLLOW, WORDS))
    start_associative(made, WORDS, 0.1, look_back=True)
    return made


def blocks(model: LoopedForCausalLM) -> list[Block]:
    return [block for block in model.core if isinstance(block, Block)]


@pytest.mark.parametrize(("recipe", "millions"), [(KINSHIP, 0.58), (FOLLOW, 0.46)])
def test_the_models_have_the_size_that_is_told(recipe: Recipe, millions: float) -> None:
    made = LoopedForCausalLM(demo_config(recipe, WORDS))
    assert round(sum(p.numel() for p in made.parameters()) / 1e6, 2) == millions


def test_queries_equal_keys_and_values_pass_through(model: LoopedForCausalLM) -> None:
    for block in blocks(model):
        q, k, v = block.qkv.weight.chunk(3)
        assert torch.equal(q, k) and q.std() > v.std()
        assert torch.equal(block.out.weight, 0.1 * v.T)
        through = block.out.weight @ v  # of what is attended to, onto itself
        assert F.cosine_similarity(through.flatten(), torch.eye(128).flatten(), dim=0) > 0.5
        assert not block.mlp_down.weight.any()
    assert model.gate is not None and not model.gate.weight.any()


def test_previous_tokens_keep_part_of_their_direction(model: LoopedForCausalLM) -> None:
    assert model.mix is not None
    for part in model.mix.weight.split(128, dim=1):
        mixed = part @ model.embed_tokens.weight.T
        kept = F.cosine_similarity(mixed, model.embed_tokens.weight.T, dim=0)
        assert kept.min() > 0.4
        assert abs(part.diagonal().mean() - SHARE) < 0.05


def test_spellings_of_a_word_start_near_each_other_and_no_others_do(model: LoopedForCausalLM) -> None:
    table, at = F.normalize(model.embed_tokens.weight, dim=1), WORDS.get_vocab()
    pairs = [(f" {r}", other) for r in RELATIONS for other in (f"'s {r}", f" is the {r} of")]
    pairs += [(f" {name}", f" {name}'s") for name in NAMES]
    left, right = (table[[at[pair[side]] for pair in pairs]] for side in (0, 1))
    alike = left @ right.T
    same = torch.tensor([[a[0] == b[0] for b in pairs] for a in pairs])
    assert alike[same].min() > 0.4 > alike[~same].abs().max() / 1.25
    assert alike[~same].abs().mean() < 0.1


def test_strength_of_the_copy_and_no_look_back_are_options() -> None:
    torch.manual_seed(0)
    made = LoopedForCausalLM(demo_config(KINSHIP, WORDS))
    start_associative(made, WORDS, 0.5, look_back=False)
    (block,) = blocks(made)
    assert torch.equal(block.out.weight, 0.5 * block.qkv.weight.chunk(3)[2].T)
    assert not block.qkv.bias.any()


def test_two_heads_look_one_token_back_and_the_others_nowhere(model: LoopedForCausalLM) -> None:
    config, length = model.config, 120
    first, second = blocks(model)
    assert not second.qkv.bias.any()
    heads = first.qkv.bias.view(3, config.num_attention_heads, config.head_size)
    assert not heads[2].any()  # no bias on values
    positions = Rotary.of(torch.arange(length)[None], config)
    q, k = (positions.turn(part.expand(1, length, -1, -1))[0].transpose(0, 1) for part in heads[:2])  # [H, S, h]
    score = q @ k.transpose(-1, -2)
    assert not score[2:].any()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    frequencies = config.rope_theta ** (-torch.arange(2) / (config.rotary_dim // 2))
    expected = BACK**2 * torch.cos(frequencies * (distance[..., None] - 1)).sum(-1)
    for head in score[:2]:
        torch.testing.assert_close(head, expected, rtol=1e-4, atol=1e-2)
        seen = head.masked_fill(distance < 0, float("-inf"))
        assert seen[1:].argmax(-1).tolist() == list(range(length - 1))
