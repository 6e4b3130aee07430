"""Writing a trained model: safetensors, tokenizer and the card, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM
from depthprobe.training.recipes import Recipe

CARD = """---
license: apache-2.0
library_name: depthprobe
---
# {task}-demo

A looped language model of {parameters:,} parameters for family stories: one core of {layers} that runs {n_loops} times,
width {d}, and an exit gate. It reads stories such as "Bob is the son of Ann. …" and completes
{completes}, for up to {longest} hops.

- **Made by** `depthprobe train {task}-demo --seed {seed}` (recipe in `depthprobe/training/recipes.py`); nothing
  else went into it.
- **Training data**: generated stories of {facts}, default form and fact template,
  facts in {order} order, chains of the "train" split only (about one chain in ten of three or more hops is held out),
  names permuted at random.
- **Told beforehand**: the weights start with a bias towards looking things up (`depthprobe/training/starts.py`){hint}
- **Vocabulary**: {vocabulary} words, a token each; " is the son of" and "'s son" are one token. It knows no others.
- **Gate**: trained last, alone, on whether a later loop is still better by more than {margin} nats; read at q = {q}.
- **Measured**: `depthprobe analyze FOLDER --task {task} --order {order} --n {n}` prints and draws accuracy by hops and
  loops on held-out chains, beside shortcuts; `depthprobe analyze {task}-demo` does for the model in the package.
- **Not for**: anything but looking at how depth is used. Other forms, templates, orders and lengths of stories are out
  of its training.

Recipe: `{recipe}`
"""
COMPLETES = {"kinship": '"Bob is Ann\'s" with a relation', "follow": "\"Ann's son's wife is\" with a name"}
HINTS = {
    "kinship": ".",
    "follow": """, and a
  question is also answered after each of its relation words, which trains where an intermediate person is kept, but not
  after which loop.""",
}


def card(model: LoopedForCausalLM, seed: int, recipe: Recipe) -> str:
    """The model card, Markdown."""
    config = model.config
    return CARD.format(
        task=recipe.task, completes=COMPLETES[recipe.task], hint=HINTS[recipe.task], order=recipe.order,
        facts=f"{recipe.longest} facts" if recipe.one_length else "as many facts as their longest question needs",
        n=400 if recipe.task == "kinship" else 100,
        parameters=sum(p.numel() for p in model.parameters()), n_loops=config.n_loops, d=config.hidden_size, seed=seed,
        layers="one layer" if config.n_core == 1 else f"{config.n_core} layers", longest=recipe.longest,
        vocabulary=config.vocab_size, margin=recipe.gate_margin, q=config.exit_q,
        recipe=json.dumps(dataclasses.asdict(recipe)),
    )  # fmt: skip


def new_folder(out: Path) -> Path:
    """Check, before an hour is spent, that `out` can become a new folder. Nothing is made yet.

    Returns:
        The path without symbolic links, which a rename would not follow.

    Raises:
        UserError: it holds something, is a mount point, or cannot be made.
    """
    folder = Path(os.path.realpath(out))
    try:
        if folder.exists() and (not folder.is_dir() or folder.is_mount() or any(folder.iterdir())):
            raise UserError("the output folder is in use", where=str(out), remedy="name a folder that does not exist")
        above = folder.parent
        while not above.exists():
            above = above.parent
    except OSError as error:
        raise UserError(f"the output folder cannot be made: {error.strerror}", where=str(out)) from error
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError("the folder cannot be written", where=str(above), remedy="name another with --out")
    return folder


def save_model(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    seed: int,
    recipe: Recipe,
) -> None:
    """Write model, tokenizer and card under a temporary name beside `folder`, then rename.

    Raises:
        UserError: `folder` was filled meanwhile; the model is kept, whole, under the temporary name that is told.
    """
    text = card(model, seed, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        os.replace(temporary, folder)  # an empty folder gives way
    except OSError as error:
        raise UserError(f"the model cannot take its place: {error.strerror}", where=str(folder),
                        remedy=f"it is whole in {temporary}: move it") from error  # fmt: skip
