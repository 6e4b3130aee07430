"""`RunFolder`: a run folder that this process writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.files import TEMPORARY
from depthprobe.runs.files import as_user_error, atomic_write, locked
from depthprobe.runs.manifest import AGAIN, SCHEMA_VERSION, compare, read_manifest
from depthprobe.runs.provenance import git_commit, versions

_PART = re.compile(r"part-(\d{5,})\.parquet")


class RunFolder:
    """A run folder that this process writes. Use `create` or `resume`, and `close` (or `with`) when done.

    Attributes:
        path: the folder.
        manifest: what manifest.json holds.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: int) -> None:
        self.path = path
        self.manifest = manifest
        self._lock: int | None = lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- opening ---------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, path: Path, identity: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """A new folder with its manifest.

        Args:
            path: must not exist, or be empty.
            identity: values for `manifest.IDENTITY`; "versions" and "git" are filled in if absent.
            about: more for the manifest, not compared when a run is resumed.

        Raises:
            UserError: something is there already, or the place cannot be written to.
        """
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise as_user_error(error, path) from error
        lock = locked(path)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "started": _now(),
            "finished": None,
            "versions": versions(),
            "git": git_commit(),
            **identity,
            **(about or {}),
        }
        run = cls(path, manifest, lock)
        try:
            run._sweep()
            run._write_manifest()
        except BaseException:
            run.close()
            with contextlib.suppress(OSError):
                path.rmdir()  # only while it is empty
            raise
        return run

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, Any]) -> RunFolder:
        """A folder that was begun with the same identity, finished or not.

        Raises:
            UserError: no run folder, one of another version, in use by another process, or begun with
                something else; the first field that differs is named.
        """
        manifest = read_manifest(path)
        compare(manifest, {"versions": versions(), "git": git_commit(), **identity}, path)
        run = cls(path, manifest, locked(path))
        run._sweep()
        return run

    @property
    def finished(self) -> bool:
        """Whether all tables are final."""
        return self.manifest.get("status") == "finished"

    # -- tables ----------------------------------------------------------------------------------------------

    def parts(self, name: str) -> set[int]:
        """Numbers of the finished parts of a table."""
        folder = self.path / "tables" / name
        if not folder.is_dir():
            return set()
        return {int(found[1]) for found in map(_PART.fullmatch, os.listdir(folder)) if found}

    def write_part(self, name: str, number: int, rows: pl.DataFrame) -> None:
        """One part of a table; it is there as a whole or not at all."""
        self._write(self.path / "tables" / name / f"part-{number:05d}.parquet", name, rows)

    def join_parts(self, name: str, n_parts: int) -> pl.DataFrame:
        """Make the final table from parts 0 … n_parts − 1, in that order, and return it.

        Raises:
            UserError: a part is missing or damaged.
        """
        missing = sorted(set(range(n_parts)) - self.parts(name))
        if missing:
            where = str(self.path / "tables" / name)
            raise UserError(
                f"part {missing[0]} is missing", where=where, remedy="continue the run with --resume"
            )
        folder = self.path / "tables" / name
        whole = pl.concat([_read(folder / f"part-{number:05d}.parquet", name) for number in range(n_parts)])
        self.write_table(name, whole)
        return whole

    def has_table(self, name: str) -> bool:
        """Whether the final table is there."""
        return (self.path / "tables" / f"{name}.parquet").is_file()

    def write_table(self, name: str, rows: pl.DataFrame) -> None:
        """A final table; it replaces an older one at once."""
        self._write(self.path / "tables" / f"{name}.parquet", name, rows)

    def read_table(self, name: str) -> pl.DataFrame:
        """A final table, checked."""
        return _read(self.path / "tables" / f"{name}.parquet", name)

    def finish(self, **about: Any) -> None:
        """Say in the manifest that all tables are final, then drop the parts."""
        self.manifest |= {**about, "status": "finished", "finished": _now()}
        self._write_manifest()
        self.drop_parts()

    def drop_parts(self) -> None:
        """Remove the parts of final tables; also those that a run killed at its very end left."""
        for name in tables.SCHEMAS:
            if self.has_table(name):
                shutil.rmtree(self.path / "tables" / name, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Take the folder away if no table was begun: a run that failed at once leaves nothing."""
        written = [file for file in self.path.rglob("*") if file.is_file() and file.name != "manifest.json"]
        if not written and not self.finished:
            shutil.rmtree(self.path, ignore_errors=True)

    # -- inside ----------------------------------------------------------------------------------------------

    def _write(self, file: Path, name: str, rows: pl.DataFrame) -> None:
        # Parquet goes through memory: a writer that meets a full disk itself may keep only the words of the
        # error.
        buffer = io.BytesIO()
        tables.check(name, rows).write_parquet(buffer)
        atomic_write(file, buffer.getbuffer())

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        atomic_write(self.path / "manifest.json", text.encode())

    def _sweep(self) -> None:
        """Remove what a killed process was in the middle of writing."""
        for file in self.path.rglob(f"{TEMPORARY}*"):
            file.unlink(missing_ok=True)


def check_free(path: Path) -> None:
    """Check that a run may begin in this folder.

    Raises:
        UserError: a run, or anything else, is there already.
    """
    try:
        left = [name for name in os.listdir(path) if not name.startswith(TEMPORARY)]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UserError(
            "a file stands where the run folder should be", where=str(path), remedy=AGAIN
        ) from None
    except OSError as error:
        raise as_user_error(error, path) from error
    if "manifest.json" in left:
        remedy = "continue it with --resume, or choose another --out"
        raise UserError("there is a run in this folder already", where=str(path), remedy=remedy)
    if left:
        what = "the folder is not empty and holds no run"
        raise UserError(what, where=str(path), remedy="choose another --out")


def _read(file: Path, name: str) -> pl.DataFrame:
    try:
        rows = pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        what = f"the table {name} cannot be read: {error}"
        raise UserError(what, where=str(file), remedy="remove the file and continue with --resume") from None
    return tables.check(name, rows)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
