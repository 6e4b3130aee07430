"""The scheduler by example: what runs next, who is in it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from depthprobe.errors import UserError
from depthprobe.runtime.jobs import Job, Tick
from depthprobe.runtime.layouts import LAYOUTS
from depthprobe.runtime.scheduler import Scheduler
from depthprobe.runtime.settings import SchedulerConfig


def scheduler(**options: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**{"n_loops": 3, "width": 2, "core_pages": 1000, **options}))


def play(s: Scheduler, exits: dict[int, list[int]], steps: int = 1000) -> list[tuple[str, list[int], list[int]]]:
    """Run with job's tokens leaving at `exits[id]`; the ticks as (stage, ids, loops)."""
    ticks = []
    while steps and (tick := s.plan()) is not None:
        ticks.append((tick.stage, [job.id for job in tick.jobs], tick.depths))
        answer(s, tick, exits)
        steps -= 1
        s.check_integrity()
    return ticks


def answer(s: Scheduler, tick: Tick, exits: dict[int, list[int]]) -> None:
    ahead = s.config.horizon
    leaves = [
        exits[job.id][job.position - job.prompt_len + 1] <= d + ahead
        for job, d in zip(tick.jobs, tick.depths, strict=False)
    ]
    s.commit(tick, leaves=leaves if tick.stage == "recurrent" else None)


def add(s: Scheduler, *shapes: tuple[int, int]) -> list[Job]:
    jobs = [Job(i, prompt, new) for i, (prompt, new) in enumerate(shapes)]
    for job in jobs:
        s.add(job)
    return jobs


def test_one_request_of_one_token() -> None:
    """The prompt's last token is a decode row: it is not prefilled, and leaves by rule."""
    s = scheduler()
    (job,) = add(s, (4, 1))
    assert play(s, {0: [2]}) == [
        ("prefill", [0], []), ("prelude", [0], []), ("recurrent", [0], [1]), ("recurrent", [0], [2]), ("coda", [0], []),
    ]  # fmt: skip
    assert s.idle and job.exits == [2] and job.prompt_exits == [3, 3, 3] and job.phase == "done"
    assert s.counters["core_rows_prefill"] == 9 and s.counters["core_rows_decode"] == 2
    assert s.free_core == 1000


def test_refill_mixes_depths_where_cohorts_wait() -> None:
    """As in figure 1 of arXiv 2608.09444: three requests, two rows."""
    exits = {0: [3, 1], 1: [1, 3], 2: [1, 3]}
    passes = {}
    for policy in ("refill", "no-refill", "lockstep", "full"):
        s = scheduler(policy=policy, spare=1)
        add(s, (1, 2), (1, 2), (1, 2))
        ticks = play(s, exits)
        passes[policy] = [ids for stage, ids, _ in ticks if stage == "recurrent"]
        mixed = any(len(set(depths)) > 1 for stage, _, depths in ticks if stage == "recurrent")
        assert mixed == (policy == "refill")
    assert len(passes["refill"]) == 6, "12 loops in full batches of two"
    assert [len(passes[policy]) for policy in ("no-refill", "lockstep", "full")] == [9, 9, 9]
    rows = {policy: sum(map(len, ids)) for policy, ids in passes.items()}
    assert rows == {"refill": 12, "no-refill": 12, "lockstep": 18, "full": 18}


