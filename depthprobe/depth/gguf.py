"""GGUF files: dequantised by transformers, with the tokenizer that they carry."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch

from depthprobe.errors import UserError


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without a config.json.

    Raises:
        UserError: a folder with several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise UserError(f"there are {len(files)} GGUF files in '{path}'", where=names, remedy="name one of them")
    return files[0] if files else None


def load_gguf(file: Path, dtype: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file; weights in float32 unless `dtype` is a torch dtype.

    Raises:
        UserError: the package gguf is missing, or the file is damaged or of an unknown architecture.
    """
    if importlib.util.find_spec("gguf") is None:
        remedy = "`pip install 'depthprobe[gguf]'`"
        raise UserError("the package gguf, which reads GGUF files, is missing", where=str(file), remedy=remedy)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    kind = dtype if isinstance(dtype, torch.dtype) else torch.float32
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the reader's progress bar cannot be turned off
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=kind, output_loading_info=True, **place
            )
            model, report = loaded
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
    except Exception as error:
        what = f"the GGUF file cannot be read: {type(error).__name__}: {error}"[:300]
        remedy = "fetch it again, or give an architecture that transformers can read from GGUF"
        raise UserError(what, where=str(file), remedy=remedy) from error
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        # transformers fills them with random numbers and goes on
        what = f"the GGUF file lacks {len(missing)} tensors, the first is {missing[0]}"
        raise UserError(what, where=str(file), remedy="fetch it again")
    # the loader marks the model as quantised although it has dequantised it
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    return model, tokenizer
