"""`depthprobe train RECIPE`: trains an embedded model from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train an embedded model from scratch by its recipe.")


@app.callback()
def _recipes() -> None:
    """Train an embedded model from scratch by its recipe."""


@app.command("family-demo")
def family_demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the model; must not exist or be empty.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights, order, names and stories.")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Other than the recipe's; for a look, not a model.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="torch threads.")] = 1,
) -> None:
    """A looped model (0.46 M parameters, 8 loops) of both family tasks: under an hour on two CPU cores."""
    from depthprobe.training.family_demo import Recipe, train
    from depthprobe.training.save import new_folder, save_model

    folder = new_folder(out)

    recipe = Recipe(threads=threads) if steps is None else Recipe(threads=threads, steps=steps)
    model, tokenizer = train(seed, recipe, say=lambda line: typer.echo(line, err=True))
    save_model(model, tokenizer, folder, seed, recipe)
    typer.echo(out)
