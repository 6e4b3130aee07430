"""The engine's scheduler under a clock that is computed: what does not fit on this machine.

    from depthprobe.runtime.presets import PRESETS, WORKLOADS
    from depthprobe.runtime.simulate import Simulator, settings
    from depthprobe.runtime.workload import draw, exit_shares

    clock = PRESETS["h100-ouro-1.4b"]
    works = draw(WORKLOADS["alpaca"], 1000, exit_shares("2.47", clock.n_loops, clock.least_depth))
    print(Simulator(settings(clock, works, width=64), clock, works).run().throughput)

Not a model of the scheduler but the `Scheduler` itself, driven as `Engine.step` drives it; only the seconds of a tick
and the exits come from elsewhere. Replaying what an engine recorded gives the same ticks. Nothing here holds a tensor.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from depthprobe.errors import UserError
from depthprobe.runtime.jobs import Job, Stage, Tick
from depthprobe.runtime.layouts import layout
from depthprobe.runtime.roofline import Clock
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.settings import Policy, SchedulerConfig
from depthprobe.runtime.workload import Work

STAGES: tuple[Stage, ...] = ("prefill", "prelude", "recurrent", "coda")


@dataclass(frozen=True, slots=True)
class Ran:
    """One tick as it was run. The first fields are those of a trace's tick lines.

    Fields:
        rows: tokens of the tick.
        depths: rows at each loop, `[U]`; zeros but in recurrent ticks.
        work: what the clock's line takes for rows: rows, in a prefill core passes.
        context: keys read, as in `roofline.Line`.
        free_core, free_outer: pages after its commit.
    """

    tick: int
    stage: Stage
    rows: int
    depths: list[int]
    frozen: int
    work: int
    context: int
    start: float
    duration: float
    free_core: int
    free_outer: int
    ahead: int
    replay: bool
    preempted: int


@dataclass(slots=True)
class Simulated:
    """What came out; times in seconds of the clock.

    Fields:
        tokens, mean_exit: of decoded tokens, those of aborted requests included.
        seconds: from the first arrival to the last commit.
        stage_seconds, stage_ticks: by stage.
        waiting: seconds without anything to run; `host`: seconds in which the device waits for the host.
        rows, context: rows of all recurrent ticks, and the keys that they read.
        latencies: end-to-end seconds / tokens of each request that ran to its end.
        first: seconds from arrival to the first token, likewise.
        peak_core, peak_outer: most pages held, reservations included.
        most_in_flight: most requests with a slot.
        counters: of the scheduler.
        refused: lines for requests that can never be served.
        steady: tokens, seconds, seconds that were neither prefill nor waiting, rows and number of recurrent ticks,
            until everything had come and fewer requests than the width were left; None if that never was so. What
            comes after is the tail of a finite workload, in which no policy fills its batch.
    """

    width: int
    tokens: int = 0
    mean_exit: float = 0.0
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    stage_ticks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    waiting: float = 0.0
    host: float = 0.0
    rows: int = 0
    context: int = 0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    peak_core: int = 0
    peak_outer: int = 0
    most_in_flight: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    steady: tuple[int, float, float, int, int] | None = None

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decoding(self) -> float:
        """Seconds that are neither prefill nor waiting for arrivals."""
        return self.seconds - self.stage_seconds["prefill"] - self.waiting

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens a second before the tail, of all the time and of the seconds of decoding."""
        tokens, seconds, decoding = self.steady[:3] if self.steady else (self.tokens, self.seconds, self.decoding)
        return tokens / seconds if seconds else 0.0, tokens / decoding if decoding > 0 else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the time in which the device runs nothing."""
        return (self.waiting + self.host) / self.seconds if self.seconds else 0.0

    @property
    def fill(self) -> float:
        """Mean rows of a recurrent tick as a share of the width, before the tail."""
        rows, ticks = self.steady[3:] if self.steady else (self.rows, self.stage_ticks["recurrent"])
        return rows / (ticks * self.width) if ticks else 0.0

    @property
    def mean_context(self) -> float:
        """Keys that a row of a recurrent tick reads."""
        return self.context / self.rows if self.rows else 0.0


class Simulator:
    """Serves works under a clock.

    Args:
        config: of the scheduler; `settings` makes one.
        clock: with as many loops as config.
        works: with exits within 1…U.
        watch: called with every tick that ran, in order.
        times: start and duration of every tick, as recorded, instead of those of the clock; it ends with the last.

    Raises:
        UserError: clock and config have other loops.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        works: Sequence[Work],
        watch: Callable[[Ran], None] | None = None,
        times: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        if clock.n_loops != config.n_loops:
            what = f"clock {clock.name} is of {clock.n_loops} loops, the scheduler of {config.n_loops}"
            raise UserError(what, where="clock")
        self.config, self.clock, self.works, self._watch, self._times = config, clock, works, watch, times
        self.scheduler = Scheduler(config)
        self.out = Simulated(config.width)
        self.now = 0.0
        self._line = sorted(range(len(works)), key=lambda i: works[i].arrival)
        self._aborts = sorted((w.aborted, i) for i, w in enumerate(works) if w.aborted is not None)
        self._exit: dict[int, int] = {}  # by job, of its current token
        self._planned: deque[Tick] = deque()
        self._last = 0.0  # seconds that the tick before ran
        self._exits = 0  # sum over decoded tokens
        self._seconds = {stage: getattr(clock, stage) for stage in STAGES}
        self._was_full = False
        self._tick = 0  # the next one to run

    def run(self) -> Simulated:
        """Serve everything to its end."""
        out, works, line = self.out, self.works, self._line
        begin = self.now = works[line[0]].arrival if line else 0.0
        sent = gone = 0
        while self._times is None or self._tick < len(self._times):
            if self._times is not None:
                self.now = self._times[self._tick][0]
            while sent < len(line) and works[line[sent]].arrival <= self.now:
                self._add(line[sent])
                sent += 1
            while gone < len(self._aborts) and self._aborts[gone][0] <= self.now:
                self._abort(self._aborts[gone][1])
                gone += 1
            tick = self._planned.popleft() if self._planned else self.scheduler.plan()
            if tick is not None:
                if self.scheduler.in_flight >= self.config.width:
                    self._was_full = True
                elif self._was_full and out.steady is None and sent == len(line) and not self.scheduler.waiting:
                    out.seconds = self.now - begin
                    out.steady = out.tokens, out.seconds, out.decoding, out.rows, out.stage_ticks["recurrent"]
                self._step(tick)
                self._tick += 1
                continue
            assert self.scheduler.idle, "the scheduler has jobs and plans nothing"
            if sent == len(line):
                break
            wait = works[line[sent]].arrival - self.now
            out.waiting += wait
            self.now += wait
        out.seconds = self.now - begin
        out.counters = dict(self.scheduler.counters)
        out.mean_exit = self._exits / out.tokens if out.tokens else 0.0
        return out

    def _add(self, index: int) -> None:
        work = self.works[index]
        try:
            if not work.exits and work.aborted is None:
                raise UserError("no token is generated", where=f"request {index}")
            self.scheduler.add(Job(index, work.prompt_len, work.max_new, work.arrival))
        except UserError as error:
            self.out.refused.append(str(error))

    def _abort(self, index: int) -> None:
        self.scheduler.abort(index)

    def _step(self, tick: Tick) -> None:
        scheduler, config, out, jobs = self.scheduler, self.config, self.out, tick.jobs
        stage = tick.stage
        used = config.core_pages - scheduler.free_core
        if used > out.peak_core:
            out.peak_core = used
        used = config.outer_pages - scheduler.free_outer
        if used > out.peak_outer:
            out.peak_outer = used
        if scheduler.in_flight > out.most_in_flight:
            out.most_in_flight = scheduler.in_flight
        exits: list[Sequence[int]] | None = None
        if stage == "prefill":
            exits = [self._prompt_exits(tick, job, *chunk) for job, chunk in zip(jobs, tick.chunks, strict=True)]
            work, context = self._passes(tick, exits)
        else:
            work = len(jobs)
            context = sum([job.position for job in jobs]) + work
        if self._times is not None:
            exposed, duration = 0.0, self._times[self._tick][1]
        else:  # the host prepares a tick that was planned ahead while the one before it runs
            exposed = max(0.0, self.clock.host - self._last) if tick.ahead else self.clock.host
            duration = self._seconds[stage](work, context)
        start = self.now + exposed
        self.now = start + duration
        self._last = duration
        out.host += exposed
        out.stage_seconds[stage] += duration
        out.stage_ticks[stage] += 1
        if stage == "recurrent":
            self._recurrent(tick, work, context)
        elif stage == "prelude":
            for job in jobs:
                known = self.works[job.id].exits
                index = job.position - job.prompt_len + 1
                self._exit[job.id] = known[index] if index < len(known) else config.n_loops
            scheduler.commit(tick)
        elif stage == "coda":
            self._coda(tick)
        else:
            ragged = config.prefill == "ragged" and not tick.replay
            scheduler.commit(tick, prompt_exits=exits if ragged else None)
        if self._watch is not None:
            self._watch(self._ran(tick, work, context, start, duration))

    def _recurrent(self, tick: Tick, work: int, context: int) -> None:
        scheduler, ahead, exit_of = self.scheduler, self.config.horizon, self._exit
        self.out.rows += work
        self.out.context += context
        leaves = None
        if tick.asks:
            leaves = [exit_of[job.id] <= d + ahead for job, d in zip(tick.jobs, tick.depths, strict=True)]
        # as the engine: the next tick is planned before the answers of this one are read
        if ahead and not self._planned and (further := scheduler.plan()) is not None:
            self._planned.append(further)
        scheduler.commit(tick, leaves=leaves)

    def _coda(self, tick: Tick) -> None:
        out, works, now = self.out, self.works, self.now
        finished = []
        for job in tick.jobs:
            if job.aborted:
                finished.append(True)
                continue
            n, work = len(job.exits) + 1, works[job.id]
            out.tokens += 1
            self._exits += job.depth
            if n == 1:
                out.first.append(now - work.arrival)
            last = n == len(work.exits) and work.aborted is None
            if last:
                out.latencies.append((now - work.arrival) / n)
                del self._exit[job.id]
            finished.append(last)
        self.scheduler.commit(tick, finished=finished)

    def _prompt_exits(self, tick: Tick, job: Job, start: int, stop: int) -> Sequence[int]:
        if tick.replay:
            return job.recorded(start, stop)
        known = self.works[job.id].prompt_exits if self.config.prefill == "ragged" else ()
        return known[start:stop] if known else [self.config.n_loops] * (stop - start)

    @staticmethod
    def _passes(tick: Tick, exits: list[Sequence[int]]) -> tuple[int, int]:
        context = 0
        for (start, _), own in zip(tick.chunks, exits, strict=True):
            context += sum([e * j for j, e in enumerate(own, start + 1)])
        return sum(map(sum, exits)), context

    def _ran(self, tick: Tick, work: int, context: int, start: float, duration: float) -> Ran:
        depths = [0] * self.config.n_loops
        for depth in tick.depths:
            depths[depth - 1] += 1
        rows = sum(stop - begin for begin, stop in tick.chunks) if tick.chunks else len(tick.jobs)
        scheduler = self.scheduler
        return Ran(
            tick.number, tick.stage, rows, depths, sum(tick.frozen) if tick.frozen else 0, work, context, start,
            duration, scheduler.free_core, scheduler.free_outer, tick.ahead, tick.replay, len(tick.preempted),
        )  # fmt: skip


