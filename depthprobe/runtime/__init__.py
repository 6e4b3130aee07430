"""The runtime: continuous depth batching over a ragged KV cache, with every exit on record.

    from depthprobe.runtime import Engine, Sampling

    engine = Engine(model, exit="q:0.5", kv="ragged", width=16)
    for done in engine.generate([[5, 9, 2], [7]], Sampling(max_new_tokens=4)):
        print(done.tokens, done.exit_depths)

`layouts`, `jobs`, `settings`, `queues`, `admission` and `scheduler` are plain Python without a tensor or an array,
so that a schedule is tested in microseconds and simulated without a model; `pages` is numpy.
"""

from __future__ import annotations

from depthprobe.runtime.engine import Engine
from depthprobe.runtime.jobs import Job, Outcome, Tick
from depthprobe.runtime.layouts import LAYOUTS, Layout, layout
from depthprobe.runtime.pages import CopyPlan, PagePool
from depthprobe.runtime.record import Recorder, read_lines, read_meta
from depthprobe.runtime.requests import Completion, Request, Sampling, TokenEvent
from depthprobe.runtime.runner import Runner
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.settings import POLICIES, SchedulerConfig

__all__ = [
    "Engine", "Request", "Sampling", "Completion", "TokenEvent", "Runner", "Recorder", "read_lines", "read_meta",
    "LAYOUTS", "Layout", "layout", "POLICIES", "SchedulerConfig", "Job", "Tick", "Outcome", "Scheduler",
    "PagePool", "CopyPlan",
]  # fmt: skip
