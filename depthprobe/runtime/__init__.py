"""The runtime: continuous depth batching over a ragged KV cache.

`layouts`, `jobs`, `settings`, `queues`, `admission` and `scheduler` are plain Python without a tensor or an array,
so that a schedule is tested in microseconds and simulated without a model; `pages` is numpy.
"""

from __future__ import annotations

from depthprobe.runtime.jobs import Job, Outcome, Tick
from depthprobe.runtime.layouts import LAYOUTS, Layout, layout
from depthprobe.runtime.pages import CopyPlan, PagePool
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.settings import POLICIES, SchedulerConfig

__all__ = [
    "LAYOUTS", "Layout", "layout", "POLICIES", "SchedulerConfig", "Job", "Tick", "Outcome", "Scheduler",
    "PagePool", "CopyPlan",
]  # fmt: skip