def settings(
    clock: Clock,
    works: Sequence[Work],
    *,
    width: int,
    policy: Policy = "refill",
    kv: str = "shared",
    spare: int | None = None,
    coda_share: float | None = None,
    horizon: int = 0,
    prefill_tokens: int = 512,
    kv_bytes: int | None = None,
    **others: Any,
) -> SchedulerConfig:
    """The settings that an engine on that machine would have.

    Args:
        spare: None: as many as the width.
        coda_share: None: what `clock.least_coda` rows are of the width; without it 1 with spare slots of at least
            half the width, else ½.
        kv_bytes: for pages; None: what the clock says the machine has.
        others: further fields of `SchedulerConfig`.
    """
    kind = layout(kv)
    spare = width if spare is None else spare
    if coda_share is None:
        coda_share = (
            min(1.0, clock.least_coda / max(width, 1)) if clock.least_coda else 1.0 if spare * 2 >= width else 0.5
        )
    core, outer = clock.pages(_pages_per_token(kind.reserve, kind.held, clock.n_loops, works, policy), kv_bytes)
    return SchedulerConfig(
        n_loops=clock.n_loops, width=width, core_pages=core, outer_pages=outer, spare=spare, policy=policy, kv=kind,
        prefill_tokens=prefill_tokens, coda_share=coda_share, horizon=horizon, **others,
    )  # fmt: skip


def _pages_per_token(
    reserve: Callable[[int], int], held: Callable[[int, int], int], loops: int, works: Sequence[Work], policy: str
) -> float:
    """Core pages that a token of these works keeps in the mean."""
    prompt = sum(work.prompt_len for work in works)
    output = sum(len(work.exits) for work in works)
    if policy == "full" or not output:
        return reserve(loops)
    kept = [held(e, loops) for e in range(1, loops + 1)]
    decoded = sum(kept[e - 1] for work in works for e in work.exits)
    return (prompt * kept[-1] + decoded) / (prompt + output)
