"""`depthprobe report RUN`: draws report.html again from a run folder's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from depthprobe.errors import UserError


def command(
    run: Annotated[Path, typer.Argument(help="The folder that `depthprobe analyze` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write the page; RUN/report.html if not given.", dir_okay=False),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print accuracy by hops and depth as Markdown instead.")
    ] = False,
) -> None:
    """Draw report.html again from a run folder's tables, without running the model."""
    from depthprobe.report import accuracy_markdown, read_run, write_report

    if not markdown:
        typer.echo(write_report(run, out))
        return
    if out is not None:
        raise UserError("--markdown prints and writes no page", where="--out", remedy="leave one of the two out")
    typer.echo(accuracy_markdown(read_run(run)))
