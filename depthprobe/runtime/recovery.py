"""After a tick that failed on the device: a scheduler without it, in which all who were not in it go on.

A failed tick cannot be committed, and what stands in the pages that it was writing is not known. All slots and pages
are given up. Jobs that were in the tick, or in one planned on top of it, are lost; the others line up again as
preempted ones do, and decide nothing anew. Where a layout cannot be replayed, all that had begun are lost.
"""

from __future__ import annotations

from collections.abc import Collection

from depthprobe.runtime.jobs import Job
from depthprobe.runtime.scheduler import Scheduler


def restarted(old: Scheduler, lost: Collection[int]) -> tuple[Scheduler, list[Job]]:
    """A scheduler that goes on where `old` cannot, and the jobs that are lost.

    Args:
        lost: ids of the jobs of all outstanding ticks.
    """
    new = Scheduler(old.config)
    new.counters.update(old.counters)
    new._number = old._number  # ticks are counted on
    new._committed = old._number - 1
    gone: list[Job] = []
    for job in sorted(old.jobs.values(), key=lambda job: job.priority):
        begun = job.slot >= 0
        job.slot, job.core_pages, job.outer_pages = -1, 0, 0
        job._promised_core = job._promised_outer = 0
        if job.id in lost or (begun and not old.config.layout.parallel):
            new.counters["core_rows_decode"] -= job._ran
            new.counters["core_rows_aborted"] += job._ran
            job.phase, job.aborted = "done", True
            gone.append(job)
            continue
        if begun:
            new.counters["preemptions"] += 1
            job.preemptions += 1
            if job.leave_after is None and job.depth:
                job.floor = max(job.floor, min(job.depth + 1 + old.config.horizon, old.config.n_loops))
            job.replay_to = max(job.replay_to, job.prefilled)
            job.prefilled = job.depth = 0
            job._running, job._last_tick = False, -1
        new.add(job)
    return new, gone
