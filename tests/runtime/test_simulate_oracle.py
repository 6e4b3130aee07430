"""Oracle 6: what the engine did on a model, the simulator does again from the record alone, tick for tick."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from depthprobe.halting import Lookahead, LookaheadHead, QExit, parse_rule
from depthprobe.models import LoopedConfig
from depthprobe.runtime import Engine, Request, Sampling, SchedulerConfig
from depthprobe.runtime.fit import SAME, config_of, follow
from depthprobe.runtime.layouts import layout
from depthprobe.runtime.record import read_lines
from depthprobe.runtime.roofline import Clock, Line
from depthprobe.runtime.simulate import Ran, Simulator
from depthprobe.runtime.workload import of_trace
from tests.runtime.helpers import VOCABULARY, random_model

CONFIG = LoopedConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=1, n_loops=4,
    n_prelude=1, initializer_range=0.25, max_position_embeddings=32, exit_gate=True,
)  # fmt: skip
MODEL = random_model(CONFIG, 1)
few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ahead() -> Lookahead:
    torch.manual_seed(2)
    head = LookaheadHead.start(MODEL)
    with torch.no_grad():
        head.weight.normal_(std=0.3)
    return Lookahead(QExit(0.6), head)


RULES = {
    "q": lambda: parse_rule("q:0.5"), "ponder": lambda: parse_rule("ponder"), "full": lambda: parse_rule("full"),
    "ahead": ahead, "random": lambda: parse_rule("random:.4/.3/.2/.1"),
}  # fmt: skip


class Steps:
    """A clock that stands still within a tick; the engine's seconds are then the ticks that it has begun."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def serve(
    folder: Path, rng: random.Random, n: int, steps: Steps | None = None, often: float = 0.4, **options
) -> Engine:
    """n requests that come between ticks."""
    clock = {} if steps is None else {"clock": steps}
    with Engine(MODEL, record=folder, max_len=14, **clock, **options) as engine:
        asked = n
        while asked or engine.in_flight:
            while asked and (rng.random() < often or not engine.in_flight):
                prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8)))
                stops = (3,) if rng.random() < 0.5 else ()
                engine.add(Request(prompt, Sampling(rng.randint(1, 5), seed=rng.randrange(9), stop_tokens=stops)))
                asked -= 1
            engine.step()
            if steps is not None:
                steps.now += 1.0
    return engine


@few
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 9), rule=st.sampled_from(sorted(RULES)), data=st.data(),
    policy=st.sampled_from(["refill", "no-refill", "lockstep", "full"]), prefill=st.sampled_from(["dense", "ragged"]),
    by_depth=st.booleans(), tight=st.booleans(),
)  # fmt: skip
def test_a_trace_is_made_again_from_its_exits(seed, n, rule, data, policy, prefill, by_depth, tight) -> None:
    layouts = ["ragged", "last-exited", "shared", "first-then-shared"]
    prefill = "dense" if policy == "full" else prefill  # no request here says where its prompt leaves
    kv = data.draw(st.sampled_from(["depth-indexed", *layouts] if policy == "full" and prefill == "dense" else layouts))
    pages = 12 * layout(kv).reserve(4) + data.draw(st.integers(0, 4)) if tight else None
    with tempfile.TemporaryDirectory() as folder:
        engine = serve(
            Path(folder, "t"), random.Random(seed), n, exit=None if policy == "full" else RULES[rule](), kv=kv,
            policy=policy, prefill=prefill, width=data.draw(st.integers(1, 5)), spare=data.draw(st.integers(0, 4)),
            often=data.draw(st.sampled_from([0.4, 0.95])),
            coda_share=data.draw(st.sampled_from([0.0, 0.5, 1.0])), prefill_tokens=data.draw(st.integers(1, 9)),
            kv_pages=pages, by_depth=by_depth,
        )  # fmt: skip
        ran, lines = follow(Path(folder, "t"))
        assert len(ran) == len(lines)
        assert all(getattr(mine, name) == row[name] for mine, row in zip(ran, lines, strict=True) for name in SAME)
        works = of_trace(Path(folder, "t"))
    counters = engine.scheduler.counters
    event(f"preempted: {counters['preemptions'] > 0}")
    event(f"ahead: {any(row['ahead'] for row in lines)}")
    event(f"chunks: {counters['ticks_prefill'] > n}")
    assert sum(sum(work.exits) for work in works) == counters["core_rows_decode"]


@pytest.mark.parametrize(
    ("options", "happens"),
    [({"policy": "refill", "kv_pages": 50}, "preemptions"), ({"policy": "lockstep"}, "core_rows_frozen"),
     ({"policy": "no-refill", "prefill_tokens": 2}, "ticks_prefill"), ({"exit": "ahead"}, "ahead"),
     ({"exit": "ahead", "prefill": "ragged", "kv_pages": 50}, "core_rows_recomputed")],
)  # fmt: skip
def test_what_is_rare_happens_and_is_made_again(options, happens, tmp_path) -> None:
    options = {"exit": "q", "width": 6, "spare": 6, "coda_share": 0.5, **options}
    options["exit"] = RULES[options["exit"]]()
    engine = serve(tmp_path / "t", random.Random(5), 20, often=0.95, **options)
    ran, lines = follow(tmp_path / "t")
    assert len(ran) == len(lines)
    if happens == "ahead":
        assert any(one.ahead for one in ran)
    else:
        assert engine.scheduler.counters[happens] > 0


@pytest.mark.parametrize("rule", ["q", "ahead"])
@pytest.mark.parametrize("policy", ["refill", "no-refill", "lockstep"])
def test_the_same_ticks_without_recorded_times(policy, rule, tmp_path) -> None:
    """Arrivals alone, in a clock in which every tick takes as long: nothing is taken from the recorded ticks."""
    serve(tmp_path / "t", random.Random(3), 12, Steps(), exit=RULES[rule](), policy=policy, width=3, prefill_tokens=4)
    works = of_trace(tmp_path / "t")
    second = Line(1.0)
    ran: list[Ran] = []
    config: SchedulerConfig = config_of(tmp_path / "t")
    out = Simulator(config, Clock("steps", 4, second, second, second, second), works, watch=ran.append).run()
    lines = list(read_lines(tmp_path / "t", "ticks"))
    assert [(one.tick, one.stage, one.rows, one.depths, one.start) for one in ran] == [
        (row["tick"], row["stage"], row["rows"], row["depths"], row["start"]) for row in lines
    ]
    assert out.tokens == sum(len(work.exits) for work in works)


def test_another_record_is_noticed(tmp_path) -> None:
    serve(tmp_path / "t", random.Random(3), 6, exit=RULES["q"](), width=3)
    file = tmp_path / "t" / "ticks-00001.jsonl"
    text = file.read_text().splitlines(keepends=True)
    k = next(i for i, line in enumerate(text) if '"recurrent"' in line)
    text[k] = text[k].replace('"rows":', '"rows":1')
    file.write_text("".join(text))
    ran, lines = follow(tmp_path / "t")
    assert len(ran) == k and len(lines) == len(text)
