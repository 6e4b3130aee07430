"""What the scheduler knows, and the moves that planning and committing share: where each job is, and its pages."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from depthprobe.runtime.admission import Admission
from depthprobe.runtime.jobs import Job, Outcome, Tick
from depthprobe.runtime.queues import loop_queue
from depthprobe.runtime.settings import SchedulerConfig

COUNTERS = (
    "core_rows_decode", "core_rows_prefill", "core_rows_recomputed", "core_rows_frozen", "core_rows_aborted",
    "rows_prelude", "rows_coda", "ticks_prefill", "ticks_prelude", "ticks_recurrent", "ticks_coda", "preemptions",
)  # fmt: skip


class SchedulerState:
    """Jobs in their queues. Base of `scheduler.Scheduler`, which documents the public fields."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.jobs: dict[int, Job] = {}
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._n_loops = config.n_loops
        layout = config.layout
        self._reserve = layout.reserve(config.n_loops)
        self._held = [0] + [layout.held(e, config.n_loops) for e in range(1, config.n_loops + 1)]
        self._admission = Admission(config)
        self._prefilling: deque[Job] = deque()
        self._entering: OrderedDict[int, Job] = OrderedDict()  # wait for the prelude
        self._looping = loop_queue(config)
        self._parked: OrderedDict[int, Job] = OrderedDict()  # wait for the coda
        self._outstanding: deque[Tick] = deque()
        self._number = 0  # of the next tick
        self._committed = -1  # number of the last tick that was committed
        self._fixed = -1  # number of an outstanding tick past which nothing is planned
        self._asking: deque[int] = deque()  # horizon 1: numbers of outstanding recurrent ticks that ask
        self._last_recurrent = -1
        self._ending: dict[int, list[Job]] = {}  # aborted jobs, by the outstanding tick that they wait for
        self._preempted: list[tuple[Job, int]] = []  # since the last planned tick

    @property
    def idle(self) -> bool:
        """Whether there is no work at all: no job, no outstanding tick."""
        return not self.jobs and not self._outstanding

    @property
    def free_core(self) -> int:
        """Core pages that nobody holds."""
        return self._admission.free_core

    @property
    def free_outer(self) -> int:
        """Outer pages that nobody holds."""
        return self._admission.free_outer

    @property
    def waiting(self) -> int:
        """Jobs without a slot."""
        return self._admission.waiting

    @property
    def in_flight(self) -> int:
        """Jobs with a slot."""
        return self._admission.in_flight

    def _is_outstanding(self, job: Job) -> bool:
        return job._last_tick > self._committed

    def _enter(self, job: Job) -> None:
        """All before its current token is in pages, or will be."""
        job.phase = "prelude"
        self._entering[job.id] = job

    def _park(self, job: Job) -> None:
        """Its last loop is planned or done: it waits for the coda."""
        job.phase = "parked"
        job.leave_after = job.depth
        self._looping.left(job)
        self._parked[job.id] = job

    def _remove(self, job: Job) -> None:
        """Out of the queue it is in (a row of an outstanding coda is in none)."""
        if job.phase == "prefill":
            self._prefilling.remove(job)
        elif job.phase == "prelude":
            del self._entering[job.id]
        else:
            self._parked.pop(job.id, None)
            self._looping.discard(job)

    def _preempt(self, job: Job) -> None:
        """Slot and pages are taken from a job in no outstanding tick; what was decided about it stays."""
        assert not self._admission.whole and not self._is_outstanding(job)
        self._remove(job)
        self._preempted.append((job, self._admission.release(job)))
        self.counters["preemptions"] += 1
        job.preemptions += 1
        if job.leave_after is None and job.depth:
            job.floor = max(job.floor, min(job.depth + 1 + self.config.horizon, self._n_loops))
        job.replay_to = max(job.replay_to, job.prefilled)
        job.prefilled = job.depth = 0
        self._admission.line_up(job)

    def _end(self, job: Job, out: Outcome) -> None:
        out.freed.append((job, self._admission.release(job)))

    # ------------------------------------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Raise `AssertionError` with all that does not add up: pages, slots, queues. Looks at everything."""
        wrong = [*self._admission.check(), *self._check_queues(), *self._check_pages()]
        assert not wrong, "; ".join(wrong)

    def _check_queues(self) -> Iterator[str]:
        places: dict[int, list[str]] = {id_: [] for id_ in self.jobs}
        for name, queue in (
            ("prefill", self._prefilling), ("prelude", self._entering.values()),
            ("looping", self._looping.looping()), ("parked", self._parked.values()),
        ):  # fmt: skip
            for job in queue:
                if self.jobs.get(job.id) is not job:
                    yield f"{job} is queued for {name} and is no job"
                else:
                    places[job.id].append(name)
        for tick in self._outstanding:
            if tick.stage == "coda":
                for job in tick.jobs:
                    if not job.aborted:
                        places[job.id].append("parked")
        for id_, found in places.items():
            job = self.jobs[id_]
            if found != ([] if job.phase == "waiting" else [job.phase]):
                yield f"{job} is in {found}"
            if (job.slot < 0) != (job.phase == "waiting"):
                yield f"{job} waits with a slot or is elsewhere without one"
        ending = sum(map(len, self._ending.values()))
        if self.in_flight != sum(job.slot >= 0 for job in self.jobs.values()) + ending:
            yield f"{self.in_flight} slots are taken, not by the jobs in flight"
        if self.waiting != sum(job.phase == "waiting" for job in self.jobs.values()):
            yield f"{self.waiting} jobs are counted as waiting"

    def _check_pages(self) -> Iterator[str]:
        """Pages of each job from its record; where ticks are outstanding, those that are in none of them."""
        for job in self.jobs.values():
            if self._is_outstanding(job):
                continue
            core = sum(self._held[e] for e in job.recorded(0, job.prefilled))
            tokens = job.prefilled
            if job.phase in ("looping", "parked"):
                core += self._reserve if job.leave_after != job.depth else self._held[job.depth]
                tokens += 1
            if (job.core_pages, job.outer_pages) != (core, tokens * self._admission.outer):
                yield f"{job} holds {job.core_pages} and {job.outer_pages} pages, its record says {core}, {tokens}"
