"""`depthprobe lens`: trains a tuned lens, and says how much closer to the model's output it is than the logit lens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthprobe.errors import UserError
from depthprobe.files import check_place

if TYPE_CHECKING:
    import polars as pl

    from depthprobe.depth import DepthModel

app = typer.Typer(no_args_is_help=True, help="Train a tuned lens, or compare one with the logit lens.")

_Model = Annotated[str, typer.Argument(help="follow-demo, kinship-demo, smollm2, a folder, or a hub id.")]
_Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="stories (ours), stories:follow, stories:kinship, pydoc (the Python reference), a .txt or .jsonl "
        "file, or a folder of them. One document in five is held out from training.",
    ),
]
_Length = Annotated[
    int | None, typer.Option("--length", min=2, help="Tokens of a row, at most. 128, or all of a shorter context.")
]
_Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
_Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
_Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")]


@app.callback()
def _commands() -> None:
    """Train a tuned lens, or compare one with the logit lens."""


@app.command()
def train(
    model: _Model,
    data: _Data,
    out: Annotated[Path, typer.Option("--out", help="File for the lens, .safetensors.")],
    steps: Annotated[int, typer.Option("--steps", min=0, help="Steps of the optimiser.")] = 200,
    warm: Annotated[
        int,
        typer.Option("--warm", min=0, help="Positions for the least squares that it begins with, times the width."),
    ] = 16,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Texts of a step.")] = 8,
    reads: Annotated[int, typer.Option("--reads", min=1, help="Positions of each text that a step reads.")] = 8,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate; it falls linearly to nothing.")] = 0.02,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the order of texts and of positions.")] = 0,
    length: _Length = None,
    device: _Device = "cpu",
    dtype: _Dtype = "auto",
    revision: _Revision = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a lens that is there.")] = False,
) -> None:
    """Train an affine map for every depth but the last, so that its readout is close to the final output."""
    if out.suffix != ".safetensors":
        what = f"'{out.name}' is no .safetensors file"
        raise UserError(what, where="--out", remedy=f"name it {out.stem}.safetensors")
    if out.exists() and not overwrite:
        raise UserError("there is a file already", where=str(out), remedy="name another, or pass --overwrite")
    check_place(out.parent, what="the tuned lens cannot be written")
    from depthprobe.lens import Recipe
    from depthprobe.pipeline.tuned import train_lens

    recipe = Recipe(warm=warm, steps=steps, rows=rows, reads=reads, rate=rate, seed=seed)
    opened = _open(model, device, dtype, revision)
    lens = train_lens(opened, data, recipe, length=length, progress=_told(steps))
    lens.save(out)
    typer.echo(out)


@app.command()
def evaluate(
    model: _Model,
    lens: Annotated[Path, typer.Argument(help="A file of `depthprobe lens train`.")],
    data: _Data,
    every: Annotated[
        bool, typer.Option("--all", help="Read all documents, of a text that the training did not see.")
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Positions to read, about.")] = 4096,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the positions and of the bootstrap.")] = 0,
    length: _Length = None,
    device: _Device = "cpu",
    dtype: _Dtype = "auto",
    revision: _Revision = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file, too.", dir_okay=False)
    ] = None,
) -> None:
    """KL to the final output of the logit lens and of a tuned lens, on held-out text, depth by depth."""
    if as_json is not None and not as_json.resolve().parent.is_dir():
        where = str(as_json.parent)
        raise UserError("there is no such folder", where=where, remedy="make it, or choose another --json")
    if as_json is not None:
        check_place(as_json.parent, remedy="choose another --json")
    from depthprobe.lens import TunedLens
    from depthprobe.pipeline.tuned import DOCUMENTS, evaluate_lens

    opened = _open(model, device, dtype, revision)
    found = TunedLens.load(lens, opened)
    split = "all" if every else "heldout"
    table = evaluate_lens(
        opened, found, data, split=split, tokens=tokens, seed=seed, length=length,
        remark=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    verdict = _verdict(opened, table)
    _print(opened, table, f"{opened.name} on {data}, {'all' if every else 'held-out'} text")
    typer.echo(verdict)
    if as_json is not None:
        trained = {name: value for name, value in found.about.items() if name != DOCUMENTS}
        told = {
            "model": opened.name, "lens": str(lens), "trained_on": trained, "data": data, "split": split,
            "positions": table["positions"][0], "groups": table["groups"][0], "verdict": verdict,
            "below_everywhere": not _above(table) and not _unsure(table), "below_on_average": not _above(table),
            "depths": table.drop("positions", "groups").to_dicts(),
        }  # fmt: skip
        text = json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False)
        from depthprobe.files import atomic_write

        atomic_write(as_json, text.encode())


def _open(model: str, device: str, dtype: str, revision: str | None) -> DepthModel:
    from depthprobe.cli.analyze import _quiet_libraries

    _quiet_libraries()
    from depthprobe.depth import load

    return load(model, revision=revision, device=device, dtype=dtype)


def _told(steps: int) -> Callable[[int, int, float], None]:
    """Ten lines of a training, to stderr."""
    every = max(1, steps // 10)

    def tell(step: int, steps: int, loss: float) -> None:
        if step == 1 or step % every == 0 or step == steps:
            print(f"step {step}/{steps}: mean KL {loss:.4f} nats", file=sys.stderr)

    return tell


def _above(table: pl.DataFrame) -> list[int]:
    """Depths before the last at which the tuned lens is not below on average, though there is something to be below."""
    return table[:-1].filter(~table[:-1]["below"] & ~table[:-1]["exact"])["depth"].to_list()


def _unsure(table: pl.DataFrame) -> list[int]:
    """Depths before the last at which it is below on average, and the interval of the difference does not say so."""
    before = table[:-1]
    sure = (before["difference_high"] < 0).fill_null(False)
    return before.filter(before["below"] & ~before["exact"] & ~sure)["depth"].to_list()


def _verdict(model: DepthModel, table: pl.DataFrame) -> str:
    exact = table[:-1].filter("exact")["depth"].to_list()
    beside = f", apart from {_names(model, exact)}, read as the model's own output already" if exact else ""
    if above := _above(table):
        return f"The tuned lens is on average not below the logit lens at {_names(model, above)}{beside}."
    below = f"below the logit lens at every depth before the last{beside}"
    if table["difference_high"].null_count():
        return f"The tuned lens is on average {below}; from {table['groups'][0]} groups no interval is told."
    if unsure := _unsure(table):
        where = _names(model, unsure)
        return f"The tuned lens is on average {below}; the interval of the difference reaches 0 at {where}."
    return f"The tuned lens is {below}, by more than the intervals."


def _names(model: DepthModel, depths: list[int]) -> str:
    return ", ".join(str(model.axis[depth]) for depth in depths)


def _print(model: DepthModel, table: pl.DataFrame, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=130)  # a file or a pipe has no width of its own
    counts = f"{table['positions'][0]} positions, {table['groups'][0]} groups"
    shown = Table(title=f"KL(final output ‖ depth), nats: {title}; {counts}", title_justify="left")
    for name in ("depth", "logit lens", "95 %", "tuned lens", "95 %", "tuned − logit", "95 %"):
        shown.add_column(name, justify="left" if name == "depth" else "right", no_wrap=True)
    for row in table.iter_rows(named=True):
        cells = [str(model.axis[row["depth"]])]
        for name in ("logit", "tuned", "difference"):
            cells += [f"{row[name]:.4f}", _interval(row, name)]
        shown.add_row(*cells)
    console.print(shown)


def _interval(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "?" if low is None else f"{low:.4f} to {high:.4f}"
