"""The models that come with the package: folders that transformers loads without a network.

    path = embedded_path("follow-demo")
    model = AutoModelForCausalLM.from_pretrained(path)      # after `import depthprobe.models`
    tokenizer = AutoTokenizer.from_pretrained(path)
"""

from __future__ import annotations

from pathlib import Path

from depthprobe.errors import UserError

#: what a folder must hold to count as a model
FILES = ("config.json", "model.safetensors", "tokenizer.json", "README.md")

_FOLDER = Path(__file__).parent / "embedded"


def embedded_models(folder: Path = _FOLDER) -> list[str]:
    """Names of the embedded models, sorted; a folder that lacks one of `FILES` is not one."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if not _missing(entry))


def embedded_path(name: str, folder: Path = _FOLDER) -> Path:
    """Folder of an embedded model, for `from_pretrained`.

    Raises:
        UserError: no such model, with the names there are, or its folder lacks files, naming them.
    """
    path = folder / name
    # a name is one folder, never a way out of it
    if not name or name in (".", "..") or Path(name).name != name or not path.is_dir():
        known = ", ".join(embedded_models(folder)) or "there are none"
        raise UserError(f"no embedded model named {name!r}", where="model name", remedy=f"known: {known}")
    if missing := _missing(path):
        raise UserError(f"the embedded model {name!r} lacks {', '.join(missing)}", where=str(path),
                        remedy="install the package again")  # fmt: skip
    return path


def _missing(path: Path) -> list[str]:
    return [name for name in FILES if not (path / name).is_file()]
