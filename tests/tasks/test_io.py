"""Items in files: strict to read, atomic to write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from depthprobe.errors import UserError
from depthprobe.tasks.io import read_data, read_items, write_items
from depthprobe.tasks.items import Item


def write(path: Path, *lines: object) -> Path:
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def test_your_own_data_needs_a_text_and_an_answer(tmp_path: Path) -> None:
    row = {"prompt": "The capital of Peru is", "answer": "Lima", "hops": 2, "id": "peru"}
    row |= {"candidates": ["Lima", "Cuzco", "Oslo"], "plausible": ["Lima", "Cuzco"]}
    path = write(tmp_path / "d.jsonl", {"text": "The capital of France is ", "answer": " Paris"}, row)
    france, peru = read_items(path)
    assert (france.text, france.answer, france.hops) == ("The capital of France is", "Paris", 1)
    assert (france.candidates, france.plausible) == (("Paris", "Lima"), ("Paris",))
    assert france.text + france.continuation() == "The capital of France is Paris"
    assert (peru.id, peru.hops, peru.plausible, peru.task) == ("peru", 2, ("Lima", "Cuzco"), "data")


def test_your_own_data_comes_back_from_a_file(tmp_path: Path) -> None:
    rows = ({"text": "x", "answer": "é"}, "", {"text": "y", "answer": "b"})
    items = read_items(write(tmp_path / "a.jsonl", *rows))
    assert [i.id for i in items] == ["line1", "line3"]
    assert write_items(tmp_path / "deep" / "b.jsonl", items) == 2
    assert read_data(tmp_path / "deep" / "b.jsonl") == items


GOOD = {"text": "x is", "answer": "a", "candidates": ["a", "b"]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not JSON", "line 2, column 2"]),
        ("[1]", ["expected an object, got list"]),
        ({**GOOD, "text": "  "}, ["field 'text' is empty"]),
        ({"answer": "a"}, ["field 'text' is missing"]),
        ({"text": "x"}, ["field 'answer' is missing"]),
        ({**GOOD, "text": 3}, ["field 'text': expected text, got int"]),
        ({**GOOD, "prompt": "x"}, ["'text' and 'prompt'"]),
        ({**GOOD, "hops": "2"}, ["field 'hops'"]),
        ({**GOOD, "hops": True}, ["field 'hops'"]),
        ({**GOOD, "candidates": ["b", "c"]}, ["field 'candidates'", "'a' is not in it"]),
        ({**GOOD, "candidates": ["a"]}, ["field 'candidates'", "fewer than two"]),
        ({**GOOD, "candidates": ["a", "a"]}, ["field 'candidates'", "twice"]),
        ({**GOOD, "candidates": "ab"}, ["field 'candidates'", "list of words"]),
        ({**GOOD, "plausible": ["b"]}, ["field 'plausible'"]),
        ({**GOOD, "anwser": "a"}, ["unknown field 'anwser'"]),
        ({**GOOD, "task": "kinship"}, ["field 'task'"]),
        ({**GOOD, "id": "line1"}, ["id 'line1' is that of line 1"]),
        ({"facts": [], "id": "z"}, ["field 'story_id' is missing"]),
    ],
)
def test_a_bad_line_is_named_in_one_line(tmp_path: Path, line: object, words: list[str]) -> None:
    path = write(tmp_path / "d.jsonl", GOOD, line)
    with pytest.raises(UserError) as caught:
        read_data(path)
    message = str(caught.value)
    assert f"{path}, line 2" in message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="no items"):
        read_items(tmp_path / "d.jsonl")


def test_missing_file_folder_and_wrong_encoding(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_items(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="a folder"):
        read_items(tmp_path)
    (tmp_path / "l1.jsonl").write_bytes(b'{"text": "x", "answer": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(UserError, match=r"line 2.*UTF-8"):
        read_items(tmp_path / "l1.jsonl")


def test_one_answer_for_all_rows_cannot_be_scored(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer than two"):
        read_items(write(tmp_path / "d.jsonl", {"text": "x", "answer": "a"}, {"text": "y", "answer": "a"}))


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GOOD)
    before = path.read_bytes()
    item = read_items(path)[0]

    def breaks() -> Iterator[Item]:
        yield item
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_items(path, breaks())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["d.jsonl"]


def test_a_place_that_cannot_be_written_to_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write here"):
        write_items(tmp_path / "file" / "d.jsonl", [])
    with pytest.raises(UserError, match="cannot write here"):  # a folder in which nothing can be made
        write_items("/proc/d.jsonl", [])
    with pytest.raises(UserError, match="folder"):
        write_items(tmp_path, [])
