"""A run's accuracy by hops and depth as Markdown, for a README, a model card or a paper's appendix."""

from __future__ import annotations

from depthprobe.analysis import GROUPS
from depthprobe.report.data import Run, Task
from depthprobe.report.text import missing


def accuracy_markdown(run: Run) -> str:
    """One table per task: a row for each hops; the loop ends (or, without loops, the axis' ticks) as columns.

    Cells are the share of questions whose best candidate is the answer; the last depth has its 95 % interval. Then the
    strongest shortcut and, for a model with a gate, the mean depth at which it leaves. Below it the change of the
    settling depth per hop, of each group of questions.
    """
    return "\n\n".join(_table(run, task) for task in run.tasks)


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
    table = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([f"**{title}**", "", *table, "", _slopes(task)])


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
