"""The clock, workloads and bounds on cases that are known by hand, and the simulator's own books."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthprobe.errors import UserError
from depthprobe.runtime import Clock, Line, SchedulerConfig, Simulator
from depthprobe.runtime.bound import bound, flop_bound, time_bound
from depthprobe.runtime.compare import compare, published_range, quantiles
from depthprobe.runtime.presets import PRESETS, PUBLISHED, WORKLOADS, clock_of, mean_at, slopes
from depthprobe.runtime.roofline import load_clock, save_clock
from depthprobe.runtime.simulate import Ran
from depthprobe.runtime.simulate import settings as settings_of
from depthprobe.runtime.workload import Work, draw, exit_shares

OURO, HUGINN = PRESETS["h100-ouro-1.4b"], PRESETS["h100-huginn"]
UNIT = Clock("unit", 4, Line(1.0, 0.1, 0.01), Line(0.5), Line(2.0, 0.2), Line(3.0, 0.1), f0=0.5)


def test_a_line_is_a_sum_and_saturates_where_the_slope_is_the_reload() -> None:
    line = Line(6.0, 0.5, 0.25)
    assert line(4, 8) == 6 + 2 + 2
    assert line.saturation(2) == 6.0
    assert Line(1.0).saturation(5) == math.inf
    assert line * 2 + Line(1.0) == Line(13.0, 1.0, 0.5)


def test_slopes_give_back_the_published_saturation() -> None:
    gamma, alpha = slopes(5.3, (128, 180), (8192, 9))
    line = Line(5.3, gamma, alpha)
    assert line.saturation(128) == pytest.approx(180) and line.saturation(8192) == pytest.approx(9)


def test_presets_are_the_published_fits() -> None:
    assert OURO.recurrent.fixed == 5.3e-3 and HUGINN.recurrent.fixed == 2.3e-3
    assert OURO.recurrent.saturation(128) == pytest.approx(180) and 1 <= OURO.recurrent.saturation(8192) < 10
    assert HUGINN.recurrent.saturation(128) == pytest.approx(80) and 1 <= HUGINN.recurrent.saturation(8192) < 10
    assert (OURO.prelude + OURO.coda)(64, 64 * 1000) == pytest.approx(0.4e-3)
    outer = HUGINN.prelude + HUGINN.coda
    assert 2.6e-3 < outer(1, 128) < 2.9e-3 and 4.0e-3 < outer(7, 7 * 8192) < 4.7e-3
    assert HUGINN.f0 == pytest.approx(1.2, abs=0.03)
    # keys and values are streamed at less than the chip's bandwidth
    for clock in (OURO, HUGINN):
        assert 2.5e12 < clock.core_page_bytes / clock.recurrent.per_context < 3.35e12
    # the largest published bounds
    assert flop_bound(OURO, mean_at(OURO, 0.2)) == pytest.approx(1.6, abs=0.01)
    assert flop_bound(HUGINN, mean_at(HUGINN, 0.5)) == pytest.approx(2.4, abs=0.02)
    assert all(list(p.means.values()) == sorted(p.means.values(), reverse=p is PUBLISHED["h100-huginn"])
               for p in PUBLISHED.values())  # fmt: skip


def test_bounds_by_hand() -> None:
    assert bound(0.0, 1.0, 4, 2.0) == 2.0
    assert bound(1.0, 1.0, 4, 2.0) == 5 / 3
    assert flop_bound(UNIT, 2.0) == 4.5 / 2.5
    outside, core = 0.5 + 2 + 0.4, 1 + 0.2 + 0.2
    assert time_bound(UNIT, 2, 10, 2.0) == pytest.approx((outside + 4 * core) / (outside + 2 * core))
    assert quantiles([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8)}


def test_one_request_costs_what_its_stages_cost() -> None:
    ran: list[Ran] = []
    works = [Work(4, [2, 4], 2)]
    config = SchedulerConfig(n_loops=4, width=2, core_pages=100)
    out = Simulator(config, UNIT, works, watch=ran.append).run()
    assert [one.stage for one in ran] == (
        ["prefill", "prelude", "recurrent", "recurrent", "coda", "prelude", *["recurrent"] * 4, "coda"]
    )
    assert (ran[0].rows, ran[0].work, ran[0].context) == (3, 12, 4 * (1 + 2 + 3))
    assert [one.context for one in ran if one.stage == "recurrent"] == [4, 4, 5, 5, 5, 5]
    seconds = 3 + 1.2 + 2 * 0.5 + 2 * 2.2 + 2 * (1.1 + 0.04) + 4 * (1.1 + 0.05)
    assert out.seconds == pytest.approx(seconds) and ran[-1].start + ran[-1].duration == pytest.approx(seconds)
    assert (out.tokens, out.mean_exit, out.peak_core) == (2, 3.0, 4 * 3 + 2 + 4)  # a token in flight reserves all
    assert list(out.latencies) == [pytest.approx(seconds / 2)] and out.idle_share == 0


def test_time_passes_while_nobody_comes_and_the_host_is_hidden_only_ahead() -> None:
    works = [Work(1, [3, 3, 3], 3, arrival=2.0), Work(1, [3], 1, arrival=100.0)]
    config = SchedulerConfig(n_loops=4, width=2, core_pages=100)
    out = Simulator(config, UNIT, works).run()
    assert out.waiting > 60 and out.seconds == pytest.approx(98 + out.latencies[1])
    for horizon in (0, 1):
        clock = Clock("host", 4, Line(1.0), Line(1.0), Line(1.0), host=0.25)
        ran: list[Ran] = []
        config = SchedulerConfig(n_loops=4, width=2, core_pages=100, horizon=horizon)
        out = Simulator(config, clock, works[:1], watch=ran.append).run()
        hidden = sum(one.ahead > 0 for one in ran)
        assert (hidden > 0) == (horizon == 1) and out.host == pytest.approx(0.25 * (len(ran) - hidden))


def test_a_request_that_cannot_fit_is_refused_alone() -> None:
    works = [Work(3, [1, 1], 2), Work(90, [1] * 30, 30), Work(3, [1], 1)]
    out = Simulator(SchedulerConfig(n_loops=4, width=2, core_pages=60), UNIT, works).run()
    assert out.tokens == 3 and len(out.refused) == 1 and "request 1" in out.refused[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 25), width=st.integers(1, 9), spare=st.integers(0, 5),
    policy=st.sampled_from(["refill", "no-refill", "lockstep", "full"]), horizon=st.integers(0, 1),
    kv=st.sampled_from(["ragged", "shared", "last-exited"]), prefill=st.sampled_from(["dense", "ragged"]),
    pages=st.integers(0, 60), rate=st.sampled_from([0.0, 0.05, 1.0]),
)  # fmt: skip
def test_the_books_balance(seed, n, width, spare, policy, horizon, kv, prefill, pages, rate) -> None:
    rng = random.Random(seed)
    works, now = [], 0.0
    for _ in range(n):
        prompt, tokens = rng.randint(1, 9), rng.randint(1, 6)
        now += rng.expovariate(rate) if rate else 0.0
        exits, before = ([rng.randint(1, 4) for _ in range(m)] for m in (tokens, prompt - 1))
        works.append(Work(prompt, exits, tokens + rng.randint(0, 2), before, now))
    config = SchedulerConfig(n_loops=4, width=width, spare=spare, core_pages=4 * 17 + pages, policy=policy, kv=kv,
                             horizon=horizon, prefill=prefill, prefill_tokens=rng.randint(1, 20))  # fmt: skip
    ran: list[Ran] = []
    out = Simulator(config, UNIT, works, watch=ran.append).run()
    assert out.tokens == sum(len(work.exits) for work in works) and len(out.latencies) == n
    floor = min(4, 1 + horizon)
    executed = [4 if policy == "full" else max(e, floor) for work in works for e in work.exits]
    assert out.counters["core_rows_decode"] == sum(executed)
    assert out.mean_exit == pytest.approx(sum(executed) / len(executed))
    assert out.seconds == pytest.approx(sum(one.duration for one in ran) + out.waiting)
    assert sum(out.stage_seconds.values()) == pytest.approx(sum(one.duration for one in ran))
    assert out.rows == sum(one.rows for one in ran if one.stage == "recurrent") and 0 < out.fill <= 1
    assert out.peak_core <= config.core_pages and ran[-1].free_core == config.core_pages
    assert min(out.latencies) > 0 and min(out.first) > 0


def test_drawn_lengths_and_exits_have_the_published_means() -> None:
    for name, (prompt, output, high) in {"alpaca": (18, 60, 75), "sharegpt": (270, 310, 3264)}.items():
        works = draw(WORKLOADS[name], 2000, exit_shares("2.47", 4, 2), seed=3)
        assert sum(w.prompt_len for w in works) / 2000 == pytest.approx(prompt, rel=0.01)
        assert sum(w.max_new for w in works) / 2000 == pytest.approx(output, rel=0.02)
        assert sorted(w.prompt_len for w in works)[1980] == pytest.approx(high, rel=0.12)
        exits = [e for w in works for e in w.exits]
        assert sum(exits) / len(exits) == pytest.approx(2.47, abs=0.01) and set(exits) == {2, 3, 4}
        assert all(w.arrival == 0 and w.prompt_len + w.max_new <= 16384 and w.prompt_len >= 4 for w in works)
    works = draw(WORKLOADS["alpaca"], 2000, [1.0], rate=4.0)
    assert works[-1].arrival == pytest.approx(500, rel=0.1)
    both = [draw(WORKLOADS["alpaca"], 50, [0.5, 0.5], rate=rate) for rate in (None, 1.0)]
    assert len({tuple((w.prompt_len, bytes(w.exits)) for w in one) for one in both}) == 1


def test_exit_shares_by_mean_by_hand_and_by_least_depth() -> None:
    assert exit_shares("2.5", 4, 2) == pytest.approx([0, 0.5625, 0.375, 0.0625])
    assert exit_shares("4", 4) == [0, 0, 0, 1] and exit_shares("1", 1) == [1]
    assert exit_shares("1/1/2", 4) == [0.25, 0.25, 0.5, 0]
    assert exit_shares("1/1/2", 4, 2) == [0, 0.5, 0.5, 0]
    for text, words in (("5", "within"), ("1", "within"), ("a/b", "shares"), ("0/0", "shares"), ("1/1/1/1/1", "shares"),
                        ("nowhere", "neither"), ("-1/2", "shares")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            exit_shares(text, 4, 2)


def test_impossible_clocks_and_workloads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recurrent\.per_row"):
        Clock("bad", 4, Line(1.0, -1.0))
    with pytest.raises(UserError, match="n_loops"):
        Clock("bad", 0, Line(1.0))
    with pytest.raises(UserError, match="loops"):
        Simulator(SchedulerConfig(n_loops=3, width=1, core_pages=9), UNIT, [])
    with pytest.raises(UserError, match="no clock"):
        clock_of("h200")
    with pytest.raises(UserError, match=r"threshold 0\.3"):
        mean_at(OURO, 0.3)
    with pytest.raises(UserError, match="rate"):
        draw(WORKLOADS["alpaca"], 1, [1.0], rate=0.0)
    with pytest.raises(UserError, match="0 requests"):
        draw(WORKLOADS["alpaca"], 0, [1.0])
    file = tmp_path / "clock.json"
    save_clock(OURO, file)
    assert clock_of(str(file)) == OURO == load_clock(file)
    for text, words in (("{", "cannot be read"), ("{}", "no clock"), ('{"clock_version": 1, "x": 2}', "too many")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            load_clock(file)


def test_pages_are_shared_out_and_ragged_fits_fewer_requests() -> None:
    works = draw(WORKLOADS["sharegpt"], 200, exit_shares("2.47", 4, 2))
    kept = {}
    for kv in ("shared", "ragged"):
        config = settings_of(OURO, works, width=64, kv=kv, kv_bytes=8 << 30)
        assert config.core_pages == (8 << 30) // OURO.core_page_bytes and config.outer_pages == 0
        kept[kv] = Simulator(config, OURO, works).run()
    assert kept["ragged"].most_in_flight < kept["shared"].most_in_flight
    assert kept["ragged"].fill < kept["shared"].fill and kept["ragged"].tokens == kept["shared"].tokens
    config = settings_of(HUGINN, draw(WORKLOADS["alpaca"], 50, exit_shares("6", 16, 3)), width=8, kv="ragged")
    used = config.core_pages * HUGINN.core_page_bytes + config.outer_pages * HUGINN.outer_page_bytes
    assert HUGINN.kv_bytes * 0.999 < used <= HUGINN.kv_bytes and config.coda_share == 1.0


def test_rows_of_a_comparison_say_what_departs() -> None:
    works = draw(WORKLOADS["alpaca"], 300, exit_shares("2.47", 4, 2))
    rows = compare(OURO, works, policies=["refill", "full", "no-refill"], widths=[32], kvs=["shared"], threshold=0.2,
                   horizon=1)  # fmt: skip
    full, refill, no_refill = rows
    assert full["policy"] == "full" and full["speedup"] == 1 and full["says"] is None
    assert refill["fraction"] < 0.94 and refill["decode_fraction"] > 0.94 and "prefill" in refill["says"]
    assert no_refill["decode_fraction"] < refill["decode_fraction"] and "full" in no_refill["says"]
    assert refill["flop_bound"] == pytest.approx(1.6, abs=0.01) and refill["mean_exit"] == pytest.approx(2.47, abs=0.02)
    slow = replace(OURO, host=2e-3, prefill=Line())
    waits = compare(slow, works, policies=["refill"], widths=[32], kvs=["shared"], horizon=1)[0]
    assert waits["host_share"] > 0.1 and "waits for the host" in waits["says"]
    poor = compare(OURO, works, policies=["refill"], widths=[64], kvs=["ragged"], kv_bytes=1 << 30)[0]
    assert poor["speedup"] > refill["speedup"] and poor["peak_bytes"] <= 1 << 30
    none = compare(OURO, draw(WORKLOADS["alpaca"], 60, [0, 0, 0, 1]), policies=["refill"], widths=[16], kvs=["ragged"])
    assert none[0]["speedup"] == pytest.approx(1, abs=0.02) and "within" in none[0]["says"]
    assert published_range(OURO, "no-refill", 3.0) is None and published_range(UNIT, "refill", 2.0) is None


def test_simulating_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, depthprobe.runtime.compare as c; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