def test_no_refill_shrinks_and_has_one_coda_lockstep_freezes() -> None:
    s = scheduler(policy="no-refill")
    add(s, (1, 1), (1, 1), (1, 1))
    assert play(s, {0: [1], 1: [3], 2: [2]}) == [
        ("prelude", [0, 1], []), ("recurrent", [0, 1], [1, 1]), ("recurrent", [1], [2]), ("recurrent", [1], [3]),
        ("coda", [0, 1], []), ("prelude", [2], []), ("recurrent", [2], [1]), ("recurrent", [2], [2]), ("coda", [2], []),
    ]  # fmt: skip
    s = scheduler(policy="lockstep")
    a, b = add(s, (1, 1), (1, 1))
    frozen = []
    while (tick := s.plan()) is not None:
        if tick.stage == "recurrent":
            assert tick.jobs == [a, b] and tick.depths[0] == tick.depths[1]
            frozen.append(tick.frozen)
        answer(s, tick, {0: [1], 1: [3]})
    assert frozen == [None, [True, False], [True, False]]
    assert s.counters["core_rows_frozen"] == 2 and s.counters["core_rows_decode"] == 4
    assert (a.ticks_run, a.ticks_waited, b.ticks_run, b.ticks_waited) == (1, 2, 3, 0)


def test_full_never_asks_and_runs_ahead_to_the_coda() -> None:
    s = scheduler(policy="full", kv="depth-indexed")
    add(s, (2, 1), (2, 1))
    ticks = []
    while (tick := s.plan()) is not None:
        ticks.append(tick)
    assert [t.stage for t in ticks] == ["prefill", "prelude", "recurrent", "recurrent", "recurrent", "coda"]
    assert [t.ahead for t in ticks] == list(range(6)) and not any(t.asks for t in ticks)
    for tick in ticks:
        s.commit(tick)
    assert s.idle


def test_the_coda_waits_for_its_minimum_or_for_nothing_else_to_run() -> None:
    s = scheduler(width=2, spare=2, coda_share=1.0)
    add(s, (1, 1), (1, 1), (1, 1))
    assert play(s, {0: [1], 1: [3], 2: [1]}) == [
        ("prelude", [0, 1], []), ("prelude", [2], []), ("recurrent", [0, 1], [1, 1]), ("recurrent", [1, 2], [2, 1]),
        ("coda", [0, 2], []), ("recurrent", [1], [3]), ("coda", [1], []),
    ]  # fmt: skip
    assert SchedulerConfig(2, 30, 9, coda_share=0.1).least_coda(99) == 3
    assert SchedulerConfig(2, 30, 9, coda_share=0.5).least_coda(3) == 2
    assert SchedulerConfig(2, 30, 9).least_coda(3) == 1


def test_by_depth_takes_the_fullest_depth_and_leaves_nobody_behind() -> None:
    s = scheduler(width=8, kv=replace(LAYOUTS["ragged"], mixes_depths=False), n_loops=2)
    add(s, *[(1, 60)] * 7)
    exits = {0: [2] * 60, **{i: [1] * 60 for i in range(1, 7)}}
    ticks = [t for t in play(s, exits, 100) if t[0] == "recurrent"]
    assert all(len(set(depths)) == 1 for _, _, depths in ticks)
    deep = [i for i, (_, ids, depths) in enumerate(ticks) if depths == [2]]
    assert len(deep) >= 3 and max(b - a for a, b in pairwise(deep)) <= 2 * 2 + 3


def test_chunks_share_a_budget_and_the_oldest_goes_first() -> None:
    s = scheduler(width=4, prefill_tokens=5)
    jobs = add(s, (4, 1), (8, 1), (3, 1))
    s.add(Job(9, 2, 1, arrival=-1.0))
    seen = []
    while (tick := s.plan()) is not None and tick.stage in ("prefill", "prelude"):
        seen.append((tick.stage, [job.id for job in tick.jobs], tick.chunks))
    assert seen == [
        ("prefill", [9, 0, 1], [(0, 1), (0, 3), (0, 1)]), ("prelude", [9, 0], []),
        ("prefill", [1], [(1, 6)]), ("prefill", [1, 2], [(6, 7), (0, 2)]), ("prelude", [1, 2], []),
    ]  # fmt: skip
    assert jobs[1].prefilled == 7


