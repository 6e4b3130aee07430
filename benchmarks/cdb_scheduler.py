"""What the scheduler alone costs a row, by width: `plan` and `commit` driven without a model."""

from __future__ import annotations

import random
import time
from typing import Any

from cdb_load import EXITS

from depthprobe.runtime.jobs import Job
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.settings import SchedulerConfig

WIDTHS, TURNS = (64, 512, 4096), 3


def scheduler_cost(new: int = 4) -> dict[str, Any]:
    """Microseconds of processor time a row (of prelude, core and coda), the least of some turns, and how the widest
    compares with width 64."""
    best = dict.fromkeys(WIDTHS, float("inf"))
    for _ in range(TURNS):
        for width in WIDTHS:
            # the same number of rows at each width
            runs = [_drive(width, new, seed) for seed in range(WIDTHS[-1] // width)]
            best[width] = min(best[width], sum(spent for spent, _ in runs) / sum(rows for _, rows in runs))
    found: dict[str, Any] = {f"scheduler_us_per_row_w{width}": 1e6 * cost for width, cost in best.items()}
    widest, narrowest = (found[f"scheduler_us_per_row_w{width}"] for width in (WIDTHS[-1], WIDTHS[0]))
    return found | {"scheduler_widest_over_w64": widest / narrowest}


def _drive(width: int, new: int, seed: int) -> tuple[float, int]:
    chance, loops = random.Random(seed), len(EXITS)
    pages = 2 * width * (new + 8) * loops
    config = SchedulerConfig(loops, width, pages, spare=width, coda_share=1.0, prefill_tokens=8 * width)
    scheduler = Scheduler(config)
    for number in range(3 * width):
        scheduler.add(Job(number, 8, new, float(number)))
    spent, rows, due = 0.0, 0, dict[int, int]()  # due: the loop after which each row leaves
    while True:
        begun = time.thread_time()
        tick = scheduler.plan()
        spent += time.thread_time() - begun
        if tick is None:
            return spent, rows
        leaves = None
        if tick.stage == "prelude":
            drawn = chance.choices(range(1, loops + 1), EXITS, k=len(tick.jobs))
            due.update(zip((job.id for job in tick.jobs), drawn, strict=True))
        elif tick.stage == "recurrent":
            leaves = [due[job.id] <= depth for job, depth in zip(tick.jobs, tick.depths, strict=True)]
        rows += 0 if tick.stage == "prefill" else len(tick.jobs)
        begun = time.thread_time()
        scheduler.commit(tick, leaves=leaves)
        spent += time.thread_time() - begun
