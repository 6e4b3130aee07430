"""Configurations: what is refused, what is derived, and the way to disk and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from depthprobe.errors import UserError
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from tests.models.helpers import configs, random_model, random_rows


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        *[({"num_attention_heads": bad}, "num_attention_heads") for bad in ("4", 4.0, None, [4], True)],
        ({"hidden_size": "128"}, "hidden_size"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads"),
        ({"head_dim": 16.0}, "head_dim"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 6, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"n_loops": 0}, "n_loops"),
        ({"n_loops": 2.5}, "n_loops"),
        ({"n_core": 0}, "n_core"),
        ({"n_prelude": -1}, "n_prelude"),
        ({"n_coda": -1}, "n_coda"),
        ({"n_previous_tokens": 3}, "n_previous_tokens"),
        ({"norm": "post"}, "norm"),
        ({"input_injection": "multiply"}, "input_injection"),
        ({"exit_q": 0.0}, "exit_q"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"pad_token_id": 5000}, "pad_token_id"),
    ],
)
def test_the_impossible_is_refused_by_field(options: dict, field: str) -> None:
    with pytest.raises(UserError, match=f"config field {field}"):
        LoopedConfig(**options)


def test_what_is_derived() -> None:
    config = LoopedConfig(hidden_size=48, num_attention_heads=4, n_prelude=1, n_core=2, n_coda=1, n_loops=3)
    assert (config.head_dim, config.num_key_value_heads, config.num_hidden_layers) == (12, 4, 8)
    assert LoopedConfig(head_dim=32, partial_rotary_factor=0.25).rotary_dim == 8


@settings(max_examples=8, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**31))
def test_to_disk_and_back(config: LoopedConfig, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    model = random_model(config, seed, torch.float32)
    model.save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(again, LoopedForCausalLM)
    assert AutoConfig.from_pretrained(folder).to_diff_dict() == model.config.to_diff_dict()
    ids = torch.tensor(random_rows(seed, 1))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)
    tied = again.lm_head.weight is again.embed_tokens.weight
    assert tied == config.tie_word_embeddings


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = LoopedForCausalLM(LoopedConfig(input_injection="concat", initializer_range=0.05))
    assert model.core[0].qkv.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(model.core[0].mlp_norm.weight, torch.ones(128))
    state_half = model.adapter.weight[:, :128]
    assert state_half.diagonal().mean().item() == pytest.approx(1.0, abs=0.02)
    assert model.gate.bias.item() == 0.0
