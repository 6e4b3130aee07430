"""`depthprobe agree`: what it prints and writes, and every wrong pair of folders as one line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import depthprobe
from depthprobe import tables
from depthprobe.cli.main import main
from depthprobe.runtime.engine import Engine
from depthprobe.runtime.requests import Request, Sampling
from tests.replay.served_cases import edit


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the lens over a few questions."""
    folder = tmp_path_factory.mktemp("agree") / "run"
    depthprobe.analyze(str(tiny), task="follow", hops="1-3", n=4, out=folder, resamples=100, browse=0)
    return folder


def served(tiny: Path, run: Path, folder: Path, *, exit: str = "q:0.5", **options: str) -> Path:
    """Its questions served by the same model; one more request asks nothing of the run."""
    model = depthprobe.load(str(tiny))
    items = pl.read_parquet(run / "tables" / "items.parquet")
    keys = ("item", "task", "hops")
    asked = [
        Request(tuple(row["prompt_ids"]), Sampling(max_new_tokens=2), row["item"], about={k: row[k] for k in keys})
        for row in items.iter_rows(named=True)
    ]
    about = {"model": str(tiny), "model_fingerprint": model.fingerprint()}
    with Engine(model.model, exit=exit, record=folder, about=about, width=4, max_len=200, **options) as engine:
        assert not any(done.error for done in engine.generate([*asked, Request((1, 2, 3), id="other")]))
    return folder


def test_a_run_and_a_trace(tiny: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = served(tiny, run, tmp_path / "trace", prefill="ragged")
    assert main(["agree", str(run), str(trace), "--report"]) == 0
    out, err = capsys.readouterr()
    assert "follow, exit q:0.5, ragged prefill: means in loops" in out and "all requests, exit" in out
    assert "k = 3" in out and "left − settles" in out and out.splitlines()[-1] == str(trace / "tables")
    assert "the terms add up exactly" in err and "12 items settle where the lens saw them settle" in err
    found = {file.stem: tables.check(file.stem, pl.read_parquet(file)) for file in (trace / "tables").iterdir()}
    made = ("agreement", "agreement_by_hops", "replayed", "served_requests", "served_ticks", "served_tokens")
    assert sorted(found) == list(made)
    assert found["agreement"].filter(task="follow")["cluster"].n_unique() <= 4  # the run's, not the request's
    page = (run / "report.html").read_text()
    assert "Served depth: where did tokens really leave" in page and "Exit − settling, and what it is made of" in page
    # another trace of the run is shown beside it, the same one again in its place
    other = served(tiny, run, tmp_path / "other", exit="hazard:0.4")
    for one in (other, trace):
        assert main(["agree", str(run), str(one), "--report"]) == 0
    both = pl.read_parquet(run / "tables" / "agreement.parquet")
    assert sorted(both["rule"].unique()) == ["hazard:0.4", "q:0.5"]
    assert both.filter(rule="q:0.5").height == found["agreement"].height


def test_a_trace_alone(tiny: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = served(tiny, run, tmp_path / "trace")
    assert main(["agree", str(trace), "--out", str(tmp_path / "out"), "--batch-tokens", "50"]) == 0
    out, err = capsys.readouterr()
    assert "no run is given" in err and "cache, prompt" in out
    assert (tmp_path / "out" / "tables" / "agreement.parquet").is_file() and not (trace / "tables").exists()


def test_planned_exits_say_so(tiny: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = served(tiny, run, tmp_path / "trace", exit="fixed:2")
    assert main(["agree", str(run), str(trace)]) == 0
    assert "planned, not decided by a rule: there are no terms" in capsys.readouterr().err


def test_what_does_not_belong_together(
    tiny: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = served(tiny, run, tmp_path / "trace")

    def refused(*arguments: str | Path) -> str:
        assert main(["agree", *map(str, arguments)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("error: ")
        return lines[-1]

    assert "there is no trace here" in refused(tmp_path / "nothing")
    assert "there is no run here" in refused(tmp_path / "nothing", trace)
    assert "there is no run to report in" in refused(trace, "--report")
    assert "the rule does not look ahead" in refused(trace, "--lookahead", str(tmp_path))
    assert "3 folders are given" in refused(run, trace, trace)
    assert "follow-demo is not the model that served" in refused(trace, "--model", "follow-demo")
    settling = run / "tables" / "settling.parquet"
    kept = settling.read_bytes()
    changed = pl.read_parquet(settling).with_columns(settling_loop=pl.col("settling_loop") % 3 + 1)
    changed.cast({"settling_loop": pl.Int32}).write_parquet(settling)
    try:
        said = refused(run, trace, "--margin", "0")
    finally:
        settling.write_bytes(kept)
    assert "the lens saw it settle at loop" in said and "(item " in said

    def longer(line: dict) -> None:
        if line["event"] == "end" and line["request"] == "other":
            line["exits"][1] += 1

    edit(trace, "requests", longer)
    assert "(request other, token 1)" in refused(trace)
    about = json.loads((trace / "trace.json").read_text())
    (trace / "trace.json").write_text(json.dumps(about | {"model": None}))
    assert "does not say which model served" in refused(trace)
    drawn = served(tiny, run, tmp_path / "drawn", exit="ponder")
    assert "exit rule ponder" in refused(drawn)
    shared = served(tiny, run, tmp_path / "shared", kv="shared")
    assert "layout shared has no forward" in refused(shared)
