"""`depthprobe trace`: from a model and questions to a record, and every refusal as one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depthprobe.cli.main import main
from depthprobe.models import LoopedConfig
from depthprobe.runtime.record import read_lines, read_meta
from tests.runtime.helpers import random_model

SMALL = LoopedConfig(
    vocab_size=17, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=2, n_prelude=1, n_coda=2,
    n_loops=3,
)  # fmt: skip
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


def test_what_no_request_can_have_is_refused_at_once(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and nothing is served or written."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3]}\n')
    ask = ["trace", tiny, "--prompts", prompts, "--out", tmp_path / "a"]
    for options, words in (
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--temperature", "-1"], "temperature"),
        (["--exit", "replay"], "replayed exits come with requests"),
        (["--policy", "full", "--prefill", "ragged"], "use prefill dense"),
        (["--exit", "q:0.5,min_prompt=2"], "dense prefill"),
        (["--exit", "lookahead:l2:0.5", "--lookahead", "/nonexistent"], "needs none"),
        (["--exit", "LookAhead:L2:0.5", "--lookahead", "/nonexistent"], "needs none"),
        (["--exit", "fixed:1", "--lookahead", "/nonexistent"], "does not look ahead"),
        (["--exit", "Lookahead:0.5", "--lookahead", "/nonexistent"], "/nonexistent"),  # it is read
        (["--exit", "lookahead:never:1"], "there is no exit rule 'never'"),
        (["--n-loops", "9"], "n_loops is 9"),
        (["--max-len", "1000000"], "max_len is 1000000"),
        (["--tap", "1000000"], "tap is 1000000"),
        (["--coda-share", "2"], "coda_share"),
        (["--kv-pages", "0"], "kv_pages is 0"),
        (["--stop", ""], "stop"),
    ):
        assert words in refused(capsys, *ask, *options), options
    prompts.write_text('{"prompt": [1]}\n{"prompt": [2], "max_new_tokens": 0}\n')
    for bad in ("0", "-1", "1.5", '"3"', "true", "null"):
        prompts.write_text('{"prompt": [1]}\n{"prompt": [2], "max_new_tokens": ' + bad + "}\n")
        said = refused(capsys, *ask)
        assert "p.jsonl, line 2" in said and "max_new_tokens" in said
    assert not (tmp_path / "a").exists()


def test_a_trace_of_nothing_served_is_an_error(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": [99999]}\n{"prompt": []}\n')
    said = refused(capsys, "trace", tiny, "--prompts", prompts, "--out", tmp_path / "a")
    assert "none of 2 requests" in said and "99999" in said
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["refused"] == 2


def test_accuracy_is_of_what_was_served() -> None:
    """A refused question is neither right nor wrong, and both counts are told."""
    from depthprobe.pipeline.trace import summarise
    from depthprobe.runtime import Engine, Sampling

    engine = Engine(random_model(SMALL, 0), exit="fixed:2", width=2, max_len=6)
    done = engine.generate([[1, 2], [3, 4], [1] * 9, [5] * 9], Sampling(max_new_tokens=2, ignore_eos=True))
    right, wrong = done[0].tokens, [17, 17]
    about = [{"answer_ids": ids, "hops": hops} for ids, hops in ((right, 1), (wrong, 1), (right, 1), (right, 2))]
    told = summarise(engine, done, about)
    counts = {"requests": 4, "served": 2, "refused": 2, "n_questions": 4, "n_answers": 2, "accuracy": 0.5}
    assert {name: told[name] for name in counts} == counts
    assert told["by_hops"] == [
        {"hops": 1, "n": 2, "accuracy": 0.5, "mean_exit": 2.0}, {"hops": 2, "n": 0, "accuracy": None, "mean_exit": None}
    ]  # fmt: skip
    nothing = summarise(engine, done[2:], about[2:])
    assert (nothing["served"], nothing["accuracy"], nothing["mean_exit"]) == (0, None, None)


def test_memory_counts_the_pages_of_prelude_and_coda() -> None:
    from depthprobe.pipeline.trace import summarise
    from depthprobe.runtime import Engine, Sampling

    engine = Engine(random_model(SMALL, 0), exit="confidence:0.9", width=2)
    done = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=2))
    told = summarise(engine, done, [{}])
    layer = 2 * 16 * 8  # keys and values in float64
    assert told["peak_outer_pages"] == 4 and told["peak_core_bytes"] == told["peak_core_pages"] * 2 * layer
    assert told["peak_kv_bytes"] == told["peak_core_bytes"] + 4 * 3 * layer
    assert told["rule_outputs"] == engine.runner.work.rule_outputs > 0


def test_stops_and_engine_options_reach_the_engine(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3]}\n')
    base = ["trace", str(tiny), "--prompts", str(prompts), "--exit", "full", "--max-new-tokens", "6", "--ignore-eos"]
    assert main([*base, "--out", str(tmp_path / "a"), "--n-loops", "2", "--coda-share", "0.3", "--max-len", "20"]) == 0
    about = read_meta(tmp_path / "a")
    assert (about["n_loops"], about["coda_share"], about["max_len"]) == (2, 0.3, 20)
    made = [row["token"] for row in read_lines(tmp_path / "a", "tokens")]
    assert len(made) == 6
    stop = ["--stop-token", str(made[2]), "--n-loops", "2"]
    assert main([*base, "--out", str(tmp_path / "b"), *stop]) == 0
    (end,) = [row for row in read_lines(tmp_path / "b", "requests") if row["event"] == "end"]
    assert end["finish_reason"] == "stop" and end["tokens"] == made[: made.index(made[2]) + 1]
    capsys.readouterr()
