"""The runtime: continuous depth batching over a ragged KV cache, with every exit on record.

    from depthprobe.runtime import Engine, Sampling

    engine = Engine(model, exit="q:0.5", kv="ragged", width=16)
    for done in engine.generate([[5, 9, 2], [7]], Sampling(max_new_tokens=4)):
        print(done.tokens, done.exit_depths)

`layouts`, `jobs`, `settings`, `queues`, `admission` and `scheduler` are plain Python without a tensor or an array,
so that a schedule is tested in microseconds; `simulate` runs that scheduler under a computed clock, without a model;
`pages` is numpy. Names are resolved when they are asked for (PEP 562): who simulates loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthprobe.runtime.engine import Engine
    from depthprobe.runtime.jobs import Job, Outcome, Tick
    from depthprobe.runtime.layouts import LAYOUTS, Layout, layout
    from depthprobe.runtime.pages import CopyPlan, PagePool
    from depthprobe.runtime.record import Recorder, read_lines, read_meta
    from depthprobe.runtime.requests import Completion, Request, Sampling, TokenEvent
    from depthprobe.runtime.roofline import Clock, Line
    from depthprobe.runtime.runner import Runner
    from depthprobe.runtime.scheduler import Scheduler
    from depthprobe.runtime.settings import POLICIES, SchedulerConfig
    from depthprobe.runtime.simulate import Simulated, Simulator

__all__ = [
    "Engine", "Request", "Sampling", "Completion", "TokenEvent", "Runner", "Recorder", "read_lines", "read_meta",
    "LAYOUTS", "Layout", "layout", "POLICIES", "SchedulerConfig", "Job", "Tick", "Outcome", "Scheduler",
    "PagePool", "CopyPlan", "Clock", "Line", "Simulator", "Simulated",
]  # fmt: skip

_MODULES = {
    "engine": ("Engine",), "jobs": ("Job", "Outcome", "Tick"), "layouts": ("LAYOUTS", "Layout", "layout"),
    "pages": ("CopyPlan", "PagePool"), "record": ("Recorder", "read_lines", "read_meta"),
    "requests": ("Completion", "Request", "Sampling", "TokenEvent"), "roofline": ("Clock", "Line"),
    "runner": ("Runner",), "scheduler": ("Scheduler",), "settings": ("POLICIES", "SchedulerConfig"),
    "simulate": ("Simulated", "Simulator"),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
