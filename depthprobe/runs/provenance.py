"""What made a run: versions of the software, and the commit of the checkout."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "polars", "safetensors")


def versions() -> dict[str, str | None]:
    """Versions of Python, depthprobe and the packages that numbers depend on."""
    from depthprobe import __version__

    found: dict[str, str | None] = {"python": platform.python_version(), "depthprobe": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that depthprobe runs from, "+" and a digest of its changes; None outside one.

    Only the package counts: a run folder or a note beside it does not change what is measured.
    """
    package = folder or Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, check=True, capture_output=True, timeout=10).stdout

    try:
        root = Path(git("rev-parse", "--show-toplevel").decode().strip())
        if not git("ls-files", "--", "errors.py"):
            return None  # installed into somebody else's repository
        commit = git("rev-parse", "HEAD").decode().strip()
        changed = git("-C", str(root), "diff", "HEAD", "--", "depthprobe", "tasks", "kernels")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+{hashlib.sha256(changed).hexdigest()[:12]}" if changed else commit
