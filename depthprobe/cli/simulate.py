"""`depthprobe simulate`: the scheduler under a computed clock, and clocks from traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from depthprobe.errors import UserError

app = typer.Typer(invoke_without_command=True, no_args_is_help=False, add_completion=False)


@app.callback()
def run(
    context: typer.Context,
    clock: Annotated[
        str, typer.Option("--clock", help="h100-ouro-1.4b, h100-huginn, or a file that `fit` wrote.")
    ] = "h100-ouro-1.4b",
    workload: Annotated[
        str,
        typer.Option("--workload", help="alpaca, sharegpt, PROMPT:OUTPUT tokens (e.g. 100:50), or a trace to replay."),
    ] = "alpaca",
    requests: Annotated[int | None, typer.Option("--requests", help="How many. Default: 1000.")] = None,
    thresholds: Annotated[
        str | None, typer.Option("--threshold", help="Published exit thresholds, e.g. 0.2,0.5,1. Default: the lowest.")
    ] = None,
    exits: Annotated[
        str | None,
        typer.Option("--exits", help="Instead: mean depths, e.g. 2.5,4; shares of depths, 0/.6/.3/.1; or a trace."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second, arriving at random. Default: all at once.")
    ] = None,
    policies: Annotated[str, typer.Option("--policy", help="Any of refill, no-refill, lockstep, full.")] = (
        "refill,no-refill,lockstep"
    ),
    widths: Annotated[str, typer.Option("--width", help="Most rows of a batch, e.g. 16,64,256.")] = "64",
    kvs: Annotated[str, typer.Option("--kv", help="Layouts, e.g. shared,ragged.")] = "shared,ragged",
    spare: Annotated[int | None, typer.Option("--spare", help="Further slots. Default: as many as --width.")] = None,
    coda_share: Annotated[
        float | None, typer.Option("--coda-share", help="The coda waits for that share of the width. Default: clock's.")
    ] = None,
    horizon: Annotated[int, typer.Option("--horizon", help="1: exits are known a loop before, 0: after it.")] = 1,
    prefill_tokens: Annotated[int, typer.Option("--prefill-tokens", help="Most prompt tokens of a tick.")] = 512,
    kv_gib: Annotated[float | None, typer.Option("--kv-gib", help="Memory for KV pages. Default: clock's.")] = None,
    host_ms: Annotated[
        float | None, typer.Option("--host-ms", help="Host's time to prepare a tick. Default: clock's.")
    ] = None,
    prefill_ms: Annotated[
        float | None, typer.Option("--prefill-ms", help="Fixed part of a prefill tick. Default: clock's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths, exits and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Serve requests in simulated time; hold throughput against full depth, the bound and published figures."""
    if context.invoked_subcommand is not None:
        return
    import dataclasses

    from depthprobe.runtime.compare import compare
    from depthprobe.runtime.presets import clock_of

    chosen = clock_of(clock)
    if host_ms is not None:
        chosen = dataclasses.replace(chosen, host=host_ms / 1e3)
    if prefill_ms is not None:
        line = dataclasses.replace(chosen.prefill, fixed=prefill_ms / 1e3)
        chosen = dataclasses.replace(chosen, prefill=line)
    options: dict[str, Any] = {
        "policies": _names("policy", policies), "widths": [_whole("width", one) for one in _names("width", widths)],
        "kvs": _names("kv", kvs), "spare": spare, "coda_share": coda_share, "horizon": horizon,
        "prefill_tokens": prefill_tokens, "kv_bytes": None if kv_gib is None else int(kv_gib * 2**30),
    }  # fmt: skip
    _known("policy", options["policies"], ("refill", "no-refill", "lockstep", "full"))
    rows = []
    for threshold, works in _works(chosen, workload, requests, thresholds, exits, rate, horizon, seed):
        rows += compare(
            chosen, works, threshold=threshold, say=lambda line: print(line, file=sys.stderr), **options
        )  # fmt: skip
    if as_json:
        told = {
            "clock": dataclasses.asdict(chosen),
            "workload": workload,
            "rate": rate,
            "horizon": horizon,
            "seed": seed,
        }
        typer.echo(json.dumps(told | {"rows": rows}, indent=2, ensure_ascii=False, allow_nan=False))
        return
    _print(chosen, workload, rate, rows)


