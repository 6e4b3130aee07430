"""The CLUTRR layout, on rows written for this test."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from depthprobe.errors import UserError
from depthprobe.tasks.clutrr import check_rows, clutrr_items, read_clutrr
from depthprobe.tasks.io import read_data
from depthprobe.tasks.kinship import RELATIONS

TINY = Path(__file__).parent / "data" / "clutrr_tiny.csv"


def cells() -> list[dict[str, str]]:
    with TINY.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_are_read_in_the_order_of_the_chain() -> None:
    rows = read_clutrr(TINY)
    assert [(row.number, row.id, row.hops) for row in rows] == [
        (1, "tiny-0", 2),
        (2, "tiny-1", 3),
        (3, "tiny-2", 2),
        (4, "tiny-3", 2),
    ]
    assert rows[1].facts == (
        ("Mads", "brother", "Ulla"),
        ("Svea", "daughter", "Mads"),
        ("Tor", "brother", "Svea"),
    )
    assert rows[1].query == ("Ulla", "Tor")
    assert "[" not in rows[1].story
    assert rows[1].genders["Jorun"] == "female"
    assert (rows[1].task_name, rows[1].split, rows[1].target) == ("task_3.3", "test", "nephew")


def test_the_solver_judges_each_row() -> None:
    findings = check_rows(read_clutrr(TINY))
    assert [finding.kind for finding in findings] == ["right", "right", "wrong", "ambiguous"]
    assert str(findings[2]) == "row 3 (tiny-2): wrong: Roc is Ines's aunt, never the uncle that the row gives"
    assert "mother or mother-in-law" in findings[3].what


def test_edges_say_the_same_as_the_proof(tmp_path: Path) -> None:
    rows = cells()
    for row in rows:
        row["proof_state"] = ""
    assert [r.facts for r in read_clutrr(write(tmp_path / "e.csv", rows))] == [
        r.facts for r in read_clutrr(TINY)
    ]


def test_the_generators_own_layout_has_the_relation_as_target(tmp_path: Path) -> None:
    rows = [
        {**row, "target": row["target_text"], "text_target": f"so {row['target_text']}"} for row in cells()
    ]
    for row in rows:
        del row["target_text"]
    found = read_clutrr(write(tmp_path / "g.csv", rows))
    assert [row.target for row in found] == ["granddaughter", "nephew", "uncle", "mother"]


def test_a_walk_may_come_by_the_same_person_twice(tmp_path: Path) -> None:
    there, back = "('Ottilie', 'son', 'Bram'), ('Bram', 'daughter', 'Cleo')", "('Cleo', 'father', 'Bram')"
    row = cells()[0] | {"query": "('Ottilie', 'Bram')", "target_text": "son"}
    row["proof_state"] = f"[{{('Ottilie', 'son', 'Bram'): [{there}, {back}]}}]"
    with pytest.raises(UserError, match="circle"):  # the proof rests on what it proves
        read_clutrr(write(tmp_path / "c.csv", [row]))
    row |= {"proof_state": "", "story_edges": "[(0, 1), (1, 2), (2, 1)]"}
    row["edge_types"] = "['son', 'daughter', 'father']"
    (found,) = read_clutrr(write(tmp_path / "w.csv", [row]))
    assert found.facts == (
        ("Bram", "son", "Ottilie"),
        ("Cleo", "daughter", "Bram"),
        ("Bram", "father", "Cleo"),
    )
    assert check_rows([found])[0].kind == "right"


def test_items_ask_in_the_words_of_the_story() -> None:
    item = clutrr_items(read_clutrr(TINY))[1]
    assert item.text.endswith("lent it to her brother Tor. Tor is Ulla's")
    assert (item.answer, item.hops, item.chain_people) == ("nephew", 3, ("Ulla", "Mads", "Svea", "Tor"))
    assert (item.candidates, item.plausible) == (RELATIONS, ("son", "nephew", "son-in-law"))
    assert [span.of(item.text) for span in item.question_people_spans] == ["Tor", "Ulla"]


def test_data_files_leave_out_what_the_solver_refuses() -> None:
    remarks: list[str] = []
    items = read_data(TINY, remark=remarks.append)
    assert [item.id for item in items] == ["clutrr-1", "clutrr-2"]
    assert len(remarks) == 2
    assert "row 4 (tiny-3): ambiguous" in remarks[1]


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("query", "('Ottilie', 'Cleo'", "not a Python literal"),
        ("query", "('Ottilie',)", "not a pair of names"),
        ("proof_state", "[{('Ottilie', 'x', 'Zoe'): [('Ottilie', 'son', 'Zoe')]}]", "no step concludes"),
        ("story", "", "empty cell"),
        ("story", "[Ottilie] and [Bram].", "Cleo of the stated relations is not in the story"),
        ("target_text", "", "empty cell"),
        ("proof_state", "[1, 2]", "not a list of"),
        ("proof_state", "[{('Ottilie', 'x', 'Cleo'): [('Ottilie', 'son')]}]", "not a list of"),
        ("genders", "Ottilie:woman", "not name:male or name:female"),
        ("genders", "Ottilie", "not name:male or name:female"),
    ],
)
def test_a_bad_cell_is_named_in_one_line(tmp_path: Path, column: str, value: str, words: str) -> None:
    rows = cells()[:2]
    rows.append(rows[0] | {column: value} | ({"target": "11"} if column == "target_text" else {}))
    path = write(tmp_path / "bad.csv", rows)
    with pytest.raises(UserError) as caught:
        read_clutrr(path)
    message = str(caught.value)
    assert words in message
    assert f"{path}, row 3, column {column}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("edge_types", "['son']", "do not lead from Ottilie to Cleo"),
        ("edge_types", "son", "not a Python literal"),
        ("story_edges", "[(0, 1)]", "not one relation for each"),
        ("story_edges", "[(0, 1), (1, 9)]", "not pairs of nodes"),
    ],
)
def test_bad_edges_are_named(tmp_path: Path, column: str, value: str, words: str) -> None:
    row = cells()[0] | {"proof_state": "", column: value}
    with pytest.raises(UserError, match=words):
        read_clutrr(write(tmp_path / "bad.csv", [row]))


def test_an_unknown_relation_is_a_finding_and_no_item(tmp_path: Path) -> None:
    rows = read_clutrr(write(tmp_path / "u.csv", [cells()[0] | {"target_text": "godmother"}]))
    (finding,) = check_rows(rows)
    assert finding.kind == "unknown"
    assert "godmother" in finding.what
    assert clutrr_items(rows) == []


def test_stated_relations_that_no_family_has(tmp_path: Path) -> None:
    row = cells()[0] | {"genders": "Ottilie:female,Bram:female,Cleo:female"}
    (finding,) = check_rows(read_clutrr(write(tmp_path / "c.csv", [row])))
    assert finding.kind == "contradiction"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no column story"),
        (b"a,b\n1,2\n", "no column story and no column query"),
        (b"story,query,target_text\n", "no column proof_state"),
        (b"story,query,target_text,proof_state\n", "no rows"),
        (b"story,query,target_text,proof_state\n\xe9,,,\n", "not UTF-8"),
    ],
)
def test_a_file_that_is_not_clutrr(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_data(path)


def test_no_file_no_good_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_clutrr(tmp_path / "none.csv")
    with pytest.raises(UserError, match="no row has exactly one answer"):
        read_data(write(tmp_path / "w.csv", cells()[2:]))
