"""A trace's JSON lines as tables.

    found = trace_tables(Path("traces/demo"))           # served_requests, served_tokens, served_ticks
    write_tables(Path("traces/demo"), found)            # traces/demo/tables/*.parquet
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.runs.files import atomic_write
from depthprobe.runtime.record import read_lines, read_meta

__all__ = ["trace_tables", "write_tables"]

#: of the record's field -> of the table, where they differ
_TOKEN_NAMES = {"lambda": "gate_lambda", "cdf": "gate_cdf"}
_GIVEN = ("item", "story", "cluster", "task", "hops", "answer_ids")


def trace_tables(folder: Path) -> dict[str, pl.DataFrame]:
    """The record of a trace, as far as it was written: a cut last line is left out, a request without an end has nulls.

    Raises:
        UserError: no trace, or lines that are not a trace's.
    """
    about = read_meta(folder)
    tokens = [_token(line) for line in read_lines(folder, "tokens")]
    found = {
        "served_requests": _requests(folder, about, tokens),
        "served_tokens": tokens,
        "served_ticks": [_only("served_ticks", line) for line in read_lines(folder, "ticks")],
    }
    try:
        return {name: tables.conform(name, rows) for name, rows in found.items()}
    except (UserError, pl.exceptions.PolarsError) as error:
        what = f"its lines are not those of a trace: {getattr(error, 'what', error)}"
        raise UserError(what, where=str(folder), remedy="serve the requests again") from None


def write_tables(folder: Path, found: Mapping[str, pl.DataFrame]) -> None:
    """Write tables to `folder/tables/NAME.parquet`, each whole or not at all; one that is there is replaced.

    Raises:
        UserError: the disk is full or not to be written to.
    """
    for name, table in found.items():
        buffer = io.BytesIO()
        tables.check(name, table).write_parquet(buffer)
        atomic_write(folder / "tables" / f"{name}.parquet", buffer.getbuffer())


def _token(line: Mapping[str, Any]) -> dict[str, Any]:
    row = _only("served_tokens", {_TOKEN_NAMES.get(key, key): value for key, value in line.items()})
    lens = row["lens"]
    # one token of each readout may stand without a list of its own
    row["lens"] = None if lens is None else [own if isinstance(own, list) else [own] for own in lens]
    return row


def _requests(folder: Path, about: Mapping[str, Any], tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    made: dict[str, list[dict[str, Any]]] = {}
    for token in tokens:
        made.setdefault(token["request"], []).append(token)
    for line in read_lines(folder, "requests"):
        name = line["request"]
        if line.get("event") == "start":
            own = sorted(made.get(name, ()), key=lambda row: row["index"])
            rows[name] = _only("served_requests", {
                **{key: line.get(key) for key in _GIVEN}, "request": name, "prompt": line["prompt"],
                "arrival": line["arrival"], "temperature": (line.get("sampling") or {}).get("temperature", 0.0),
                # until its end says it
                "tokens": [row["token"] for row in own], "exits": [row["exit"] for row in own],
            })  # fmt: skip
            if about.get("prefill") == "dense":
                rows[name]["prompt_exits"] = [about["n_loops"]] * (len(line["prompt"]) - 1)
        elif name in rows:
            ends = ("tokens", "exits", "prompt_exits", "finish_reason", "first_token", "finished", "preemptions")
            rows[name] |= {key: line.get(key) for key in ends}
    return list(rows.values())


def _only(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a table; what later versions of the record say besides is left out, what they lack is null."""
    return {column: line.get(column) for column in tables.SCHEMAS[name]}
