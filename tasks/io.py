"""Items in files: one JSON object a line, written whole or not at all, and read strictly.

Three kinds of file are read:

    items      what `write_items` wrote: every field of `Item`
    your data  {"text": "The capital of France is", "answer": "Paris"} and, if you like,
               "hops" (default 1), "candidates" (default: all answers of the file), "plausible" (candidates
               of the right type; default: the answer alone), "id", "story_id" (questions about one story
               share it); "prompt" may be written for "text"
    CLUTRR     a .csv with the columns of the CLUTRR release (clutrr.py)

An item of your own data has task "data", no facts and no chain. Its text ends right before the answer: a
space at the end is taken off, because it belongs to the answer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import UserError
from .items import Item, Task

__all__ = ["read_data", "read_items", "write_items"]

DATA: Task = cast("Task", "data")  # neither kinship nor follow: nothing is known about its facts
_OWN_FIELDS = ("text", "prompt", "answer", "hops", "candidates", "plausible", "id", "story_id", "task")


def write_items(path: str | Path, items: Iterable[Item]) -> int:
    """Write items, one JSON object a line, and return how many.

    The file appears under its name only when it is complete, with a parent folder if there was none.

    Raises:
        UserError: the place cannot be written to. A disk that fills up raises OSError; nothing is left behind
            then either.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise UserError(
            "cannot write here", where=str(path), remedy=f"{error.strerror}; choose another"
        ) from None
    count = 0
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for item in items:
                file.write(
                    json.dumps(_own_row(item) if item.task == DATA else item.to_dict(), ensure_ascii=False)
                )
                file.write("\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # a temporary file is private; the finished one is like any other
        if path.is_dir():
            raise UserError("is a folder", where=str(path), remedy="name a file")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return count


def read_items(path: str | Path) -> list[Item]:
    """Items from a JSON-lines file of full items or of your own data, or of both.

    Raises:
        UserError: no such file, an empty file, or a line that is not an item; the line and the field are
            named.
    """
    path = Path(path)
    rows = [(number, row) for number, row in _json_lines(path)]
    if not rows:
        raise UserError("no items", where=str(path), remedy="each line is to hold one JSON object")
    answers = tuple(dict.fromkeys(str(row["answer"]).strip() for _, row in rows if "answer" in row))
    items: list[Item] = []
    seen: dict[str, int] = {}
    for number, row in rows:
        where = f"{path}, line {number}"
        try:
            item = Item.from_dict(row) if "facts" in row else _own_item(row, number, answers)
        except ValueError as error:
            raise UserError(str(error), where=where, remedy="mend or drop the line") from None
        if item.id in seen:
            remedy = "give each line its own id"
            raise UserError(f"id {item.id!r} is that of line {seen[item.id]}", where=where, remedy=remedy)
        seen[item.id] = number
        items.append(item)
    return items


def read_data(path: str | Path, *, remark: Callable[[str], None] | None = None) -> list[Item]:
    """Items from any file that this module can read; which kind it is follows from its name and its content.

    Args:
        remark: is called with one line for each CLUTRR row that is left out because the solver finds it
            wrong or ambiguous.

    Raises:
        UserError: as `read_items` and `clutrr.read_clutrr`; or no row of a CLUTRR file stands the check.
    """
    path = Path(path)
    if path.suffix.lower() != ".csv":
        return read_items(path)
    from .clutrr import check_rows, clutrr_items, read_clutrr

    rows = read_clutrr(path)
    findings = {finding.number: finding for finding in check_rows(rows) if finding.kind != "right"}
    for finding in findings.values():
        if remark is not None:
            remark(f"{path}, {finding}: left out")
    kept = [row for row in rows if row.number not in findings]
    if not kept:
        raise UserError(
            "no row has exactly one answer, the one given", where=str(path), remedy="see the remarks"
        )
    return clutrr_items(kept)


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), remedy="check the path") from None
    except IsADirectoryError:
        raise UserError(
            "a folder, not a file", where=str(path), remedy="name a file of JSON lines in it"
        ) from None
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"not UTF-8 at byte {error.start}", where=where, remedy="save it as UTF-8"
            ) from None
        except (json.JSONDecodeError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise UserError(
                f"not JSON: {what}", where=where + column, remedy="one JSON object a line"
            ) from None
        if not isinstance(row, dict):
            what = f"expected an object, got {type(row).__name__}"
            raise UserError(what, where=where, remedy="one JSON object a line")
        yield number, row


def _own_item(row: Mapping[str, Any], number: int, answers: tuple[str, ...]) -> Item:
    """An item from a row of your own data; ValueError names the field."""
    for name in row:
        if name not in _OWN_FIELDS:
            raise ValueError(f"unknown field '{name}'")
    if "text" in row and "prompt" in row:
        raise ValueError("fields 'text' and 'prompt' are the same: give one")
    text = _filled(row, "prompt" if "prompt" in row else "text").rstrip()
    answer = _filled(row, "answer").strip()
    hops = row.get("hops", 1)
    if not isinstance(hops, int) or isinstance(hops, bool) or hops < 0:
        raise ValueError("field 'hops': expected a whole number from 0 up")
    candidates = _words(row, "candidates") if "candidates" in row else answers
    plausible = _words(row, "plausible") if "plausible" in row else (answer,)
    if answer not in candidates:
        raise ValueError(f"field 'candidates': the answer {answer!r} is not in it")
    if len(candidates) < 2:
        raise ValueError("field 'candidates': fewer than two, so that no answer could be wrong")
    if answer not in plausible or not set(plausible) <= set(candidates):
        raise ValueError("field 'plausible': it is to hold the answer, and candidates only")
    if row.get("task", DATA) != DATA:
        raise ValueError(f"field 'task': {row['task']!r} needs all fields of an item")
    name = _filled(row, "id") if "id" in row else f"line{number}"
    return Item(
        id=name,
        story_id=_filled(row, "story_id") if "story_id" in row else name,
        task=DATA,
        hops=hops,
        text=text,
        story=text,
        question="",
        answer=answer,
        candidates=candidates,
        plausible=plausible,
        facts=(),
        chain_people=(),
        chain_relations=(),
        question_people_spans=(),
        question_relation_spans=(),
        form="data",
        template="data",
        order="data",
        distractors="data",
        split=None,
        seed=0,
    )


def _own_row(item: Item) -> dict[str, Any]:
    names = ("id", "story_id", "task", "hops", "text", "answer")
    return {n: getattr(item, n) for n in names} | {
        "candidates": list(item.candidates),
        "plausible": list(item.plausible),
    }


def _filled(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise ValueError(f"field '{name}' is missing")
    if not isinstance(value, str):
        raise ValueError(f"field '{name}': expected text, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"field '{name}' is empty")
    return value


def _words(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row[name]
    if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value):
        raise ValueError(f"field '{name}': expected a list of words")
    words = tuple(v.strip() for v in value)
    if len(set(words)) < len(words):
        raise ValueError(f"field '{name}': a word stands in it twice")
    return words


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
