"""Who gets in: the waiting line, slots, and the count of pages.

Pages are only counted here; which page holds what is the business of `pages.PagePool`, which is driven by the same
ticks and must have the same counts.

A request is admitted when a slot is free and the pages that are neither held nor promised cover its prefill, its
first decode token, and one further token of each request in flight (the watermark). What is still to be taken of
that is *promised* to it: no other request is admitted on it, but a decoding one may take it, since it is nearer to
its end; the younger one is then preempted if it must. Layouts that cannot replay promise all pages of the request
instead, which nobody takes, so that preemption never comes up. A request alone always gets in: `fits` was checked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from depthprobe.errors import UserError
from depthprobe.runtime.jobs import Job
from depthprobe.runtime.settings import SchedulerConfig


class Admission:
    """Waiting jobs by priority, slots, and free and promised pages."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.reserve = config.layout.reserve(config.n_loops)
        self.outer = 1 if config.outer_pages else 0  # outer pages of a token
        self.whole = not config.layout.parallel  # whether a request's pages are promised for its whole life
        self.free_core = config.core_pages
        self.free_outer = config.outer_pages
        self.promised_core = 0
        self.promised_outer = 0
        self.slots: list[Job | None] = [None] * config.n_slots
        self.free_slots = list(range(config.n_slots - 1, -1, -1))
        self.waiting = 0
        self._line: list[tuple[float, int, int, Job]] = []  # a heap; jobs aborted while waiting lie in it until met
        self._count = 0

    @property
    def in_flight(self) -> int:
        """Jobs with a slot."""
        return len(self.slots) - len(self.free_slots)

    def fits(self, job: Job) -> None:
        """Raise `UserError` if the job could not even be served alone."""
        where = f"request {job.id}"
        if job.prompt_len < 1:
            raise UserError("the prompt is empty", where=where, remedy="give at least one token")
        if job.max_new < 1:
            raise UserError(f"max_new is {job.max_new}", where=where, remedy="ask for at least one token")
        if self.config.max_len and job.tokens > self.config.max_len:  # the last token made is never fed back
            what = f"{job.prompt_len} + {job.max_new} tokens are more than the {self.config.max_len} of a sequence"
            raise UserError(what, where=where, remedy="shorten the prompt, lower max_new or raise max_len")
        for kind, each, pool in (
            ("core", self.reserve, self.config.core_pages), ("outer", self.outer, self.config.outer_pages),
        ):  # fmt: skip
            if job.tokens * each > pool:
                what = f"{job.tokens} tokens may need {job.tokens * each} {kind} pages, the pool has {pool}"
                raise UserError(what, where=where, remedy="raise kv_pages, or shorten prompt or max_new")

    def line_up(self, job: Job) -> None:
        """Put a job into the waiting line, at its place by priority."""
        self._count += 1
        self.waiting += 1
        job.phase = "waiting"
        heapq.heappush(self._line, (job.arrival, job.id, self._count, job))

    def leave_line(self) -> None:
        """A waiting job was ended (its phase is no longer "waiting")."""
        self.waiting -= 1

    def admit(self) -> Job | None:
        """Give the first in line a slot and promise it pages, if there are any."""
        while self._line and self._line[0][3].phase != "waiting":
            heapq.heappop(self._line)
        if not self._line or not self.free_slots:
            return None
        job = self._line[0][3]
        tokens = job.tokens if self.whole else job.position + 1
        marked = tokens if self.whole else tokens + self.in_flight
        if self.free_core - self.promised_core < marked * self.reserve:
            return None
        if self.free_outer - self.promised_outer < marked * self.outer:
            return None
        heapq.heappop(self._line)
        self.waiting -= 1
        job._promised_core, job._promised_outer = tokens * self.reserve, tokens * self.outer
        self.promised_core += job._promised_core
        self.promised_outer += job._promised_outer
        job.slot = self.free_slots.pop()
        self.slots[job.slot] = job
        return job

    def room(self) -> int:
        """Tokens for which there are free pages."""
        tokens = self.free_core // self.reserve
        return min(tokens, self.free_outer) if self.outer else tokens

    def take(self, job: Job, tokens: int) -> None:
        """The pages of so many tokens in flight."""
        core, outer = tokens * self.reserve, tokens * self.outer
        self.free_core -= core
        self.free_outer -= outer
        job.core_pages += core
        job.outer_pages += outer
        if job._promised_core:
            core, outer = min(core, job._promised_core), min(outer, job._promised_outer)
            self._promise(job, -core, -outer)

    def give(self, job: Job, core: int) -> None:
        """Core pages that lie deeper than an exit."""
        job.core_pages -= core
        self.free_core += core

    def release(self, job: Job) -> int:
        """All pages and the slot, whose index is returned."""
        self.free_core += job.core_pages
        self.free_outer += job.outer_pages
        job.core_pages = job.outer_pages = 0
        self._promise(job, -job._promised_core, -job._promised_outer)
        slot, job.slot = job.slot, -1
        self.slots[slot] = None
        self.free_slots.append(slot)
        return slot

    def youngest_first(self) -> list[Job]:
        """Jobs in flight that were not aborted, the latest arrival first."""
        held = [job for job in self.slots if job is not None and job.phase != "done"]
        return sorted(held, key=lambda job: job.priority, reverse=True)

    def _promise(self, job: Job, core: int, outer: int) -> None:
        job._promised_core += core
        job._promised_outer += outer
        self.promised_core += core
        self.promised_outer += outer

    def check(self) -> Iterator[str]:
        """What does not add up."""
        held = [job for job in self.slots if job is not None]
        for what, free, sum_, size in (
            ("core pages", self.free_core, sum(job.core_pages for job in held), self.config.core_pages),
            ("outer pages", self.free_outer, sum(job.outer_pages for job in held), self.config.outer_pages),
        ):
            if free < 0 or free + sum_ != size:
                yield f"{what}: {free} free and {sum_} held are not {size}"
        if self.promised_core != sum(job._promised_core for job in held) or self.promised_core < 0:
            yield f"{self.promised_core} core pages promised, not what the jobs were"
        if self.promised_outer != sum(job._promised_outer for job in held) or self.promised_outer < 0:
            yield f"{self.promised_outer} outer pages promised, not what the jobs were"
        if self.whole and self.promised_core > self.free_core:
            yield f"{self.promised_core} core pages promised, {self.free_core} free"
        for slot, job in enumerate(self.slots):
            if job is not None and job.slot != slot:
                yield f"slot {slot} holds {job}"
        if sorted(self.free_slots) != [slot for slot, job in enumerate(self.slots) if job is None]:
            yield "the free slots are not those without a job"
        if self.waiting != sum(entry[3].phase == "waiting" for entry in self._line):
            yield f"{self.waiting} jobs wait, but the line has others"
