"""Who loops next: three ways to form a recurrent batch, with one interface.

A job enters with `add` when its prelude is planned and is taken by `take` for each of its loops. Between a `take`
and the next, jobs that left the loops are told by `left`; jobs that lose their slot by `discard`. No method but
`discard`, which is rare, looks at more jobs than a batch holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from depthprobe.runtime.jobs import Job
from depthprobe.runtime.settings import SchedulerConfig


class LoopQueue(ABC):
    """Base of the queues. `job._running` is theirs: whether the job has a row in the batch."""

    cohorts = False  # whether a batch starts together, and is over before the next one's coda and prelude

    def __init__(self, width: int) -> None:
        self.width = width
        self.ready: OrderedDict[int, Job] = OrderedDict()  # waiting for a row, by id, oldest token first
        self.rows: list[Job] = []  # the batch of the last tick; never changed in place: the tick holds it too

    def add(self, job: Job) -> None:
        self.ready[job.id] = job

    @abstractmethod
    def take(self) -> list[Job]:
        """The next batch, at most `width` jobs; empty if there is none."""

    def ran(self, rows: list[Job]) -> None:  # noqa: B027 - most need no notice
        """The batch's depths were advanced, and those that are known to leave have been told by `left`."""

    def left(self, job: Job) -> None:
        """The job is parked: it gets no further row (lockstep: only frozen ones)."""
        job._running = False

    def discard(self, job: Job) -> None:
        """The job is gone from its slot, wherever it was."""
        job._running = False
        if self.ready.pop(job.id, None) is None:
            self.rows = [row for row in self.rows if row is not job]

    @property
    def over(self) -> bool:
        """Whether nobody in the batch has loops to run."""
        return not any(job._running for job in self.rows)

    def looping(self) -> Iterator[Job]:
        """All jobs with loops to run (for checks)."""
        yield from (job for job in self.rows if job._running)
        yield from self.ready.values()


class Refill(LoopQueue):
    """Those that run go on, and rows that become free are taken in order of waiting."""

    def take(self) -> list[Job]:
        rows = [job for job in self.rows if job._running]
        for _ in range(min(self.width - len(rows), len(self.ready))):
            _, job = self.ready.popitem(last=False)
            job._running = True
            rows.append(job)
        self.rows = rows
        return rows


class Cohort(LoopQueue):
    """A batch starts together and takes nobody in; `keep`: rows that left stay in it, frozen (lockstep)."""

    cohorts = True

    def __init__(self, width: int, keep: bool) -> None:
        super().__init__(width)
        self.keep = keep

    def take(self) -> list[Job]:
        if not self.over:
            if not self.keep:
                self.rows = [job for job in self.rows if job._running]
            return self.rows
        self.rows = []
        for _ in range(min(self.width, len(self.ready))):
            _, job = self.ready.popitem(last=False)
            job._running = True
            self.rows.append(job)
        return self.rows


class ByDepth(LoopQueue):
    """Rows of one depth a tick: that with most rows waiting; ties go to the deeper, which ends tokens.

    A depth whose first row has waited for 2 U recurrent ticks goes first, so that a few rows at a depth that
    is never the fullest are not left behind.
    """

    def __init__(self, width: int, n_loops: int) -> None:
        super().__init__(width)
        self.patience = 2 * n_loops
        self.clock = 0
        self.depths: list[OrderedDict[int, tuple[int, Job]]] = [OrderedDict() for _ in range(n_loops)]

    def add(self, job: Job) -> None:
        self.depths[job.depth][job.id] = (self.clock, job)

    def take(self) -> list[Job]:
        filled = [bucket for bucket in self.depths if bucket]
        if not filled:
            return []
        self.clock += 1
        bucket = min(filled, key=lambda one: next(iter(one.values()))[0])
        if self.clock - next(iter(bucket.values()))[0] <= self.patience:
            bucket = max(reversed(filled), key=len)
        self.rows = [bucket.popitem(last=False)[1][1] for _ in range(min(self.width, len(bucket)))]
        for job in self.rows:
            job._running = True
        return self.rows

    def ran(self, rows: list[Job]) -> None:
        for job in rows:
            if job._running:
                self.add(job)

    def left(self, job: Job) -> None:
        job._running = False
        if job.depth < len(self.depths):
            self.depths[job.depth].pop(job.id, None)

    def discard(self, job: Job) -> None:
        self.left(job)

    def looping(self) -> Iterator[Job]:
        for bucket in self.depths:
            yield from (job for _, job in bucket.values())


def loop_queue(config: SchedulerConfig) -> LoopQueue:
    """The queue that policy and layout ask for. In a cohort all rows are at one depth anyway."""
    if config.policy != "refill":
        return Cohort(config.width, keep=config.policy == "lockstep")
    if config.by_depth or not config.layout.mixes_depths:
        return ByDepth(config.width, config.n_loops)
    return Refill(config.width)
