"""What a manifest says, for the page. All but the schema version may be missing: the page then says less."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from depthprobe.report.data import Run
from depthprobe.report.text import count, span

__all__ = ["exit_q", "model_name", "run_facts", "spared_first", "version"]


def _get(manifest: Mapping[str, Any], *paths: str) -> Any:
    """The first of some dotted paths that holds something."""
    for path in paths:
        node: Any = manifest
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is not None and node != "":
            return node
    return None


def model_name(manifest: Mapping[str, Any]) -> str:
    """As the user named it; of a path the last part."""
    name = str(_get(manifest, "summary.model", "model.name", "config.model") or "the model")
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith((".", "/", "~")) else name


def exit_q(manifest: Mapping[str, Any]) -> float | None:
    """The gate's threshold in the model's config; None without a gate."""
    q = _get(manifest, "model.exit_q", "exit_q")
    return float(q) if q is not None else None


def spared_first(manifest: Mapping[str, Any]) -> int:
    """Tokens at the front of a prompt that layers were never skipped for."""
    return int(_get(manifest, "counts.spared_first") or 0)


def _spared(manifest: Mapping[str, Any]) -> str | None:
    spared = spared_first(manifest)
    return f"the first {'token' if spared == 1 else f'{spared} tokens'} of each prompt" if spared else None


def version(manifest: Mapping[str, Any]) -> str:
    """Of the depthprobe that made the run."""
    return str(_get(manifest, "versions.depthprobe") or "")


def run_facts(run: Run) -> list[tuple[str, str]]:
    """(label, value) rows of "What was run"."""
    m = run.manifest
    stories = sum(task.n_stories for task in run.tasks)
    items = sum(task.items.height for task in run.tasks)
    shared = sum(int((~task.items["first_token_only"]).sum()) for task in run.tasks)
    long = int(_get(m, "counts.too_long") or 0)
    hops = sorted({task.hops for task in run.tasks})
    rows = [
        ("model", _get(m, "model.name", "config.model")),
        ("revision", _get(m, "model.revision", "config.revision")),
        ("fingerprint", _get(m, "model.fingerprint", "fingerprint")),
        (
            "dtype, device",
            _joined(_get(m, "model.dtype", "config.dtype"), _get(m, "model.device", "config.device")),
        ),
        ("tasks", ", ".join(task.name for task in run.tasks)),
        ("hops", "; ".join(span(ks) for ks in hops)),
        ("questions", f"{items} on {count(stories, 'story')}"),
        (
            "shared tokens",
            f"{shared} questions have candidates with the same first token" if shared else None,
        ),
        (
            "gate",
            f"Q-exit at q = {exit_q(m):g}"
            if exit_q(m) is not None and any(t.has_gate for t in run.tasks)
            else "none",
        ),
        ("left out", f"{count(long, 'question')} longer than the context" if long else None),
        ("never skipped", _spared(m)),
        ("seed", _get(m, "seed", "config.seed")),
        ("command", _command(_get(m, "command", "command_line"))),
        ("started", _when(_get(m, "started"))),
        ("took", _took(_get(m, "started"), _get(m, "finished"))),
        ("versions", _versions(_get(m, "versions"))),
        ("git", _get(m, "git_hash", "git", "git_commit")),
    ]
    return [(label, str(value)) for label, value in rows if value is not None and value != ""]


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part is not None)


def _command(command: Any) -> str | None:
    if isinstance(command, list):
        return " ".join(map(str, command))
    return None if command is None else str(command)


def _parsed(moment: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(moment) if isinstance(moment, str) else None
    except ValueError:
        return None


def _when(moment: Any) -> str | None:
    parsed = _parsed(moment)
    return parsed.strftime("%Y-%m-%d %H:%M %Z").strip() if parsed else None


def _took(started: Any, finished: Any) -> str | None:
    first, last = _parsed(started), _parsed(finished)
    if first is None or last is None:
        return None
    try:
        seconds = (last - first).total_seconds()
    except TypeError:  # one of them without a time zone
        return None
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _versions(versions: Any) -> str | None:
    if not isinstance(versions, Mapping):
        return None
    return ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None)
