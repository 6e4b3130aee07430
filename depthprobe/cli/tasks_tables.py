"""Tables that `depthprobe tasks check` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def shortcut_table(task: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Accuracies by shortcut and hops; the best of each number of hops is marked."""
    hops = sorted({row["hops"] for row in rows})
    cells = {(row["shortcut"], row["hops"]): row for row in rows}
    best = {k: max(row["accuracy"] for row in rows if row["hops"] == k) for k in hops}
    counts = {k: next(row["n"] for row in rows if row["hops"] == k) for k in hops}
    table = _by_hops(f"{task}: what can be had without following the chain", "shortcut", hops)
    for name in dict.fromkeys(row["shortcut"] for row in rows):
        values: list[str] = []
        for k in hops:
            row = cells.get((name, k))
            text = "" if row is None else f"{row['accuracy']:.2f}"
            values.append(f"[bold]{text}[/bold]" if row and row["accuracy"] == best[k] else text)
        table.add_row(name, *values)
    table.add_section()
    table.add_row("± (95 %, at most)", *(f"{_half(rows, k):.2f}" for k in hops), style="dim")
    table.add_row("items", *(str(counts[k]) for k in hops), style="dim")
    return table


def donor_table(task: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Items with a donor of each kind by hops; rows as in `Donors.counts`, with "control"."""
    hops = sorted({row["hops"] for row in rows})
    found = {(row["kind"], row["hops"]): row["found"] for row in rows}
    asked = {row["hops"]: row["asked"] for row in rows}
    table = _by_hops(f"{task}: items that have a donor", "kind of donor", hops)
    for control in (False, True):
        for kind in dict.fromkeys(row["kind"] for row in rows if row["control"] == control):
            name = kind.replace("_", " ") + (" (control)" if control else "")
            table.add_row(name, *(str(found.get((kind, k), "")) for k in hops))
    table.add_section()
    table.add_row("items asked", *(str(asked[k]) for k in hops), style="dim")
    return table


def novelty_table(task: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Items of which something is new by hops; rows as `novelty_counts` gives them."""
    table = _by_hops(f"{task}: what is new to training", "items with a new", [row["hops"] for row in rows])
    for way in rows[0]["new"]:
        table.add_row(way, *(str(row["new"][way]) for row in rows))
    table.add_section()
    table.add_row("nothing new", *(str(row["nothing_new"]) for row in rows))
    table.add_row("items", *(str(row["items"]) for row in rows), style="dim")
    return table


def _by_hops(title: str, first: str, hops: Sequence[int]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for k in hops:
        table.add_column(f"k={k}", justify="right", no_wrap=True)
    return table


def _half(rows: Sequence[dict[str, Any]], hops: int) -> float:
    """The widest half-interval of a number of hops."""
    return max((row["high"] - row["low"]) / 2 for row in rows if row["hops"] == hops)
