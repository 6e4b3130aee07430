"""Reads the public CLUTRR layout (arXiv 1908.06177) and checks every row with the solver.

A CLUTRR file is a CSV with a header. Two layouts are about and both are read:

    dataset release  ,id,story,query,target,target_text,clean_story,proof_state,f_comb,task_name,
                     story_edges,edge_types,query_edge,genders,task_split          (target is a class number)
    generator output ,id,story,query,text_query,target,text_target,clean_story,proof_state,f_comb,task_name,
                     story_edges,edge_types,query_edge,genders,syn_story,node_mapping,task_split
                                                                                   (target is the relation)

Needed are `story`, `query`, the answer (`target_text`, or `target` where it is a relation) and the stated
relations (`proof_state`, or else `story_edges`, `edge_types` and `genders`). CLUTRR writes
('Ann', 'son', 'Bob') for "Ann's son is Bob", so a triple (a, r, b) is our fact "b is the r of a", and the
query ('Ann', 'Dan') asks what Dan is to Ann.

Noise sentences of a story (tasks 2.x to 4.x) have edges but no relation in any column: the chain is what is
checked. Rows are counted from 1, without the header.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from .items import GENDER_WORDS, Item
from .kinship import RELATIONS
from .labels import plausible_relations
from .solver import ContradictionError, Knowledge
from .splits import split_of
from .stories import render_kinship_question

__all__ = ["ClutrrRow", "Finding", "check_rows", "clutrr_items", "is_clutrr_header", "read_clutrr"]

_REMEDY = (
    "columns as in the CLUTRR release are needed: story, query, target_text, proof_state, genders, task_name"
)


@dataclass(frozen=True, slots=True)
class ClutrrRow:
    """One row, parsed but not yet checked.

    Attributes:
        number: 1-based, the header not counted.
        id: the row's `id`, or "row N".
        story: the story without the square brackets around names.
        query: (a, b): what is b to a?
        target: the relation that the file gives as the answer.
        facts: the stated relations as (subject, relation, object): subject is the relation of object; in
            the order of the walk from a to b. A walk may come by the same person twice.
        genders: name -> "male" | "female", as far as the row says.
        task_name, split: as in the file, empty where missing.
    """

    number: int
    id: str
    story: str
    query: tuple[str, str]
    target: str
    facts: tuple[tuple[str, str, str], ...]
    genders: Mapping[str, str]
    task_name: str
    split: str

    @property
    def hops(self) -> int:
        """Relations from a to b."""
        return len(self.facts)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the solver says of a row.

    Attributes:
        number, id: of the row.
        kind: "right" (exactly one answer, the given one), "wrong" (exactly one answer, another), "ambiguous"
            (the stated relations allow several), "contradiction" (no family has them all), "unknown" (a word
            that is none of the relations).
        what: the finding in words.
    """

    number: int
    id: str
    kind: Literal["right", "wrong", "ambiguous", "contradiction", "unknown"]
    what: str

    def __str__(self) -> str:
        return f"row {self.number} ({self.id}): {self.kind}: {self.what}"


def check_rows(rows: Iterable[ClutrrRow]) -> list[Finding]:
    """A finding for each row, in order: the solver is given the row's stated relations and genders alone.

    CLUTRR derives answers by a list of rules, some of which take one of two readings (my son's grandmother as
    my mother, my son's father's father as my father); such rows come out as ambiguous or wrong here.
    """
    return [Finding(row.number, row.id, *_judge(row)) for row in rows]


def _judge(
    row: ClutrrRow,
) -> tuple[Literal["right", "wrong", "ambiguous", "contradiction", "unknown"], str]:
    for word in (row.target, *(relation for _, relation, _ in row.facts)):
        if word not in RELATIONS:
            return "unknown", f"{word!r} is no relation that this package knows"
    genders = [(name, GENDER_WORDS[gender == "male"], "") for name, gender in row.genders.items()]
    try:
        found = Knowledge.of([*row.facts, *genders]).between(row.query[1], row.query[0])
    except ContradictionError as error:
        return "contradiction", str(error)
    who = f"{row.query[1]} is {row.query[0]}'s"
    if found == {row.target}:
        return "right", f"{who} {row.target}"
    if row.target not in found:
        kind = "wrong" if len(found) == 1 else "ambiguous"
        return kind, f"{who} {_either(found)}, never the {row.target} that the row gives"
    return "ambiguous", f"{who} {_either(found)}; the row gives {row.target}"