def _works(
    clock: Any, workload: str, requests: int | None, thresholds: str | None, exits: str | None,
    rate: float | None, horizon: int, seed: int,
) -> Any:  # fmt: skip
    """(threshold or None, works) for each set of exits."""
    from depthprobe.runtime.presets import PUBLISHED, WORKLOADS, Lengths, mean_at
    from depthprobe.runtime.record import read_meta
    from depthprobe.runtime.workload import draw, exit_shares, of_trace

    if thresholds is not None and exits is not None:
        raise UserError("--threshold and --exits both say where tokens leave", where="exits", remedy="leave one out")
    if Path(workload).is_dir():
        for name, given in (("requests", requests), ("threshold", thresholds), ("exits", exits), ("rate", rate)):
            if given is not None:
                what = f"--{name} is given, and the requests are those of a trace"
                raise UserError(what, where=name, remedy="leave it out")
        loops = read_meta(Path(workload)).get("n_loops")
        if loops != clock.n_loops:
            what = f"the trace is of {loops} loops, the clock {clock.name} of {clock.n_loops}"
            raise UserError(what, where="clock", remedy=f"fit one: depthprobe simulate fit {workload}")
        yield None, of_trace(Path(workload))
        return
    lengths = WORKLOADS.get(workload)
    if lengths is None:
        prompt, _, output = workload.partition(":")
        if not (prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
            raise UserError(f"no workload is named {workload}", where="workload",
                            remedy=f"use one of {', '.join(WORKLOADS)}, 100:50 or the folder of a trace")  # fmt: skip
        lengths = Lengths(int(prompt), 0.0, int(output), 0.0, longest=int(prompt) + int(output), least=1)
    least = max(clock.least_depth, 1 + horizon)
    n = 1000 if requests is None else requests
    if exits is not None:
        cases = [(None, one) for one in _names("exits", exits)]
    else:
        published = PUBLISHED.get(clock.name)
        if thresholds is None and published is None:
            what = f"nothing says where tokens leave under clock {clock.name}"
            raise UserError(what, where="exits", remedy="give --exits, a mean depth for example")
        if thresholds is None and published is not None:
            chosen = [min(published.means, key=lambda one: published.means[one])]
        else:
            chosen = [_number("threshold", one) for one in _names("threshold", thresholds or "")]
        cases = [(one, str(mean_at(clock, one))) for one in chosen]
    for threshold, text in cases:
        yield threshold, draw(lengths, n, exit_shares(text, clock.n_loops, least), rate=rate, seed=seed)


@app.command()
def fit(
    trace: Annotated[Path, typer.Argument(help="The --out of `depthprobe trace`.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write the clock here, for --clock.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the fit as JSON.")] = False,
) -> None:
    """Fit a clock to the ticks of a trace: what a tick, a row and a key cost, with residuals."""
    import dataclasses

    from depthprobe.runtime.fit import fit as fit_trace
    from depthprobe.runtime.roofline import save_clock

    fitted = fit_trace(trace)
    if out is not None:
        save_clock(fitted.clock, out)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(fitted), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from rich.table import Table

    table = Table("stage", "ticks", "fixed, µs", "a row, µs", "a key, ns", "median error", "R²", "left out")
    for stage, one in fitted.lines.items():
        line = one.line
        table.add_row(
            stage, str(one.n), f"{line.fixed * 1e6:.1f}", f"{line.per_row * 1e6:.3f}", f"{line.per_context * 1e9:.2f}",
            f"{one.relative:.1%}", "–" if one.r2 is None else f"{one.r2:.3f}", ", ".join(one.left_out),
        )  # fmt: skip
    _console().print(table, highlight=False)
    typer.echo(f"the scheduler makes {fitted.follows} of {fitted.ticks} ticks again from the record")
    typer.echo(f"seconds in ticks: {fitted.measured:.4g} measured, {fitted.predicted:.4g} by the clock")
    if out is not None:
        typer.echo(f"clock: {out}")


def _print(clock: Any, workload: str, rate: float | None, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    how = "all at once" if rate is None else f"{rate:g} requests/s"
    table = Table(title=f"{clock.name}, {workload}, {how}", title_justify="left")
    for name in ("kv", "width", "thr.", "exit", "policy", "tok/s", "speed-up", "bound", "fraction", "decoding",
                 "in time", "fill", "prefill", "idle", "ms/tok p50", "in flight", "GiB", "published"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("kv", "policy") else "right", no_wrap=True)
    for row in rows:
        latency, published = row["latency_s"], row["published"]
        table.add_row(
            row["kv"], str(row["width"]), _n(row["threshold"], "g"), _n(row["mean_exit"], ".2f"), row["policy"],
            _n(row["tokens_per_s"], ".0f"), _n(row["speedup"], ".3f"), _n(row["flop_bound"], ".3f"),
            _n(row["fraction"], ".3f"), _n(row["decode_fraction"], ".3f"), _n(row["time_fraction"], ".3f"),
            _n(row["fill"], ".2f"), _n(row["shares"]["prefill"], ".0%"), _n(row["idle_share"], ".1%"),
            "–" if latency is None else f"{1e3 * latency['p50']:.1f}", str(row["most_in_flight"]),
            f"{row['peak_bytes'] / 2**30:.1f}",
            "–" if published is None else f"{published[0]:.2f}–{published[1]:.2f}",
        )  # fmt: skip
    _console().print(table, highlight=False)
    for row in rows:
        if row["says"]:
            at = "" if row["threshold"] is None else f" at {row['threshold']:g}"
            typer.echo(f"{row['kv']}, width {row['width']}, {row['policy']}{at}: {row['says']}")
    if refused := max((row["refused"] for row in rows), default=0):
        typer.echo(f"up to {refused} requests were refused: too long for the pages", err=True)


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=190)


def _names(option: str, text: str) -> list[str]:
    names = [one.strip() for one in text.split(",") if one.strip()]
    if not names:
        raise UserError("nothing is asked for", where=option, remedy="name one or more, with commas between")
    return names


def _known(option: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{option} is {name!r}", where=option, remedy=f"use one of {', '.join(known)}")


def _whole(option: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{option} is {text!r}", where=option, remedy="give whole numbers with commas between")
    return int(text)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} is {text!r}", where=option, remedy="give numbers with commas between") from None


def _n(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
