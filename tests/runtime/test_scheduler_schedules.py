"""Thousands of random schedules: whatever arrives, exits and is aborted when, the scheduler comes to its end and adds up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from depthprobe.runtime.jobs import Job
from depthprobe.runtime.layouts import LAYOUTS
from depthprobe.runtime.settings import POLICIES, SchedulerConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_driver import Drive


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
    slack = rng.choice((0, rng.randrange(1, 8), rng.randrange(1, 60), 1000))
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


def random_run(seed: int, check: bool = True) -> Drive:
    """One schedule, all of it drawn from a seed."""
    rng = random.Random(seed)
    random.seed(seed)  # the driver's nonsense answers
    shapes = [(rng.choice((1, 1, 2, 5, 9)), rng.choice((1, 2, 3, 6))) for _ in range(rng.randrange(1, 13))]
    config = random_config(rng, max(p + n - 1 for p, n in shapes))
    weights = rng.choice(([1] * config.n_loops, [5] + [1] * (config.n_loops - 1), [1] * (config.n_loops - 1) + [5]))
    depths = range(1, config.n_loops + 1)
    exits = {
        (id_, position): rng.choices(depths, weights)[0]
        for id_, (prompt, new) in enumerate(shapes)
        for position in range(prompt + new)
    }
    drive = Drive(config, exits, ahead=rng.choice((1, 1, 2, 3, 5)), check=check)
    drive.finish = {id_: rng.randrange(1, 7) for id_ in range(len(shapes)) if rng.random() < 0.3}
    late = rng.random() < 0.5
    arrivals = sorted((rng.randrange(40) if late else 0, id_) for id_ in range(len(shapes)))
    aborts = sorted((rng.randrange(60), rng.randrange(len(shapes))) for _ in range(rng.choice((0, 0, 1, 4))))
    order = list(range(len(shapes)))
    if rng.random() < 0.2:
        rng.shuffle(order)  # added out of the order of arrival
    clock = 0
    limit = 200 + 60 * sum((p + n) * config.n_loops for p, n in shapes) * len(shapes)
    while True:
        while arrivals and arrivals[0][0] <= clock:
            at, id_ = arrivals.pop(0)
            drive.scheduler.add(Job(id_, *shapes[id_], arrival=float(order[id_] if order != sorted(order) else at)))
        while aborts and aborts[0][0] <= clock:
            drive.abort(aborts.pop(0)[1])
        worked = drive.step()
        if not worked and not arrivals:
            break
        clock += 1
        assert clock < limit, "no end"
    drive.finish_checks()
    return drive


def sequence(drive: Drive) -> list[object]:
    return [
        (t.stage, [j.id for j in t.jobs], t.depths, t.frozen, t.chunks, t.replay, t.ahead, [j.id for j, _ in t.preempted])
        for t in drive.ticks
    ]


N = 100


@pytest.mark.parametrize("block", range(20))
def test_random_schedules(block: int) -> None:
    for seed in range(block * N, (block + 1) * N):
        random_run(seed)
