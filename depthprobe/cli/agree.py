"""`depthprobe agree [RUN] TRACE`: why each served token left where it did, beside where its readout settles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.pipeline.agree import Agreement

#: term -> head of its column
_HEADS = {
    "s_full": "settles", "exit": "left", "total": "left − settles", "gate": "gate", "cache_prompt": "cache, prompt",
    "cache_decode": "cache, decoded", "lookahead": "lookahead head", "delay": "delay", "cap_floor": "cap, floor",
    "numerics": "numerics",
}  # fmt: skip


def command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN] TRACE",
            help="A run folder of `depthprobe analyze` with the same items, and the trace; or the trace alone.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for tables/*.parquet; TRACE if not given.", file_okay=False)
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Put the agreement into RUN, too, and draw its report again.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="The model that served, if it is not where the trace says.")
    ] = None,
    lookahead: Annotated[
        str | None, typer.Option("--lookahead", help="The head that served; the one beside the model if not given.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu",
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Most tokens of a forward.")] = 4096,
    epsilon: Annotated[
        float | None,
        typer.Option("--epsilon", help="How near its threshold a rule's number is rounding; by dtype if not given."),
    ] = None,
    margin: Annotated[
        float | None, typer.Option("--margin", help="How near two logits are a tie; by dtype if not given.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap.")] = 0,
) -> None:
    """Replay what was served, and take the difference between exit and settling apart, token by token.

    With RUN, intervals draw its clusters of stories, and the settling must be that of its lens.
    """
    if len(folders) > 2:
        what = f"{len(folders)} folders are given"
        raise UserError(what, where="RUN TRACE", remedy="give a run and a trace, or a trace alone")
    run, trace = (None, folders[0]) if len(folders) == 1 else (folders[0], folders[1])
    if report and run is None:
        raise UserError("there is no run to report in", where="--report", remedy="depthprobe agree RUN TRACE --report")
    from depthprobe.cli.analyze import _quiet_libraries

    _quiet_libraries()
    from depthprobe.analysis.agreement import Epsilon, epsilon_of
    from depthprobe.pipeline.agree import add_to_run, agree
    from depthprobe.runs.trace_tables import write_tables
    from depthprobe.runtime.record import read_meta

    default = epsilon_of(read_meta(trace)["dtype"])
    near = Epsilon(default.criterion if epsilon is None else epsilon, default.margin if margin is None else margin)
    found = agree(
        trace, run, model=model, lookahead=lookahead, device=device, epsilon=near, batch_tokens=batch_tokens,
        seed=seed, remark=_say,
    )  # fmt: skip
    place = trace if out is None else out
    write_tables(place, found.tables)
    _tell(found)
    if run is None:
        _say("no run is given: settling is not compared with a lens, and intervals draw stories or single questions")
    if run is not None and report:
        from depthprobe.report import write_report

        add_to_run(run, found)
        typer.echo(write_report(run))
    typer.echo(place / "tables")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _tell(found: Agreement) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width of its own
    rows = found.tables["agreement_by_hops"]
    tokens = found.tables["agreement"].height
    for (task,), part in rows.partition_by("task", as_dict=True, maintain_order=True).items():
        told = [term for term in _HEADS if term in part["term"].to_list()]
        zero = [term for term in told if not part.filter(term=term)["nonzero"].to_numpy().any()]
        terms = [term for term in told if term not in zero]
        how = f"exit {found.about['exit']}, {found.about['prefill']} prefill"
        title = f"{task or 'all requests'}, {how}: means in loops, with 95 % intervals"
        shown = Table(title=title, title_justify="left")
        for head in ("hops", "tokens", *(_HEADS[term] for term in terms)):
            shown.add_column(head, justify="left" if head == "hops" else "right", no_wrap=head in ("hops", "tokens"))
        for (hops,), cell in part.partition_by("hops", as_dict=True, maintain_order=True).items():
            of = {row["term"]: row for row in cell.iter_rows(named=True)}
            name = "all" if hops is None else f"k = {hops}"
            shown.add_row(name, str(cell["n_tokens"][0]), *(_cell(of[term]) for term in terms))
        console.print(shown)
        if zero:
            console.print(f"0 for every token: {'; '.join(_HEADS[term] for term in zero)}", highlight=False)
    if found.tables["agreement"]["gate"].null_count():
        _say("the exits were planned, not decided by a rule: there are no terms")
    elif tokens:
        off = found.tables["agreement"].filter(found.tables["agreement"]["numerics"] != 0).height
        said = "the terms add up exactly" + (f"; rounding moved {off}" if off else "")
        _say(f"{tokens} tokens: {said}; ε {found.epsilon.criterion:g}, {found.epsilon.margin:g} of logits")
    ties = f", {found.ties} of them ties" if found.ties else ""
    _say(f"every greedy token is the replay's at its exit{ties}; numbers on record differ by {found.gap:.1g} at most")
    if found.compared:
        _say(f"{found.compared} items settle where the lens saw them settle")


def _cell(row: dict[str, float | str | None]) -> str:
    mean, low, high = row["mean"], row["low"], row["high"]
    sign = "" if row["term"] in ("s_full", "exit") else "+"
    shown = f"{mean:{sign}.2f}"
    return shown if low is None or high is None else f"{shown}\n{low:{sign}.2f} to {high:{sign}.2f}"