def _either(words: Iterable[str]) -> str:
    """Relation words as a list in their usual order, "unrelated" last; long lists are cut."""
    found = sorted(words, key=lambda word: RELATIONS.index(word) if word in RELATIONS else len(RELATIONS))
    return " or ".join(found[:4]) + (f" or one of {len(found) - 4} more" if len(found) > 4 else "")


def clutrr_items(rows: Iterable[ClutrrRow], form: str = "statement") -> list[Item]:
    """Kinship items in CLUTRR's own words, asked in one of the kinship forms of `stories`.

    The facts are left empty, since nothing says which words of a told story state which relation; chain,
    answer, candidates and plausible answers are there. Rows with unknown relations are left out.
    """
    items: list[Item] = []
    for row in rows:
        if row.target not in RELATIONS:
            continue
        question = render_kinship_question(form, *row.query, len(row.story) + 1)
        relations = tuple(relation for _, relation, _ in row.facts)
        items.append(
            Item(
                id=f"clutrr-{row.number}",
                story_id=f"clutrr-{row.number}",
                task="kinship",
                hops=row.hops,
                text=f"{row.story} {question.text}",
                story=row.story,
                question=question.text,
                answer=row.target,
                candidates=RELATIONS,
                plausible=plausible_relations(row.target),
                facts=(),
                chain_people=(row.query[0], *(subject for subject, _, _ in row.facts)),
                chain_relations=relations,
                question_people_spans=question.people,
                question_relation_spans=(),
                form=form,
                template="clutrr",
                order="clutrr",
                distractors=row.task_name or "clutrr",
                split=split_of(relations),
                seed=0,
            )
        )
    return items


def is_clutrr_header(header: list[str]) -> bool:
    """Whether a CSV with these column names is meant to be CLUTRR."""
    return {"story", "query"} <= set(header) and bool({"target_text", "target"} & set(header))


