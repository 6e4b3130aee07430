"""Embedded models: found by name, listed, loadable by transformers' Auto classes, refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from depthprobe.errors import UserError
from depthprobe.halting import Lookahead, LookaheadHead, QExit
from depthprobe.halting.head import FILE
from depthprobe.models import LoopedConfig, LoopedForCausalLM, embedded_models, embedded_path


def embed(folder: Path, name: str) -> Path:
    """Save a tiny model with a word tokenizer and a card, as a recipe does."""
    words = {word: i for i, word in enumerate(["<pad>", "Ann", "is", "tall"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    LoopedForCausalLM(LoopedConfig(vocab_size=4, hidden_size=16, n_core=1, n_loops=2)).save_pretrained(
        folder / name
    )
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>").save_pretrained(folder / name)
    (folder / name / "README.md").write_text("# a card\n")
    return folder / name


def test_by_name_with_the_auto_classes(tmp_path: Path) -> None:
    embed(tmp_path, "b-model")
    embed(tmp_path, "a-model")
    (tmp_path / "half").mkdir()
    assert embedded_models(tmp_path) == ["a-model", "b-model"]
    path = embedded_path("a-model", tmp_path)
    ids = AutoTokenizer.from_pretrained(path)("Ann is tall", return_tensors="pt")
    assert ids.input_ids.tolist() == [[1, 2, 3]]
    model = AutoModelForCausalLM.from_pretrained(path)
    assert isinstance(model, LoopedForCausalLM)
    with torch.no_grad():
        assert model(ids.input_ids, ids.attention_mask).logits.shape == (1, 3, 4)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    embed(tmp_path, "a-model")
    for name in ("", ".", "..", "../a-model", "b-model"):
        with pytest.raises(UserError, match="known: a-model"):
            embedded_path(name, tmp_path)
    (tmp_path / "a-model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        embedded_path("a-model", tmp_path)
    assert embedded_models(tmp_path / "nowhere") == []


def test_every_model_of_the_package_loads() -> None:
    for name in embedded_models():
        path = embedded_path(name)
        assert (path / "model.safetensors").stat().st_size <= 8 * 2**20
        model = AutoModelForCausalLM.from_pretrained(path)
        assert isinstance(model, LoopedForCausalLM)
        assert len(AutoTokenizer.from_pretrained(path)) == model.config.vocab_size
        head = LookaheadHead.load(path, model)  # refused unless it is of this gate and norm
        assert (path / FILE).stat().st_size <= 2**16
        assert model(torch.ones(1, 3, dtype=torch.long), exits=Lookahead(QExit(0.9), head)).exit_depths is not None
