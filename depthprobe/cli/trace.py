"""`depthprobe trace`: serve questions or prompts with early exits, and keep the record of every exit."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    model: Annotated[str, typer.Argument(help="A looped model: follow-demo, kinship-demo, a folder.")] = "follow-demo",
    task: Annotated[
        list[str] | None, typer.Option("--task", help="kinship or follow; may be repeated. Default: the model's own.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="Your own questions: JSON lines or a CLUTRR csv.")] = None,
    hops: Annotated[str | None, typer.Option("--hops", help="Hop counts, e.g. 1-6 (the default) or 2,4.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Stories for each task, each asked at every k. 100.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Chains: heldout (the default), train or any.")] = None,
    order: Annotated[str | None, typer.Option("--order", help="Of facts: shuffled, forward or reverse.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help='Instead: a prompt a line, or JSON lines {"prompt": …}.')
    ] = None,
    exit: Annotated[
        str | None,
        typer.Option(
            "--exit",
            help="Exit rule: q:0.5, hazard:0.3, l2:0.05, kl:5e-4, confidence:0.9, fixed:3, full, "
            "act:0.01, ponder, random:.5/.5, lookahead:0.5; with ,min=2. Default: the model's q.",
        ),
    ] = None,
    lookahead: Annotated[
        str | None, typer.Option("--lookahead", help="The head of a lookahead rule. Default: the one beside the model.")
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv",
            help="ragged (the default), last-exited, shared, first-then-shared; depth-indexed for --policy full; "
            "state-copied for act.",
        ),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="refill, no-refill, lockstep or full.")] = "refill",
    prefill: Annotated[
        str, typer.Option("--prefill", help="dense, or ragged: prompt tokens leave early too.")
    ] = "dense",
    width: Annotated[int, typer.Option("--width", help="Most rows of a batch.")] = 64,
    spare: Annotated[
        int | None, typer.Option("--spare", help="Further slots, for rows that wait. Default: as many, in refill.")
    ] = None,
    coda_share: Annotated[
        float | None, typer.Option("--coda-share", help="The coda waits for that share of --width. Default: 1, or 0.5.")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option("--max-len", help="Longest sequence. Default: the trained context, if the pool can.")
    ] = None,
    n_loops: Annotated[int | None, typer.Option("--n-loops", help="Fewer loops than the model's.")] = None,
    kv_pages: Annotated[int | None, typer.Option("--kv-pages", help="Pages of the pool. Default: up to 1 GiB.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", help="Of each request. Default: the answer's, or 16.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0: the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of probability that is drawn from.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="A text that ends a request; may be repeated.")
    ] = None,
    stop_token: Annotated[
        list[int] | None, typer.Option("--stop-token", help="An id that ends a request; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on behind the model's end-of-sequence token.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second, arriving at random. Default: all at once.")
    ] = None,
    tap: Annotated[int, typer.Option("--tap", help="Tokens of the readout after each loop to keep in the trace.")] = 0,
    device: Annotated[str | None, typer.Option("--device", help="cpu (the default), cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of stories, arrivals and draws. 1000.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the trace. Default: runs/trace-<model>-<time>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Serve questions or prompts with continuous depth batching; write the record of every exit."""
    from depthprobe.cli.analyze import _progress, _quiet_libraries
    from depthprobe.pipeline.trace import trace

    if out is None:
        name = Path(model).name or "model"
        out = Path("runs") / f"trace-{name}-{datetime.now():%Y%m%d-%H%M%S}"
    engine: dict[str, Any] = {
        "kv": kv, "policy": policy, "prefill": prefill, "width": width, "spare": spare, "kv_pages": kv_pages,
        "tap": tap, "coda_share": coda_share, "max_len": max_len, "n_loops": n_loops,
    }  # fmt: skip
    _quiet_libraries()
    with _progress() as progress:
        served = trace(
            model, out=out, prompts=prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
            stop=stop or (), stop_tokens=stop_token or (), ignore_eos=ignore_eos,
            rate=rate, lookahead=lookahead, exit=exit, engine=engine, progress=progress,
            remark=lambda line: print(line, file=sys.stderr),
            task=task or None, data=data, hops=hops, n=n, split=split,
            order=order, device=device, dtype=dtype, seed=seed,
        )  # fmt: skip
    for one in served.completions:
        if one.error is not None:
            print(f"refused: {one.error}", file=sys.stderr)
    if as_json:
        typer.echo(json.dumps({"trace": str(served.folder), **served.summary}, ensure_ascii=False, indent=2))
        return
    _print(served.summary)
    typer.echo(f"trace: {served.folder}")


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    how = f"{summary['exit']}, {summary['kv']} KV, {summary['policy']}"
    head = f"{summary['tokens']} tokens of {summary['requests']} requests: {how}"
    decoded = f"{summary['core_rows_decode']} ({_percent(summary['decode_share'])} of full depth)"
    answers = f"{_n(summary.get('accuracy'), 3)} of {summary.get('n_answers', 0)}"
    if summary.get("n_answers") != summary.get("n_questions"):
        answers += f" served, of {summary['n_questions']} asked"
    pages = f"{summary['peak_core_pages']} core pages"
    if summary["peak_outer_pages"]:
        pages += f" and {summary['peak_outer_pages']} of prelude and coda"
    pages += f", {summary['peak_kv_bytes'] / 2**20:.2f} MiB"
    table = Table(title=head, title_justify="left", show_header=False)
    for name, value in (
        ("mean exit, loops", f"{_n(summary['mean_exit'], 2)} of {summary['n_loops']}"),
        ("executed core passes of decoded tokens", decoded),
        ("all executed passes, prefill included", _percent(summary["all_share"]) + " of full depth"),
        ("answers that are right", answers),
        ("tokens a second", _n(summary["tokens_per_s"], 1)),
        ("latency a token, s (median, 90 %)", _two(summary["normalised_latency_s"])),
        ("first token after, s (median, 90 %)", _two(summary["first_token_s"])),
        ("most KV at a time", pages),
        ("outputs that the exit rule asked for", str(summary["rule_outputs"])),
    ):  # fmt: skip
        left_out = {"answers that are right": "accuracy" not in summary,
                    "outputs that the exit rule asked for": not summary["rule_outputs"]}  # fmt: skip
        if not left_out.get(name):
            table.add_row(name, value)
    console.print(table, highlight=False)
    if rows := summary.get("by_hops"):
        hops = Table("hops", "questions", "accuracy", "mean exit")
        for row in rows:
            hops.add_row(str(row["hops"]), str(row["n"]), _n(row["accuracy"], 2), _n(row["mean_exit"], 2))
        console.print(hops, highlight=False)


def _n(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _two(value: dict[str, float] | None) -> str:
    return "–" if value is None else f"{value['p50']:.4f}, {value['p90']:.4f}"
