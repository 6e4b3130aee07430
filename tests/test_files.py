"""Writing a file whole or not at all, whatever it holds."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from depthprobe.errors import UserError
from depthprobe.files import as_user_error, atomic_write


def test_a_failed_write_is_one_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write(tmp_path / "below" / "a", b"old")
    for code, told in ((errno.ENOSPC, "disk is full .*: make room, then ask again"), (errno.EIO, "no page: .*: go")):

        def fails(*_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch, pytest.raises(UserError, match=told):
            patch.setattr(os, "fsync", fails)
            atomic_write(tmp_path / "below" / "a", b"new", what="no page", remedy="go elsewhere", again="ask again")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "below").iterdir()] == [("a", b"old")]


def test_what_the_disk_says() -> None:
    told = str(as_user_error(OSError(errno.EROFS, "Read-only file system"), Path("/somewhere")))
    assert told == "cannot write here: Read-only file system (/somewhere): choose another --out"
