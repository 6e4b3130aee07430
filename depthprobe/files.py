"""Files that are there as a whole or not at all, and what to say when the disk does not play along."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from depthprobe.errors import UserError

__all__ = ["TEMPORARY", "as_user_error", "atomic_write", "check_place"]

#: Names of files that are being written begin so; a killed process leaves them behind.
TEMPORARY = ".partial-"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write(
    file: Path,
    data: bytes | memoryview,
    *,
    what: str = "cannot write here",
    remedy: str = "choose another --out",
    again: str = "run the command again",
) -> None:
    """Write a file so that it appears under its name only when it is whole and on the disk.

    Args:
        what, remedy, again: as `as_user_error` takes them.

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
            raise as_user_error(error, file, what=what, remedy=remedy, again=again) from error
        raise


def check_place(folder: Path, *, what: str = "cannot write here", remedy: str = "choose another --out") -> None:
    """Check that files can be written below a folder, before hours of work end in that they cannot.

    A file is made and removed again: what a mode says is not what a disk does. Of a folder that is not there the
    nearest one that is; nothing is left behind.

    Args:
        what, remedy: as `as_user_error` takes them.

    Raises:
        UserError: it cannot be written to, or a file stands in the way.
    """
    there = folder.absolute()
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    probe = there / f"{TEMPORARY}{os.getpid()}"
    try:
        probe.touch()
    except OSError as error:
        raise as_user_error(error, folder, what=what, remedy=remedy) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def as_user_error(
    error: OSError,
    path: Path,
    *,
    what: str = "cannot write here",
    remedy: str = "choose another --out",
    again: str = "run the command again",
) -> UserError:
    """What the disk says, in one line; whatever it is, another place may do better.

    Args:
        what, remedy: of the line, unless the disk is full.
        again: what to do once there is room.
    """
    if error.errno in _FULL:
        return UserError("the disk is full", where=str(path), remedy=f"make room, then {again}")
    return UserError(f"{what}: {error.strerror or error}", where=str(path), remedy=remedy)


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