def test_layouts_without_a_parallel_forward_prefill_in_one_piece_and_promise_all_pages() -> None:
    s = scheduler(width=3, prefill_tokens=4, kv="shared", core_pages=19)
    add(s, (7, 3), (3, 2), (6, 2))
    tick = s.plan()
    assert tick is not None and tick.chunks == [(0, 6)] and tick.jobs[0].core_pages == 6
    tick = s.plan()
    assert tick is not None and tick.stage == "prelude"
    tick = s.plan()
    assert tick is not None and tick.chunks == [(0, 2)]
    s.plan()
    tick = s.plan()
    assert tick is not None and tick.stage == "recurrent", "9 + 4 of 19 pages are promised, 7 more are not there"
    s = scheduler(width=3, kv="shared", core_pages=19)
    add(s, (7, 3), (3, 2), (6, 2))
    play(s, {0: [1] * 3, 1: [1] * 2, 2: [1] * 2})
    assert s.idle and not s.counters["preemptions"]


def test_lookahead_plans_one_recurrent_tick_ahead() -> None:
    s = scheduler(horizon=1, n_loops=4)
    (job,) = add(s, (1, 1))
    prelude, first, second = s.plan(), s.plan(), s.plan()
    assert prelude and first and second and (first.depths, second.depths, second.ahead) == ([1], [2], 2)
    assert s.plan() is None, "whether it leaves after loop 2 is what loop 1 says"
    s.commit(prelude)
    out = s.commit(first, leaves=[True])
    assert out.exited == [] and job.phase == "parked" and job.leave_after == 2
    coda = s.plan()
    assert coda is not None and coda.stage == "coda" and coda.ahead == 1
    assert s.commit(second, leaves=[False]).exited == [(job, 2)]
    out = s.commit(coda)
    assert out.finished == [job] and out.freed == [(job, 1 - 1)] and job.exits == [2]


def test_nothing_is_planned_past_an_open_question() -> None:
    s = scheduler()
    add(s, (3, 2))
    prefill, prelude, recurrent = s.plan(), s.plan(), s.plan()
    assert prefill and prelude and recurrent and recurrent.asks and s.plan() is None
    with pytest.raises(ValueError, match="in the order of planning"):
        s.commit(prelude)
    s.commit(prefill)
    s.commit(prelude)
    with pytest.raises(ValueError, match="leaves for 1 rows: none"):
        s.commit(recurrent)
    with pytest.raises(ValueError, match="leaves for 1 rows: 2"):
        s.commit(recurrent, leaves=[True, False])
    s.commit(recurrent, leaves=[True])
    coda = s.plan()
    assert coda is not None and coda.stage == "coda" and s.plan() is None
    ragged = scheduler(prefill="ragged")
    add(ragged, (3, 1))
    tick = ragged.plan()
    assert tick is not None and ragged.plan() is None
    with pytest.raises(ValueError, match="exits of 2 prompt tokens"):
        ragged.commit(tick, prompt_exits=[[1, 4]])
    ragged.commit(tick, prompt_exits=[[1, 2]])
    assert ragged.free_core == 1000 - 3


def test_preemption_takes_the_latest_and_replays_its_exits_without_asking_again() -> None:
    s = scheduler(width=2, core_pages=18)  # with three tokens each they would need 9 and 14
    old, young = add(s, (1, 5), (3, 4))
    exits = {0: [3] * 5, 1: [2, 3, 1, 3]}
    asked: list[tuple[int, int, int]] = []
    preempted: list[Job] = []
    replays = []
    while (tick := s.plan()) is not None:
        if tick.stage == "recurrent":
            for job, d in zip(tick.jobs, tick.depths, strict=True):
                if job.leave_after is None and d >= job.floor:
                    asked.append((job.id, job.position, d))
        preempted += [job for job, _ in tick.preempted]
        replays += [(job.id, span) for job, span in zip(tick.jobs, tick.chunks, strict=False) if tick.replay]
        answer(s, tick, exits)
        s.check_integrity()
    assert preempted == [young] and young.preemptions == 1 and replays
    assert len(asked) == len(set(asked))
    assert old.exits == exits[0] and young.exits == exits[1]
    counters = s.counters
    assert counters["core_rows_decode"] == 15 + 9 and counters["core_rows_prefill"] == 2 * 3
    assert counters["core_rows_recomputed"] > 0


