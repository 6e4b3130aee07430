"""`depthprobe train`: an embedded model from scratch by its recipe, or a lookahead head beside a model's gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from depthprobe.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Train an embedded model by its recipe, or a head that looks ahead.")

_Out = Annotated[Path, typer.Option("--out", help="Folder for the model; must not exist or be empty.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, order, names and stories.")]
_Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Other than the recipe's; for a look, not a model.")]
_Threads = Annotated[int, typer.Option("--threads", min=1, help="torch threads.")]


@app.callback()
def _recipes() -> None:
    """Train an embedded model from scratch by its recipe, or a lookahead head beside a model's gate."""


@app.command("kinship-demo")
def kinship_demo(out: _Out, seed: _Seed = 0, steps: _Steps = None, threads: _Threads = 1) -> None:
    """A looped model (0.58 M parameters, 8 loops) of the kinship task: about 20 minutes of a core."""
    _train("kinship", out, seed, steps, threads)


@app.command("follow-demo")
def follow_demo(out: _Out, seed: _Seed = 0, steps: _Steps = None, threads: _Threads = 1) -> None:
    """A looped model (0.46 M parameters, 8 loops) of the follow task: about half an hour of a core."""
    _train("follow", out, seed, steps, threads)


@app.command()
def lookahead(
    model: Annotated[str, typer.Argument(help="follow-demo, kinship-demo, or a folder of a looped model with a gate.")],
    data: Annotated[
        str, typer.Option("--data", help="stories, stories:follow or stories:kinship; held-out chains for the test.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="File for the head; by default lookahead.safetensors beside the model.")
    ] = None,
    stories: Annotated[int, typer.Option("--stories", min=1, help="Stories to train on.")] = 2000,
    heldout: Annotated[int, typer.Option("--heldout", min=1, help="Stories to test on.")] = 500,
    longest: Annotated[int, typer.Option("--longest", min=3, max=8, help="Hops of the longest question.")] = 6,
    order: Annotated[
        str | None, typer.Option("--order", help="Of facts: forward, reverse, shuffled; default: as in the recipe.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the stories, and of the tokens that are read.")] = 0,
    threads: _Threads = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a head that is there.")] = False,
) -> None:
    """A Linear(d, 1) that tells one loop ahead what the frozen gate will say, for exit rule `lookahead:0.9`."""
    from depthprobe.depth.load import find_folder
    from depthprobe.halting.head import FILE

    file = find_folder(model, None) / FILE if out is None else out
    if file.suffix != ".safetensors":
        what = f"'{file.name}' is no .safetensors file"
        raise UserError(what, where="--out", remedy=f"name it {file.stem}.safetensors")
    if file.exists() and not overwrite:
        remedy = "name another with --out, or pass --overwrite"
        raise UserError("there is a file already", where=str(file), remedy=remedy)
    from depthprobe.training.lookahead import HeadRecipe, parse_data, train_head

    tasks = parse_data(data)
    import torch

    from depthprobe.depth import load
    from depthprobe.models import LoopedForCausalLM

    torch.set_num_threads(threads)
    opened = load(model)
    if not isinstance(opened.model, LoopedForCausalLM):
        what = f"{model} is a {type(opened.model).__name__}, which has no exit gate"
        raise UserError(what, remedy="give follow-demo, kinship-demo, or the folder of a looped model")
    recipe = HeadRecipe(stories=stories, heldout=heldout, longest=longest, seed=seed)
    say = lambda line: typer.echo(line, err=True)  # noqa: E731
    head = train_head(opened.model, opened.tokenizer, tasks, recipe, order, say)
    head.save(file)
    for line in _agreement(head.about["heldout"]):
        typer.echo(line, err=True)
    typer.echo(file)


def _agreement(measured: list[dict[str, Any]]) -> list[str]:
    """A line for every quantile and kind of token: how the head's exits compare with the gate's."""
    lines = ["held-out stories: exits of the head against the gate's from depth 2 on; late: the gate's, a loop late"]
    for row in measured:
        for kind in ("answers", "tokens"):
            told = row[kind]
            lines.append(
                f"q {row['q']:g} {kind:>7} n {told['n']}: equal {told['head_equal']:.3f} "
                f"(late {told['late_equal']:.3f}), within one {told['head_within_one']:.3f}, "
                f"mean depth {told['gate_depth_from_2']:.2f} gate, "
                f"{told['head_depth']:.2f} head, {told['late_depth']:.2f} late"
            )
    return lines


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