def read_clutrr(path: str | Path) -> list[ClutrrRow]:
    """All rows of a CLUTRR file.

    Raises:
        UserError: no such file, not CSV or not UTF-8, no rows, a missing column, a cell that cannot be read:
            the row and the column are named.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(file, path))
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), remedy="check the path") from None
    except IsADirectoryError:
        raise UserError("a folder, not a file", where=str(path), remedy="name a CSV file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 at byte {error.start}", where=str(path), remedy="save the file as UTF-8"
        ) from None
    if not rows:
        raise UserError("no rows", where=str(path), remedy="the file has a header at most")
    return rows


def _rows(file: Any, path: Path) -> Iterator[ClutrrRow]:
    reader = csv.DictReader(file)
    header = list(reader.fieldnames or [])
    if not is_clutrr_header(header):
        missing = [name for name in ("story", "query", "target_text") if name not in header]
        raise UserError(f"no column {' and no column '.join(missing)}", where=str(path), remedy=_REMEDY)
    if "proof_state" not in header and not {"story_edges", "edge_types", "genders"} <= set(header):
        raise UserError("no column proof_state", where=str(path), remedy=_REMEDY)
    number = 0
    while True:
        number += 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"not CSV: {error}", where=f"{path}, row {number}", remedy="quote the cell"
            ) from None
        if row is None:
            return
        yield _Cells(row, number, path).parse()


class _Cells:
    """The cells of one row, which know where they are when they cannot be read."""

    def __init__(self, row: Mapping[str, Any], number: int, path: Path) -> None:
        self.row, self.number, self.path = row, number, path

    def parse(self) -> ClutrrRow:
        genders = self.genders()
        query = self.query()
        facts = (
            self.proof(query) if self.text("proof_state", needed=False) else self.edges(query, list(genders))
        )
        story = self.text("story").replace("[", "").replace("]", "")
        for name in {name for subject, _, obj in facts for name in (subject, obj)}:
            if name not in story:
                raise self.error("story", f"{name} of the stated relations is not in the story")
        return ClutrrRow(
            number=self.number,
            id=self.text("id", needed=False) or f"row {self.number}",
            story=" ".join(story.split()),
            query=query,
            target=self.target(),
            facts=facts,
            genders=genders,
            task_name=self.text("task_name", needed=False),
            split=self.text("task_split", needed=False),
        )

    def error(self, column: str, what: str) -> UserError:
        return UserError(
            what, where=f"{self.path}, row {self.number}, column {column}", remedy="mend or drop the row"
        )

    def text(self, column: str, *, needed: bool = True) -> str:
        value = self.row.get(column)
        value = value.strip() if isinstance(value, str) else ""
        if needed and not value:
            raise self.error(column, "empty cell")
        return value

    def literal(self, column: str) -> Any:
        text = self.text(column)
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise self.error(column, f"not a Python literal: {text[:40]!r}") from None

    def query(self) -> tuple[str, str]:
        pair = self.literal("query")
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, str) and x for x in pair)):
            raise self.error("query", "not a pair of names such as ('Ann', 'Bob')")
        return pair

    def target(self) -> str:
        for column in ("target_text", "target", "text_target"):
            text = self.text(column, needed=False)
            if text and not text.lstrip("-").isdigit():
                return text
        raise self.error("target_text", "empty cell")

    def genders(self) -> dict[str, str]:
        genders: dict[str, str] = {}
        for entry in filter(None, self.text("genders", needed=False).split(",")):
            name, colon, gender = entry.strip().rpartition(":")
            if not colon or not name or gender not in ("male", "female"):
                raise self.error("genders", f"not name:male or name:female: {entry.strip()[:40]!r}")
            genders[name] = gender
        return genders

    def proof(self, query: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
        """The leaves of the proof from left to right, which is the walk from query[0] to query[1]."""
        derived: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
        try:
            for step in self.literal("proof_state"):
                for conclusion, premises in step.items():
                    derived[_triple(conclusion)] = [_triple(premise) for premise in premises]
        except (AttributeError, TypeError, ValueError):
            raise self.error("proof_state", "not a list of {(a, relation, b): [premises]}") from None
        root = next((triple for triple in derived if (triple[0], triple[2]) == query), None)
        if root is None:
            raise self.error("proof_state", f"no step concludes what {query[1]} is to {query[0]}")
        leaves: list[tuple[str, str, str]] = []
        todo, opened = [root], 0
        while todo:
            triple = todo.pop()
            if triple in derived:
                opened += 1
                if opened > 1000:  # a step that rests on itself
                    raise self.error("proof_state", "the steps go round in a circle")
                todo.extend(reversed(derived[triple]))
            else:
                leaves.append(triple)
        return self.walk("proof_state", leaves, query)

    def edges(self, query: tuple[str, str], names: list[str]) -> tuple[tuple[str, str, str], ...]:
        """The stated relations from edges between nodes; `names` are in the order of the nodes."""
        edges, types = self.literal("story_edges"), self.literal("edge_types")
        if not isinstance(types, list) or not isinstance(edges, list) or len(edges) < len(types):
            raise self.error("edge_types", "not one relation for each of the first story_edges")
        try:  # noise edges come last and have no type
            stated = [_triple((names[a], kind, names[b])) for (a, b), kind in zip(edges, types, strict=False)]
        except (TypeError, ValueError, IndexError):
            raise self.error("story_edges", "not pairs of nodes that genders names") from None
        return self.walk("story_edges", stated, query)

    def walk(
        self, column: str, stated: list[tuple[str, str, str]], query: tuple[str, str]
    ) -> tuple[tuple[str, str, str], ...]:
        """The triples as facts, after a check that each begins where the one before it ends."""
        stops = [query[0], *(triple[2] for triple in stated)]
        if [triple[0] for triple in stated] != stops[:-1] or stops[-1] != query[1]:
            raise self.error(column, f"the stated relations do not lead from {query[0]} to {query[1]}")
        return tuple((b, relation, a) for a, relation, b in stated)


def _triple(value: Any) -> tuple[str, str, str]:
    a, relation, b = value
    if not all(isinstance(x, str) and x for x in (a, relation, b)):
        raise ValueError("not three words")
    return a, relation, b
