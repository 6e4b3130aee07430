"""`depthprobe frontier`: what leaving early costs and saves, beside what it has to be better than."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import polars as pl

    from depthprobe.pipeline.frontier import Frontier


def command(
    model: Annotated[str, typer.Argument(help="A looped model: follow-demo, kinship-demo, a folder.")] = "follow-demo",
    task: Annotated[
        list[str] | None, typer.Option("--task", help="kinship or follow; may be repeated. Default: the model's own.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="Your own questions: JSON lines or a CLUTRR csv.")] = None,
    hops: Annotated[str | None, typer.Option("--hops", help="Hop counts, e.g. 1-6 (the default) or 2,4.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", help="Stories for each task, each asked at every k. Default: 2,000 answers or more."),
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Chains: heldout (the default), train or any.")] = None,
    order: Annotated[str | None, typer.Option("--order", help="Of facts: shuffled, forward or reverse.")] = None,
    exit: Annotated[
        str | None,
        typer.Option(
            "--exit",
            help="Exit rules between commas or spaces; q:mean=2.5 sets a threshold on other stories, so that it has "
            "that mean depth. Default: q:0.3,q:0.5,q:0.7,q:0.9.",
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option("--kv", help="Layouts between commas: ragged, shared, first-then-shared, last-exited.")
    ] = "ragged",
    prefill: Annotated[
        str, typer.Option("--prefill", help="dense, or ragged: prompt tokens leave early too.")
    ] = "dense",
    permutations: Annotated[
        int, typer.Option("--permutations", help="Seeds of each rule's exits permuted over the tokens; 0: none.")
    ] = 2,
    calibrate: Annotated[
        int, typer.Option("--calibrate", help="Stories, of another split, on which thresholds are set.")
    ] = 60,
    lookahead: Annotated[
        str | None, typer.Option("--lookahead", help="The head of a lookahead rule. Default: the one beside the model.")
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="refill, no-refill or lockstep.")] = "refill",
    width: Annotated[int, typer.Option("--width", help="Most rows of a batch.")] = 64,
    kv_pages: Annotated[int | None, typer.Option("--kv-pages", help="Pages of the pool. Default: up to 1 GiB.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu (the default), cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of stories and bootstrap. 1000.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder. Default: runs/frontier-<model>-<time>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Serve questions at every threshold: accuracy, depth, work, latency and KV together, beside fixed depths, their
    mixture, permuted exits, a confidence exit and two oracles."""
    from depthprobe.cli.analyze import _progress, _quiet_libraries
    from depthprobe.pipeline.frontier import EXITS, frontier

    _quiet_libraries()
    engine: dict[str, Any] = {"policy": policy, "kv_pages": kv_pages}
    with _progress() as progress:
        found = frontier(
            model, out=out, exit=EXITS if exit is None else split_rules(exit),
            kv=[one.strip() for one in kv.split(",")],
            prefill=prefill, width=width, permutations=permutations, calibrate=calibrate, lookahead=lookahead,
            resume=resume, engine=engine, progress=progress, remark=lambda line: print(line, file=sys.stderr),
            command=shlex.join(["depthprobe", *sys.argv[1:]]) if sys.argv else None, task=task or None, data=data,
            hops=hops, n=n, split=split, order=order, device=device, dtype=dtype, seed=seed,
        )  # fmt: skip
    if as_json:
        told = {name: found.tables[name].to_dicts() for name in ("frontier", "frontier_differences")}
        told = {"run": str(found.folder), "report": str(found.report), **told}
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False))
        return
    _print(found)
    typer.echo(f"report: {found.report}")


def split_rules(text: str) -> list[str]:
    """ "q:0.5,min=2,q:0.9" → the rules; what begins with an option's name belongs to the rule before it."""
    rules: list[str] = []
    for part in text.replace(" ", ",").split(","):
        if part.startswith(("min=", "min_prompt=")) and rules:
            rules[-1] += f",{part}"
        elif part:
            rules.append(part)
    return rules


def _print(found: Frontier) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a file or a pipe has no width of its own
    whole = found.tables["frontier"].filter(found.tables["frontier"]["hops"].is_null())
    for (task, kv), part in whole.partition_by(["task", "kv"], as_dict=True, maintain_order=True).items():
        title = f"{task}, {kv} KV: {part['n'][0]} answers, {part['n_clusters'][0]} clusters of stories"
        table = Table(title=title, title_justify="left")
        # where prompts leave early, equal depth of decoded tokens is not equal work
        ragged = bool(((part["gain"] - part["gain_all"]).abs() > 1e-9).any())
        gains = ("over a mixture", "at equal passes") if ragged else ("over a mixture",)
        heads = ("accuracy", "95 %", "mean exit", "passes", "all", *gains, "s/token", "90 %", "peak KV")
        table.add_column("setting", no_wrap=True)
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for row in part.iter_rows(named=True):
            table.add_row(row["setting"], *_cells(row, ragged))
        console.print(table, highlight=False)
        if part["reason"][0]:
            console.print(f"no intervals: {part['reason'][0]}", highlight=False)
        _print_differences(console, found.tables["frontier_differences"], str(task), str(kv))


def _cells(row: dict[str, Any], ragged: bool) -> tuple[str, ...]:
    gains = [
        "" if row[name] is None else f"{100 * row[name]:+.1f}{_span(row, name, 100, 1)}"
        for name in (("gain", "gain_all") if ragged else ("gain",))
    ]
    return (
        f"{row['accuracy']:.3f}", _span(row, "accuracy", 1, 3).strip(" ()"), f"{row['mean_exit']:.2f}",
        f"{100 * row['decode_share']:.0f} %", f"{100 * row['all_share']:.0f} %", *gains, f"{row['latency_p50']:.3f}",
        f"{row['latency_p90']:.3f}", f"{row['peak_kv_bytes'] / 2**20:.1f} MiB",
    )  # fmt: skip


def _print_differences(console: Any, table: pl.DataFrame, task: str, kv: str) -> None:
    rows = table.filter((table["task"] == task) & (table["kv"] == kv) & table["hops"].is_null())
    for name, part in rows.partition_by("setting", as_dict=True, maintain_order=True).items():
        said = [
            f"{row['against']} {100 * row['accuracy']:+.1f}{_span(row, 'accuracy', 100, 1)}"
            for row in part.iter_rows(named=True)
        ]
        console.print(f"{name[0]}, points against: {'; '.join(said)}", highlight=False, soft_wrap=True)


def _span(row: dict[str, Any], name: str, scale: float, digits: int) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "" if low is None else f" ({scale * low:.{digits}f} to {scale * high:.{digits}f})"
