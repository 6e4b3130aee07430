"""The page of a frontier: accuracy, depth, work, latency and memory of every setting, in one HTML file.

    from depthprobe.report.frontier import write_frontier
    write_frontier(Path("runs/frontier"))            # runs/frontier/frontier.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from depthprobe.errors import UserError
from depthprobe.files import atomic_write
from depthprobe.report import palette
from depthprobe.report.blocks import Block
from depthprobe.report.data import SCHEMA_VERSION, read_table
from depthprobe.report.figures import Grid
from depthprobe.report.manifest import model_name, version
from depthprobe.report.page import _asset, _embedded, _typeset
from depthprobe.report.panels.frontier import frontier_depth, frontier_memory
from depthprobe.report.text import count, interval, number, percent, percent_interval, points_interval, signed

__all__ = ["write_frontier"]

_AGAINST = {
    "full": "full depth", "permuted": "its exits permuted", "confidence": "the confidence exit",
    "settling": "the settling oracle", "earliest": "the earliest-equal oracle",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Section:
    slug: str
    title: str
    lead: str
    blocks: tuple[Block, ...]


def write_frontier(folder: Path, out: Path | None = None) -> Path:
    """Draw the page of a finished frontier.

    Args:
        folder: what `depthprobe frontier` wrote.
        out: where to; `folder/frontier.html` if None. Written whole or not at all.

    Raises:
        UserError: no such folder, an unfinished run, or a page that cannot be written.
    """
    import json

    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"there is no frontier here: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, where=str(folder), remedy="give the --out of `depthprobe frontier`") from None
    if manifest.get("schema_version") != SCHEMA_VERSION or manifest.get("status") != "finished":
        what = "the run is not finished, or of another version"
        raise UserError(what, where=str(folder), remedy="continue it with `depthprobe frontier … --resume`")
    found = {name: read_table(folder, name, required=True) for name in ("frontier", "frontier_differences")}
    path = folder / "frontier.html" if out is None else out
    html = _render(manifest, found, folder.resolve().name)
    atomic_write(path, html.encode(), what="the page cannot be written", remedy="choose another place")
    return path


def _render(manifest: Mapping[str, Any], found: Mapping[str, pl.DataFrame], folder: str) -> str:
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    frontier, name = found["frontier"], model_name(manifest)
    tasks = frontier["task"].unique(maintain_order=True).to_list()
    sections = [_section(frontier, found["frontier_differences"], task) for task in tasks]
    figures = [figure for section in sections for block in section.blocks for figure in block.figures]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
                              finalize=_typeset)  # fmt: skip
    macros = _asset("page.html.j2").split("<!doctype html>")[0]  # figures and tables are those of the report
    return environment.from_string(macros + _asset("frontier.html.j2")).render(
        name=name, sections=sections, facts=_facts(manifest), version=version(manifest), folder=folder,
        variables=palette.css(1), style=_asset("style.css"), figures=_embedded({f.id: f.spec for f in figures}),
        plotly=get_plotlyjs().replace("</script", "<\\/script"), run_name=_embedded(folder),
        sheets=_embedded({f.id: f.csv() for f in figures}), scripts=[_asset("page.js"), _asset("export.js")],
    )  # fmt: skip


def _section(frontier: pl.DataFrame, differences: pl.DataFrame, task: str) -> _Section:
    rows = frontier.filter(pl.col("task") == task)
    whole = rows.filter(pl.col("hops").is_null())
    reason = whole["reason"][0]
    figures = (frontier_depth(frontier, task), frontier_memory(frontier, task))
    none = f" No intervals: {reason}." if reason else ""
    blocks = (
        Block(
            "What does leaving early cost?",
            "Everything here was served, keys and values as each layout keeps them. Between two fixed depths lie their "
            "random mixtures: a rule gains by choosing where to go deep if it stands above the dotted line. Permuted "
            "exits keep how often each depth is taken and forget for which token. The confidence exit has its "
            "threshold from other stories of another split, where it has the rule's mean depth. The oracles know what "
            "full depth would say: one leaves where that word stays the first, one where it first is." + none,
            figures,
        ),
        Block("All of it together", "Latency is from a request's arrival to its end, for each generated token, with as "
              "many requests at a time as the engine has slots.", table=_table(whole), table_title="All hops"),
        Block("Against what it has to be better than", "The rule's accuracy minus the other's, in points, question by "
              "question, and its mean depth minus the other's.",
              table=_differences(differences.filter((pl.col("task") == task) & pl.col("hops").is_null())),
              table_title="Paired differences, with 95 % intervals over clusters of stories"),
    )  # fmt: skip
    return _Section(task, task, _lead(whole), blocks)


def _lead(whole: pl.DataFrame) -> str:
    kv = whole["kv"][0]
    own = whole.filter(pl.col("kv") == kv)
    full = own.filter(pl.col("kind") == "fixed").sort("mean_exit").row(-1, named=True)
    rules = own.filter(pl.col("kind") == "rule").sort("mean_exit")
    said = [
        f"{row['setting']} leaves after {number(row['mean_exit'])} of {number(full['mean_exit'], 0)} loops with "
        f"{percent(row['accuracy'])} right; a mixture of fixed depths with that mean has "
        f"{percent(row['mixture_accuracy'])} ({signed(100 * row['gain'], 1)} points, {_points(row, 'gain')})."
        for row in rules.iter_rows(named=True)
    ]
    return f"{kv} keys, {count(full['n'], 'answer')}: full depth is {percent(full['accuracy'])} right. {' '.join(said)}"


def _table(whole: pl.DataFrame) -> Grid:
    head = (
        "keys and values", "setting", "rule", "right", "mean depth", "decoded passes", "all passes",
        "points over a mixture", "over one of equal passes", "readouts for the rule",
        "s a token (median, 90 %)", "tokens/s", "peak KV, MiB",
    )  # fmt: skip
    rows = tuple(
        (
            row["kv"], row["setting"], row["rule"],
            f"{percent(row['accuracy'])} ({percent_interval(row['accuracy_low'], row['accuracy_high'])})",
            f"{number(row['mean_exit'])} ({interval(row['mean_exit_low'], row['mean_exit_high'])})",
            percent(row["decode_share"]), percent(row["all_share"]),
            *("" if row[name] is None else f"{signed(100 * row[name], 1)} ({_points(row, name)})"
              for name in ("gain", "gain_all")),
            number(row["read_rows"], 0), f"{number(row['latency_p50'], 3)}, {number(row['latency_p90'], 3)}",
            number(row["tokens_per_s"], 1), number(row["peak_kv_bytes"] / 2**20, 1),
        )
        for row in whole.iter_rows(named=True)
    )  # fmt: skip
    return Grid(head, rows, "frontier", note="Passes are shares of all loops for every token.")


def _differences(rows: pl.DataFrame) -> Grid:
    head = ("keys and values", "rule", "against", "points of accuracy", "loops")
    lines = tuple(
        (
            row["kv"], row["setting"], _AGAINST[row["against"]],
            f"{signed(100 * row['accuracy'], 1)} ({_points(row, 'accuracy')})",
            f"{signed(row['mean_exit'])} ({interval(row['mean_exit_low'], row['mean_exit_high'])})",
        )
        for row in rows.iter_rows(named=True)
    )  # fmt: skip
    return Grid(head, lines, "frontier_differences")


def _points(row: Mapping[str, Any], name: str) -> str:
    return points_interval(row[f"{name}_low"], row[f"{name}_high"])


def _facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    config, about = manifest.get("config", {}), manifest.get("model", {})
    counts = manifest.get("counts", {})
    rows = [
        ("model", about.get("name")), ("fingerprint", about.get("fingerprint")), ("dtype", about.get("dtype")),
        ("device", about.get("device")), ("tasks", ", ".join(config.get("task", ()))),
        ("questions", counts.get("questions")), ("answers served", counts.get("answers")),
        ("split", config.get("split")), ("order of facts", config.get("order")),
        ("engine", ", ".join(f"{k} {v}" for k, v in config.get("engine", {}).items())),
        ("stories for thresholds", config.get("calibrate")), ("seed", manifest.get("seed")),
        ("command", manifest.get("command")), ("started", manifest.get("started")),
        ("finished", manifest.get("finished")), ("git", manifest.get("git")),
    ]  # fmt: skip
    return [(label, str(value)) for label, value in rows if value is not None and value != ""]
