"""`depthprobe report RUN`: draws report.html again from a run folder's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="The folder that `depthprobe analyze` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write the page; RUN/report.html if not given.", dir_okay=False),
    ] = None,
) -> None:
    """Draw report.html again from a run folder's tables, without running the model."""
    from depthprobe.report import write_report

    typer.echo(write_report(run, out))
