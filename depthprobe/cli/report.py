"""`depthprobe report RUN`: draws report.html again from a run folder's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from depthprobe.errors import UserError


def command(
    run: Annotated[Path, typer.Argument(help="The folder that `depthprobe analyze` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write the page; RUN/report.html if not given.", dir_okay=False),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            "--items",
            metavar="N|all",
            help="How many questions the item browser holds; at most 500 and a million cells if not given.",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print its tables by hops as Markdown instead.")
    ] = False,
) -> None:
    """Draw report.html again from a run folder's tables, without running the model."""
    from depthprobe.report import accuracy_markdown, causal_markdown, read_run, write_report

    if not markdown:
        typer.echo(write_report(run, out, _limit(items)))
        return
    for option, value in (("--out", out), ("--items", items)):
        if value is not None:
            raise UserError("--markdown prints and writes no page", where=option, remedy="leave one of the two out")
    found = read_run(run)
    typer.echo("\n\n".join(filter(None, (accuracy_markdown(found), causal_markdown(found)))))


def _limit(items: str | None) -> int | Literal["all"] | None:
    if items is None or items == "all":
        return items
    if items.isdecimal() and int(items) > 0:
        return int(items)
    raise UserError(f"'{items}' is no number of questions", where="--items", remedy="give a number from 1, or 'all'")
