"""A finished run in a notebook: its headline, accuracy and settling by hops, and a link to the report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["summary_html"]

_CELL = ' style="text-align:right;padding:0 .8em"'


def summary_html(summary: Mapping[str, Any], report: Path) -> str:
    """HTML of `analysis.summarise`'s dict; colours and fonts are the notebook's own."""
    parts = [_task(summary["model"], task) for task in summary["tasks"]]
    try:
        link = os.path.relpath(report)  # Jupyter serves what lies beside the notebook
    except ValueError:  # another drive
        link = str(report)
    parts.append(f'<p>Report: <a href="{escape(link, quote=True)}" target="_blank">{escape(link)}</a></p>')
    return "\n".join(parts)


def _task(model: str, task: Mapping[str, Any]) -> str:
    gate = task["exit"] is not None
    head = ["hops", "accuracy (95 %)", "best shortcut", f"settles ({task['unit']})"]
    if gate:
        head.append(f"gate exit (q {task['exit']['q']:g})")
    rows = []
    for row in task["hops"]:
        bounds = "" if row["low"] is None else f" ({row['low']:.2f}–{row['high']:.2f})"
        shortcut = "–" if row["shortcut"] is None else f"{row['shortcut_accuracy']:.2f} {row['shortcut']}"
        cells = [str(row["hops"]), f"{row['accuracy']:.2f}{bounds}", shortcut, _number(row["settling"])]
        rows.append(cells + ([_number(row["mean_exit"])] if gate else []))
    body = "".join(_row(cells, "td") for cells in rows)
    title = f"{model} on {task['task']}: {task['n_stories']} stories"
    return (
        f"<table><caption>{escape(title)}</caption><thead>{_row(head, 'th')}</thead><tbody>{body}</tbody></table>"
        f"<p>{escape(task['headline'])}</p>"
    )


def _row(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}{_CELL}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
