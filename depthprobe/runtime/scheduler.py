"""The scheduler of continuous depth batching: a pure state machine without tensors, arrays or a clock.

`plan()` names the next stage and its rows, `commit(tick, …)` takes back what the model decided and moves them:

    while (tick := scheduler.plan()) is not None:
        leaves = run(tick)                          # a model, a simulator, a random number generator
        scheduler.commit(tick, leaves=leaves)

The order (arXiv 2608.09444): the prelude directly follows a prefill or a coda; the coda when enough rows have left
or nothing else can run; prefill while slots and pages allow; else the next loop. Where rows form cohorts (every
policy but refill) a cohort has one coda, and the prelude waits for the prefills between two cohorts.

**Running ahead.** `plan()` may be called again before `commit` where what is outstanding cannot change who comes
next: dense prefills, preludes, recurrent ticks in which nobody is asked, and with horizon 1 one recurrent tick, for
who leaves after it was known before. Elsewhere it returns None. Ticks are committed in the order of planning, and
must run in that order on the device: pages and slots that a commit frees are used by later ticks only.

**Pages.** Those of a prefill chunk or a prelude row are taken when the tick is planned; those deeper than an exit
are given back by the commit of the tick that ran its last loop. Where pages lack for a prelude, the job that arrived
last loses slot and pages and lines up again at the place its arrival gives it. The one that arrived first is never
preempted, so that all come to their end. A preempted job is prefilled again with its recorded exits, and its
current token runs the loops that it was already decided to run: nothing is decided twice.

The cost of a plan and its commit grows with the rows of the tick alone (to preempt looks at all slots; the waiting
line costs a logarithm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from depthprobe.errors import UserError
from depthprobe.runtime.jobs import Job, Outcome, Stage, Tick
from depthprobe.runtime.state import SchedulerState


class Scheduler(SchedulerState):
    """See the top of the module. `Scheduler(config: SchedulerConfig)`.

    Fields for others to read:
        jobs: those that are not done, by id.
        counters: core rows, each one token through the core once: `core_rows_decode` (of tokens decoded or in
            flight), `core_rows_prefill`, `core_rows_recomputed` (prompt and decode rows, after preemptions),
            `core_rows_frozen` (lockstep), `core_rows_aborted` (of tokens that were in flight when aborted); further
            `rows_prelude`, `rows_coda`, `ticks_prefill` and so on, `preemptions`. Work counts when committed.
    """

    def add(self, job: Job) -> None:
        """Line up a new job.

        Raises:
            UserError: its id is in use, or it could not even be served alone. The scheduler is unchanged.
        """
        if job.id in self.jobs:
            raise UserError(f"request {job.id} exists already", where="id", remedy="give each request its own id")
        self._admission.fits(job)
        self.jobs[job.id] = job
        self._admission.line_up(job)

    def abort(self, job_id: int) -> bool:
        """End a job; False if there is none of that id (it may be done).

        If it is in no outstanding tick its slot and pages are free at once: `job.slot` is −1 then, and the caller
        frees the pages of the slot that it had. Else the commit of the last such tick names it in `Outcome.freed`.
        """
        job = self.jobs.pop(job_id, None)
        if job is None:
            return False
        self.counters["core_rows_decode"] -= job._ran
        self.counters["core_rows_aborted"] += job._ran
        if job.phase == "waiting":
            self._admission.leave_line()
        else:
            self._remove(job)
            if self._is_outstanding(job):
                self._ending.setdefault(job._last_tick, []).append(job)
            else:
                self._admission.release(job)
        job.phase, job.aborted = "done", True
        return True

    # ------------------------------------------------------------------------------------------- plan

    def plan(self) -> Tick | None:
        """The next tick; None where nothing can be planned before a commit, or there is nothing to do (`idle`)."""
        if self._fixed >= 0 or (self._asking and self._asking[0] < self._last_recurrent):
            return None
        plan = self._cohort_tick if self._looping.cohorts else self._refill_tick
        tick = plan()
        if tick is None and self._preempted and not self._outstanding:
            tick = plan()  # with the pages of those that were preempted
        return tick

    def _refill_tick(self) -> Tick | None:
        if (tick := self._plan_prelude()) is not None:
            return tick
        if self._parked:
            decoding = self.in_flight - len(self._prefilling) - sum(map(len, self._ending.values()))
            if len(self._parked) >= self.config.least_coda(decoding):
                return self._plan_coda()
        tick = self._plan_prefill()
        if tick is None:  # prompts of one token are admitted without a prefill
            tick = self._plan_prelude() or self._plan_recurrent()
        return self._plan_coda() if tick is None and self._parked else tick

    def _cohort_tick(self) -> Tick | None:
        over = self._looping.over
        if over and self._parked:
            return self._plan_coda()
        tick = self._plan_prefill()
        if tick is None and over:
            tick = self._plan_prelude()
        return tick or self._plan_recurrent()

    def _planned(self, stage: Stage, jobs: list[Job], fixed: bool = False, **fields: Any) -> Tick:
        tick = Tick(self._number, stage, jobs, ahead=len(self._outstanding), preempted=self._preempted, **fields)
        if fixed:
            self._fixed = tick.number
        self._number += 1
        self._preempted = []
        self._outstanding.append(tick)
        return tick

    def _plan_prefill(self) -> Tick | None:
        admission, line, number = self._admission, self._prefilling, self._number
        jobs: list[Job] = []
        chunks: list[tuple[int, int]] = []
        replays = False
        budget = self.config.prefill_tokens
        while budget > 0:
            job = line[0] if line else self._admit()
            if job is None:
                break
            start, stop = job.prefilled, job.position
            replay = start < job.replay_to
            if jobs and replay != replays:
                break
            if not admission.whole:
                stop = min(stop, start + budget, start + admission.room())
                stop = min(stop, job.replay_to) if replay else stop
            elif jobs and stop - start > budget:  # in one piece or not now
                break
            if stop == start:
                break
            admission.take(job, stop - start)
            jobs.append(job)
            chunks.append((start, stop))
            replays = replay
            job.prefilled, job._last_tick = stop, number
            budget -= stop - start
            if stop < job.position:
                break
            self._enter(line.popleft())
        if not jobs:
            return None
        fixed = replays or self.config.prefill == "ragged"  # the page tables of what follows depend on the exits
        return self._planned("prefill", jobs, fixed, chunks=chunks, replay=replays)

    def _admit(self) -> Job | None:
        """The next job that has something to prefill, at the end of the line; others go on to the prelude."""
        while (job := self._admission.admit()) is not None:
            if job.position > 0:
                job.phase = "prefill"
                self._prefilling.append(job)
                return job
            self._enter(job)
        return None

    def _plan_prelude(self) -> Tick | None:
        n = min(len(self._entering), self.config.width)
        if self._looping.cohorts:
            n = min(n, self.config.width - len(self._looping.ready))
        if n <= 0:
            return None
        if n <= self._admission.room():
            rows = [self._entering.popitem(last=False)[1] for _ in range(n)]
            for job in rows:
                self._admission.take(job, 1)
        else:
            rows = self._scarce_rows(n)
            if not rows:
                return None
        number = self._number
        for job in rows:
            job.phase = "looping"
            job._last_tick = number
            if job._entered < 0:
                job._entered = number
                job.ticks_run = job.ticks_waited = 0
            self._looping.add(job)
        return self._planned("prelude", rows)

    def _scarce_rows(self, n: int) -> list[Job]:
        """At most n rows, oldest first, with their pages; these are taken from the jobs that arrived last."""
        rows: list[Job] = []
        victims = iter(self._admission.youngest_first())
        for job in sorted(self._entering.values(), key=lambda job: job.priority):
            while len(rows) < n and job.slot >= 0 and self._admission.room() < 1:
                victim = next(victims)
                if self._ending or self._is_outstanding(victim):
                    return rows  # a commit comes first
                self._preempt(victim)
            if len(rows) == n or job.slot < 0:  # the others are younger still, and lost their slots before it
                break
            del self._entering[job.id]
            self._admission.take(job, 1)
            rows.append(job)
        return rows

    def _plan_recurrent(self) -> Tick | None:
        rows = self._looping.take()
        if not rows:
            return None
        number, last, ahead = self._number, self._n_loops, self.config.horizon
        never = self.config.policy == "full"
        asks = False
        depths: list[int] = []
        leaving: list[Job] = []
        frozen: list[bool] | None = None
        if self.config.policy == "lockstep":
            frozen = [not job._running for job in rows]
            rows_to_run = [job for job in rows if job._running]
            depths = [rows_to_run[0].depth + 1] * len(rows)  # a cohort is at one depth
            for job in rows:
                job._last_tick = number
        else:
            rows_to_run = rows
        for job in rows_to_run:
            job.depth = d = job.depth + 1
            job.ticks_run += 1
            job._last_tick = number
            if frozen is None:
                depths.append(d)
            if d == last or d == job.leave_after:
                leaving.append(job)
            elif not asks and job.leave_after is None and last > d + ahead >= job.floor:
                asks = not never
        for job in leaving:
            self._park(job)
        self._looping.ran(rows_to_run)
        self._last_recurrent = number
        if asks and ahead:
            self._asking.append(number)
        frozen = frozen if frozen and any(frozen) else None
        return self._planned("recurrent", rows, asks and not ahead, depths=depths, frozen=frozen, asks=asks)

    def _plan_coda(self) -> Tick:
        n = min(len(self._parked), self.config.width)
        rows = [self._parked.popitem(last=False)[1] for _ in range(n)]
        for job in rows:
            job._last_tick = self._number
            job.ticks_waited = self._number - job._entered - 1 - job.ticks_run
        return self._planned("coda", rows, fixed=True)

    # ------------------------------------------------------------------------------------------- commit

    def commit(
        self,
        tick: Tick,
        leaves: Sequence[bool] | None = None,
        finished: Sequence[bool] | None = None,
        prompt_exits: Sequence[Sequence[int]] | None = None,
    ) -> Outcome:
        """Take back what a tick did. Lists are parallel to `tick.jobs`; rows of aborted jobs are passed over.

        Args:
            tick: the oldest outstanding one.
            leaves: recurrent, needed where `tick.asks`: whether the row leaves, with horizon 0 after this loop,
                with horizon 1 after the next. Not looked at where it is settled: at depth U, with policy full, in
                frozen rows, below `job.floor` and where `job.leave_after` is set.
            finished: coda: whether the job ends with this token; it does in any case after max_new.
            prompt_exits: prefill, needed where prompts are ragged and the tick is no replay: the exit of each token
                of each chunk.

        Raises:
            ValueError: not the oldest outstanding tick, or what it needs is missing or has another length.
        """
        if not self._outstanding or self._outstanding[0] is not tick:
            raise ValueError("ticks are committed in the order of planning")
        ragged = tick.stage == "prefill" and self.config.prefill == "ragged" and not tick.replay
        for name, given, needed in (
            ("leaves", leaves, tick.asks), ("finished", finished, False), ("prompt_exits", prompt_exits, ragged),
        ):  # fmt: skip
            if (needed and given is None) or (given is not None and len(given) != len(tick.jobs)):
                raise ValueError(f"{name} for {len(tick.jobs)} rows: {'none' if given is None else len(given)}")
        chunk_exits = self._chunk_exits(tick, prompt_exits if ragged else None) if tick.chunks else []
        self._outstanding.popleft()
        self._committed = tick.number
        if self._fixed == tick.number:
            self._fixed = -1
        if self._asking and self._asking[0] == tick.number:
            self._asking.popleft()
        out = Outcome()
        self.counters[f"ticks_{tick.stage}"] += 1
        if tick.stage == "recurrent":
            self._commit_recurrent(tick, leaves if tick.asks else None, out)
        elif tick.stage == "prefill":
            self._commit_prefill(tick, chunk_exits)
        elif tick.stage == "coda":
            self._commit_coda(tick, finished, out)
        else:
            self.counters["rows_prelude"] += len(tick.jobs)
        for job in self._ending.pop(tick.number, ()):
            self._end(job, out)
        return out

    def _commit_recurrent(self, tick: Tick, leaves: Sequence[bool] | None, out: Outcome) -> None:
        last, ahead = self._n_loops, self.config.horizon
        again = aborted = 0
        exited = out.exited
        frozen = tick.frozen
        for i, (job, d) in enumerate(zip(tick.jobs, tick.depths, strict=True)):
            if frozen is not None and frozen[i]:
                continue
            if job.aborted:
                aborted += 1
                continue
            if d > job._ran:
                job._ran = d
            else:
                again += 1
            leave = job.leave_after
            if leave is None:
                if leaves is None or not leaves[i] or not last > d + ahead >= job.floor:
                    continue
                job.leave_after = leave = d + ahead
                if job.depth == leave:  # else the loop after which it leaves is still to be planned
                    self._park(job)
            if leave == d:
                exited.append((job, d))
                self._admission.give(job, self._reserve - self._held[d])
        counters, still = self.counters, sum(frozen) if frozen else 0
        counters["core_rows_frozen"] += still
        counters["core_rows_aborted"] += aborted
        counters["core_rows_recomputed"] += again
        counters["core_rows_decode"] += len(tick.jobs) - still - aborted - again

    def _chunk_exits(self, tick: Tick, prompt_exits: Sequence[Sequence[int]] | None) -> list[list[int]]:
        exits = [list(one) for one in prompt_exits or ()]
        if prompt_exits is None:
            dense = self._n_loops
            exits = [
                job.recorded(start, stop) if tick.replay else [dense] * (stop - start)
                for job, (start, stop) in zip(tick.jobs, tick.chunks, strict=True)
            ]
        for one, (start, stop) in zip(exits, tick.chunks, strict=True):
            if len(one) != stop - start or min(one) < 1 or max(one) > self._n_loops:
                raise ValueError(f"exits of {stop - start} prompt tokens, each within 1 to {self._n_loops}, are {one}")
        return exits

    def _commit_prefill(self, tick: Tick, exits: list[list[int]]) -> None:
        for job, one in zip(tick.jobs, exits, strict=True):
            if job.aborted:
                self.counters["core_rows_aborted"] += sum(one)
                continue
            if not tick.replay:
                job.prompt_exits.extend(one)
            self.counters["core_rows_recomputed" if tick.replay else "core_rows_prefill"] += sum(one)
            self._admission.give(job, len(one) * self._reserve - sum(self._held[e] for e in one))

    def _commit_coda(self, tick: Tick, finished: Sequence[bool] | None, out: Outcome) -> None:
        self.counters["rows_coda"] += len(tick.jobs)
        for i, job in enumerate(tick.jobs):
            if job.aborted:
                continue
            job.exits.append(job.depth)
            job._ran = 0
            if len(job.exits) == job.max_new or (finished is not None and finished[i]):
                del self.jobs[job.id]
                job.phase = "done"
                out.finished.append(job)
                self._end(job, out)
                continue
            job.position += 1
            job.prefilled = job.position
            job.depth = job.floor = 0
            job.leave_after = None
            job._entered = -1
            self._enter(job)
