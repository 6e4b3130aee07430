"""The few numbers that a run is about, and one headline for each task in words, with its uncertainty.

The words follow the intervals: a slope whose interval includes 0 is told as no measured change, and an
accuracy that does not beat the strongest shortcut is said not to, because settling depth then says little
about composition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from depthprobe import tables
from depthprobe.analysis.effective import effective_sentence
from depthprobe.analysis.windows import ENDS, NEEDED, backwards, site_of

__all__ = ["LEAST_MOVED", "summarise"]

#: What moves by less than this share of the depth per hop, by both bounds of its interval, hardly moves.
LEAST_MOVED = 5e-3


def summarise(found: Mapping[str, pl.DataFrame], *, name: str, exit_q: float | None = None) -> dict[str, Any]:
    """Analysis tables → a plain, JSON-ready dict.

    Args:
        found: what `analyse` returned; with a `shortcuts` table the accuracies are compared with it.
        name: of the model, for the sentences.
        exit_q: threshold under which `exits_by_hops` was made.

    Returns:
        model, headline (all tasks' sentences) and tasks: one dict per task with headline, unit ("loops",
        "layers" of an ordinary transformer, or "readouts", the steps of a looped model's axis), n_stories,
        n_items, hops (one dict per k: accuracy at full depth, strongest shortcut, mean settling depth and
        gate exit), slopes, differences, exit (at the model's own q), windows (slopes of patching's windows, and of a
        crossing its mean, as a share of the depth; empty without patching) and effective (slopes of effective depth).
    """
    shortcuts = found.get("shortcuts", tables.empty("shortcuts"))
    names = found["settling"]["task"].unique().sort().to_list()
    names.sort(key=lambda task: task != "kinship")
    tasks = [_of_task(found, shortcuts, task, name, exit_q) for task in names]
    return {"model": name, "headline": " ".join(task["headline"] for task in tasks), "tasks": tasks}


def _of_task(
    found: Mapping[str, pl.DataFrame], shortcuts: pl.DataFrame, task: str, name: str, exit_q: float | None
) -> dict[str, Any]:
    own = {
        key: table.filter(pl.col("task") == task) for key, table in found.items() if "task" in table.columns
    }
    settling = own["settling"]
    # A coda may change the answer after the last loop; then loops do not tell where it settles and the axis
    # does.
    looped = settling["settling_loop"].null_count() == 0
    column = "settling_loop" if looped else "settling_depth"
    unit = "loops" if looped else "readouts" if own["fixed_exits"].height else "layers"
    summary: dict[str, Any] = {
        "task": task,
        "unit": unit,
        "settling_column": column,
        "n_stories": settling["story"].n_unique(),
        "n_items": settling.height,
        "hops": _by_hops(own, shortcuts.filter(pl.col("task") == task), column),
        "slopes": own["slopes"].drop("task").to_dicts(),
        "differences": own["differences"].drop("task").to_dicts(),
        "exit": _exit(own["exits"], exit_q),
        "windows": _window_rows(own),
    }
    probed = "effective_slopes" in own and own["effective_slopes"].height > 0
    summary["effective"] = own["effective_slopes"].drop("task").to_dicts() if probed else []
    effective = effective_sentence(found, task, name) if probed else ""
    summary["headline"] = " ".join(_sentences(summary, name, effective))
    return summary


def _by_hops(own: Mapping[str, pl.DataFrame], shortcuts: pl.DataFrame, column: str) -> list[dict[str, Any]]:
    rows = []
    last = own["accuracy"]["depth"].max()
    for cell in own["accuracy"].filter(pl.col("depth") == last).sort("hops").to_dicts():
        row = {key: cell[key] for key in ("hops", "accuracy", "low", "high", "p_correct", "p_plausible", "n")}
        best = shortcuts.filter(pl.col("hops") == cell["hops"]).sort(
            ["accuracy", "shortcut"], descending=[True, False]
        )
        row["shortcut"] = best["shortcut"][0] if best.height else None
        row["shortcut_accuracy"] = best["accuracy"][0] if best.height else None
        row["shortcut_high"] = best["high"][0] if best.height else None
        row["settling"] = (
            own["settling"].filter(pl.col("hops") == cell["hops"])[column].cast(pl.Float64).mean()
        )
        gate = own["exits_by_hops"].filter(pl.col("hops") == cell["hops"])
        row["mean_exit"] = gate["mean_exit"][0] if gate.height else None
        row["expected_depth"] = gate["expected_depth"][0] if gate.height else None
        rows.append(row)
    return rows


def _exit(exits: pl.DataFrame, exit_q: float | None) -> dict[str, Any] | None:
    at = exits.filter(pl.col("q") == exit_q) if exit_q is not None else exits.clear()
    return at.drop("task").to_dicts()[0] if at.height else None


def _sentences(summary: dict[str, Any], name: str, effective: str) -> list[str]:
    task, unit = summary["task"], summary["unit"]
    slopes = {(row["quantity"], row["group"]): row for row in summary["slopes"]}
    settling = slopes[summary["settling_column"], "all"]
    hops = [row["hops"] for row in summary["hops"]]
    said = [_settling(name, task, unit, settling, hops)]
    gate = slopes.get(("gate_exit", "all"))
    if gate is not None and gate["slope"] is not None:
        said.append(_gate(gate))
    for row in summary["differences"]:
        if row["quantity"].startswith("accuracy: loop 1") and row["difference"] is not None:
            said.append(_first_loop(row))
    if summary["windows"]:
        said.append(_windows(name, summary["windows"]))
    said.append(effective)
    said.append(_shortcut(summary["hops"]))
    return [sentence for sentence in said if sentence]


def _settling(name: str, task: str, unit: str, row: dict[str, Any], hops: list[int]) -> str:
    if row["n_stories"] == 0:
        return (
            f"On {task}, no story is asked at two hop counts, so {name} has no paired slope of depth by hops."
        )
    if row["slope"] is None:
        return (
            f"On {task}, how {name}'s settling depth changes with hops is not told: {row['reason']}: "
            "ask for more stories with --n."
        )
    change = f"{row['slope']:+.2f} {unit} per hop, 95 % interval {row['low']:+.2f} to {row['high']:+.2f}"
    asked = f"{row['n_stories']} stories, each asked at {_range(hops)} hops"
    if row["n_clusters"] < row["n_stories"]:
        asked += f", in {row['n_clusters']} clusters of like chains"
    if row["low"] > 0:
        found = f"{name} settles on its answer later the more hops are asked ({change}; {asked})"
    elif row["high"] < 0:
        found = (
            f"{name} settles on its answer earlier, not later, the more hops are asked ({change}; {asked})"
        )
    else:
        change += ", which includes 0"
        found = f"no change of {name}'s settling depth with hops was measured ({change}; {asked})"
    return f"On {task}, {found}."


def _gate(row: dict[str, Any]) -> str:
    change = f"{row['slope']:+.2f} loops per hop, {row['low']:+.2f} to {row['high']:+.2f}"
    if row["low"] > 0:
        return f"Its gate leaves later with more hops ({change})."
    if row["high"] < 0:
        return f"Its gate leaves earlier with more hops ({change})."
    return f"Its gate shows no change of exit depth with hops ({change}, which includes 0)."


def _first_loop(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return ""
    points = f"{100 * row['difference']:+.0f} points, {100 * row['low']:+.0f} to {100 * row['high']:+.0f}"
    at = f"at {_range([row['min_hops'], row['max_hops']])} hops"
    if row["high"] < 0:
        return f"One loop alone is less accurate than all of them {at} ({points})."
    if row["low"] > 0:
        return f"One loop alone is more accurate than all of them {at} ({points})."
    return f"No accuracy difference between one loop and all was measured {at} ({points}, which includes 0)."


def _window_rows(own: Mapping[str, pl.DataFrame]) -> list[dict[str, Any]]:
    if "window_slopes" not in own:
        return []
    windows = own["windows"]
    means = {
        end: windows.filter((pl.col("end") == end) & (pl.col("site") == site_of(windows, end)))["relative"].mean()
        for end in ENDS
    }
    rows = own["window_slopes"].drop("task").to_dicts()
    relative = "_crossed_relative"
    return [row | {"mean": means.get(q.removesuffix(relative)) if (q := row["quantity"]).endswith(relative) else None}
            for row in rows]  # fmt: skip


def _windows(name: str, rows: list[dict[str, Any]]) -> str:
    found = {row["quantity"]: row for row in rows}
    arrives, leaves = found["destination_crossed_relative"], found["source_crossed_relative"]
    if not arrives["n_pairs"]:
        return f"By patching nothing is told of {name}'s depth ({arrives['reason']})."
    if arrives["slope"] is None and leaves["slope"] is None:
        why = f"{arrives['reason']}{_remedy(arrives)}"
        return f"By patching, whether {name} uses more depth with more hops is not told: {why}."
    said = [_moves(arrives, "what the answer needs reaches the last token")]
    if NEEDED in found:  # patched in all later loops: what is left of the depth needs the word
        mean = None if leaves["mean"] is None else 1 - leaves["mean"]
        said.append(_needed(backwards(leaves) | {"mean": mean}))
    else:
        said.append(_moves(leaves, "the changed word stops mattering"))
    pairs = f"{arrives['n_pairs']} pairs of stories, right on both"
    return f"By patching, {' and '.join(part for part in said if part)} ({pairs})."


def _remedy(row: Mapping[str, Any]) -> str:
    """What helps against too few; nothing of the kind helps where no story is asked twice."""
    if not row["n_stories"]:
        return ": ask at two hop counts or more with --hops"
    return ": ask for more stories with --probe-items, and as many with --n"


def _moves(row: Mapping[str, Any], what: str) -> str:
    found = _told(row, "later", "earlier, not later,")
    if found is None:
        return ""
    moved, change = found
    if moved is None:
        return f"no change with hops was measured of when {what} ({change})"
    return f"{what} {moved} ({change})" if moved else f"when {what} hardly changes with hops ({change})"


def _needed(row: Mapping[str, Any]) -> str:
    found = _told(row, "more", "less")
    if found is None:
        return ""
    moved, change = found
    if moved is None:
        return f"no change with hops was measured of how much of the depth the changed word is needed for ({change})"
    if not moved:
        return f"how much of the depth the changed word is needed for hardly changes with hops ({change})"
    amount, rest = moved.split(" ", 1)
    return f"the changed word is needed for {amount} of the depth {rest} ({change})"


def _told(row: Mapping[str, Any], rises: str, falls: str) -> tuple[str | None, str] | None:
    """(which way, "" for hardly at all, None for no measured change; the change in words); None: it is not told."""
    if row["slope"] is None:
        return None
    most = max(abs(row["low"]), abs(row["high"]))
    digits = 1 if most >= LEAST_MOVED else 2 if most >= LEAST_MOVED / 10 else 3
    slope, low, high = (f"{100 * row[name]:+.{digits}f}" for name in ("slope", "low", "high"))
    change = f"{slope} % of the depth per hop, 95 % interval {low} to {high}"
    if row["mean"] is not None:
        change += f"; on average {'for the last' if rises == 'more' else 'at'} {100 * row['mean']:.0f} %"
    if row["share_censored"]:
        change += f"; {100 * row['share_censored']:.0f} % of the pairs have no crossing"
    if most < LEAST_MOVED:
        return "", change
    if row["low"] <= 0 <= row["high"]:
        return None, f"{change}, which includes 0"
    return f"{rises if row['low'] > 0 else falls} the more hops are asked", change


def _shortcut(rows: list[dict[str, Any]]) -> str:
    known = [row for row in rows if row["shortcut_accuracy"] is not None and row["low"] is not None]
    asked = [row for row in known if row["hops"] >= 2]
    if not asked:
        return ""
    above = [row["hops"] for row in asked if row["low"] > row["shortcut_accuracy"]]
    if len(above) == len(asked):
        return f"Its accuracy is above the strongest shortcut at every k from {_range(above)} hops."
    if above:
        rest = [row["hops"] for row in asked if row["hops"] not in above]
        return (
            "Its accuracy is above the strongest shortcut by more than its interval only at "
            f"k = {_listed(above)}; at k = {_listed(rest)} depth may serve a shortcut."
        )
    return (
        "Its accuracy is nowhere above the strongest shortcut by more than its interval, so these depths are "
        "no evidence of step-by-step composition."
    )


def _range(hops: list[int]) -> str:
    low, high = min(hops), max(hops)
    return str(low) if low == high else f"{low}–{high}"


def _listed(hops: list[int]) -> str:
    return ", ".join(str(k) for k in hops)
