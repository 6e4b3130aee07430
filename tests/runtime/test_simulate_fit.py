"""Fits recover what was planted, and say when they cannot."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from depthprobe.errors import UserError
from depthprobe.models import LoopedConfig
from depthprobe.runtime import Engine, Request, Sampling
from depthprobe.runtime.fit import fit, fit_line, nonnegative
from depthprobe.runtime.record import Recorder
from depthprobe.runtime.roofline import Clock, Line
from depthprobe.runtime.settings import SchedulerConfig
from depthprobe.runtime.simulate import Ran, Simulator
from depthprobe.runtime.workload import Work
from tests.runtime.helpers import VOCABULARY, random_model

PLANTED = Clock(
    "planted", 4, Line(2e-3, 3e-5, 4e-7), Line(1e-4, 2e-6), Line(5e-4, 1e-5), Line(7e-3, 2e-5, 3e-8),
    core_page_bytes=64,
)  # fmt: skip


def write(folder: Path, works: list[Work], config: SchedulerConfig, noise: float = 0.0, seed: int = 0) -> Path:
    """A trace as the engine would write it, in planted times."""
    rng = random.Random(seed)
    ran: list[Ran] = []
    Simulator(config, PLANTED, works, watch=ran.append).run()
    about = {name: getattr(config, name) for name in SchedulerConfig.__dataclass_fields__ if name != "kv"}
    recorder = Recorder(folder, about | {"kv": config.layout.name, "core_page_bytes": 64, "outer_page_bytes": 0})
    for i, work in enumerate(works):
        recorder.write("requests", {
            "event": "start", "request": f"r{i}", "prompt": [0] * work.prompt_len, "arrival": work.arrival,
            "sampling": {"max_new_tokens": work.max_new},
        })  # fmt: skip
    for one in ran:
        row = asdict(one)
        row["duration"] *= 1 + noise * rng.uniform(-1, 1)
        recorder.write("ticks", row)
    for i, work in enumerate(works):
        recorder.write("requests", {
            "event": "end", "request": f"r{i}", "finish_reason": "length", "exits": list(work.exits),
            "prompt_exits": [4] * (work.prompt_len - 1), "finished": 1.0,
        })  # fmt: skip
    recorder.close()
    return folder


def works(n: int, seed: int = 0) -> list[Work]:
    rng = random.Random(seed)
    out = []
    for i in range(n):
        exits = [rng.randint(1, 4) for _ in range(rng.randint(1, 9))]
        out.append(Work(rng.randint(1, 30), exits, len(exits), arrival=i * 0.004))
    return out


CONFIG = SchedulerConfig(n_loops=4, width=8, core_pages=4 * 400, spare=4, prefill_tokens=40)


def test_planted_constants_come_back(tmp_path: Path) -> None:
    fitted = fit(write(tmp_path / "t", works(40), CONFIG))
    assert fitted.ticks == fitted.follows and fitted.predicted == pytest.approx(fitted.measured)
    for stage in ("recurrent", "prelude", "coda", "prefill"):
        planted, line = getattr(PLANTED, stage), fitted.lines[stage].line
        for name in ("fixed", "per_row", "per_context"):
            assert getattr(line, name) == pytest.approx(getattr(planted, name), rel=1e-4, abs=1e-12), (stage, name)
        assert fitted.lines[stage].relative < 1e-6 and fitted.lines[stage].left_out == ()
    assert fitted.clock.kv_bytes == CONFIG.core_pages * 64 and fitted.clock.n_loops == 4


def test_noise_shows_in_the_residuals(tmp_path: Path) -> None:
    fitted = fit(write(tmp_path / "t", works(60), CONFIG, noise=0.1))
    one = fitted.lines["recurrent"]
    assert 0.02 < one.relative < 0.08 and one.rms > 1e-5 and one.r2 is not None and one.r2 < 1
    assert one.line.fixed == pytest.approx(2e-3, rel=0.1)
    assert fitted.predicted == pytest.approx(fitted.measured, rel=0.01)


def test_too_few_ticks_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", [Work(5, [2, 1], 2)], CONFIG)
    with pytest.raises(UserError, match="3 recurrent ticks are too few"):
        fit(folder)
    with pytest.raises(UserError, match="no trace"):
        fit(tmp_path / "none")
    about = json.loads((folder / "trace.json").read_text())
    del about["width"]
    (folder / "trace.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="width"):
        fit(folder)


def test_requests_that_did_not_end_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", works(20), CONFIG)
    file = folder / "requests-00001.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-3]))
    with pytest.raises(UserError, match="3 of 20 requests have not ended"):
        fit(folder)


def test_no_coefficient_is_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = np.abs(rng.normal(size=(20, 3))), rng.normal(size=20)
        b = nonnegative(x, y)
        assert (b >= 0).all()
        gradient = x.T @ (x @ b - y)  # Karush-Kuhn-Tucker: none that is 0 wants to grow, the others are settled
        assert (gradient > -1e-9).all() and abs(gradient[b > 0]).max(initial=0) < 1e-9


def test_what_cannot_be_told_apart_is_left_out() -> None:
    def tick(rows: int, context: int, seconds: float) -> Ran:
        return Ran(0, "recurrent", rows, [], 0, rows, context, 0.0, seconds, 0, 0, 0, False, 0)

    same = fit_line([tick(r, 10 * r, 1 + 0.5 * r) for r in range(1, 20)])
    assert same.left_out == ("per_context",) and same.line.per_row == pytest.approx(0.5)
    one = fit_line([tick(4, 40, 3.0) for _ in range(20)])
    assert one.left_out == ("per_row", "per_context") and one.line == Line(pytest.approx(3.0)) and one.r2 is None
    assert fit_line([]).n == 0
    few = fit_line([tick(r, r, float(r)) for r in range(1, 6)])
    assert few.line.fixed == pytest.approx(3.0) and few.left_out == ("per_row", "per_context")


def test_the_engines_own_trace_can_be_fitted(tmp_path: Path) -> None:
    config = LoopedConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=1,
                          n_loops=3, max_position_embeddings=32, exit_gate=True)  # fmt: skip
    model = random_model(config, 0)
    with Engine(model, exit="q:0.5", width=4, record=tmp_path / "t") as engine:
        engine.generate([Request((1,) * n, Sampling(max_new_tokens=5)) for n in range(1, 9)])
    fitted = fit(tmp_path / "t")
    assert fitted.ticks == fitted.follows and fitted.clock.n_loops == 3
    assert fitted.lines["recurrent"].line(4, 40) > 0 and fitted.predicted == pytest.approx(fitted.measured, rel=0.2)
