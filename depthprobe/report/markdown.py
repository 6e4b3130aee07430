"""A run's accuracy by hops and depth as Markdown, for a README, a model card or a paper's appendix."""

from __future__ import annotations

import polars as pl

from depthprobe.analysis import GROUPS, means_by_hops, site_of
from depthprobe.report.causal import window_change, window_name, window_quantities
from depthprobe.report.data import Run, Task
from depthprobe.report.names import ROLES, known_first, role_name
from depthprobe.report.panels import no_windows
from depthprobe.report.text import missing

__all__ = ["accuracy_markdown", "causal_markdown"]


def accuracy_markdown(run: Run) -> str:
    """One table per task: a row for each hops; the loop ends (or, without loops, the axis' ticks) as columns.

    Cells are the share of questions whose best candidate is the answer; the last depth has its 95 % interval. Then the
    strongest shortcut and, for a model with a gate, the mean depth at which it leaves. Below it the change of the
    settling depth per hop, of each group of questions.
    """
    return "\n\n".join(_table(run, task) for task in run.tasks)


def causal_markdown(run: Run) -> str:
    """Windows and knock-out by hops, a table of each for a task that has them; empty for a run of the lens alone.

    Windows: the mean depth at which the effect crosses one half, by end and hops, with the shares of pairs that have
    no crossing or are not monotone; below, their change per hop. Knock-out: of each role the depth at which a cut costs
    the answer most, and how much, in nats.
    """
    parts = [part for task in run.tasks for part in (_windows(run, task), _knockout(run, task)) if part]
    return "\n\n".join(parts)


def _windows(run: Run, task: Task) -> str:
    if not task.windows.height:
        nothing = no_windows(task)
        return f"**{run.manifest['config']['model']}, {task.name}**: {nothing}" if nothing else ""
    site = {end: site_of(task.windows, end) for end in ("source", "destination")}
    rows = [["hops", "end", "depth crossed", "95 %", "pairs", "no crossing", "not monotone"], ["---:"] * 7]
    for end in ("source", "destination"):
        part = task.windows.filter((pl.col("end") == end) & (pl.col("site") == site[end]))
        for told in means_by_hops(part, "depth_crossed"):
            at = part.filter(pl.col("hops") == told["hops"])
            mean = "–" if told["mean"] is None else f"{told['mean']:.2f}"
            shares = (at["censored"].sum() / at.height, (~at["monotone"]).sum() / at.height)
            bounds = _interval(told["low"], told["high"])
            cells = [str(told["hops"]), end, mean, bounds, str(at.height), *(f"{share:.2f}" for share in shares)]
            rows.append(cells)
    changes = [f"{window_name(task, row['quantity'])}: {window_change(row)}" for row in window_quantities(task)]
    places = ", ".join(f"{end} at {where}" for end, where in site.items() if where)
    title = f"{run.manifest['config']['model']}, {task.name}: where a patch's effect crosses ½ ({task.step}; {places})"
    below = ["", f"Per hop – {'. '.join(changes)}."] if changes else []
    return "\n".join([f"**{title}**", "", *_lines(rows), *below])


def _knockout(run: Run, task: Task) -> str:
    table = task.knockout_by_depth.filter(pl.col("hops").is_not_null())
    if not table.height:
        return ""
    table = table.filter(pl.col("window") == table["window"].min())
    roles = known_first(table["role"].unique().to_list(), ROLES)
    rows = [["hops", *map(role_name, roles)], ["---:"] * (1 + len(roles))]
    for k in task.hops:
        cells = [str(k)]
        for role in roles:
            own = table.filter((pl.col("hops") == k) & (pl.col("role") == role)).sort("drop", descending=True)
            if not own.height:
                cells.append("–")
                continue
            peak = own.row(0, named=True)
            bounds = _interval(peak["low"], peak["high"])
            cells.append(f"{peak['drop']:.2f} ({bounds}) at {task.axis.long(peak['depth'])}")
        rows.append(cells)
    title = f"{run.manifest['config']['model']}, {task.name}: what cutting the last token off costs the answer, in nats"
    return "\n".join([f"**{title}**", "", *_lines(rows), "", "The largest over depth: a maximum of noise is above 0."])


def _lines(rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def _table(run: Run, task: Task) -> str:
    axis = run.axis
    last = len(axis.coordinates) - 1
    depths = [i for i, c in enumerate(axis.coordinates) if c.is_loop_end] if axis.looped else axis.ticks()
    depths = [depth for depth in depths if depth != last]
    head = ["hops", *(axis.short(depth) for depth in depths), f"{axis.short(last)} (last)", "95 %", "best shortcut"]
    if task.has_gate:
        head.append("mean exit")
    exits = {row["hops"]: row["mean_exit"] for row in task.exits_by_hops.iter_rows(named=True)}
    shortcuts = {row["hops"]: row for row in task.best_shortcuts().iter_rows(named=True)}
    rows = [head, ["---:"] * len(head)]
    for hops, part in task.accuracy_of.items():
        by_depth = {row["depth"]: row for row in part.iter_rows(named=True)}
        final, shortcut = by_depth[last], shortcuts.get(hops)
        cells = [str(hops), *(f"{by_depth[depth]['accuracy']:.2f}" for depth in depths)]
        cells += [f"**{final['accuracy']:.2f}**", _interval(final["low"], final["high"])]
        cells.append("–" if shortcut is None else f"{shortcut['accuracy']:.2f} {shortcut['shortcut']}")
        if task.has_gate:
            cells.append(f"{exits[hops]:.2f}")
        rows.append(cells)
    unit = axis.unit[:-1]
    title = f"{run.manifest['config']['model']}, {task.name}, {task.n_stories} stories: accuracy by hops and {unit}"
    return "\n".join([f"**{title}**", "", *_lines(rows), "", _slopes(task)])


_WORDS = {"all": "all questions", "correct": "answered right", "all_rungs": "stories right at every k"}


def _slopes(task: Task) -> str:
    """One line: settling per hop in each group, or why it is not told."""
    looped = task.settling["settling_loop"].null_count() == 0
    quantity = "settling_loop" if looped else "settling_depth"
    unit = "loops" if looped else "readouts" if task.axis.looped else "layers"
    said: list[str] = []
    for group in GROUPS:
        row = task.slope_of[quantity, group]
        if missing(row["slope"]):
            said.append(f"{_WORDS[group]}: not told, {row['reason']}")
        else:
            bounds = f"{row['low']:+.2f} to {row['high']:+.2f}; {row['n_clusters']} clusters"
            said.append(f"{_WORDS[group]}: {row['slope']:+.2f} ({bounds})")
    return f"Settling, {unit} per hop – {'. '.join(said)}. The last two groups are selected by the outcome."
