"""`depthprobe analyze`: measure how a model uses its depth, write a run folder and a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from depthprobe.pipeline.plan import DryRun


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="follow-demo (the default), kinship-demo, smollm2, a folder, a GGUF file, or a hub id."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="kinship or follow; may be repeated. Default: both; of an embedded model its own."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Your own questions: JSON lines or a CLUTRR csv.")
    ] = None,
    hops: Annotated[
        str | None, typer.Option("--hops", help="Hop counts, e.g. 1-6 (the default) or 2,4.")
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", help="Stories for each task, each asked at every k. 100; for kinship-demo 400.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Chains of relations: heldout (the default), train or any.")
    ] = None,
    form: Annotated[str | None, typer.Option("--form", help="Form of the question.")] = None,
    template: Annotated[str | None, typer.Option("--template", help="Template of the facts.")] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", help="Of facts: shuffled (the default), forward (for kinship-demo), reverse."),
    ] = None,
    distractors: Annotated[
        str | None, typer.Option("--distractors", help="none, offchain, branch or decoy.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of these options; the command line wins.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder. Default: runs/<model>-<time>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu (the default), cuda, cuda:1, ...")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="auto (the default), float32, bfloat16 or float16.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Questions run together. 48.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of stories and bootstrap. 1000.")] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option("--route", help="How states are caught: native (the default), transformer-lens or nnsight."),
    ] = None,
    skip_too_long: Annotated[
        bool | None,
        typer.Option("--skip-too-long/--no-skip-too-long", help="Leave out stories longer than the context."),
    ] = None,
    bos: Annotated[
        str | None, typer.Option("--bos", help="BOS before a prompt: tokenizer (the default), always or never.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Ask through the tokenizer's chat template.")
    ] = None,
    browse: Annotated[
        int | None,
        typer.Option("--browse", help="Questions to read token by token; 0: none. Default: as many as are cheap."),
    ] = None,
    lens: Annotated[
        str | None,
        typer.Option("--lens", help="plain (the default), norm and head alone; tuned, with --tuned; coda."),
    ] = None,
    tuned: Annotated[
        str | None, typer.Option("--tuned", help="A tuned lens: a file of `depthprobe lens train`.")
    ] = None,
    probes: Annotated[
        str | None,
        typer.Option("--probes", help="lens, the default; with others: lens,patching,effective (skipped layers)."),
    ] = None,
    probe_items: Annotated[
        int | None, typer.Option("--probe-items", help="Stories of each task for other probes. 8; for slopes 60.")
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option("--sites", help="Where to patch: resid_post (default), resid_pre, attn_out, mlp_out, loop_state."),
    ] = None,
    patch_tokens: Annotated[
        int | None,
        typer.Option("--patch-tokens", help="Questions of each k that are also patched token by token; 0: none. 1."),
    ] = None,
    spare_first: Annotated[
        int | None,
        typer.Option("--spare-first", help="First tokens that layers are never skipped for. 1; of looped models 0."),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="What a sweep may take beyond the model. 1GiB.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run takes (cells, FLOPs, memory, time), and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure how a model uses its depth on questions of known hop count; write a run folder and a report."""
    from depthprobe.errors import UserError
    from depthprobe.pipeline.config import AnalyzeConfig, read_config

    given = {
        "model": model,
        "task": task or None,
        "data": data,
        "hops": hops,
        "n": n,
        "split": split,
        "form": form,
        "template": template,
        "order": order,
        "distractors": distractors,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "seed": seed,
        "revision": revision,
        "route": route,
        "skip_too_long": skip_too_long,
        "bos": bos,
        "chat": chat,
        "browse": browse,
        "lens": lens,
        "tuned": tuned,
        "probes": probes,
        "probe_items": probe_items,
        "sites": sites,
        "patch_tokens": patch_tokens,
        "spare_first": spare_first,
        "max_memory": max_memory,
        "out": out,
    }
    options = read_config(config) if config is not None else {}
    options |= {name: value for name, value in given.items() if value is not None}
    where, memory = options.pop("out", None), options.pop("max_memory", None)
    AnalyzeConfig.of(options)  # a mistyped option is told before anything heavy is imported
    if dry_run and resume:
        what = "--dry-run continues nothing, so --resume says nothing"
        raise UserError(what, remedy="give one of them")
    _quiet_libraries()
    if dry_run:
        from depthprobe.pipeline.plan import dry_run as plan

        told = plan(out=where, max_memory=memory, remark=lambda line: print(line, file=sys.stderr), **options)
        _print_plan(told, as_json)
        return
    from depthprobe.pipeline.analyze import analyze

    with _progress() as progress:
        result = analyze(
            out=where,
            resume=resume,
            max_memory=memory,
            progress=progress,
            remark=lambda line: print(line, file=sys.stderr),
            command=shlex.join(["depthprobe", *sys.argv[1:]]) if sys.argv else None,
            **options,
        )
    if as_json:
        told = {
            "run": str(result.folder),
            "report": str(result.report),
            "counts": result.manifest["counts"],
            **result.summary,
        }
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False))
        return
    _print_summary(result.summary)
    typer.echo(f"report: {result.report}")


def _print_plan(plan: DryRun, as_json: bool) -> None:
    if as_json:
        told = {"model": plan.model, "seconds": plan.seconds, "probes": [asdict(cost) for cost in plan.probes]}
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        typer.echo(str(plan))


def _quiet_libraries() -> None:
    """Their remarks and bars would stand between ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar with rate and time left on a terminal, nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None, count="")

        def show(stage: str, done: int, total: int) -> None:
            if bars.tasks[0].description != stage:
                # work that is resumed was not done at today's rate: the clock starts at what is there
                bars.reset(
                    bar, description=stage, total=total if total > 1 else None, completed=done, count=""
                )
            count = f"{done}/{total}" if total > 1 else ""
            speed = bars.tasks[0].speed
            if count and speed:
                count += f"  {speed:.{0 if speed >= 10 else 1}f} questions/s"
            bars.update(bar, completed=done, count=count)

        yield show


def _print_summary(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=110)  # a file or a pipe has no width of its own
    for task in summary["tasks"]:
        unit = task["unit"]
        table = Table(
            title=f"{summary['model']} on {task['task']}: {task['n_stories']} stories", title_justify="left"
        )
        gate = task["exit"] is not None
        known = any(row["shortcut"] is not None for row in task["hops"])
        for name in (
            "hops",
            "accuracy",
            "95 %",
            *(["best shortcut", ""] if known else []),
            f"settles ({unit})",
        ):
            table.add_column(name, justify="left" if name == "" else "right", no_wrap=name == "")
        if gate:
            table.add_column(f"gate exit (q {task['exit']['q']:g})", justify="right")
        for row in task["hops"]:
            cells = [str(row["hops"]), _share(row["accuracy"]), f"{_share(row['low'])}–{_share(row['high'])}"]
            cells += [_share(row["shortcut_accuracy"]), str(row["shortcut"] or "")] if known else []
            cells.append(_number(row["settling"]))
            table.add_row(*cells, *([_number(row["mean_exit"])] if gate else []))
        console.print(table)
        console.print(task["headline"], highlight=False)
        console.print()


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
