"""`depthprobe train RECIPE`: trains an embedded model from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train an embedded model from scratch by its recipe.")

_Out = Annotated[Path, typer.Option("--out", help="Folder for the model; must not exist or be empty.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, order, names and stories.")]
_Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Other than the recipe's; for a look, not a model.")]
_Threads = Annotated[int, typer.Option("--threads", min=1, help="torch threads.")]


@app.callback()
def _recipes() -> None:
    """Train an embedded model from scratch by its recipe."""


@app.command("kinship-demo")
def kinship_demo(out: _Out, seed: _Seed = 0, steps: _Steps = None, threads: _Threads = 1) -> None:
    """A looped model (0.58 M parameters, 8 loops) of the kinship task: about 20 minutes of a core."""
    _train("kinship", out, seed, steps, threads)


@app.command("follow-demo")
def follow_demo(out: _Out, seed: _Seed = 0, steps: _Steps = None, threads: _Threads = 1) -> None:
    """A looped model (0.46 M parameters, 8 loops) of the follow task: about half an hour of a core."""
    _train("follow", out, seed, steps, threads)


def _train(task: str, out: Path, seed: int, steps: int | None, threads: int) -> None:
    from depthprobe.training.save import new_folder, save_model

    folder = new_folder(out)
    from dataclasses import replace

    from depthprobe.training.family_demo import train
    from depthprobe.training.recipes import RECIPES

    recipe = replace(RECIPES[task], threads=threads)
    if steps is not None:
        recipe = replace(recipe, steps=steps)
    model, tokenizer = train(recipe, seed, say=lambda line: typer.echo(line, err=True))
    save_model(model, tokenizer, folder, seed, recipe)
    typer.echo(folder)
