"""GGUF: a tiny file made here opens by its name and by its folder; what cannot be read is named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import depthprobe
from depthprobe.errors import UserError

D, FF, LAYERS, HEADS = 32, 64, 2, 4


def write(path: Path, seed: int = 0) -> torch.Tensor:
    """A random Llama with a byte-level tokenizer; returns its embedding [V, D]."""
    gguf = pytest.importorskip("gguf")
    from tiny_models import byte_tokenizer

    tokenizer = byte_tokenizer(["Bob is the son of Ann."], 300)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens += ["<|start|>", "<|end|>"]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    generator = torch.Generator().manual_seed(seed)

    def add(name: str, *shape: int) -> torch.Tensor:
        value = torch.randn(*shape, generator=generator) * 0.1
        writer.add_tensor(name, value.numpy())
        return value

    embedding = add("token_embd.weight", len(tokens), D)
    add("output.weight", len(tokens), D)
    add("output_norm.weight", D)
    for layer in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", D, D)
        add(f"blk.{layer}.ffn_gate.weight", FF, D)
        add(f"blk.{layer}.ffn_up.weight", FF, D)
        add(f"blk.{layer}.ffn_down.weight", D, FF)
        add(f"blk.{layer}.attn_norm.weight", D)
        add(f"blk.{layer}.ffn_norm.weight", D)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def said(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        depthprobe.load(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def test_a_gguf_file_opens(tmp_path: Path) -> None:
    embedding = write(tmp_path / "tiny.gguf")
    for name in (tmp_path, tmp_path / "tiny.gguf"):
        model = depthprobe.load(name)
        assert len(model.axis) == LAYERS + 1 and model.dtype == torch.float32 and model.name == str(name)
        ids = torch.tensor([model.tokenizer("Bob is the son of", add_special_tokens=False)["input_ids"]])
        capture = model.capture(ids, positions="all")
        torch.testing.assert_close(capture.states[model.axis[0]][0], embedding[ids[0]])
        assert model.check_identity(capture) < 1e-5
        assert model.tokenizer.decode(ids[0]) == "Bob is the son of"
    assert depthprobe.load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    write(tmp_path / "other.gguf", 1)
    assert "there are 2 GGUF files" in said(tmp_path) and "other.gguf, tiny.gguf" in said(tmp_path)


def test_gguf_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUFnot really")
    if importlib.util.find_spec("gguf") is not None:
        assert "the GGUF file cannot be read" in said(file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "the package gguf, which reads GGUF files, is missing" in said(file)
    assert "depthprobe[gguf]" in said(file)
    assert "there is no file" in said(tmp_path / "none.gguf")


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would fill it with random numbers."""
    gguf = pytest.importorskip("gguf")
    add = gguf.GGUFWriter.add_tensor
    left_out = "blk.1.attn_q.weight"
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tensor", lambda self, name, value: None if name == left_out else add(self, name, value)
    )
    write(tmp_path / "tiny.gguf")
    assert "the GGUF file lacks 1 tensors, the first is model.layers.1.self_attn.q_proj.weight" in said(tmp_path)
    assert "a file has no revision" in said(tmp_path / "tiny.gguf", revision="main")
