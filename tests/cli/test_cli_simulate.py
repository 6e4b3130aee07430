"""`depthprobe simulate`: tables, JSON, a clock from a trace and back, and every refusal as one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depthprobe.cli.main import main

SMALL = ["--requests", "60", "--width", "8"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *(str(argument) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_a_table_beside_the_published_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--threshold", "0.2,1", "--policy", "refill,lockstep"]) == 0
    out, err = capsys.readouterr()
    assert "h100-ouro-1.4b, alpaca, all at once" in out and "0.94–0.99" in out
    assert out.count("lockstep") == 4 and "refill at 1: within the published" in out
    assert "full, width 8, ragged" in err


def test_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--clock", "h100-huginn", "--workload", "20:10", "--exits", "6,0/0/1/3", "--policy", "refill", "--json"]
    assert main(["simulate", *SMALL, *options, "--rate", "3", "--kv-gib", "1", "--host-ms", "0.5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clock"]["host"] == 0.5e-3 and told["rate"] == 3
    rows = told["rows"]
    assert [(row["kv"], round(row["mean_exit"])) for row in rows] == [
        ("shared", 6), ("ragged", 6), ("shared", 4), ("ragged", 4),
    ]  # fmt: skip
    assert all(row["tokens"] == 600 and 0 < row["idle_share"] < 1 and row["latency_s"]["p50"] > 0 for row in rows)
    assert rows[1]["peak_pages"] > rows[0]["peak_pages"] and rows[0]["published"] == [0.73, 0.92]


def test_a_trace_is_fitted_and_replayed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, clock = tmp_path / "trace", tmp_path / "clock.json"
    ask = ["--task", "kinship", "--hops", "1-2", "--split", "any", "--n", "4", "--max-new-tokens", "4"]
    assert main(["trace", str(tiny), *ask, "--exit", "q:0.5", "--width", "2", "--out", str(trace)]) == 0
    capsys.readouterr()
    assert main(["simulate", "fit", str(trace), "--out", str(clock)]) == 0
    out = capsys.readouterr().out
    assert "recurrent" in out and "R²" in out
    ticks = sum(1 for _ in (trace / "ticks-00001.jsonl").open())
    assert f"makes {ticks} of {ticks} ticks again" in out
    assert main(["simulate", "fit", str(trace), "--json"]) == 0
    saved = json.loads(clock.read_text())
    assert saved.pop("clock_version") == 1 and json.loads(capsys.readouterr().out)["clock"] == saved
    assert main(["simulate", "--clock", str(clock), "--workload", str(trace), "--width", "2,4", "--kv", "ragged",
                 "--horizon", "0", "--policy", "refill", "--json"]) == 0  # fmt: skip
    rows = json.loads(capsys.readouterr().out)["rows"]
    summary = json.loads((trace / "summary.json").read_text())
    assert {row["tokens"] for row in rows} == {summary["tokens"]}
    assert rows[0]["mean_exit"] == pytest.approx(summary["mean_exit"])
    assert rows[0]["flop_bound"] is None and rows[0]["time_bound"] >= 1
    assert "3 loops" in refused(capsys, "--workload", trace)
    assert "requests" in refused(capsys, "--clock", clock, "--workload", trace, "--requests", "3")
    assert "--exits" in refused(capsys, "--clock", clock)
    assert main(["simulate", "--clock", str(clock), *SMALL, "--exits", str(trace), "--horizon", "0"]) == 0


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--clock", "h200"], "h100-huginn"), (["--workload", "mmlu"], "sharegpt"),
        (["--workload", "0:3"], "no workload"),
        (["--threshold", "0.3"], "0.2, 0.4"), (["--threshold", "x"], "threshold"), (["--exits", "9"], "within"),
        (["--threshold", "1", "--exits", "3"], "leave one out"), (["--policy", "fast"], "lockstep"),
        (["--width", "a"], "width"), (["--width", "0"], "width"), (["--kv", "flat"], "ragged"),
        (["--rate", "0"], "rate"),
        (["--kv", "depth-indexed"], "early exits"), (["--coda-share", "2"], "coda_share"),
        (["--requests", "0"], "0 requests"),
        (["--host-ms", "-1"], "host"), (["--kv-gib", "0"], "core_pages"), (["fit", tmp_path], "no trace"),
        (["--policy", ","], "nothing"),
    ):  # fmt: skip
        assert words in refused(capsys, *arguments)
