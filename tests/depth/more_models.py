"""More tiny random models: architectures that differ where a lens goes wrong, and transformers' own looped ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from tiny_models import CONTEXT, VOCABULARY
from transformers import AutoModelForCausalLM

_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = {**_IDS, **_SIZE, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}

MORE = ("olmo2", "stablelm", "falcon", "bloom", "gptj", "mamba", "bart", "bert", "roberta", "recurrent-gemma")
FOREIGN = ("dory", "dory-last-loop", "hrm", "inkling")


def more_config(kind: str) -> Any:
    match kind:
        case "olmo2":  # norms behind attention and feed-forward alone, QK-norm
            return t.Olmo2Config(**_LLAMA)
        case "stablelm":  # LayerNorm with bias, partial rotary
            return t.StableLmConfig(**_LLAMA, partial_rotary_factor=0.5)
        case "falcon":  # parallel attention, one key-value head, tied
            return t.FalconConfig(
                **_IDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=CONTEXT
            )
        case "bloom":  # a norm behind the embedding, ALiBi
            return t.BloomConfig(**_IDS, hidden_size=32, n_layer=3, n_head=4)
        case "gptj":  # parallel attention, a head with bias
            return t.GPTJConfig(**_IDS, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, n_positions=CONTEXT)
        case "mamba":  # no attention
            return t.MambaConfig(**_IDS, hidden_size=32, num_hidden_layers=3, state_size=4)
        case "bart":  # learned positions that are counted from the left edge
            return t.BartConfig(
                **_IDS, d_model=32, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=48,
                is_decoder=True, is_encoder_decoder=False, max_position_embeddings=CONTEXT,
            )  # fmt: skip
        case "bert":  # a projection and a norm beside the head
            return t.BertConfig(**_IDS, **_SIZE, max_position_embeddings=CONTEXT, is_decoder=True)
        case "roberta":  # positions that are counted from the padding id on
            return t.RobertaConfig(
                **{**_IDS, "pad_token_id": 1}, **_SIZE, max_position_embeddings=CONTEXT, is_decoder=True
            )
        case "recurrent-gemma":  # a recurrent state that counts padding, and soft-capped logits
            return t.RecurrentGemmaConfig(
                **_IDS, **_SIZE, lru_width=32, attention_window_size=64, logits_soft_cap=2.0, num_key_value_heads=1
            )
        case "ctrl":
            return t.CTRLConfig(**_IDS, n_embd=32, n_layer=2, n_head=4, dff=48, n_positions=CONTEXT)
        case "codegen":
            return t.CodeGenConfig(**_IDS, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=CONTEXT)
        case "dory" | "dory-last-loop":
            mode = "per_loop" if kind == "dory" else "last_loop"
            return t.DoryConfig(
                **{**_LLAMA, "num_hidden_layers": 5}, head_dim=8, n_input_layers=2, n_recurrent_layers=2,
                n_output_layers=1, n_recurrent_loops=3, recurrent_kv_cache_mode=mode,
            )  # fmt: skip
        case "hrm":
            return t.HrmTextConfig(
                **{**_LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 2}, head_dim=8, H_cycles=2, L_cycles=3
            )  # two layers a stack; the model multiplies them
        case "inkling":
            return t.Inkling2LoopTextConfig(
                **{**_LLAMA, "num_hidden_layers": 6}, unpadded_vocab_size=VOCABULARY - 2, head_dim=8,
                swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=16,
                d_rel=4, rel_extent=32, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
                n_layers_per_attn_res_block=2, loop_layer_index_start=2, loop_layer_index_end=4,
                loop_num_passes=3, loop_gate_rank=8,
            )  # fmt: skip
    raise ValueError(kind)


def more_module(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(more_config(kind))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()
