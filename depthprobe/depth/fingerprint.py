"""A hash of a model: two runs with one fingerprint ran the same weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

#: Tensors up to this many elements enter the fingerprint whole, larger ones with this many samples.
_SAMPLED = 1 << 16


def fingerprint(model: nn.Module, config: Any, tokenizer: Any) -> str:
    """SHA-256 (hex) of configuration, weights and tokenizer. Small tensors whole, large ones sampled."""
    digest = hashlib.sha256()
    fields = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        fields.pop(volatile, None)
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for key, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):  # extra state of a quantised module
            digest.update(f"{key} {value!r}".encode())
            continue
        digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
        flat = value.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLED)
        if flat.numel():
            digest.update(flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        digest.update(backend.to_str().encode())
    return digest.hexdigest()
