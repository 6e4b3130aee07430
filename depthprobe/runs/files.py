"""Files that are there as a whole or not at all, and what to say when the disk does not play along."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from depthprobe.errors import UserError

#: Names of files that are being written begin so; a killed process leaves them behind.
TEMPORARY = ".partial-"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write(file: Path, data: bytes | memoryview) -> None:
    """Write a file so that it appears under its name only when it is whole and on the disk.

    Raises:
        UserError: the disk is full or the place cannot be written to; nothing is left behind.
    """
    partial = file.with_name(f"{TEMPORARY}{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
        _sync_folder(file.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise as_user_error(error, file) from error
        raise


@contextlib.contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Turn a full disk and the like, met by code that writes below `path`, into one line."""
    try:
        yield
    except OSError as error:
        raise as_user_error(error, path) from error


def as_user_error(error: OSError, path: Path) -> UserError:
    """What the disk says, in one line; whatever it is, another place may do better."""
    if error.errno in _FULL:
        remedy = "make room, then run the same command with --resume"
        return UserError("the disk is full", where=str(path), remedy=remedy)
    return UserError(f"cannot write here: {error.strerror or error}", where=str(path), remedy="choose another --out")


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
