"""Run folders: whole files or none, resuming, and refusing to mix."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.runs import RunFolder, atomic_write, check_free, git_commit, read_manifest, versions
from depthprobe.runs.files import as_user_error

IDENTITY: dict[str, Any] = {
    "config": {"model": "toy", "hops": (1, 2), "batch_size": 4},
    "model": {"fingerprint": "abc"},
    "items": {"digest": "d1"},
}


@pytest.fixture(autouse=True)
def steady_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that nobody edits while the tests run."""
    monkeypatch.setattr("depthprobe.runs.folder.git_commit", lambda: "c0ffee")


def rows(n: int) -> pl.DataFrame:
    made = [{"task": "kinship", "hops": n, "shortcut": f"s{k}", "accuracy": 0.5, "n": k} for k in range(3)]
    return tables.conform("shortcuts", [{**row, "low": None, "high": 1.0} for row in made])


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob(".partial-*")]


def test_parts_become_a_table(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", IDENTITY, {"seed": 3}) as run:
        for number in (2, 0, 1):
            run.write_part("shortcuts", number, rows(number))
        assert run.parts("shortcuts") == {0, 1, 2}
        whole = run.join_parts("shortcuts", 3)
        assert whole["hops"].to_list() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert not run.finished
        run.finish(counts={"items": 9})
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["schema_version"], manifest["seed"]) == ("finished", 1, 3)
    assert manifest["counts"] == {"items": 9}
    assert manifest["versions"]["polars"] == pl.__version__
    assert manifest["config"]["hops"] == [1, 2]
    assert sorted(os.listdir(tmp_path / "run" / "tables")) == ["shortcuts.parquet"]
    assert leftovers(tmp_path) == []


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", IDENTITY) as run:
        run.write_part("shortcuts", 0, rows(0))
        with pytest.raises(UserError, match="part 1 is missing"):
            run.join_parts("shortcuts", 2)
        assert not run.has_table("shortcuts")


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", IDENTITY) as run:
        run.write_part("shortcuts", 0, rows(0))
        file = tmp_path / "run/tables/shortcuts/part-00000.parquet"
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(UserError, match=r"cannot be read.*part-00000.*--resume"):
            run.join_parts("shortcuts", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {**IDENTITY["config"], "batch_size": 8}}, "another batch_size: 4 there, 8 here"),
        ({"config": {**IDENTITY["config"], "hops": (1, 3)}}, r"another hops: \[1, 2\] there, \[1, 3\] here"),
        ({"config": {**IDENTITY["config"], "new": 1}}, "another new: null there, 1 here"),
        ({"model": {"fingerprint": "xyz"}}, 'another model.fingerprint: "abc" there, "xyz" here'),
        ({"items": {"digest": "d2"}}, "another items.digest"),
        ({"versions": {**versions(), "torch": "1.0"}}, 'another versions.torch: .* there, "1.0" here'),
        ({"git": "other"}, "another git"),
    ],
)
def test_two_runs_are_not_mixed(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    RunFolder.create(tmp_path / "run", IDENTITY).close()
    RunFolder.resume(tmp_path / "run", IDENTITY).close()
    with pytest.raises(UserError, match=words) as caught:
        RunFolder.resume(tmp_path / "run", {**IDENTITY, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_schema_version_is_refused(tmp_path: Path, version: int | None) -> None:
    RunFolder.create(tmp_path / "run", IDENTITY).close()
    file = tmp_path / "run/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": version}))
    with pytest.raises(UserError, match=f"schema version {version}, this depthprobe writes version 1"):
        RunFolder.resume(tmp_path / "run", IDENTITY)


def test_the_report_reads_the_version_that_is_written() -> None:
    # two rooms, neither of which may import the other, hold the number
    from depthprobe.report.data import SCHEMA_VERSION as READ
    from depthprobe.runs import SCHEMA_VERSION as WRITTEN

    assert READ == WRITTEN


def test_places_where_no_run_may_begin(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", IDENTITY).close()
    with pytest.raises(UserError, match=r"a run in this folder already.*--resume"):
        RunFolder.create(tmp_path / "run", IDENTITY)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    with pytest.raises(UserError, match="not empty and holds no run"):
        check_free(tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a file stands"):
        check_free(tmp_path / "file")
    with pytest.raises(UserError, match="a file stands"):
        RunFolder.create(tmp_path / "file/run", IDENTITY)
    with pytest.raises(UserError, match="there is no run here"):
        RunFolder.resume(tmp_path / "nothing", IDENTITY)
    (tmp_path / "run/manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest cannot be read"):
        RunFolder.resume(tmp_path / "run", IDENTITY)


def test_whatever_the_disk_says_is_one_line() -> None:
    with pytest.raises(UserError, match="cannot write here"):  # ENOENT of a folder that is there
        RunFolder.create(Path("/proc/run"), {})
    for number in (errno.ENOENT, errno.EIO, errno.ELOOP, errno.EROFS):
        told = str(as_user_error(OSError(number, os.strerror(number)), Path("/somewhere")))
        assert "/somewhere" in told and os.strerror(number) in told and "--out" in told


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path / "run", IDENTITY),
        pytest.raises(UserError, match="another run is writing"),
    ):
        RunFolder.resume(tmp_path / "run", IDENTITY)
    RunFolder.resume(tmp_path / "run", IDENTITY).close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with RunFolder.create(tmp_path / "run", IDENTITY) as run:
        run.write_part("shortcuts", 0, rows(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(
                UserError, match=r"the disk is full \(.*part-00001.parquet\): make room"
            ) as caught:
                run.write_part("shortcuts", 1, rows(1))
            assert "\n" not in str(caught.value)
        assert run.parts("shortcuts") == {0}
        assert leftovers(tmp_path) == []
        run.write_part("shortcuts", 1, rows(1))
        assert run.parts("shortcuts") == {0, 1}


def test_a_replaced_file_is_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write(tmp_path / "a", b"old")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_resuming_sweeps_what_a_killed_process_left(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", IDENTITY) as run:
        run.write_part("shortcuts", 0, rows(0))
    (tmp_path / "run/tables/shortcuts/.partial-99-part-00001.parquet").write_bytes(b"PAR1")
    with RunFolder.resume(tmp_path / "run", IDENTITY) as run:
        assert run.parts("shortcuts") == {0}
        assert leftovers(tmp_path) == []
    # killed before the manifest was there: the folder counts as empty
    (tmp_path / "new").mkdir()
    (tmp_path / "new/.partial-99-manifest.json").touch()
    RunFolder.create(tmp_path / "new", IDENTITY).close()
    assert leftovers(tmp_path) == []


def test_a_run_that_failed_at_once_is_taken_away(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", IDENTITY) as run:
        run.remove_if_empty()
    assert not (tmp_path / "run").exists()
    with RunFolder.create(tmp_path / "run", IDENTITY) as run:
        run.write_part("shortcuts", 0, rows(0))
        run.remove_if_empty()
    assert (tmp_path / "run/manifest.json").exists()


def test_commit_of_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert git_commit(tmp_path) is None
    package = tmp_path / "depthprobe"
    package.mkdir()
    (package / "errors.py").write_text("a = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    commit = git_commit(package)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "notes.md").touch()
    assert git_commit(package) == commit
    (package / "errors.py").write_text("a = 2\n")
    changed = git_commit(package)
    assert changed is not None
    assert changed.startswith(f"{commit}+")
