"""Tiny random models of several architectures, and tokenizers built on the spot."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from depthprobe.depth import DecoderModel, DepthModel, LoopedModel
from depthprobe.models import LoopedConfig, LoopedForCausalLM

VOCABULARY = 61
CONTEXT = 256


def config(kind: str, vocabulary: int = VOCABULARY) -> Any:
    """The configuration of a tiny model; every looped one has two core layers, a prelude and a coda."""
    import transformers as t

    common = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    llama = {**common, **size, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    looped = {
        **common, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "n_prelude": 1, "n_core": 2, "n_coda": 1, "n_loops": 3, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    match kind:
        case "llama":
            return t.LlamaConfig(**llama)
        case "llama-tied":
            return t.LlamaConfig(**llama, tie_word_embeddings=True)
        case "gpt2":
            return t.GPT2Config(**common, n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT)
        case "neox":
            return t.GPTNeoXConfig(**common, **size, max_position_embeddings=CONTEXT, rotary_pct=0.5)
        case "gemma2":
            return t.Gemma2Config(
                **llama, head_dim=8, query_pre_attn_scalar=8, sliding_window=64, final_logit_softcapping=2.0
            )
        case "gemma":
            return t.GemmaConfig(**llama, head_dim=8)
        case "granite":
            return t.GraniteConfig(
                **llama,
                logits_scaling=3.0,
                embedding_multiplier=2.0,
                residual_multiplier=0.5,
                attention_multiplier=0.2,
            )
        case "cohere":
            return t.CohereConfig(**llama, logit_scale=0.25)
        case "qwen3":
            return t.Qwen3Config(**llama, head_dim=8)
        case "phi":
            return t.PhiConfig(**llama, partial_rotary_factor=0.5)
        case "opt":
            return t.OPTConfig(
                **common, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                max_position_embeddings=CONTEXT, word_embed_proj_dim=16,
            )  # fmt: skip
        case "looped":
            return LoopedConfig(**looped, n_previous_tokens=2, tie_word_embeddings=False)
        case "looped-plain":
            return LoopedConfig(**{**looped, "n_prelude": 0, "n_coda": 0}, input_injection="add")
        case "looped-ouro":
            return LoopedConfig(
                **{**looped, "n_prelude": 0, "n_coda": 0}, norm="sandwich", norm_per_loop=True
            )
        case "looped-ouro-coda":
            return LoopedConfig(**looped, norm="sandwich", norm_per_loop=True, n_previous_tokens=1)
        case "looped-huginn":
            return LoopedConfig(**looped, input_injection="concat", exit_gate=False)
    raise ValueError(kind)


DECODERS = (
    "llama",
    "llama-tied",
    "gpt2",
    "neox",
    "gemma2",
    "gemma",
    "granite",
    "cohere",
    "qwen3",
    "phi",
    "opt",
)
LOOPED = ("looped", "looped-plain", "looped-ouro", "looped-ouro-coda", "looped-huginn")


def module(kind: str, vocabulary: int = VOCABULARY, seed: int = 0) -> Any:
    """A random model whose weights are large enough that its layers and its padding matter."""
    torch.manual_seed(seed)
    made = config(kind, vocabulary)
    model = LoopedForCausalLM(made) if kind.startswith("looped") else AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def depth_model(kind: str, tokenizer: Any = None, seed: int = 0) -> DepthModel:
    """The same, opened."""
    vocabulary = VOCABULARY if tokenizer is None else len(tokenizer) + 3
    opened = LoopedModel if kind.startswith("looped") else DecoderModel
    return opened(module(kind, vocabulary, seed), tokenizer, kind)


def word_tokenizer(texts: list[str], bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a word (or punctuation mark), a BOS in front of a text, [UNK] for other words."""
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    words = dict.fromkeys(word for text in texts for word, _ in split.pre_tokenize_str(text))
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split  # type: ignore[assignment]
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]"
    )


def byte_tokenizer(texts: list[str], size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE: most words take several tokens, and words that begin alike share them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
