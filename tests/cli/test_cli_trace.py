"""`depthprobe trace`: from a model and questions to a record, and every refusal as one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depthprobe.cli.main import main
from depthprobe.runtime.record import read_lines, read_meta

ASK = ["--task", "kinship", "--hops", "1-2", "--split", "any", "--n", "3"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_questions_are_served_and_recorded(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace"
    assert main(["trace", str(tiny), *ASK, "--exit", "q:0.5", "--width", "2", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == 6 and told["refused"] == 0 and told["n_answers"] == 6
    assert [row["hops"] for row in told["by_hops"]] == [1, 2]
    assert told == {"trace": str(out), **json.loads((out / "summary.json").read_text())}
    tokens = list(read_lines(out, "tokens"))
    assert told["core_rows_decode"] == sum(row["exit"] for row in tokens)
    assert told["mean_exit"] == pytest.approx(sum(row["exit"] for row in tokens) / len(tokens))
    about = read_meta(out)
    assert about["task"] == ["kinship"] and about["exit"] == "q:0.5" and about["model"] == str(tiny)
    starts = [row for row in read_lines(out, "requests") if row["event"] == "start"]
    assert all(row["item"] == row["request"] and row["answer_ids"] for row in starts)
    assert "not empty" in refused(capsys, "trace", tiny, *ASK, "--out", out)


def test_prompts_arrive_at_a_rate(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": [1, 2, 3], "max_new_tokens": 2}\n\n{"prompt": [4]}\n{"prompt": [99999]}\n')
    out = tmp_path / "trace"
    options = ["--rate", "200", "--max-new-tokens", "3", "--policy", "no-refill", "--prefill", "ragged", "--tap", "1"]
    assert main(["trace", str(tiny), "--prompts", str(file), "--out", str(out), *options]) == 0
    said, err = capsys.readouterr()
    assert "5 tokens of 3 requests" in said and err.startswith("refused: ") and "99999" in err
    assert [len(row["lens"][0]) for row in read_lines(out, "tokens")] == [1] * 5
    arrivals = [row["arrival"] for row in read_lines(out, "requests") if row["event"] == "start"]
    assert arrivals == sorted(arrivals) and arrivals[1] > arrivals[0]


def test_full_disk_and_missing_answers_are_lines(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"text": "a"}\n')
    assert "line 2" in refused(capsys, "trace", tiny, "--prompts", bad, "--out", tmp_path / "a")
    bad.write_text('{"prompt": "a", "n": 3}\n')
    assert "unknown field n" in refused(capsys, "trace", tiny, "--prompts", bad, "--out", tmp_path / "a")
    bad.write_text("\n")
    assert "no prompts" in refused(capsys, "trace", tiny, "--prompts", bad, "--out", tmp_path / "a")
    assert "from a file" in refused(capsys, "trace", tiny, "--prompts", bad, "--hops", "1", "--out", tmp_path / "a")
    assert "rate" in refused(capsys, "trace", tiny, *ASK, "--rate", "0", "--out", tmp_path / "a")
    assert "known" in refused(capsys, "trace", tiny, *ASK, "--exit", "never", "--out", tmp_path / "a")
    assert "lookahead" in refused(capsys, "trace", tiny, *ASK, "--exit", "lookahead:0.5", "--out", tmp_path / "a")
    assert "look ahead" in refused(capsys, "trace", tiny, *ASK, "--lookahead", "x", "--out", tmp_path / "a")
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot write" in refused(capsys, "trace", tiny, *ASK, "--out", file / "a")
    assert not (tmp_path / "a").exists()
