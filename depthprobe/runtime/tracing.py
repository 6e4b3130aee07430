"""From ticks to lines of the record: what each row was told, what it waited for, what it held."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from depthprobe.runtime.jobs import Tick
from depthprobe.runtime.live import Live
from depthprobe.runtime.record import Recorder
from depthprobe.runtime.requests import TokenEvent
from depthprobe.runtime.sampling import Sampled

if TYPE_CHECKING:
    from depthprobe.runtime.engine import Engine


class Tracer:
    """Makes the rows of the record for an engine; without a recorder only those that events carry.

    Gate values lie in the runner's arrays over slots and are read once for all rows of a coda tick.
    """

    def __init__(self, engine: Engine, recorder: Recorder | None) -> None:
        self._engine, self._recorder = engine, recorder
        self._loops = engine.options.scheduler.n_loops
        self._began = np.zeros(engine.options.scheduler.n_slots)
        rule, self._told = engine.options.rule, None
        if rule is None or rule.planned:  # the same of all tokens
            reason = "full" if rule is None else "replay" if rule.needs_given else "planned"
            horizon = engine.options.horizon
            self._told = {"selected": None, "reason": reason, "decided_at": None, "lookahead": horizon}

    @property
    def active(self) -> bool:
        """Whether a record is written."""
        return self._recorder is not None

    def started(self, live: Live) -> None:
        """A request has come."""
        if self._recorder is None:
            return
        request = live.request
        row: dict[str, Any] = {
            "event": "start", "request": request.id, "prompt": list(request.prompt), "arrival": live.job.arrival,
            "sampling": asdict(request.sampling), "replay": _listed(request.replay),
            "prompt_replay": _listed(request.prompt_replay), **request.about,
        }  # fmt: skip
        self._recorder.write("requests", row)

    def entered(self, tick: Tick) -> None:
        """Tokens begin their loops."""
        if self._recorder is not None:
            self._began[[job.slot for job in tick.jobs]] = self._engine.now()

    def rows(self, tick: Tick, drawn: Sampled) -> list[dict[str, Any]]:
        """What a coda tick's rows have on record beside their tokens; empty dicts without a recorder."""
        jobs = tick.jobs
        if self._recorder is None:
            return [{}] * len(jobs)
        engine, now = self._engine, self._engine.now()
        slots = [job.slot for job in jobs]
        at = torch.tensor(slots, device=drawn.tokens.device)
        margins, began = drawn.leads.tolist(), self._began[slots].tolist()
        watch, runner = engine.runner.watch, engine.runner
        nothing: list[list[float] | None] = [None] * len(jobs)
        gates = watch.lam[at].tolist() if watch.gated else nothing
        criteria = watch.criterion[at].tolist() if watch.decides else nothing
        met = watch.met[at].tolist() if watch.decides else nothing
        taps = runner.tap_ids[at].tolist() if runner.tap else nothing
        rows = []
        for i, job in enumerate(jobs):
            depth = job.depth
            lam, criterion, read = gates[i], criteria[i], taps[i]
            row = {
                "exit": depth, "executed": depth, "lambda": None if lam is None else [_short(x) for x in lam[:depth]],
                "cdf": None if lam is None else _cdf(lam[:depth], self._loops),
                "criterion": None if criterion is None else [_short(x) for x in criterion[:depth]],
                "waited": job.ticks_waited, "run": job.ticks_run, "pages": job.core_pages, "margin": margins[i],
                "start": began[i], "finished": now, "lens": None if read is None else read[:depth],
            }  # fmt: skip
            row.update(self._told or self._why(depth, met[i]))
            rows.append(row)
        return rows

    def _why(self, depth: int, marks: Any) -> dict[str, Any]:
        """Which loop the rule chose by itself, and why the row left where it did."""
        horizon = self._engine.options.horizon
        # marks[d]: whether the criterion was met after loop d + 1, least depths apart
        first = next((d + 1 for d, mark in enumerate((marks or [])[:depth]) if mark), None)
        selected = None if first is None else first + horizon
        if selected is None or selected > self._loops:
            return {"selected": None, "reason": "cap", "decided_at": None, "lookahead": horizon}
        reason = "rule" if selected == depth else "floor"
        if selected < depth == self._loops and not (marks or [])[depth - 1 - horizon]:
            reason = "cap"  # met below the least depth, and never again
        return {"selected": selected, "reason": reason, "decided_at": depth - horizon, "lookahead": horizon}

    def token(self, live: Live, event: TokenEvent, rows: list[dict[str, Any]], row: int) -> dict[str, Any]:
        """The line of one token; `tokens` writes it."""
        if live.done.first_token is None:
            live.done.first_token = self._engine.now()
        if self._recorder is None:
            return {}
        return {
            "request": event.request, "index": event.index, "position": live.job.position, "token": event.token,
            "logprob": event.logprob, **rows[row],
        }  # fmt: skip

    def tokens(self, events: list[TokenEvent]) -> None:
        """All lines of a tick at once."""
        if self._recorder is not None and events:
            self._recorder.write("tokens", *(event.record for event in events))

    def tick(self, tick: Tick, start: float, end: float) -> None:
        """A tick is over."""
        if self._recorder is None:
            return
        depths = [0] * self._loops
        for depth in tick.depths:
            depths[depth - 1] += 1
        scheduler = self._engine.scheduler
        rows = sum(stop - start for start, stop in tick.chunks) if tick.chunks else len(tick.jobs)
        self._recorder.write("ticks", {
            "tick": tick.number, "stage": tick.stage, "rows": rows, "depths": depths,
            "frozen": sum(tick.frozen) if tick.frozen else 0, "start": start, "duration": end - start,
            "free_core": scheduler.free_core, "free_outer": scheduler.free_outer, "ahead": tick.ahead,
            "replay": tick.replay, "preempted": len(tick.preempted),
        })  # fmt: skip

    def ended(self, live: Live) -> None:
        """A request has ended, however."""
        if self._recorder is None:
            return
        done = live.done
        self._recorder.write("requests", {
            "event": "end", "request": done.id, "finish_reason": done.finish_reason, "tokens": done.tokens,
            "exits": done.exit_depths, "prompt_exits": done.prompt_exit_depths, "first_token": done.first_token,
            "finished": done.finished, "preemptions": live.job.preemptions,
        })  # fmt: skip

    def close(self) -> None:
        """Bring the record to the disk."""
        if self._recorder is not None:
            self._recorder.close()


def _listed(depths: tuple[int, ...] | None) -> list[int] | None:
    return None if depths is None else list(depths)


def _short(x: float) -> float | None:
    """A number as JSON has it; seven digits are those of float32."""
    return float(f"{x:.7g}") if x - x == 0 else None


def _cdf(lambdas: list[float], n_loops: int) -> list[float]:
    survived, out = 1.0, []
    for loop, value in enumerate(lambdas, 1):
        survived *= 1.0 - value
        out.append(1.0 if loop == n_loops else float(f"{1.0 - survived:.7g}"))
    return out
