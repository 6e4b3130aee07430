"""Drives a scheduler with random decisions, and checks it against a page pool and plain bookkeeping at every tick."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from depthprobe.runtime.jobs import Job, Outcome, Tick
from depthprobe.runtime.pages import PagePool
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.settings import SchedulerConfig


@dataclass
class Drive:
    """One run.

    Fields:
        exits: exit depth of each (job, position) by rule; drawn once, so that a second run decides the same.
        ahead: outstanding ticks at most.
        rng: draws nonsense answers where the answer is settled, and which ticks are checked.
        check: share of the ticks after which everything is checked; counts are compared after each.
    """

    config: SchedulerConfig
    exits: dict[tuple[int, int], int]
    ahead: int = 1
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    check: float = 1.0
    outstanding: deque[Tick] = field(default_factory=deque)
    ticks: list[Tick] = field(default_factory=list)
    ran: Counter[tuple[int, int]] = field(default_factory=Counter)  # loops run for (job, position), each time
    asked: set[tuple[int, int, int]] = field(default_factory=set)  # (job, position, depth) decided upon
    prompt: Counter[int] = field(default_factory=Counter)  # core rows of prefills of a job
    frozen: int = 0
    done: dict[int, Job] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)  # tokens after which a job stops by itself
    left: dict[tuple[int, int], int] = field(default_factory=dict)  # depth of (job, position), as told by commits
    n_aborted: int = 0
    since: int = 0  # ticks planned since the last coda

    def __post_init__(self) -> None:
        c = self.config
        self.scheduler = Scheduler(c)
        self.pool = PagePool(c.core_pages, c.outer_pages, c.n_slots, c.max_len or 64, c.n_loops, c.layout, seed=3)

    def exit(self, job: Job, position: int) -> int:
        return self.exits.setdefault((job.id, position), self.config.n_loops)

    def abort(self, id_: int) -> bool:
        job = self.scheduler.jobs.get(id_)
        slot = -1 if job is None else job.slot
        known = self.scheduler.abort(id_)
        assert known == (job is not None)
        if job is not None:
            self.done[id_] = job
            self.n_aborted += 1
            if slot >= 0 and job.slot < 0:
                self.pool.release(slot)
        self.verify()
        return known

    def step(self) -> bool:
        """Plan up to `ahead` ticks, commit one. False when there was nothing to do."""
        before = len(self.outstanding)
        while len(self.outstanding) < self.ahead and (tick := self.scheduler.plan()) is not None:
            self.planned(tick)
        if not self.outstanding:
            assert self.scheduler.idle, f"stuck: {list(self.scheduler.jobs.values())}"
            return len(self.outstanding) > before
        self.commit(self.outstanding.popleft())
        return True

    def planned(self, tick: Tick) -> None:
        config, u = self.config, self.config.n_loops
        assert tick.jobs and tick.number == len(self.ticks) and tick.ahead == len(self.outstanding)
        assert len({job.id for job in tick.jobs}) == len(tick.jobs), "a row twice"
        self.ticks.append(tick)
        self.outstanding.append(tick)
        for job, slot in tick.preempted:
            self.pool.release(slot)
            if not self.n_aborted:  # somebody older goes on
                assert min(j.priority for j in self.scheduler.jobs.values() if j.slot >= 0) < job.priority
        self.order(tick)
        slots = [job.slot for job in tick.jobs]
        assert min(slots) >= 0 and max(slots) < config.n_slots
        if tick.stage == "prefill":
            total = sum(stop - start for start, stop in tick.chunks)
            assert total <= config.prefill_tokens or (len(tick.jobs) == 1 and not config.layout.parallel)
            for job, (start, stop) in zip(tick.jobs, tick.chunks, strict=True):
                assert start < stop <= job.position
                assert tick.replay == (start < job.replay_to) and (not tick.replay or stop <= job.replay_to)
                assert config.layout.parallel or (start, stop) == (0, job.position)
                self.pool.start_span(job.slot, start, stop)
        else:
            assert len(tick.jobs) <= config.width
        if tick.stage == "prelude":
            self.pool.start(slots, [job.position for job in tick.jobs])
        if tick.stage == "recurrent":
            assert len(tick.depths) == len(tick.jobs) and all(1 <= d <= u for d in tick.depths)
            if config.policy != "refill" or config.by_depth or not config.layout.mixes_depths:
                assert len(set(tick.depths)) == 1
            live = [not f for f in tick.frozen or [False] * len(slots)]
            assert any(live)
            writes = self.pool.writable(slots, tick.depths, [job.position for job in tick.jobs])
            for job, ok, run in zip(tick.jobs, writes.tolist(), live, strict=True):
                assert ok or not run, "a write through an alias"
                assert run or job.phase == "parked"
        self.verify()

    def order(self, tick: Tick) -> None:
        """The priorities of stages, and of rows in a recurrent tick; and progress: the coda comes in bounded time."""
        scheduler, config = self.scheduler, self.config
        slots = config.n_slots
        longest = max((job.tokens for job in scheduler.jobs.values()), default=0)
        self.since = 0 if tick.stage == "coda" else self.since + 1
        assert self.since <= 2 * slots * (longest + config.n_loops + 2), "ticks without progress"
        looping = sum(1 for _ in scheduler._looping.looping())
        if config.policy == "refill":
            decoding = scheduler.in_flight - len(scheduler._prefilling)
            decoding -= sum(map(len, scheduler._ending.values()))
            parked = len(scheduler._parked)
            if tick.stage == "recurrent":  # some were parked by this very plan
                parked -= sum(job.phase == "parked" for job in tick.jobs)
            if tick.stage in ("coda", "recurrent") and scheduler._entering:
                assert scheduler._admission.room() < 1, "the prelude comes first"
            if tick.stage == "recurrent":
                assert parked < config.least_coda(decoding), "the coda comes before"
            if tick.stage == "coda" and len(tick.jobs) < config.least_coda(decoding):
                assert not looping, "a coda too early"
            if tick.stage == "recurrent" and not (config.by_depth or not config.layout.mixes_depths):
                assert len(tick.jobs) == config.width or not scheduler._looping.ready, "a row left empty"
                before = next((t for t in reversed(self.ticks[:-1]) if t.stage == "recurrent"), None)
                if before is not None:
                    went_on = [j for j in before.jobs if j._running]
                    assert all(any(j is k for k in tick.jobs) for j in went_on), "a running row was put off"
        elif tick.stage == "coda":
            assert not any(j._running for j in scheduler._looping.rows) and not scheduler._parked, "two codas"

    def commit(self, tick: Tick) -> Outcome:
        scheduler, ahead = self.scheduler, self.config.horizon
        leaves = finished = prompt_exits = None
        aborted = [job.aborted for job in tick.jobs]
        if tick.stage == "recurrent":
            frozen = tick.frozen or [False] * len(tick.jobs)
            # nonsense where the answer is settled: it must not matter
            leaves = [self.rng.random() < 0.5 for _ in tick.jobs]
            for i, (job, d) in enumerate(zip(tick.jobs, tick.depths, strict=True)):
                if frozen[i]:
                    self.frozen += 1
                    continue
                self.ran[job.id, job.position] += 1
                c = d + ahead
                open_ = job.leave_after is None and c >= job.floor and c < self.config.n_loops and not aborted[i]
                if open_ and self.config.policy != "full":
                    assert tick.asks and (job.id, job.position, c) not in self.asked, "decided anew"
                    self.asked.add((job.id, job.position, c))
                    leaves[i] = self.exit(job, job.position) <= c
            if not tick.asks and self.rng.random() < 0.5:
                leaves = None
        if tick.stage == "prefill":
            rows = []
            for job, (start, stop) in zip(tick.jobs, tick.chunks, strict=True):
                exits = [self.exit(job, p) for p in range(start, stop)]
                if tick.replay:
                    exits = job.recorded(start, stop)
                elif self.config.prefill == "dense":
                    exits = [self.config.n_loops] * (stop - start)
                rows.append(exits)
                assert len(rows[-1]) == stop - start
                self.prompt[job.id] += sum(rows[-1])
            prompt_exits = rows if self.config.prefill == "ragged" and not tick.replay else None
        if tick.stage == "coda":
            finished = [len(job.exits) + 1 >= self.finish.get(job.id, 10**9) for job in tick.jobs]
        positions = [job.position for job in tick.jobs]
        out = scheduler.commit(tick, leaves=leaves, finished=finished, prompt_exits=prompt_exits)
        if tick.stage == "prefill":
            for job, (start, stop), exits in zip(tick.jobs, tick.chunks, rows, strict=True):
                if not job.aborted:
                    self.pool.leave([job.slot] * (stop - start), range(start, stop), exits)
        self.left |= {(job.id, job.position): e for job, e in out.exited}
        if out.exited:
            plan = self.pool.leave(
                [job.slot for job, _ in out.exited], [job.position for job, _ in out.exited], [e for _, e in out.exited]
            )
            if self.config.layout.copies:
                assert plan is not None and len(plan.source) == sum(self.config.n_loops - e for _, e in out.exited)
        if tick.stage == "coda":
            for job, position in zip(tick.jobs, positions, strict=True):
                if not job.aborted:
                    assert len(job.exits) == position - job.prompt_len + 2
                    assert self.left[job.id, position] == job.exits[-1], "told of no exit, or of another"
        for job in out.finished:
            self.done[job.id] = job
        for _, slot in out.freed:
            self.pool.release(slot)
        self.verify()
        return out

    def verify(self) -> None:
        scheduler = self.scheduler
        agree = not scheduler._preempted  # else the pool hears of it with the next tick
        if agree:
            assert (self.pool.free_core, self.pool.free_outer) == (scheduler.free_core, scheduler.free_outer)
        if self.rng.random() >= self.check:
            return
        scheduler.check_integrity()
        if agree:
            for job in scheduler.jobs.values():
                if job.slot >= 0:
                    assert self.pool.pages_held(job.slot) == job.core_pages
            self.pool.check_integrity()

    def finish_checks(self) -> None:
        """Oracle 5: after the last request the counted work adds up, and every page is free."""
        scheduler, config = self.scheduler, self.config
        self.pool.check_integrity()
        c, u = scheduler.counters, config.n_loops
        assert scheduler.idle and not scheduler.in_flight and not scheduler.waiting
        assert (scheduler.free_core, scheduler.free_outer) == (config.core_pages, config.outer_pages)
        jobs = self.done.values()
        assert c["core_rows_decode"] == sum(sum(job.exits) for job in jobs)
        executed = sum(self.ran.values()) + sum(self.prompt.values()) + self.frozen
        assert executed == sum(value for name, value in c.items() if name.startswith("core_rows"))
        assert c["core_rows_frozen"] == self.frozen
        assert sum(c[f"ticks_{s}"] for s in ("prefill", "prelude", "recurrent", "coda")) == len(self.ticks)
        if not c["preemptions"]:
            assert c["core_rows_recomputed"] == 0
        least = 1 + config.horizon
        for job in jobs:
            for i, e in enumerate(job.exits):
                p = job.prompt_len - 1 + i
                want = u if config.policy == "full" else min(u, max(self.exit(job, p), min(least, u)))
                assert e == want, f"{job} left at {e}, by rule at {want}"
                assert self.ran[job.id, p] >= e and (job.preemptions or self.ran[job.id, p] == e)
            if not job.aborted:
                assert len(job.exits) == min(job.max_new, self.finish.get(job.id, 10**9))
                assert len(job.prompt_exits) == job.prompt_len - 1
                if config.prefill == "ragged":
                    assert job.prompt_exits == [self.exit(job, p) for p in range(job.prompt_len - 1)]
                if not job.preemptions:
                    assert self.prompt[job.id] == sum(job.prompt_exits)
