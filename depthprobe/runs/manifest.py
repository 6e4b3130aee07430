"""The manifest of a run folder: read, and compared with what is asked for now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthprobe.errors import UserError

#: Of the manifest and of the tables beside it. A folder of another version is neither read nor continued.
SCHEMA_VERSION = 1

#: What has to be equal for a run to be continued, in the order in which differences are looked for.
IDENTITY = ("config", "model", "items", "versions", "git")

AGAIN = "choose another --out, or remove this folder"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run folder.

    Raises:
        UserError: there is none, it cannot be read, or it is of another schema version.
    """
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "there is no run here", where=str(path), remedy="give the --out of `depthprobe analyze`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"the manifest cannot be read: {error}", where=str(file), remedy=AGAIN) from None
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"the run folder has schema version {version}, this depthprobe writes version {SCHEMA_VERSION}",
            where=str(path),
            remedy=AGAIN,
        )
    return manifest


def compare(manifest: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> None:
    """Check that what a folder was begun with is what is asked for now, as far as `identity` says.

    Raises:
        UserError: names the first field that differs, with both values.
    """
    for key in IDENTITY:
        if key not in identity:
            continue
        # through JSON, so that tuples equal the lists which were read back
        asked = json.loads(json.dumps(identity[key]))
        found = _difference(key, manifest.get(key), asked)
        if found is not None:
            field, there, here = found
            raise UserError(
                f"the run folder was made with another {field}: {_short(there)} there, {_short(here)} here",
                where=str(path),
                remedy=AGAIN,
            )


def _difference(name: str, there: Any, here: Any) -> tuple[str, Any, Any] | None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (*here, *(key for key in there if key not in here)):
            found = _difference(f"{name}.{key}", there.get(key), here.get(key))
            if found is not None:
                return found
        return None
    return None if there == here else (name.removeprefix("config."), there, here)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
