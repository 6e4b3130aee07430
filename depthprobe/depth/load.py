"""`depthprobe.load`: a name, a folder or a hub id → a `DepthModel`, or one line that says why not.

Weights are read from safetensors alone, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from depthprobe.depth.gguf import gguf_file, load_gguf
from depthprobe.depth.model import DepthModel
from depthprobe.depth.watch import outer_lists
from depthprobe.depth.wrap import parse_route, wrap
from depthprobe.errors import UserError
from depthprobe.models import embedded_models, embedded_path  # importing it registers the looped models

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What is fetched from a hub: never a pickle, never code.
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


#: What old checkpoints stored of a layer although it is no weight.
_BUFFERS = ("inv_freq", "masked_bias", "attn.bias", "attention.bias")


def known_names() -> tuple[str, ...]:
    """Names that need no path: the embedded models and "smollm2"."""
    return (*embedded_models(), "smollm2")


def load(
    name_or_path: Any,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str | torch.dtype = "auto",
    route: str = "native",
) -> DepthModel:
    """Open a model along its depth axis.

    Args:
        name_or_path: "kinship-demo" or "follow-demo" (they come with the package), "smollm2", a folder, a GGUF
            file (or a folder with one), or a hub id; a model that is in memory is given to `wrap`.
        revision: branch, tag or commit of a hub id.
        device: as torch names it, e.g. "cpu", "cuda:1".
        dtype: "auto" (as stored; GGUF: float32), "float32", "bfloat16" or "float16", or as torch has it.
        route: how states are caught: "native" by module hooks, "transformer-lens" through a
            `TransformerBridge`, "nnsight" in traces. All give the same states.

    Raises:
        UserError: whatever is wrong with the name, the folder, the hub, the weights, the tokenizer, the
            device, or with the route for this architecture.
    """
    if not isinstance(name_or_path, str | Path):
        if (revision, device, dtype) != (None, "cpu", "auto"):
            what = "revision, device and dtype are for a model that is yet to be read"
            raise UserError(what, where=type(name_or_path).__name__, remedy="leave them out")
        return wrap(name_or_path, route=None if route == "native" else route)
    name = str(name_or_path)
    place, kind, route = parse_device(device), parse_dtype(dtype), parse_route(route)
    folder = find_folder(name, revision)
    if (file := gguf_file(folder)) is not None:
        if revision is not None:
            raise UserError("a file has no revision", where=str(file), remedy="leave --revision out")
        model, tokenizer = load_gguf(file, kind)
    else:
        config = _config(folder, name)
        _check_weights(folder, name)
        tokenizer = _tokenizer(folder, name)
        model = _weights(folder, name, config, kind)
    rows = model.get_input_embeddings().weight.shape[0]
    # tokens that were added to it may lie beyond, and often do (a pad token): `capture` refuses them in a text
    if tokenizer.vocab_size > rows:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}"
        raise UserError(what, where=name, remedy="take both from the same checkpoint")
    try:
        model = model.to(place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"the model does not fit on '{device}'", where=_first(error), remedy="use --device cpu"
        ) from error
    return wrap(model, tokenizer, name, route)


def parse_dtype(dtype: str | torch.dtype) -> Any:
    """The dtype argument of from_pretrained. Raises UserError for an unknown name."""
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype '{dtype}'", remedy=f"one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str) -> torch.device:
    """A device that is there. Raises UserError for an unknown name or one that this machine lacks."""
    try:
        place = torch.device(device)
        if place.type != "meta":
            torch.empty(1, device=place)
            return place
        reason = "it holds no values"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = _first(error)
    raise UserError(f"device '{device}' cannot be used", where=reason, remedy="use --device cpu")


def find_folder(name: str, revision: str | None = None) -> Path:
    """Where the files of a model lie (or its GGUF file); a hub id is fetched, or found in the hub's cache.

    Raises:
        UserError: no such folder, name or hub model, or the hub cannot be reached.
    """
    if name in known_names():
        if revision is not None:
            raise UserError(f"'{name}' has no revisions", remedy="leave out --revision")
        if name == "smollm2":
            from depthprobe.models.smollm2 import smollm2_path

            return smollm2_path()
        return embedded_path(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UserError(f"the folder '{name}' has no revisions", remedy="leave out --revision")
        return path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_file():
        raise UserError(
            f"'{name}' is a file", remedy="give the folder that holds config.json and the weights"
        )
    if path.suffix == ".gguf":
        raise UserError(f"there is no file '{name}'", remedy="give a GGUF file, a folder with one, or a hub id")
    if not _HUB_ID.fullmatch(name):
        raise UserError(
            f"there is no folder '{name}'", remedy=f"give {', '.join(known_names())}, a folder or a hub id"
        )
    return _from_hub(name, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    what, remedy = f"unknown model '{name}'", f"give {', '.join(known_names())}, a folder or a hub id"
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except errors.GatedRepoError as error:
        what, remedy = f"'{name}' is gated", "accept its terms on the hub and log in with `hf auth login`"
        raise UserError(what, remedy=remedy) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"'{name}' has no revision '{revision}'", remedy="give a branch, tag or commit"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(what, where="not a name, not a folder, not on the hub", remedy=remedy) from error
    except Exception as error:
        # offline mode, no network, a proxy's refusal: as many exception types as ways to have no connection
        where = "not a name, not a folder, not in the hub's cache, and the hub cannot be reached"
        raise UserError(what, where=where, remedy=f"{remedy}; a hub id needs the network once") from error


def _config(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"'{name}' has no config.json", where=str(folder), remedy="give the folder of a saved model"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"config.json cannot be read: {_first(error)}", where=str(file), remedy="fetch it again"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        kind = raw.get("model_type")
        if raw.get("auto_map"):
            what = f"'{name}' needs code from its checkpoint, and depthprobe runs none"
        elif kind is None:
            what = "config.json names no model_type"
        else:
            what = f"transformers cannot open the architecture '{kind}': {_first(error)}"
        raise UserError(
            what, where=str(file), remedy="give a model that transformers itself supports"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"'{name}' is an encoder-decoder", where=config.model_type, remedy="give a decoder-only model"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"'{name}' is quantised", where=str(file), remedy="give the unquantised weights")
    return config


def _check_weights(folder: Path, name: str) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles:
        raise UserError(
            f"'{name}' holds its weights as a pickle, which can run code when it is read",
            where=str(folder / pickles[0]),
            remedy="convert them to safetensors with `save_pretrained` on a machine where you trust them",
        )
    remedy = "a hub model may hold pickle weights only; give one with *.safetensors files"
    raise UserError(f"'{name}' has no weights", where=str(folder), remedy=remedy)


def _tokenizer(folder: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        remedy = "save it there with `tokenizer.save_pretrained`"
        raise UserError(f"'{name}' has no tokenizer", where=str(folder), remedy=remedy)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        what = f"the tokenizer of '{name}' cannot be read: {_first(error)}"
        raise UserError(
            what, where=str(folder), remedy="save it again with `tokenizer.save_pretrained`"
        ) from error


def _weights(folder: Path, name: str, config: Any, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        model, report = loaded
    except Exception as error:
        reason = _first(error)
        if "ignore_mismatched_sizes" in reason:  # what it says goes on about a report that is not shown
            reason = "tensors have other shapes than config.json asks for"
        what = f"the weights of '{name}' cannot be loaded: {reason}"
        raise UserError(what, where=str(folder), remedy="fetch or save them again") from error
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        # transformers fills them with random numbers and goes on
        what = f"the weights of '{name}' lack {len(missing)} tensors, the first is {missing[0]}"
        raise UserError(what, where=str(folder), remedy="save the whole model, with its head")
    lists = tuple(f"{path}." for path in outer_lists(model))
    surplus = sorted(
        key for key in map(str, report["unexpected_keys"]) if key.startswith(lists) and not key.endswith(_BUFFERS)
    )
    if surplus:
        # transformers leaves them out and goes on, with fewer layers or with parts of them
        what = f"the weights of '{name}' hold {len(surplus)} tensors of layers that config.json knows nothing of"
        raise UserError(what, where=surplus[0], remedy="take config.json and weights from one checkpoint")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and report of what it found; what matters of that is raised here."""
    from transformers.utils import logging

    bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _first(error: BaseException) -> str:
    """The first line of another library's message."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
