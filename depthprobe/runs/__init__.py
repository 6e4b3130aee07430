"""Run folders: what was asked, what came out, and nothing half-written.

    <run>/manifest.json                    configuration, versions, seed, commit, model fingerprint, counts
    <run>/tables/lens/part-00003.parquet   a finished part; gone when the run is finished
    <run>/tables/lens.parquet              a final table
    <run>/report.html

Every file appears under its name only when it is complete and on the disk, so a run may be killed at any
moment. Resuming computes the parts that are missing. It is refused where that would mix two things: another
configuration, model, set of items or version of the software; the message names the field that differs.
"""

from __future__ import annotations

from depthprobe.runs.files import atomic_write, user_errors
from depthprobe.runs.folder import RunFolder, check_free
from depthprobe.runs.manifest import IDENTITY, SCHEMA_VERSION, compare, read_manifest
from depthprobe.runs.provenance import git_commit, versions

__all__ = [
    "IDENTITY",
    "SCHEMA_VERSION",
    "RunFolder",
    "atomic_write",
    "check_free",
    "compare",
    "git_commit",
    "read_manifest",
    "user_errors",
    "versions",
]
