"""The record of what was served, as plain JSON lines that a killed process leaves readable.

    <trace>/trace.json             configuration: model, exit rule, layout, policy, widths; written first
    <trace>/tokens-00001.jsonl     a line for each generated token: depths, gate values, why, what it waited for
    <trace>/ticks-00001.jsonl      a line for each tick: stage, rows, depth histogram, time, free pages
    <trace>/requests-00001.jsonl   a line for each request when it ends, however it ends

A segment is closed and the next begun when it has grown to `segment_bytes`. Lines are complete up to the last flush; of
a process that was killed the last line of the last segment may be cut, and `read_lines` leaves it out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from depthprobe.errors import UserError
from depthprobe.files import as_user_error, atomic_write

#: of the fields in the lines; `read_meta` refuses others
TRACE_VERSION = 1
STREAMS = ("tokens", "ticks", "requests")
_META = "trace.json"
_CANNOT = "cannot write the trace"
_dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Recorder:
    """Writes a trace folder while the engine runs.

    Args:
        folder: must not exist, or be empty.
        about: what `trace.json` says; JSON values.
        segment_bytes: size at which a segment is closed.
        flush_s: at most so long a line stays in memory.

    Raises:
        UserError: something is in the folder, or it cannot be written to.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any], segment_bytes: int = 64 << 20, flush_s: float = 0.5
    ) -> None:
        self.folder = Path(folder)
        self._segment_bytes, self._flush_s = segment_bytes, flush_s
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise UserError(
                    "the folder of the trace is not empty", where=str(folder), remedy="choose another --out"
                )
        except OSError as error:
            raise _as_user_error(error, self.folder) from error
        text = json.dumps({"trace_version": TRACE_VERSION, **about}, indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write(self.folder / _META, text.encode() + b"\n", what=_CANNOT)
        self._segments = {name: _Segment(self.folder, name) for name in STREAMS}
        self._last_flush = time.monotonic()

    def write(self, stream: str, *rows: Mapping[str, Any]) -> None:
        """Add lines to "tokens", "ticks" or "requests".

        Raises:
            UserError: the disk is full; the lines before are there.
        """
        segment = self._segments[stream]
        try:
            segment.write([_dump(row) for row in rows])
            if segment.size >= self._segment_bytes:
                segment.next()
            now = time.monotonic()
            if now - self._last_flush >= self._flush_s:
                self._last_flush = now
                for each in self._segments.values():
                    each.flush()
        except OSError as error:
            raise _as_user_error(error, self.folder) from error

    def close(self) -> None:
        """Bring everything to the disk. Further lines are refused."""
        for segment in self._segments.values():
            segment.close()


class _Segment:
    """The open file of one stream; it is made with the first line, so an empty stream leaves no file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.number, self.size = 0, 0
        self.file: TextIO | None = None
        self.closed = False

    def write(self, lines: list[str]) -> None:
        if self.closed:
            raise UserError("the trace is closed", where=str(self.folder))
        if self.file is None:
            self.number += 1
            path = self.folder / f"{self.name}-{self.number:05d}.jsonl"
            self.file = path.open("x", encoding="utf-8", buffering=1 << 16)
        text = "\n".join(lines) + "\n"
        self.file.write(text)
        self.size += len(text)

    def flush(self) -> None:
        if self.file is not None:
            self.file.flush()

    def next(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        self.file, self.size = None, 0

    def close(self) -> None:
        self.next()
        self.closed = True


def read_meta(folder: Path) -> dict[str, Any]:
    """What `trace.json` says.

    Raises:
        UserError: no trace, not readable, or of another version.
    """
    file = Path(folder) / _META
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "there is no trace here", where=str(folder), remedy="give the --out of `depthprobe trace`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"the trace cannot be read: {error}", where=str(file)) from None
    version = about.get("trace_version") if isinstance(about, dict) else None
    if version != TRACE_VERSION:
        what = f"the trace has version {version}, this depthprobe reads version {TRACE_VERSION}"
        raise UserError(what, where=str(file), remedy="serve the requests again")
    return about


def read_lines(folder: Path, stream: str) -> Iterator[dict[str, Any]]:
    """Lines of a stream in the order in which they were written; a cut last line is left out.

    Raises:
        UserError: a line that is not JSON anywhere but at the very end of the last segment, naming file and line.
    """
    files = sorted(Path(folder).glob(f"{stream}-*.jsonl"))
    for file in files:
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if not line.endswith("\n"):
                        raise ValueError("cut")
                    yield json.loads(line)
                except ValueError:
                    if file == files[-1] and not line.endswith("\n"):
                        return
                    raise UserError("this line is not JSON", where=f"{file}, line {number}") from None


def _as_user_error(error: OSError, folder: Path) -> UserError:
    return as_user_error(error, folder, what=_CANNOT)
