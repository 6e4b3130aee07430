"""`depthprobe lens` and `analyze --lens tuned`: from a text to a table of a run, and every refusal as one line."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest
from tiny_models import depth_model

from depthprobe.cli import lens as cli
from depthprobe.cli.main import main
from depthprobe.lens import TunedLens
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


def test_rows_beyond_the_context_are_refused_and_the_length_used_is_kept(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    limit = config["max_position_embeddings"]
    train = ["lens", "train", tiny, *DATA, "--steps", "1", "--warm", "0", "--out", tmp_path / "a.safetensors"]
    said = refused(capsys, *train, "--length", limit + 1)
    assert f"rows of {limit + 1} tokens cannot be read" in said and f"is {limit}" in said
    short = tmp_path / "short"
    shutil.copytree(tiny, short)
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    train[2] = short
    assert main([str(argument) for argument in train]) == 0
    assert TunedLens.load(tmp_path / "a.safetensors").about["length"] == 40  # by default all of a shorter context
    capsys.readouterr()
    evaluate = ["lens", "evaluate", short, tmp_path / "a.safetensors", *DATA, "--length", 41]
    assert "rows of 41 tokens cannot be read" in refused(capsys, *evaluate)


def test_without_steps_it_is_least_squares(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.safetensors"
    assert main(["lens", "train", str(tiny), *DATA, "--steps", "0", "--warm", "2", "--out", str(out)]) == 0
    lens = TunedLens.load(out)
    assert lens.about["steps"] == 0 and bool(lens.weight.any())
    capsys.readouterr()
    assert "neither least squares nor steps" in refused(
        capsys, "lens", "train", tiny, *DATA, "--steps", 0, "--warm", 0, "--out", tmp_path / "b.safetensors"
    )


def test_a_text_of_the_training_is_known_by_any_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another spelling of a path, a copy, a folder around it: `--all` is refused, and a held-out half that the name
    would draw anew leaves out what the training saw."""
    lines = [f"line {n} " + " ".join(f"word{(7 * n + m) % 50}" for m in range(20)) for n in range(60)]
    corpus, copy = tmp_path / "a" / "texts.jsonl", tmp_path / "b" / "others.jsonl"
    for path in (corpus, copy):
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    lens = tmp_path / "lens.safetensors"
    assert main(["lens", "train", str(tiny), "--data", str(corpus), *QUICK, "--rows", "16", "--out", str(lens)]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    evaluate = ["lens", "evaluate", tiny, lens, "--data"]
    for name in ("a/texts.jsonl", "./a/../a/texts.jsonl", "a", copy):
        assert "was trained on this text" in refused(capsys, *evaluate, name, "--all"), name
    assert main([str(one) for one in (*evaluate, corpus, "--json", "told.json")]) == 0
    assert capsys.readouterr().err == ""  # its own held-out half has nothing of the training
    told = json.loads(Path("told.json").read_text())
    assert "documents" not in told["trained_on"]
    assert main([str(one) for one in (*evaluate, copy, "--json", "copy.json")]) == 0
    assert "documents" in (left := capsys.readouterr().err) and "trained on them" in left
    assert json.loads(Path("copy.json").read_text())["groups"] < told["groups"]


@pytest.mark.parametrize(
    ("means", "highs", "said", "everywhere"),
    [
        ([-0.2, -0.1, 0.0], [-0.1, -0.05, 0.0], "by more than the intervals.", True),
        ([-0.2, -0.1, 0.0], [-0.1, 0.02, 0.0], "on average below .* reaches 0 at ", False),
        ([-0.2, -0.1, 0.0], [None, None, None], "on average below .* from 3 groups no interval", False),
        ([-0.2, 0.1, 0.0], [-0.1, 0.3, 0.0], "on average not below the logit lens at ", False),
    ],
)
def test_the_verdict_follows_the_intervals(
    means: list[float], highs: list[float | None], said: str, everywhere: bool
) -> None:
    model = depth_model("llama")
    table = pl.DataFrame(
        {"depth": [0, 1, 2], "difference": means, "difference_high": highs, "below": [m < 0 for m in means],
         "exact": [False, False, True], "groups": [3] * 3},
        schema_overrides={"difference_high": pl.Float64},
    )  # fmt: skip
    assert re.search(said, cli._verdict(model, table))
    assert (not cli._above(table) and not cli._unsure(table)) == everywhere


def test_an_out_that_cannot_be_written_is_told_before_the_training(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_open", lambda *_: pytest.fail("the model is loaded"))
    (tmp_path / "file").write_text("x")
    train = ["lens", "train", tiny, *DATA, "--out"]
    said = refused(capsys, *train, tmp_path / "file" / "below" / "a.safetensors")
    assert "cannot be written: Not a directory" in said and "choose another --out" in said

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", full)
    assert "Read-only file system" in refused(capsys, *train, tmp_path / "new" / "a.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_bad_input(tiny: Path, lens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, train = tmp_path / "a.safetensors", ["lens", "train", tiny]
    assert "is no .safetensors file" in refused(capsys, *train, *DATA, "--out", tmp_path / "a.bin")
    assert "there is a file already" in refused(capsys, *train, *DATA, "--out", lens)
    assert "there is no such text" in refused(capsys, *train, "--data", "nowhere", "--out", new)
    assert "learning rate" in refused(capsys, *train, *DATA, "--rate", "-1", "--out", new)
    (tmp_path / "short.txt").write_text("")
    assert "there is no text in it" in refused(capsys, *train, "--data", tmp_path / "short.txt", "--out", new)
    evaluate = ["lens", "evaluate", tiny]
    assert "no such tuned lens" in refused(capsys, *evaluate, new, *DATA)
    assert "there is no text in it" in refused(capsys, *evaluate, lens, "--data", tmp_path / "short.txt")
    assert "leave out --all" in refused(capsys, *evaluate, lens, *DATA, "--all")
    assert "no such folder" in refused(capsys, *evaluate, lens, *DATA, "--json", tmp_path / "x" / "y.json")
    assert "made for another model" in refused(capsys, "lens", "evaluate", "follow-demo", lens, *DATA)
    assert "--lens tuned needs a lens" in refused(capsys, "analyze", tiny, "--lens", "tuned")
    assert "says nothing without --lens tuned" in refused(capsys, "analyze", tiny, "--tuned", lens)
    assert "there is no 'koda'" in refused(capsys, "analyze", tiny, "--lens", "koda")
    run = tmp_path / "run"
    asked = ["analyze", "follow-demo", *ASK, "--lens", "tuned", "--tuned", lens, "--out", run]
    assert "made for another model" in refused(capsys, *asked)
    assert not run.exists() and not new.exists()
