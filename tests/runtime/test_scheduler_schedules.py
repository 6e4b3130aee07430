"""Thousands of random schedules: whatever arrives, exits and is aborted, the scheduler ends, and adds up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_driver import Drive

from depthprobe.runtime.jobs import Job
from depthprobe.runtime.layouts import LAYOUTS
from depthprobe.runtime.settings import POLICIES, SchedulerConfig
from depthprobe.runtime.state import COUNTERS


def random_config(rng: random.Random, n_jobs_tokens: int) -> SchedulerConfig:
    """Any configuration whose pool holds at least one job of `n_jobs_tokens` tokens."""
    u = rng.choice((1, 2, 3, 4, 4, 6))
    policy = rng.choice(POLICIES)
    prefill = "ragged" if rng.random() < 0.4 else "dense"
    names = list(LAYOUTS)
    if policy != "full" or prefill == "ragged":
        names.remove("depth-indexed")
    kv = LAYOUTS[rng.choice(names)]
    if rng.random() < 0.15:
        kv = replace(kv, mixes_depths=False)
    least = kv.reserve(u) * n_jobs_tokens
    slack = rng.choice((0, rng.randrange(1, 8), rng.randrange(1, 20), rng.randrange(1, 60), 1000))
    width = rng.choice((1, 2, 3, 5, 8))
    return SchedulerConfig(
        n_loops=u,
        width=width,
        spare=rng.choice((0, 0, 1, width)),
        core_pages=least + slack,
        outer_pages=rng.choice((0, 0, n_jobs_tokens + rng.randrange(20), 1000)),
        policy=policy,
        kv=kv,
        prefill_tokens=rng.choice((1, 3, 8, 512)),
        coda_share=rng.choice((0.0, 0.5, 1.0)),
        horizon=rng.choice((0, 1)),
        prefill=prefill,
        by_depth=rng.random() < 0.1,
    )


def random_run(rng: random.Random, check: float, ahead: int | None = None, aborts: bool = True) -> Drive:
    """One schedule, all of it drawn from `rng`."""
    longest = rng.choice((3, 6, 12))
    shapes = [(rng.choice((1, 1, 2, 5, 9)), rng.randrange(1, longest + 1)) for _ in range(rng.randrange(1, 13))]
    config = random_config(rng, max(p + n - 1 for p, n in shapes))
    depths = range(1, config.n_loops + 1)
    weights = [1.0] * config.n_loops
    weights[rng.randrange(config.n_loops)] = 5.0
    exits = {
        (id_, position): rng.choices(depths, weights)[0]
        for id_, (prompt, new) in enumerate(shapes)
        for position in range(prompt + new)
    }
    drawn = rng.choice((1, 1, 2, 3, 5))
    drive = Drive(config, exits, ahead or drawn, random.Random(rng.randrange(100)), check)
    drive.finish = {id_: rng.randrange(1, 7) for id_ in range(len(shapes)) if rng.random() < 0.3}
    last = rng.choice((0, 40))
    arrivals = sorted((rng.randrange(last + 1), id_) for id_ in range(len(shapes)))
    n_ends = rng.choice((0, 0, 1, 4)) if aborts else 0
    ends = sorted((rng.randrange(60), rng.randrange(len(shapes))) for _ in range(n_ends))
    shuffled = rng.random() < 0.2  # some come later than others that arrived after them
    clock = 0
    while True:
        while arrivals and arrivals[0][0] <= clock:
            at, id_ = arrivals.pop(0)
            drive.scheduler.add(Job(id_, *shapes[id_], arrival=float(id_ * 7 % 5 if shuffled else at)))
        while ends and ends[0][0] <= clock:
            drive.abort(ends.pop(0)[1])
        worked = drive.step()
        if not worked and not arrivals:
            break
        clock += 1
    drive.finish_checks()
    return drive


def sequence(drive: Drive) -> list[object]:
    """All that a tick says, of all ticks."""
    ticks = []
    for t in drive.ticks:
        lost = [(job.id, slot) for job, slot in t.preempted]
        ticks.append((t.stage, [job.id for job in t.jobs], t.depths, t.frozen, t.chunks, t.replay, t.ahead, lost))
    return ticks


@pytest.mark.parametrize("block", range(20))
def test_random_schedules(block: int) -> None:
    """2,000 schedules; counts are compared with the pages after every tick, everything after one in twenty."""
    for seed in range(block * 100, (block + 1) * 100):
        random_run(random.Random(seed), check=0.05)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False))
def test_schedules_checked_after_every_tick(rng: random.Random) -> None:
    random_run(rng, check=1.0)


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_many_random_schedules(block: int) -> None:
    for seed in range(10_000 + block * 1000, 10_000 + (block + 1) * 1000):
        random_run(random.Random(seed), check=0.05)


@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_many_schedules_checked_after_every_tick(rng: random.Random) -> None:
    random_run(rng, check=1.0)


def test_the_same_inputs_give_the_same_ticks() -> None:
    for seed in range(60):
        assert sequence(random_run(random.Random(seed), 0)) == sequence(random_run(random.Random(seed), 0))


def test_running_ahead_does_not_change_who_leaves_where() -> None:
    went_ahead = 0
    for seed in range(150):
        plain = random_run(random.Random(seed), 0, ahead=1, aborts=False)
        far = random_run(random.Random(seed), 0, ahead=4, aborts=False)
        assert max(t.ahead for t in plain.ticks) == 0
        went_ahead += max(t.ahead for t in far.ticks) > 0
        for id_, job in plain.done.items():
            assert far.done[id_].exits == job.exits and far.done[id_].prompt_exits == job.prompt_exits
    assert went_ahead > 75


def test_the_random_schedules_reach_what_they_are_for() -> None:
    """Else the thousands above would prove little."""
    seen: set[str] = set()
    for seed in range(300):
        drive = random_run(random.Random(seed), 0)
        config, counters = drive.config, drive.scheduler.counters
        seen |= {name for name, value in counters.items() if value}
        if counters["preemptions"]:
            seen.add(f"{config.policy} {config.horizon} preempted")
        if any(t.replay for t in drive.ticks):
            seen.add(f"{config.prefill} replayed")
        if config.horizon and any(t.ahead and t.stage == "recurrent" for t in drive.ticks):
            seen.add("lookahead ahead")
        seen.add(f"layout {config.layout.name}")
    assert set(COUNTERS) <= seen
    assert {f"{p} {h} preempted" for p in POLICIES for h in (0, 1)} <= seen
    assert {"dense replayed", "ragged replayed", "lookahead ahead"} <= seen
    assert {f"layout {name}" for name in LAYOUTS} <= seen
