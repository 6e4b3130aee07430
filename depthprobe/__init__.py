"""depthprobe: how language models use their depth.

    import depthprobe

    model = depthprobe.load("follow-demo")          # depthprobe.depth.DepthModel
    depthprobe.logit_lens(model, text)              # what it would say at each token and depth
    result = depthprobe.analyze("follow-demo")      # a run folder with tables and a report

Nothing heavy is imported until it is asked for (PEP 562), so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthprobe import analysis, depth, effective, halting, lens, models, patching, pipeline, report, runs
    from depthprobe import tables as tables
    from depthprobe import tasks as tasks
    from depthprobe import training as training
    from depthprobe.depth import load, wrap
    from depthprobe.effective import effective_depth
    from depthprobe.errors import UserError
    from depthprobe.lens import logit_lens
    from depthprobe.patching import causal_patch
    from depthprobe.pipeline import analyze

__version__ = "0.1.0"

__all__ = [
    "load", "wrap", "analyze", "logit_lens", "causal_patch", "effective_depth", "UserError", "tasks", "halting",
    "models", "depth", "lens", "patching", "effective", "training", "tables", "analysis", "report", "runs", "pipeline",
    "__version__",
]  # fmt: skip

#: name -> (module, attribute); a room is its own module and needs no entry
_ATTRIBUTES = {
    "load": ("depthprobe.depth", "load"),
    "wrap": ("depthprobe.depth", "wrap"),
    "logit_lens": ("depthprobe.lens", "logit_lens"),
    "analyze": ("depthprobe.pipeline", "analyze"),
    "effective_depth": ("depthprobe.effective", "effective_depth"),
    "causal_patch": ("depthprobe.patching", "causal_patch"),
    "UserError": ("depthprobe.errors", "UserError"),
}
_ROOMS = frozenset(__all__) - _ATTRIBUTES.keys() - {"__version__"}


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        module, attribute = _ATTRIBUTES[name]
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value  # the next access does not come here
        return value
    if name in _ROOMS:
        return importlib.import_module(f"depthprobe.{name}")
    raise AttributeError(f"module 'depthprobe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