@pytest.mark.parametrize("horizon", [0, 1])
def test_what_was_decided_before_a_preemption_stays(horizon: int) -> None:
    s = scheduler(n_loops=6, horizon=horizon)
    (job,) = add(s, (1, 3))
    while job.depth < 3:
        tick = s.plan()
        assert tick is not None
        s.commit(tick, leaves=[False] if tick.stage == "recurrent" else None)
    s._preempt(job)
    assert job.floor == 4 + horizon and job.phase == "waiting" and s.free_core == 1000
    depths = []
    while (tick := s.plan()) is not None and tick.stage != "coda":
        depths += tick.depths
        s.commit(tick, leaves=[True] if tick.stage == "recurrent" else None)
    assert depths == list(range(1, 5 + horizon)), "it leaves at the first exit that was not refused already"
    assert s.counters["core_rows_recomputed"] == 3
    assert tick is not None
    s._fixed, s._outstanding, s._committed = -1, type(s._outstanding)(), tick.number  # as if it had not been planned
    s._parked[job.id] = job
    s._preempt(job)
    assert job.leave_after == 4 + horizon
    depths = []
    while (tick := s.plan()) is not None and tick.stage != "coda":
        assert not tick.asks
        depths += tick.depths
        s.commit(tick)
    assert depths == list(range(1, 5 + horizon))


def test_a_replay_that_is_interrupted_goes_on_from_the_record() -> None:
    """Chunks do not mix recorded and new positions, however often the job loses its place."""
    s = scheduler(prefill="ragged", prefill_tokens=4, width=1, spare=1)
    (job,) = add(s, (9, 1))

    def chunk() -> tuple[bool, list[tuple[int, int]]]:
        tick = s.plan()
        assert tick is not None and tick.stage == "prefill"
        n = tick.chunks[0][1] - tick.chunks[0][0]
        s.commit(tick, prompt_exits=None if tick.replay else [[2] * n])
        s.check_integrity()
        return tick.replay, tick.chunks

    assert [chunk(), chunk()] == [(False, [(0, 4)]), (False, [(4, 8)])]
    s._preempt(job)
    assert s.free_core == 1000 and chunk() == (True, [(0, 4)])
    s._preempt(job)
    assert [chunk(), chunk()] == [(True, [(0, 4)]), (True, [(4, 8)])], "what was replayed once is no longer all"
    assert s.counters["core_rows_prefill"] == 16 and s.counters["core_rows_recomputed"] == 8 + 16
    s = scheduler(prefill_tokens=6, width=1)
    (job,) = add(s, (9, 1))
    tick = s.plan()
    assert tick is not None
    s.commit(tick)
    s._preempt(job)
    replay = s.plan()
    assert replay is not None and replay.replay and replay.chunks == [(0, 6)] and s.plan() is None
    s.commit(replay)
    rest = s.plan()
    assert rest is not None and not rest.replay and rest.chunks == [(6, 8)]


def test_replays_and_new_chunks_are_ticks_of_their_own() -> None:
    s = scheduler(prefill_tokens=100)
    a, b = add(s, (5, 1), (5, 1))
    for job in (a, b):
        job.replay_to, job.prompt_exits = (3, [1, 2, 3]) if job is a else (0, [])
    seen = []
    while (tick := s.plan()) is not None and tick.stage == "prefill":
        seen.append((tick.replay, [job.id for job in tick.jobs], tick.chunks))
        s.commit(tick)
    assert seen == [(True, [0], [(0, 3)]), (False, [0, 1], [(3, 4), (0, 4)])]


