"""`depthprobe tasks`: files come out whole, wrong items are named, settings are checked first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from depthprobe.cli.main import main
from depthprobe.tasks.io import read_items, write_items

TINY = Path(__file__).parent / "data" / "clutrr_tiny.csv"


@pytest.fixture
def file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "items.jsonl"
    assert main(["tasks", "generate", "--out", str(path), "--n", "6", "--hops", "1-2", "--seed", "7"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    return path


def test_generate_writes_both_tasks_and_the_same_again(file: Path, tmp_path: Path) -> None:
    items = read_items(file)
    assert [(i.task, i.hops) for i in items[:2]] == [("kinship", 1), ("kinship", 2)]
    assert len(items) == 24
    again = tmp_path / "again.jsonl"
    assert main(["tasks", "generate", "-o", str(again), "--n", "6", "--hops", "1-2", "--seed", "7"]) == 0
    assert again.read_bytes() == file.read_bytes()


def test_generate_takes_settings(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"Person{chr(65 + n)}" for n in range(20)) + "\n")
    path = tmp_path / "i.jsonl"
    options = ["--task", "kinship", "--hops", "2,3", "--n", "4", "--template", "has", "--form", "qa"]
    options += ["--order", "reverse", "--distractors", "offchain", "--facts", "5", "--names", str(names)]
    assert main(["tasks", "generate", "-o", str(path), *options, "--questions", "2", "--split", "train"]) == 0
    for item in read_items(path):
        assert (item.template, item.form) == ("has", "qa")
        assert (item.order, item.distractors) == ("reverse", "offchain")
        assert len(item.facts) == 5
        assert item.split == "train"
        assert item.chain_people[0].startswith("Person")
    assert any("/q" in item.id for item in read_items(path))


def test_check_of_good_items(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", str(file)]) == 0
    out = capsys.readouterr().out
    assert "24 of 24 items have exactly one answer" in out
    for word in ("kinship", "follow", "k=2", "multiset_last", "last_two_words"):
        assert word in out


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize(
    "option",
    [["--task", "follow"], ["--hops", "1-6"], ["--seed", "0"], ["--gender-facts"], ["--split", "train"]],
)
def test_options_of_generated_items_are_refused_beside_a_file(
    file: Path, capsys: pytest.CaptureFixture[str], command: str, option: list[str]
) -> None:
    assert main(["tasks", command, str(file), *option]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{option[0]} says nothing" in said and str(file) in said


def test_check_names_wrong_items_and_says_so_with_its_exit_code(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = read_items(file)
    wrong = next(word for word in items[0].candidates if word != items[0].answer)
    bad = tmp_path / "bad.jsonl"
    write_items(bad, [replace(items[0], answer=wrong, plausible=(wrong,)), *items[1:4]])
    assert main(["tasks", "check", str(bad), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["items"], report["verified"]) == (4, 3)
    assert report["wrong"] == [f"{items[0].id}: the facts give {items[0].answer}, the item says {wrong}"]
    assert {"task", "hops", "shortcut", "accuracy", "low", "high", "n"} == set(report["shortcuts"][0])


def test_check_without_a_file_makes_items(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", "--task", "kinship", "--hops", "2", "--n", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["items"], report["verified"], report["wrong"]) == (5, 5, [])


def test_check_counts_donors_by_kind_and_hops(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", str(file), "--json"]) == 0
    assert "donors" not in json.loads(capsys.readouterr().out)
    assert main(["tasks", "check", str(file), "--donors", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["donors"]
    assert {(row["task"], row["hops"], row["kind"], row["control"]) for row in rows} >= {
        ("kinship", 1, "relation", False), ("kinship", 2, "same_answer", True),
        ("follow", 2, "name", False), ("follow", 2, "distractor_name", True),
    }  # fmt: skip
    assert all(0 <= row["found"] <= row["asked"] == 6 for row in rows)
    assert all(sum(row["by_hop"].values()) == row["found"] for row in rows)
    assert any(row["found"] for row in rows if row["kind"] == "relation")
    assert main(["tasks", "check", str(file), "--donors"]) == 0
    out = capsys.readouterr().out
    for words in ("follow: items that have a donor", "relation", "distractor name (control)", "items asked"):
        assert words in out


def test_check_says_what_is_new_against_a_training_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = tmp_path / "train.jsonl"
    write_items(train, [item for item in read_items(file) if item.hops == 1])
    assert main(["tasks", "check", str(file), "--against", str(train), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["novelty"]
    assert [(row["task"], row["hops"], row["nothing_new"], row["new"]["length"]) for row in rows] == [
        ("follow", 1, 6, 0), ("follow", 2, 0, 6), ("kinship", 1, 6, 0), ("kinship", 2, 0, 6),
    ]  # fmt: skip
    assert main(["tasks", "check", str(file), "--against", str(train)]) == 0
    out = capsys.readouterr().out
    assert "kinship: what is new to training" in out and "nothing new" in out
    train.write_text('{"text": "a is", "answer": "x"}\n{"text": "b is", "answer": "y"}\n')
    assert main(["tasks", "check", str(file), "--against", str(train)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no training item states its chain" in said


def test_check_of_a_clutrr_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", str(TINY)]) == 1
    out = capsys.readouterr().out
    assert "row 3 (tiny-2): wrong: Roc is Ines's aunt" in out
    assert "2 of 4 items" in out


def test_check_of_your_own_data_has_nothing_to_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "a is", "answer": "x"}\n{"text": "b is", "answer": "y"}\n')
    assert main(["tasks", "check", str(path)]) == 0
    assert "2 have no facts to check" in capsys.readouterr().out


def test_show_prints_story_questions_and_answers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = read_items(file)[1]
    assert main(["tasks", "show", str(file), "--item", item.id]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{item.question} {item.answer}" in out
    assert f"1:{item.chain_people[1]} is the {item.chain_relations[0]} of {item.chain_people[0]}." in out
    assert main(["tasks", "show", "--task", "follow", "--hops", "1,2", "--story", "3"]) == 0
    assert "follow-0-3" in capsys.readouterr().out
    assert main(["tasks", "show", str(TINY)]) == 0
    assert "Cleo is Ottilie's granddaughter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--out", "x.jsonl", "--hops", "9"], "out of range"),
        (["generate", "--out", "x.jsonl", "--task", "chess"], "there is no task 'chess'"),
        (["generate", "--out", "x.jsonl", "--n", "0"], "--n"),
        (["generate", "--out", "x.jsonl", "--questions", "-1"], "--questions"),
        (["generate", "--out", "x.jsonl", "--names", "none.txt"], "cannot read the names"),
        (["generate", "--out", "x.jsonl", "--form", "sung"], "no question form 'sung'"),
        (["generate"], "--out"),
        (["check", "none.jsonl"], "no such file"),
        (["show", "--item", "nobody"], "there is no item nobody"),
        (["show", str(TINY), "--story", "5"], "there is no story 5"),
    ],
)
def test_a_users_error_is_one_line_and_leaves_nothing(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert words in errors[0]
    assert list(tmp_path.iterdir()) == []
