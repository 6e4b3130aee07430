"""A tiny random model as a folder that `depthprobe.load` opens, with a tokenizer for the family tasks."""

from __future__ import annotations

from pathlib import Path

from tiny_models import module, word_tokenizer

from depthprobe.tasks.generate import Generator


def save_model(folder: Path, kind: str = "looped-plain") -> Path:
    """Save it and return the folder; `kind` as in `tiny_models.config`."""
    texts = [
        f"{item.text} {word}"
        for task in ("kinship", "follow")
        for item in Generator(task, seed=5).items(60)
        for word in item.candidates
    ]
    tokenizer = word_tokenizer(texts)
    module(kind, len(tokenizer) + 3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
