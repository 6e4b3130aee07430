"""Who is compared in `cdb.py`, run in turn and timed: engines with their parts, and static batches."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cdb_load import Load
from cdb_static import StaticBatches

import depthprobe.runtime.engine as engine_module
from depthprobe.runtime.engine import Engine


@dataclass(frozen=True)
class Seconds:
    """On the wall's clock, and of this thread's processor time, which other processes disturb less."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.thread_time())

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


class Parts:
    """Seconds by part, each without the parts inside it. A part is an attribute wrapped by `watch`."""

    def __init__(self) -> None:
        self.spent: dict[str, Seconds] = defaultdict(Seconds)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [Seconds()]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inner.append(Seconds())
        begun = Seconds.now()
        try:
            yield
        finally:
            took = Seconds.now() - begun
            self.spent[name] += took - self._inner.pop()
            self.calls[name] += 1
            self._inner[-1] += took

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        call = getattr(owner, attribute)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        setattr(owner, attribute, watched)


#: and what the runner's `work` calls their rows
STAGES = {"prefill": "core_prefill", "prelude": "prelude", "recurrent": "core", "coda": "coda"}


class Run:
    """One of those compared.

    `rounds`: decode seconds of each call of `advance`, which runs until so many tokens have come in all. `goal`: all
    tokens that will come.
    """

    name: str
    tokens: int = 0

    def __init__(self, name: str, goal: int) -> None:
        self.name, self.goal = name, goal
        self.rounds: list[Seconds] = []

    def advance(self, tokens: int) -> None:
        raise NotImplementedError

    @property
    def out(self) -> list[list[int]]:
        """Tokens of each request that has ended; to be asked once."""
        raise NotImplementedError

    @property
    def total(self) -> Seconds:
        return sum(self.rounds, Seconds())


class StaticRun(Run):
    """Static batches at full depth."""

    def __init__(self, name: str, load: Load, width: int) -> None:
        self.batches = StaticBatches(load, width)
        super().__init__(name, self.batches.requests * load.shape.new)

    def advance(self, tokens: int) -> None:
        spent = Seconds()
        while self.tokens < tokens:
            begun = Seconds.now()
            made = self.batches.step()
            spent += Seconds.now() - begun
            self.tokens += made
            if not made and not self.batches.begin():
                break
        self.rounds.append(spent)

    @property
    def out(self) -> list[list[int]]:
        return self.batches.out


