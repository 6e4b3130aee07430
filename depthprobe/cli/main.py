"""`depthprobe`: routes to one module per command and turns the user's errors into one line.

    depthprobe --help
    depthprobe analyze follow-demo --hops 1-6 --out runs/demo

Contract for a command module `depthprobe/cli/<name>.py`
--------------------------------------------------------
* It has a row in `COMMANDS` below: its name, and the one line that `depthprobe --help` shows. Listing imports
  no command module; the module is imported when its command runs (or when its own `--help` is asked for).
* It defines **one** of

      command   a function with typer annotations; its docstring is the help text: depthprobe <name> ...
      app       a `typer.Typer()` with commands of its own:                       depthprobe <name> <sub> ...

  e.g. `def command(model: Annotated[str, typer.Argument(help="...")] = "follow-demo") -> None`.
* At its top it imports typer, the standard library and `depthprobe.errors` only; rich, torch, transformers,
  polars, plotly and numpy, and the rooms that need them, are imported inside the functions.
* Errors of the user are raised as `UserError`; nothing is caught and printed in the command. Another exit
  code: `raise typer.Exit(code)`. Results go to stdout, progress and remarks to stderr.

Tests call `main([...])`, which returns the exit code and never raises for a user's error.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as build_command

from depthprobe.errors import UserError

#: name -> the line in `depthprobe --help`; the module is depthprobe.cli.<name>
COMMANDS: dict[str, str] = {
    "analyze": "Measure how a model uses its depth as questions get harder, and write a report.",
    "agree": "Hold a trace against the lens: why each served token left where it did.",
    "report": "Draw report.html again from a run folder's tables.",
    "tasks": "Generate, check and show kinship and follow questions.",
    "trace": "Serve questions with early exits, and keep the record of every exit.",
    "simulate": "Serve in computed time: schedules, throughput and memory of machines that are not here.",
    "frontier": "Serve at every threshold: what leaving early costs and saves, beside fixed depths and oracles.",
    "lens": "Train a tuned lens, or compare one with the logit lens.",
    "train": "Train an embedded model from scratch by its recipe, or a head that looks ahead.",
    "doctor": "Say what is installed, what is missing, and what brings it.",
}

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class _LazyGroup(TyperGroup):
    """Lists commands from `COMMANDS` and imports a command's module when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, line in COMMANDS.items():
            self.add_command(TyperCommand(name, callback=None, help=line, short_help=line))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            return args[0], _load(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    """The click command of `depthprobe.cli.<name>`, by the contract in this module's docstring."""
    module = importlib.import_module(f"depthprobe.cli.{name}")
    group: typer.Typer | None = getattr(module, "app", None)
    if group is None:
        group = typer.Typer(add_completion=False)
        group.command(name)(module.command)
    command = build_command(group)
    command.name = name
    return command


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        from depthprobe import __version__

        typer.echo(f"depthprobe {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """How looped language models, and ordinary transformers, use their depth."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (a check failed), 2 (user error), 130 (Ctrl-C).

    Exceptions that are neither the user's nor the machine's are bugs and keep their traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = build_command(app).main(args=arguments, prog_name="depthprobe", standalone_mode=False)
    except SystemExit as stop:
        code = stop.code
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        line = _as_line(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return EXIT_USER_ERROR
    if code == EXIT_INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _as_line(error: Exception) -> str | None:
    """One line for what the user or the machine must put right; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    # typer carries its own click in some releases, so the class is known by its method, not by its import
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "depthprobe")
        said = error.format_message().rstrip(".") or "no command is given"  # type: ignore[attr-defined]
        return str(UserError(said, remedy=f"see `{path} --help`"))
    if isinstance(error, ModuleNotFoundError) and not (error.name or "depthprobe").startswith("depthprobe"):
        what = f"the package {error.name} is not installed"
        return str(UserError(what, remedy="`depthprobe doctor` names the command that brings it"))
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return str(UserError("out of memory", remedy="take a smaller --batch-size"))
    if _is_full_disk(error):
        where = getattr(error, "filename", None)
        return str(UserError("the disk is full", where=where, remedy="make room, then run the command again"))
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = error.strerror or "not permitted"
        return str(UserError(what, where=error.filename, remedy="choose another place"))
    return None


def _is_full_disk(error: Exception) -> bool:
    """Polars, safetensors and torch lose the errno and keep only the words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


if __name__ == "__main__":
    sys.exit(main())
