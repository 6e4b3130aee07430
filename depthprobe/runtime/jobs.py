"""What the scheduler moves: jobs (requests), ticks (what runs next) and outcomes (what a commit changed)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["waiting", "prefill", "prelude", "looping", "parked", "done"]
Stage = Literal["prefill", "prelude", "recurrent", "coda"]


class Job:
    """A request as the scheduler sees it: lengths and depths, no tokens.

    Prefill covers all of the prompt but its last token, which is the first decode row. All fields but the first
    four are the scheduler's; others read them. "The current token" is the decode row in flight.

    Fields:
        id, prompt_len, max_new: prompt_len ≥ 1 tokens in, at most max_new ≥ 1 out.
        arrival: earlier ones come first; ties are broken by id.
        phase: "prefill", "prelude", "looping" and "parked" (left the loops, waits for the coda) hold a slot.
        slot: its index in preallocated arrays, −1 without one.
        prefilled: leading tokens whose KV is in pages, or will be when the ticks planned so far have run.
        position: index of the current token in the sequence, at first prompt_len − 1.
        depth: loops of the current token that are run or planned.
        leave_after: the decided exit depth of the current token; None while it is open.
        floor: loops that were decided to be run before a preemption; exits below it are not asked about again.
        exits: exit depth of each decode row that went through the coda, in order.
        prompt_exits: exit depths of the prefilled prompt tokens; U where they were prefilled densely.
        replay_to: positions below it were computed before a preemption: their exits are on record.
        core_pages, outer_pages: pages held.
        ticks_run: recurrent ticks in which the current token was computed (again after a preemption; not frozen).
        ticks_waited: ticks, of any stage, between its prelude and its coda in which it was not. Known when its
            coda is planned, and until its successor's prelude is.
        preemptions: how often it lost its slot.
        aborted: whether it was ended by `Scheduler.abort`.
    """

    __slots__ = (
        "_entered", "_last_tick", "_promised_core", "_promised_outer", "_ran", "_running", "aborted", "arrival",
        "core_pages", "depth", "exits", "floor", "id", "leave_after", "max_new", "outer_pages", "phase", "position",
        "preemptions", "prefilled", "prompt_exits", "prompt_len", "replay_to", "slot", "ticks_run", "ticks_waited",
    )  # fmt: skip

    def __init__(self, id: int, prompt_len: int, max_new: int, arrival: float = 0.0) -> None:
        self.id = id
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.arrival = arrival
        self.phase: Phase = "waiting"
        self.slot = -1
        self.prefilled = 0
        self.position = prompt_len - 1
        self.depth = 0
        self.leave_after: int | None = None
        self.floor = 0
        self.exits: list[int] = []
        self.prompt_exits: list[int] = []
        self.replay_to = 0
        self.core_pages = 0
        self.outer_pages = 0
        self.ticks_run = 0
        self.ticks_waited = 0
        self.preemptions = 0
        self.aborted = False
        self._promised_core = 0  # pages set aside for it at admission and not taken yet
        self._promised_outer = 0
        self._ran = 0  # loops of the current token that were executed at least once
        self._running = False  # whether it is in the recurrent batch
        self._last_tick = -1  # the latest tick that it is part of
        self._entered = -1  # the tick of its current token's first prelude

    @property
    def priority(self) -> tuple[float, int]:
        """Smaller comes first."""
        return self.arrival, self.id

    @property
    def began(self) -> int:
        """Number of the tick of the current token's first prelude."""
        return self._entered

    @property
    def tokens(self) -> int:
        """Tokens that hold pages when it has generated max_new: the last one generated is never run."""
        return self.prompt_len + self.max_new - 1

    def recorded(self, start: int, stop: int) -> list[int]:
        """Exit depths on record of positions start…stop − 1, of the prompt and decoded ones."""
        end = self.prompt_len - 1
        return self.prompt_exits[start:stop] + self.exits[max(start - end, 0) : max(stop - end, 0)]

    def __repr__(self) -> str:
        return f"Job({self.id}, {self.phase}, slot {self.slot}, position {self.position}, depth {self.depth})"


@dataclass(frozen=True, slots=True, eq=False)
class Tick:
    """One stage for some rows. Lists are parallel to `jobs`.

    Fields:
        number: ticks are counted from 0 in the order of planning.
        depths: recurrent: the loop, 1…U, that each row runs.
        frozen: lockstep only: rows computed past their exit; nothing of them may be written or kept.
        chunks: prefill: positions start…stop − 1 of each job.
        replay: prefill: all chunks were computed before a preemption, and run with `job.recorded(start, stop)`;
            chunks of one tick are all replayed or all new.
        asks: recurrent: whether `commit` needs `leaves`.
        ahead: planned ticks that were not committed when this one was planned.
        preempted: (job, slot it had) of jobs that lost slot and pages since the last planned tick; their pages
            are to be freed before those of this tick are taken.
    """

    number: int
    stage: Stage
    jobs: list[Job]
    depths: list[int] = field(default_factory=list)
    frozen: list[bool] | None = None
    chunks: list[tuple[int, int]] = field(default_factory=list)
    replay: bool = False
    asks: bool = False
    ahead: int = 0
    preempted: list[tuple[Job, int]] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What a commit changed.

    Fields:
        exited: recurrent: (job, exit depth) of rows that left; the token is `job.position`.
        finished: coda: jobs that are done.
        freed: (job, slot it had) of jobs, finished or aborted, whose slot and pages are free now.
    """

    exited: list[tuple[Job, int]] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    freed: list[tuple[Job, int]] = field(default_factory=list)