class EngineRun(Run):
    """An engine with all requests in line.

    Prompts are not computed: their keys are copied into the pages that the engine takes for them (left as they are
    where the load has none), and such ticks do not count. Only what was preempted is prefilled in truth, and counts.

    Args:
        full: exits are all U (with a rule that replays).
        ragged: prompt tokens leave early too, by drawn exits.
        parts: time the parts of a step.
        options: of the engine.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        *,
        full: bool = False,
        ragged: bool = False,
        parts: bool = False,
        record: Path | None = None,
        **options: Any,
    ) -> None:
        s, policy = load.shape, options.get("policy", "refill")
        replays = policy != "full"
        slots = s.width + options.get("spare", s.width if policy == "refill" else 0)
        # requests are equally long and end in waves: the last one is to be as wide as the others
        self.requests = load.requests(replays, full, ragged, multiple=slots)
        super().__init__(name, len(self.requests) * s.new)
        self.load = load
        settings: dict[str, Any] = {"max_len": s.prompt + s.new, "width": s.width, "prefill_tokens": 1 << 20, **options}
        if replays:
            settings["exit"] = "replay"
        if ragged:
            settings["prefill"] = "ragged"
        self.engine = Engine(load.model, record=record, **settings)
        self.engine.runner.model = load.packed
        for table in (*self.engine.runner.kv.core, *self.engine.runner.kv.outer):
            table.zero_()  # the machine hands memory out when it is first written; a server has run for a while
        self._prefill, self._seen = self.engine.runner.prefill, set[tuple[int, int]]()
        self.engine.runner.prefill = self._filled  # type: ignore[method-assign]
        self._copied, self._spent = False, Seconds()
        self._which = {request.prompt: number for number, request in enumerate(self.requests[: s.prompts])}
        self.parts = Parts() if parts else None
        if self.parts is not None:
            self._watch(self.parts)
        for request in self.requests:
            self.engine.add(request, arrival=0.0)
        self.ticks: dict[str, list[tuple[int, Seconds]]] = defaultdict(list)
        self.ideal_peak = self.peak = self.outer_peak = self.most_slots = 0

    def _filled(
        self,
        slots: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        tokens: Sequence[list[int]],
        exits: Any,
        seeds: Any,
    ) -> list[list[int]]:
        # who comes a second time was preempted
        keys = [(id(one), start) for one, (start, _) in zip(tokens, chunks, strict=True)]
        if any(key in self._seen for key in keys):
            return self._prefill(slots, chunks, tokens, exits, seeds)
        self._seen.update(keys)
        self._copied = True
        runner, pool = self.engine.runner, self.engine.pool
        left = []
        for slot, (start, stop), ids, given in zip(slots, chunks, tokens, exits, strict=True):
            pool.start_span(slot, start, stop)
            e = np.asarray([pool.n_loops] * (stop - start) if given is None else given)
            core = torch.from_numpy(pool.core[slot, :, start:stop].astype(np.int64))
            number = self._which.get(tuple(ids[: self.load.shape.prompt]), 0)
            for table, kept in zip(runner.kv.core, self.load.core_keys or (), strict=False):
                table[core] = kept[number, :, start:stop]
            if pool.n_outer:
                outer = torch.from_numpy(pool.outer[slot, start:stop].astype(np.int64))
                for table, kept in zip(runner.kv.outer, self.load.outer_keys or (), strict=False):
                    table[outer] = kept[number, start:stop]
            pool.leave(np.full(stop - start, slot), np.arange(start, stop), e)
            left.append(e.tolist())
        return left

    def step(self) -> Seconds:
        """One tick. Its time goes to the running round, and to its stage; none where prompts were copied."""
        engine, before = self.engine, self._counted()
        self._copied = False
        begun = Seconds.now()
        if self.parts is None:
            made = len(engine.step())
        else:
            kept = self.parts.spent.copy(), self.parts.calls.copy()
            with self.parts.part("engine"), _sampling(self.parts):
                made = len(engine.step())
            if self._copied:
                self.parts.spent, self.parts.calls = kept
        took = Seconds.now() - begun
        self._count_pages()
        self.tokens += made
        if self._copied:
            return Seconds()
        self._spent += took
        after = self._counted()
        stage = next((one for one in STAGES if after[one][0] > before[one][0]), "prelude")
        self.ticks[stage].append((after[stage][1] - before[stage][1], took))
        return took

    def _counted(self) -> dict[str, tuple[int, int]]:
        """Ticks and rows of each stage so far."""
        counters, work = self.engine.scheduler.counters, self.engine.runner.work
        return {stage: (counters[f"ticks_{stage}"], getattr(work, rows)) for stage, rows in STAGES.items()}

    def advance(self, tokens: int) -> None:
        self._spent = Seconds()
        while self.tokens < tokens and self.engine.in_flight:
            self.step()
        self.rounds.append(self._spent)

    def _count_pages(self) -> None:
        pool, scheduler = self.engine.pool, self.engine.scheduler
        self.most_slots = max(self.most_slots, scheduler.in_flight)
        self.outer_peak = max(self.outer_peak, pool.peak_outer)
        if pool.peak_core == self.peak:
            return
        self.peak = pool.peak_core
        ideal = 0
        for job in scheduler.jobs.values():
            if job.slot < 0:
                continue
            ideal += sum(job.recorded(0, job.prefilled))
            if job.phase in ("looping", "parked"):
                given = self.requests[job.id].replay
                ideal += pool.n_loops if given is None else given[len(job.exits)]
        self.ideal_peak = max(self.ideal_peak, ideal)

    def _watch(self, parts: Parts) -> None:
        engine = self.engine
        for stage in ("prelude", "recurrent", "leave", "coda"):
            parts.watch(engine.runner, stage, f"runner.{stage}")
        parts.watch(engine.runner, "_row_pages", "page index")
        for call in ("plan", "commit"):
            parts.watch(engine.scheduler, call, "scheduler")
        for call in ("start", "start_span", "leave", "release"):
            parts.watch(engine.pool, call, "pool")

    @property
    def mean_exit(self) -> float:
        """Loops of a decode row, of a rule that replays."""
        return sum(sum(request.replay or ()) for request in self.requests) / self.goal

    @property
    def out(self) -> list[list[int]]:
        done = [self.engine.take(request.id) for request in self.requests]
        return [[] if one is None else one.tokens for one in done]


@contextmanager
def _sampling(parts: Parts) -> Iterator[None]:
    """`sample`, which the engine calls by its module's name, as a part of its own."""
    plain = engine_module.sample
    parts.watch(engine_module, "sample", "sample")
    try:
        yield
    finally:
        engine_module.sample = plain


def random_keys(engine: Engine) -> None:
    """Something in every page of an engine whose prompts have no keys."""
    some = torch.randn(4096, engine.runner.kv.width)
    for table in (*engine.runner.kv.core, *engine.runner.kv.outer):
        for rows in table[:-2].split(len(some)):
            rows.copy_(some[: len(rows)])


def per_row(run: EngineRun, stage: str) -> float:
    """Processor seconds of a row of a stage."""
    ticks = run.ticks[stage]
    return sum(took.cpu for _, took in ticks) / max(1, sum(rows for rows, _ in ticks))


def in_turn(runs: Sequence[Run], turns: int) -> None:
    """All runs to their end, a share of 1/turns each in turn, so that a slower minute falls on all alike."""
    for number in range(1, turns + 1):
        for run in runs if number % 2 else reversed(runs):
            run.advance(run.goal * number // turns)
        print(f"turn {number} of {turns}", file=sys.stderr, flush=True)


def over(above: Run, below: Run) -> dict[str, float]:
    """Decode seconds a token of one over those of another, by ending of a key: processor time of all ("") and its
    quartiles over turns, and on the clock."""
    scale = below.goal / above.goal
    cpu, wall = (scale * getattr(above.total, clock) / getattr(below.total, clock) for clock in ("cpu", "wall"))
    ratios = [scale * a.cpu / b.cpu for a, b in zip(above.rounds, below.rounds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"": cpu, "_wall": wall, "_q1": low, "_q3": high}
