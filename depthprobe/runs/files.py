"""The disk below a run folder: one line for what it says, and a lock. Files are written by `depthprobe.files`."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from depthprobe import files
from depthprobe.errors import UserError

#: What to do when a full disk has room again.
RESUME = "run the same command with --resume"


def atomic_write(file: Path, data: bytes | memoryview) -> None:
    """`depthprobe.files.atomic_write` for a file of a run, which can be resumed."""
    files.atomic_write(file, data, again=RESUME)


def as_user_error(error: OSError, path: Path) -> UserError:
    """`depthprobe.files.as_user_error` for a run, which can be resumed."""
    return files.as_user_error(error, path, again=RESUME)


@contextlib.contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Turn a full disk and the like, met by code that writes below `path`, into one line."""
    try:
        yield
    except OSError as error:
        raise as_user_error(error, path) from error


def locked(path: Path) -> int:
    """A lock on the folder that a dead process cannot keep."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise as_user_error(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        remedy = "wait for it, or choose another --out"
        raise UserError("another run is writing to this folder", where=str(path), remedy=remedy) from None
    except OSError:
        pass  # a file system without locks: go on without one
    return descriptor
