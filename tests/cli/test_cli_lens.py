"""`depthprobe lens` and `analyze --lens tuned`: from a text to a table of a run, and every refusal as one line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from depthprobe.cli.main import main
from depthprobe.pipeline import questions

DATA = ["--data", "stories:kinship"]
QUICK = ["--steps", "4", "--warm", "2", "--length", "64"]
ASK = ["--task", "kinship", "--hops", "1-2", "--split", "any", "--n", "4", "--batch-size", "4"]


@pytest.fixture(scope="module")
def lens(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens") / "tiny.safetensors"
    assert main(["lens", "train", str(tiny), *DATA, *QUICK, "--steps", "30", "--out", str(path)]) == 0
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_train_says_where_and_evaluate_says_how_near(
    tiny: Path, lens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.safetensors"
    assert main(["lens", "train", str(tiny), *DATA, *QUICK, "--out", str(out)]) == 0
    said, progress = capsys.readouterr()
    assert said == f"{out}\n" and "step 4/4: mean KL" in progress
    told = tmp_path / "told.json"
    arguments = ["lens", "evaluate", str(tiny), str(lens), *DATA, "--tokens", "600", "--json", str(told)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    found = json.loads(told.read_text())
    assert found["verdict"] == printed.splitlines()[-1]
    assert found["below_everywhere"] and "below the logit lens at every depth before the last" in found["verdict"]
    assert found["trained_on"]["data"] == "stories:kinship" and found["trained_on"]["license"] == "Apache-2.0"
    assert len(found["depths"]) == 7 and found["positions"] >= 600 and found["groups"] > 5
    first, last = found["depths"][0], found["depths"][-1]
    assert first["tuned"] < first["logit"] and first["difference_high"] < 0 < first["tuned_low"] < first["tuned_high"]
    assert abs(last["logit"]) < 1e-6 and abs(last["tuned"]) < 1e-6 and last["exact"]


def test_a_run_reads_by_the_tuned_lens(
    tiny: Path, lens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(questions, "TRAINING_STORIES", 30)
    monkeypatch.setattr("depthprobe.runs.folder.git_commit", lambda: "c0ffee")
    with_lens = [*ASK, "--lens", "tuned", "--tuned", str(lens)]
    assert main(["analyze", str(tiny), *with_lens, "--out", str(tmp_path / "tuned")]) == 0
    assert main(["analyze", str(tiny), *ASK, "--out", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    tuned, plain = (pl.read_parquet(tmp_path / name / "tables" / "lens.parquet") for name in ("tuned", "plain"))
    assert tuned["lens"].unique().to_list() == ["tuned"] and plain["lens"].unique().to_list() == ["plain"]
    last = pl.col("depth") == plain["depth"].max()
    assert tuned.filter(last).drop("lens").equals(plain.filter(last).drop("lens"))
    assert tuned["kl_final"].mean() < plain["kl_final"].mean()  # type: ignore[operator]
    words = [pl.read_parquet(tmp_path / name / "tables" / "tokens.parquet") for name in ("tuned", "plain")]
    assert not words[0].equals(words[1])
    assert "the tuned lens" in (tmp_path / "tuned" / "report.html").read_text()
    # another lens under the same path is another run
    assert main(["lens", "train", str(tiny), *DATA, *QUICK, "--out", str(lens), "--overwrite"]) == 0
    capsys.readouterr()
    assert "another model.tuned_lens" in refused(
        capsys, "analyze", tiny, *with_lens, "--out", tmp_path / "tuned"
    )


def test_bad_input(tiny: Path, lens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, train = tmp_path / "a.safetensors", ["lens", "train", tiny]
    assert "is no .safetensors file" in refused(capsys, *train, *DATA, "--out", tmp_path / "a.bin")
    assert "there is a file already" in refused(capsys, *train, *DATA, "--out", lens)
    assert "there is no such text" in refused(capsys, *train, "--data", "nowhere", "--out", new)
    assert "learning rate" in refused(capsys, *train, *DATA, "--rate", "-1", "--out", new)
    (tmp_path / "short.txt").write_text("")
    assert "no texts to train on" in refused(capsys, *train, "--data", tmp_path / "short.txt", "--out", new)
    evaluate = ["lens", "evaluate", tiny]
    assert "no such tuned lens" in refused(capsys, *evaluate, new, *DATA)
    assert "no held-out text" in refused(capsys, *evaluate, lens, "--data", tmp_path / "short.txt")
    assert "was trained on this text" in refused(capsys, *evaluate, lens, *DATA, "--all")
    assert "no such folder" in refused(capsys, *evaluate, lens, *DATA, "--json", tmp_path / "x" / "y.json")
    assert "made for another model" in refused(capsys, "lens", "evaluate", "follow-demo", lens, *DATA)
    assert "--lens tuned needs a lens" in refused(capsys, "analyze", tiny, "--lens", "tuned")
    assert "says nothing without --lens tuned" in refused(capsys, "analyze", tiny, "--tuned", lens)
    assert "there is no 'coda'" in refused(capsys, "analyze", tiny, "--lens", "coda")
    run = tmp_path / "run"
    asked = ["analyze", "follow-demo", *ASK, "--lens", "tuned", "--tuned", lens, "--out", run]
    assert "made for another model" in refused(capsys, *asked)
    assert not run.exists() and not new.exists()
