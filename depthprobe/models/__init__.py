"""Looped language models: configuration, forward with exits, cache, and the models in the package.

Importing this registers the classes with transformers' `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from depthprobe.models.cache import LoopedCache
from depthprobe.models.configuration import LoopedConfig
from depthprobe.models.embedded import embedded_models, embedded_path
from depthprobe.models.modeling import LoopedForCausalLM, LoopedOutput

AutoConfig.register(LoopedConfig.model_type, LoopedConfig, exist_ok=True)
AutoModelForCausalLM.register(LoopedConfig, LoopedForCausalLM, exist_ok=True)

__all__ = [
    "LoopedConfig", "LoopedForCausalLM", "LoopedOutput", "LoopedCache", "embedded_models", "embedded_path",
]  # fmt: skip
