"""The engine: requests in, tokens out, and a record of every exit that was taken.

    engine = Engine(model, exit="q:0.5", width=8)
    for done in engine.generate([[5, 9, 2], [7]], Sampling(max_new_tokens=4)):
        print(done.tokens, done.exit_depths)

It joins the parts that know nothing of each other: the scheduler says which rows run, the runner runs them, the pool
holds their pages, the recorder writes down what happened. `step()` is one tick.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthprobe.errors import UserError
from depthprobe.models.modeling import LoopedForCausalLM
from depthprobe.runtime.jobs import Job, Outcome, Tick
from depthprobe.runtime.live import Decodes, Live
from depthprobe.runtime.options import EngineOptions, end_tokens
from depthprobe.runtime.pages import PagePool
from depthprobe.runtime.prompts import as_request
from depthprobe.runtime.record import Recorder
from depthprobe.runtime.recovery import restarted
from depthprobe.runtime.requests import Completion, Request, Sampling, TokenEvent
from depthprobe.runtime.runner import Runner
from depthprobe.runtime.sampling import sample
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.tracing import Tracer


class Engine:
    """Serves a `LoopedForCausalLM` with continuous depth batching.

    Args:
        model: in evaluation mode; U loops, or fewer with `n_loops`.
        tokenizer: for prompts given as text, texts of completions and stop strings; None: ids alone.
        record: folder of the trace; None: no trace is written.
        about: more for the trace's `trace.json`, such as the model's name.
        clock: seconds; arrivals and records are in it, counted from the engine's making.
        options: the fields of `EngineOptions`: exit, kv, policy, width, spare, prefill, …

    Raises:
        UserError: options that model or each other do not allow.
    """

    def __init__(
        self,
        model: LoopedForCausalLM,
        *,
        tokenizer: Decodes | None = None,
        record: Path | str | None = None,
        about: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self.options = EngineOptions.of(model, **options)
        o, settings = self.options, self.options.scheduler
        self.model, self.tokenizer = model, tokenizer
        self._vocab, self._back = model.config.vocab_size, model.config.n_previous_tokens
        self._eos = end_tokens(model)
        self.pool = PagePool(
            settings.core_pages, settings.outer_pages, settings.n_slots, settings.max_len, settings.n_loops,
            settings.layout,
        )  # fmt: skip
        self.runner = Runner(model, self.pool, o.rule, o.prompt_rule, record=o.record_gates, tap=o.tap)
        self.scheduler = Scheduler(settings)
        self._zero = clock()
        self._clock = clock
        recorder = None if record is None else Recorder(Path(record), o.describe(model, self.runner) | (about or {}))
        self.tracer = Tracer(self, recorder)
        self._live: dict[int, Live] = {}
        self._going: dict[int, Live] = {}  # aborted, and in a tick that was planned before
        self._ids: dict[str, int] = {}
        self._next_id = 0
        self._done: dict[str, Completion] = {}
        self._planned: deque[Tick] = deque()
        self._streams: dict[str, deque[TokenEvent]] = {}
        self._made_of = self._weights()

    # -- requests

    def now(self) -> float:
        """Seconds since the engine was made."""
        return self._clock() - self._zero

    def add(self, request: Request, arrival: float | None = None) -> str:
        """Line a request up; returns its id.

        Args:
            arrival: when it came, in the engine's seconds; now if not given.

        Raises:
            UserError: it can never be served, in one line; nothing else is touched.
        """
        name = request.id or f"r{self._next_id}"
        if name in self._ids or name in self._done:
            raise UserError(f"a request named {name} is there already", where="id", remedy="give each its own id")
        request = self.options.checked(request, name, self._vocab, self.tokenizer is not None)
        if self._weights() != self._made_of:
            what = "the model's weights have changed since the engine was made, which keeps a copy of them"
            raise UserError(what, where=f"request {name}", remedy="make a new Engine")
        job = Job(self._next_id, len(request.prompt), request.sampling.max_new_tokens,
                  self.now() if arrival is None else arrival)  # fmt: skip
        try:
            self.scheduler.add(job)
        except UserError as error:
            raise UserError(error.what, where=f"request {name}", remedy=error.remedy) from None
        live = Live(request, job, self.tokenizer)
        try:
            self.tracer.started(live)
        except BaseException:
            self.scheduler.abort(job.id)
            raise
        self._next_id += 1
        self._ids[name] = job.id
        self._live[job.id] = live
        return name

    def abort(self, name: str) -> bool:
        """End a request now; its tokens so far are in `take`. False if there is none of that name in flight."""
        number = self._ids.pop(name, None)
        if number is None:
            return False
        live = self._live.pop(number)
        slot = live.job.slot
        self.scheduler.abort(number)
        if slot >= 0 and live.job.slot < 0:
            self.pool.release(slot)
        elif slot >= 0:
            self._going[number] = live  # a tick that is planned already will run it
        self._finish(live, "aborted")
        return True

    def take(self, name: str) -> Completion | None:
        """The completion of a request that has ended, once; None while it goes on, or if there is none."""
        return self._done.pop(name, None)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    # -- running

    def step(self) -> list[TokenEvent]:
        """Run one tick; the tokens that it made, oldest request first. Without work an empty list."""
        tick = self._planned.popleft() if self._planned else self.scheduler.plan()
        if tick is None:
            if self._live:
                raise RuntimeError(f"{len(self._live)} requests are in flight and no tick can be planned")
            return []
        start = self.now()
        run = {"prefill": self._prefill, "prelude": self._prelude, "recurrent": self._recurrent, "coda": self._coda}
        try:
            for _, slot in tick.preempted:
                self.pool.release(slot)
            outcome, events = run[tick.stage](tick)
            for job, slot in outcome.freed:
                self.pool.release(slot)
                self._going.pop(job.id, None)
            self.tracer.tick(tick, start, self.now())
        except BaseException as error:
            self._recover(tick, error)
            raise
        for event in events:
            if (queue := self._streams.get(event.request)) is not None:
                queue.append(event)
        return events

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._live or self._planned:
            self.step()

    def _recover(self, failed: Tick, error: BaseException) -> None:
        """End the requests of a tick that failed, with what is known of them; all others will go on."""
        lost = {job.id for tick in (failed, *self._planned) for job in tick.jobs}
        self._planned.clear()
        self._going.clear()
        self.scheduler, gone = restarted(self.scheduler, lost)
        for slot in range(self.scheduler.config.n_slots):
            self.pool.release(slot)
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        for job in gone:
            live = self._live.pop(job.id)
            del self._ids[live.request.id]
            with contextlib.suppress(UserError):  # the record may be what failed
                self._finish(live, "error", why)

    def generate(
        self,
        prompts: Iterable[Sequence[int] | str | Request],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Completion]:
        """Serve prompts to their end, in the order given. One that cannot be served has `error`; the others go on.

        Args:
            prompts: token ids, text (with a tokenizer), or whole requests.
            sampling: for all, or one for each prompt; `Sampling()` if not given. Not for whole requests.
        """
        prompts = list(prompts)
        shared = sampling if isinstance(sampling, Sampling) or sampling is None else None
        each = [shared] * len(prompts) if shared is sampling else list(sampling)  # type: ignore[arg-type]
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts, {len(each)} samplings", where="sampling")
        names: list[str | Completion] = []
        for prompt, own in zip(prompts, each, strict=True):
            try:
                names.append(self.add(self.request(prompt, own)))
            except UserError as error:
                ids = prompt.prompt if isinstance(prompt, Request) else ()
                names.append(Completion("", ids, finish_reason="refused", error=str(error)))
        pending = {name for name in names if isinstance(name, str)}
        try:
            while pending:
                pending.difference_update(event.request for event in self.step() if event.finish_reason is not None)
        except BaseException:
            for name in pending:
                self.abort(name)
                self._done.pop(name, None)
            raise
        return [self._done.pop(name) if isinstance(name, str) else name for name in names]

    def stream(self, prompt: Sequence[int] | str | Request, sampling: Sampling | None = None) -> Iterator[TokenEvent]:
        """Serve one prompt, with whatever else is in flight, and give its tokens as they come.

        Several streams may be read in turn: each has its own tokens, whoever runs the ticks. Leaving the iterator
        before its end aborts the request.
        """
        name = self.add(self.request(prompt, sampling))
        queue = self._streams[name] = deque()
        try:
            while queue or name in self._ids:
                if queue:
                    yield queue.popleft()
                else:
                    self.step()
        finally:
            del self._streams[name]
            self.abort(name)
            self._done.pop(name, None)

    def request(self, prompt: Sequence[int] | str | Request, sampling: Sampling | None = None) -> Request:
        """A request of what `generate` takes (`UserError` where that is impossible)."""
        return as_request(prompt, sampling, self.tokenizer)

    def close(self) -> None:
        """Abort what is in flight, and bring the trace to the disk."""
        for name in list(self._ids):
            self.abort(name)
        self.run()
        self.tracer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_integrity(self) -> None:
        """Raise AssertionError where scheduler and pool disagree, or either with itself."""
        self.scheduler.check_integrity()
        self.pool.check_integrity()
        if self._planned:
            return  # the pool takes its pages when it runs
        assert (self.pool.free_core, self.pool.free_outer) == (self.scheduler.free_core, self.scheduler.free_outer)

    # -- the stages

    def _prefill(self, tick: Tick) -> tuple[Outcome, list[TokenEvent]]:
        lives = self._of(tick)
        exits = [self._known_exits(live, *chunk, tick.replay) for live, chunk in zip(lives, tick.chunks, strict=True)]
        left = self.runner.prefill(
            [job.slot for job in tick.jobs], tick.chunks, [live.tokens for live in lives], exits,
            [live.request.seed for live in lives],
        )  # fmt: skip
        return self.scheduler.commit(
            tick, prompt_exits=left if self.options.ragged_prefill and not tick.replay else None
        ), []

    @staticmethod
    def _known_exits(live: Live, start: int, stop: int, replay: bool) -> list[int] | None:
        if replay:
            return live.job.recorded(start, stop)
        given = live.request.prompt_replay
        return None if given is None else list(given[start:stop])

    def _prelude(self, tick: Tick) -> tuple[Outcome, list[TokenEvent]]:
        slots, positions = _slots(tick.jobs), _positions(tick.jobs)
        lives = self._of(tick)
        tokens = [live.tokens[job.position] for live, job in zip(lives, tick.jobs, strict=True)]
        before = [live.previous(live.job.position, self._back) for live in lives] if self._back else None
        given = [live.given() for live in lives] if self.options.replays else None
        seeds = [live.request.seed for live in lives]
        self.runner.prelude(slots, tokens, before, positions, seeds, given)
        self.tracer.entered(tick)
        return self.scheduler.commit(tick), []

    def _recurrent(self, tick: Tick) -> tuple[Outcome, list[TokenEvent]]:
        floors = [job.floor for job in tick.jobs] if any(job.floor for job in tick.jobs) else None
        leaves = self.runner.recurrent(
            _slots(tick.jobs), _positions(tick.jobs), np.array(tick.depths), tick.frozen, floors
        )  # fmt: skip
        if self.options.horizon and not self._planned and (further := self.scheduler.plan()) is not None:
            self._planned.append(further)  # who is in it was known before this tick's answers are read
        outcome = self.scheduler.commit(tick, leaves=leaves.tolist() if tick.asks else None)
        if outcome.exited:
            jobs = [job for job, _ in outcome.exited]
            depths = np.array([depth for _, depth in outcome.exited])
            self.runner.leave(_slots(jobs), _positions(jobs), depths)
        return outcome, []

    def _coda(self, tick: Tick) -> tuple[Outcome, list[TokenEvent]]:
        jobs = tick.jobs
        slots, positions = _slots(jobs), _positions(jobs)
        lives = self._of(tick)
        logits = self.runner.coda(slots, positions)
        asked = [live.request.sampling for live in lives]
        wanted = [s.logprobs for s in asked if s.logprobs is not None]
        most = min(max(wanted), self._vocab) if wanted else None
        drawn = sample(
            logits, [s.temperature for s in asked], [s.top_p for s in asked],
            [live.request.seed for live in lives], positions + 1, top_logprobs=most, leads=self.tracer.active,
        )  # fmt: skip
        tokens = drawn.tokens.tolist()
        logprobs = drawn.logprobs.tolist() if wanted else [0.0] * len(tokens)
        best_ids, best = drawn.top_ids.tolist(), drawn.top_logprobs.tolist()
        exited = self.tracer.rows(tick, drawn)
        sound = self.runner.sound(slots)
        events, finished, unsound = [], [], []
        for row, (live, token, logprob) in enumerate(zip(lives, tokens, logprobs, strict=True)):
            if live.job.aborted or not sound[row]:
                finished.append(True)
                if not live.job.aborted:
                    unsound.append(live)
                continue
            text, reason = live.take(token, self._eos)
            depth = live.job.depth
            live.done.exit_depths.append(depth)
            event = TokenEvent(live.request.id, len(live.done.tokens) - 1, token, depth, text, finish_reason=reason)
            if live.done.logprobs is not None and live.done.top is not None:
                top = tuple(zip(best_ids[row], best[row], strict=True))[: asked[row].logprobs]
                event.logprob, event.top = logprob, top
                live.done.logprobs.append(logprob)
                live.done.top.append(top)
            event.record = self.tracer.token(live, event, exited, row)
            events.append(event)
            finished.append(reason is not None)
        self.tracer.tokens(events)
        outcome = self.scheduler.commit(tick, finished=finished)
        for event in events:
            if event.finish_reason is not None:
                self._finish(self._live.pop(self._ids.pop(event.request)), event.finish_reason)
        for live in unsound:
            del self._live[self._ids.pop(live.request.id)]
            at = live.job.position
            self._finish(live, "error", f"the model's state at position {at} is not finite")
            events.append(TokenEvent(live.request.id, len(live.done.tokens), -1, live.job.depth, finish_reason="error"))
        return outcome, events

    def _of(self, tick: Tick) -> list[Live]:
        return [self._live.get(job.id) or self._going[job.id] for job in tick.jobs]

    def _weights(self) -> int:
        # every change in place counts a tensor's version up
        return sum(parameter._version for parameter in self.model.parameters())

    def _finish(self, live: Live, reason: str, error: str | None = None) -> None:
        live.done.finish_reason, live.done.finished, live.done.error = reason, self.now(), error
        live.done.prompt_exit_depths = list(live.job.prompt_exits)
        if live.text is not None:
            live.done.text = live.text.whole
        self.tracer.ended(live)
        self._done[live.request.id] = live.done


def _slots(jobs: Sequence[Job]) -> np.ndarray:
    return np.fromiter((job.slot for job in jobs), dtype=np.int64, count=len(jobs))


def _positions(jobs: Sequence[Job]) -> np.ndarray:
    return np.fromiter((job.position for job in jobs), dtype=np.int64, count=len(jobs))
