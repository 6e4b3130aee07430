"""`depthprobe frontier`: the tables, the page, resumption, and every refusal as one line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from depthprobe.cli.frontier import split_rules
from depthprobe.cli.main import main
from depthprobe.runs import RunFolder

ASK = ["--task", "kinship", "--hops", "1-2", "--split", "any", "--n", "3", "--calibrate", "2", "--width", "4"]
TIMED = ("latency", "seconds", "tokens_per_s", "latency_p50", "latency_p90")


def table(folder: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(folder / "tables" / f"{name}.parquet").drop(TIMED, strict=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["frontier", *(str(argument) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_rules_are_told_from_their_options() -> None:
    assert split_rules("q:0.5,min=2,q:0.9 kl:mean=2,min_prompt=1") == ["q:0.5,min=2", "q:0.9", "kl:mean=2,min_prompt=1"]


def test_everything_is_served_and_a_stopped_run_goes_on(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = [*ASK, "--kv", "ragged,shared", "--exit", "q:0.4,q:mean=2", "--permutations", "2"]
    out = tmp_path / "whole"
    assert main(["frontier", str(tiny), *ask, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "kinship, shared KV: 6 answers" in said and "earliest-equal oracle" in said and "no intervals" in said
    answers, served = table(out, "frontier_answers"), table(out, "frontier_served")
    # 3 fixed depths, 2 rules, each with a confidence exit and two permutations, 2 oracles, in 2 layouts
    assert served.height == 2 * (3 + 2 * 4 + 2) and answers.height == 6 * served.height
    for row in served.iter_rows(named=True):
        own = answers.filter(setting=row["setting"], kv=row["kv"], seed=row["seed"])
        assert own["decode_rows"].sum() == row["decode_rows"]
        assert own["decode_rows"].sum() + own["prompt_rows"].sum() == row["all_rows"]
        set_aside = row["kind"] == "confidence" or row["setting"] == "q:mean=2"
        assert (row["target"] is not None) == (row["n_calibration"] is not None) == set_aside
    rule, shuffled = (
        answers.filter(setting=name, kv="ragged") for name in ("q:0.4", "permuted q:0.4")
    )  # fmt: skip
    for _, one in shuffled.group_by("seed"):
        assert sorted(one["mean_exit"]) == sorted(rule["mean_exit"])
    full, settled = (answers.filter(setting=name, kv="ragged") for name in ("fixed:3", "settling oracle"))
    assert full["predicted"].list.first().to_list() == settled["predicted"].list.first().to_list()
    page = (out / "frontier.html").read_text()
    assert "What leaving early costs" in page and "http-equiv" in page

    # killed in the middle, then continued
    stop, write = 9, RunFolder.write_part

    def dies(self: RunFolder, name: str, number: int, rows: pl.DataFrame) -> None:
        if number == stop:
            raise KeyboardInterrupt
        write(self, name, number, rows)

    again = tmp_path / "again"
    monkeypatch.setattr(RunFolder, "write_part", dies)
    assert main(["frontier", str(tiny), *ask, "--out", str(again)]) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert "unfinished" in refused(capsys, tiny, *ask, "--out", again)
    assert "permutations: 2 there, 1 here" in refused(capsys, tiny, *ask[:-1], "1", "--out", again, "--resume")
    assert main(["frontier", str(tiny), *ask, "--out", str(again), "--resume", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == str(again) and len(told["frontier"]) == table(again, "frontier").height
    for name in ("frontier_answers", "frontier_served", "frontier", "frontier_differences"):
        assert table(again, name).equals(table(out, name)), name
    assert not (again / "tables" / "frontier_answers").exists()
    assert main(["frontier", str(tiny), *ask, "--out", str(again)]) == 0  # finished: drawn again
    assert "finished already" in capsys.readouterr().err


def test_prompts_may_leave_early(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ragged"
    options = ["--prefill", "ragged", "--exit", "confidence:0.2", "--permutations", "1"]
    assert main(["frontier", str(tiny), *ASK, *options, "--out", str(out)]) == 0
    answers = table(out, "frontier_answers")
    assert "confidence" not in answers["kind"].to_list()  # beside itself
    one = answers.filter(setting="fixed:1")
    assert one["prompt_rows"].to_list() == one["prompt_exits"].list.len().to_list()
    rule, shuffled = (answers.filter(setting=name) for name in ("confidence:0.2", "permuted confidence:0.2"))
    assert rule["prompt_rows"].sum() == shuffled["prompt_rows"].sum()
    assert table(out, "frontier_served").filter(kind="rule")["read_rows"][0] >= rule["decode_rows"].sum()


def test_refusals_are_lines(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", tmp_path / "a"]
    assert "every fixed depth" in refused(capsys, tiny, *ASK, "--exit", "fixed:2", *out)
    assert "known" in refused(capsys, tiny, *ASK, "--exit", "never", *out)
    assert "one twice" in refused(capsys, tiny, *ASK, "--exit", "q:0.5,q:0.5", *out)
    assert "names nothing" in refused(capsys, tiny, *ASK, "--exit", ",", *out)
    assert "no early exits" in refused(capsys, tiny, *ASK, "--kv", "depth-indexed", *out)
    assert "no KV layout" in refused(capsys, tiny, *ASK, "--kv", "ragged,flat", *out)
    assert "within 1 to 3" in refused(capsys, tiny, *ASK, "--exit", "q:mean=7", *out)
    assert "permutations" in refused(capsys, tiny, *ASK, "--permutations", "-1", *out)
    assert "calibrate" in refused(capsys, tiny, *ASK[:-4], "--calibrate", "0", *out)
    assert "policy" in refused(capsys, tiny, *ASK, "--policy", "full", *out)
    assert "no run to resume" in refused(capsys, tiny, *ASK, *out, "--resume")
    assert not (tmp_path / "a").exists()