def test_pages_of_a_job_in_an_outstanding_tick_are_not_taken() -> None:
    """What can run goes on; the older request takes them after the commit."""
    s = scheduler(n_loops=2, core_pages=8, spare=2)
    s._admission.promised_core = -100  # let in more than fit, as decoding ones may take what was promised
    s.add(Job(5, 4, 1, arrival=1.0))
    prefill, prelude = s.plan(), s.plan()
    assert prefill and prelude and prelude.stage == "prelude" and s.free_core == 0
    s.add(Job(1, 1, 1, arrival=0.0))
    recurrent = s.plan()
    assert recurrent and [job.id for job in recurrent.jobs] == [5] and not recurrent.preempted and s.in_flight == 2
    s.commit(prefill)
    s.commit(prelude)
    s.commit(recurrent, leaves=[False])
    tick = s.plan()
    assert tick is not None and [job.id for job in tick.jobs] == [1] and [job.id for job, _ in tick.preempted] == [5]


def test_one_piece_prefills_share_a_tick_only_within_the_budget() -> None:
    s = scheduler(kv="first-then-shared", prefill_tokens=6, width=3)
    add(s, (5, 1), (3, 1), (4, 1))
    ticks = [s.plan() for _ in range(4)]
    assert [tick and tick.chunks for tick in ticks] == [[(0, 4), (0, 2)], [], [(0, 3)], []]


def test_abort_at_any_time() -> None:
    s = scheduler(width=2)
    a, b, c = add(s, (1, 3), (1, 3), (1, 3))
    assert s.abort(2) and c.aborted and c.slot == -1 and not s.abort(2)
    prelude, recurrent = s.plan(), s.plan()
    assert prelude and recurrent and s.abort(0)
    assert a.slot >= 0 and a.aborted, "it is in two outstanding ticks"
    s.check_integrity()
    assert s.commit(prelude).freed == []
    out = s.commit(recurrent, leaves=[True, True])
    assert [(job, e) for job, e in out.exited] == [(b, 1)] and [job for job, _ in out.freed] == [a]
    assert a.slot == -1 and s.counters["core_rows_aborted"] == 1 and s.counters["core_rows_decode"] == 1
    assert s.abort(1) and b.slot == -1 and s.counters["core_rows_aborted"] == 2
    assert s.idle and s.plan() is None and s.free_core == 1000


def test_a_request_stops_where_it_says_and_its_slot_serves_the_next() -> None:
    s = scheduler(width=1)
    a, b = add(s, (1, 9), (1, 1))
    order = []
    while (tick := s.plan()) is not None:
        leaves = [True] * len(tick.jobs) if tick.stage == "recurrent" else None
        finished = [tick.jobs[0] is a and len(a.exits) == 1] if tick.stage == "coda" else None
        order += s.commit(tick, leaves=leaves, finished=finished).finished
    assert order == [a, b] and a.exits == [1, 1]


def test_impossible_requests_are_refused_one_by_one() -> None:
    s = scheduler(core_pages=30, outer_pages=8, max_len=20)
    for shape, message in (
        ((0, 1), r"the prompt is empty \(request 7\)"),
        ((1, 0), "max_new is 0"),
        ((8, 4), "11 tokens may need 33 core pages, the pool has 30"),
        ((8, 2), "9 tokens may need 9 outer pages, the pool has 8"),
        ((15, 7), "15 . 7 tokens are more than the 20"),
    ):
        with pytest.raises(UserError, match=message):
            s.add(Job(7, *shape))
    s.add(Job(7, 8, 1))
    with pytest.raises(UserError, match="request 7 exists already"):
        s.add(Job(7, 1, 1))
    play(s, {7: [1]})
    assert s.idle


def test_integrity_names_what_is_wrong() -> None:
    s = scheduler()
    (job,) = add(s, (1, 2))
    s.plan()
    s.check_integrity()
    job.core_pages += 1
    with pytest.raises(AssertionError, match="core pages: 997 free and 4 held are not 1000"):
        s.check_integrity()
    job.core_pages -= 1
    s._parked[0] = job
    with pytest.raises(AssertionError, match=r"is in \['looping', 'parked'\]"):
        s.check_integrity()
