"""One task's section as plain data for the template: headline, tiles, example, figures and findings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import polars as pl

from depthprobe.analysis import GROUPS, MIN_CLUSTERS
from depthprobe.report import panels
from depthprobe.report.blocks import Block, Chip
from depthprobe.report.causal import causal_blocks
from depthprobe.report.data import Run, Task
from depthprobe.report.figures import Grid
from depthprobe.report.palette import hop_token
from depthprobe.report.served import served_blocks
from depthprobe.report.text import count, interval, missing, number, percent, points_interval, signed
from depthprobe.report.words import ABOUT, shortcut_name

__all__ = ["Example", "Section", "Tile", "section", "settling_quantity"]

_MEASURES = (
    ("settling", "settling depth"),
    ("correct", "correct depth"),
    ("plausible", "plausible depth"),
    ("earliest_equal", "earliest equal depth"),
)
_EXITS = (("gate_exit", "gate exit"), ("expected_depth", "expected depth under the gate"))


@dataclass(frozen=True, slots=True)
class Tile:
    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an example's text; `hop` and `token` for a fact of the chain."""

    text: str
    hop: int | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    hops_word: str
    parts: tuple[Part, ...]
    answer: str
    plausible: str


@dataclass(frozen=True, slots=True)
class Section:
    slug: str
    title: str
    about: str
    headline: tuple[str, ...]
    tiles: tuple[Tile, ...]
    example: Example | None
    blocks: tuple[Block, ...]


def section(run: Run, task: Task, headline: str, exit_q: float | None) -> Section:
    """All of a task's part of the page; `headline` is what `depthprobe.analysis.summarise` says of it."""
    return Section(
        slug=task.slug,
        title=task.name.capitalize() if task.name.islower() else task.name,
        about=ABOUT.get(task.name, "Questions from your own file."),
        headline=tuple(re.split(r"(?<=\.)\s+(?=[A-Z])", headline)),
        tiles=_tiles(task),
        example=_example(run, task),
        blocks=(
            _accuracy(task),
            _curves(run, task),
            *_loops(task),
            _settling(task),
            *_groups(task),
            _gate(task, exit_q),
            *served_blocks(task),
            *causal_blocks(run, task),
        ),
    )


# -- tiles -------------------------------------------------------------------------------------------------


def _tiles(task: Task) -> tuple[Tile, ...]:
    final = task.final()
    ks = f"k = {task.hops[0]}" if len(task.hops) == 1 else f"k = {task.hops[0]} → {task.hops[-1]}"
    tiles = [
        Tile(
            "Accuracy at full depth",
            _from_to(final["accuracy"].to_list()),
            f"{ks}, {count(final['n'][0], 'question')} each",
        )
    ]
    best = task.best_shortcuts()
    if best.height:
        names = [shortcut_name(name) for name in dict.fromkeys(best["shortcut"].to_list())]
        named = ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"
        tiles.append(Tile("Best shortcut", _from_to(best["accuracy"].to_list()), named))
    quantity, unit = settling_quantity(task)
    tiles.append(_slope_tile(task, quantity, "Settling, change per hop", unit))
    if task.has_gate:
        tiles.append(_slope_tile(task, "gate_exit", "Gate exit, change per hop", "loops"))
    return tuple(tiles)


def _from_to(values: list[float]) -> str:
    if len(values) == 1:
        return percent(values[0])
    return f"{percent(values[0])} → {percent(values[-1])}"


def settling_quantity(task: Task) -> tuple[str, str]:
    """The column of settling that is told, and its unit.

    Loops where every question has a settling loop (a coda may change the answer), else depth.
    """
    looped = task.settling["settling_loop"].null_count() == 0
    return ("settling_loop", "loops") if looped else ("settling_depth", _steps(task))


def _steps(task: Task) -> str:
    return "readouts" if task.axis.looped else "layers"


def _slope_tile(task: Task, quantity: str, label: str, unit: str) -> Tile:
    row = task.slope_of.get((quantity, "all"))
    if row is None or row["n_stories"] == 0:
        return Tile(label, "–", "no story is asked at two hop counts")
    if missing(row["slope"]):
        return Tile(label, "–", f"{row['reason']}: ask for more stories with --n")
    return Tile(label, signed(row["slope"]), f"{unit}; 95 % interval {interval(row['low'], row['high'])}")


# -- example -----------------------------------------------------------------------------------------------


def _example(run: Run, task: Task) -> Example | None:
    """The first story's middle rung, its chain's facts marked."""
    k = task.hops[len(task.hops) // 2]
    rows = task.items.filter(pl.col("hops") == k).sort("item")
    if not rows.height:
        return None
    item = rows.row(0, named=True)
    text, at = item["text"], 0
    parts: list[Part] = []
    for fact in sorted(item["facts"], key=lambda fact: fact["start"]):
        if fact["role"] != "chain" or fact["hop"] is None or fact["start"] < at:
            continue
        parts.append(Part(text[at : fact["start"]]))
        # hops of the chain take the colours of the rungs, spread over them
        colour = run.hops.index(fact["hop"]) if fact["hop"] in run.hops else len(run.hops) - 1
        parts.append(Part(text[fact["start"] : fact["end"]], fact["hop"], hop_token(colour)))
        at = fact["end"]
    parts.append(Part(text[at:]))
    plausible = ", ".join(item["plausible"]) or "none given"
    return Example(f"k = {k}", tuple(part for part in parts if part.text), item["answer"], plausible)


# -- blocks ------------------------------------------------------------------------------------------------


def _accuracy(task: Task) -> Block:
    beside = panels.accuracy_beside_shortcuts(task)
    figures = (panels.accuracy_by_depth(task), *((beside,) if beside else ()))
    about = (
        "The share of questions whose right answer leads the candidates when the model is read at each depth."
    )
    about += (
        " The shortcuts beside it answer without following the chain: only what lies above them can speak "
        "of depth."
        if beside
        else " This run has no shortcut baselines, so it cannot tell depth from a shortcut."
    )
    return Block("How deep is a right answer?", about, figures, after=_differences(task))


def _differences(task: Task) -> str:
    said: list[str] = []
    for row in task.differences.iter_rows(named=True):
        if missing(row["difference"]):
            continue
        what = row["quantity"].removeprefix("accuracy: ").replace(" - ", " minus ")
        hops = (
            f"k = {row['min_hops']}"
            if row["min_hops"] == row["max_hops"]
            else f"k = {row['min_hops']}–{row['max_hops']}"
        )
        said.append(
            f"{what} at {hops}: {signed(100 * row['difference'], 1)} points (95 % interval "
            f"{points_interval(row['low'], row['high'])})"
        )
    return "Accuracy, on the same questions: " + "; ".join(said) + "." if said else ""


def _curves(run: Run, task: Task) -> Block:
    return Block(
        "When does the answer appear?",
        "Mean probabilities over the whole vocabulary, by hops, with 95 % bands. Both panels have one "
        "scale: where plausible "
        "rises before correct, the model knows the kind of answer before the answer.",
        panels.probability_curves(task, run.hops),
        hops=tuple(Chip(k, hop_token(run.hops.index(k))) for k in task.hops),
    )


def _loops(task: Task) -> tuple[Block, ...]:
    figures = panels.layers_within_loops(task)
    if not figures:
        return ()
    state = any(c.site == "loop_state" for c in task.axis.coordinates)
    block = Block(
        "What does each layer of a loop add?",
        "Every readable depth at its place: a column is a loop, a row a layer within it, a band a hop count. "
        + ("The row “end” is the state behind the norm that closes each loop, a depth of its own. " if state else "")
        + "Within a loop a state is not made to be read, so a weak row before a loop's end says little.",
        figures,
    )
    return (block,)


def _settling(task: Task) -> Block:
    paired = bool((task.slopes["n_stories"] > 0).any())
    return Block(
        "Do harder questions settle later?",
        "Each row is a distribution over its questions. If depth serves the chain, the rows drift to the "
        "right as k grows. "
        "The mean is over the questions that get there; “never” counts the others, in percent.",
        panels.settling_strips(task),
        table=_slopes(task) if paired else None,
        table_title="Change per hop, paired by story",
        after=(
            "Earliest equal depth is the first depth whose top token is the final one, even if it leaves "
            "again. "
            "“Answered right” and “every rung right” are selected by the outcome: see the notes. "
            f"A change from fewer than {MIN_CLUSTERS} clusters is not told."
            if paired
            else "No story is asked at two hop counts, so there is no change per hop to measure."
        ),
    )


def _slopes(task: Task) -> Grid:
    loops_too = task.axis.looped and task.axis.steps_per_loop > 1
    wanted: list[tuple[str, str]] = []
    for stem, name in _MEASURES:
        in_loops = task.slope_of.get((f"{stem}_loop", "all"))
        if in_loops is not None:
            wanted.append((f"{stem}_loop", f"{name}, loops"))
        if in_loops is None or loops_too:
            wanted.append((f"{stem}_depth", f"{name}, {_steps(task)}"))
    wanted.append(("settling_relative", "settling depth, % of the model's depth"))
    wanted += [(quantity, f"{name}, loops") for quantity, name in _EXITS]
    rows: list[tuple[str, ...]] = []
    for quantity, name in wanted:
        every, right, rungs = (task.slope_of.get((quantity, group)) for group in GROUPS)
        if every is not None:
            scale = 100 if quantity.endswith("_relative") else 1
            selected = (_change(right, scale), _change(rungs, scale))
            rows.append((name, _change(every, scale), _verdict(every), _stories(every), *selected))
    head = (
        "quantity, unit",
        "all questions (95 % interval)",
        "with more hops",
        "stories (clusters)",
        "answered right (selected)",
        "every rung right (selected)",
    )
    return Grid(head, tuple(rows), "slopes")


def _groups(task: Task) -> tuple[Block, ...]:
    """Mean settling by hops in each group of questions."""
    quantity, unit = settling_quantity(task)
    cell = {
        (row["hops"], row["group"]): row
        for row in task.settling_by_hops.filter(pl.col("quantity") == quantity).iter_rows(named=True)
    }
    if not cell:
        return ()

    def shown(k: int, group: str) -> str:
        row = cell.get((k, group))
        if row is None or missing(row["mean"]):
            return "no question"
        return f"{number(row['mean'])} ({interval(row['low'], row['high'])}; {count(row['n_items'], 'question')})"

    head = ("hops", "all questions", "answered right (selected)", "every rung right (selected)")
    rows = tuple((f"k = {k}", *(shown(k, group) for group in GROUPS)) for k in task.hops)
    block = Block(
        "Is it the same for questions answered right?",
        "Both groups beside “all questions” are selected by the outcome. Of “answered right” harder k lose more; "
        "“every rung right” holds the same stories at every k, those that the model answers at each of them: it "
        "compares like with like, but only for stories that are easy for this model.",
        table=Grid(head, rows, "settling_by_hops"),
        table_title=f"Mean settling depth in {unit}, with 95 % intervals",
    )
    return (block,)


def _stories(row: dict[str, Any]) -> str:
    return f"{row['n_stories']} ({row['n_clusters']})"


def _change(row: dict[str, Any] | None, scale: float = 1) -> str:
    """In the table's unit times `scale`; a refused one says why."""
    if row is None or not row["n_stories"]:
        return "–"
    if missing(row["slope"]):
        return row["reason"]
    return f"{signed(scale * row['slope'])} ({interval(scale * row['low'], scale * row['high'])})"


def _verdict(row: dict[str, Any]) -> str:
    if missing(row["slope"]):
        return "not told"
    return "later" if row["low"] > 0 else "earlier" if row["high"] < 0 else "no change measured"


def _gate(task: Task, exit_q: float | None) -> Block:
    title = "What would the gate do?"
    figures = tuple(f for f in (panels.exits_by_hops(task, exit_q), panels.exit_trade_off(task, exit_q)) if f)
    if figures:
        return Block(
            title,
            "Exits as the gate would choose them at the position that predicts the answer, read off after "
            "a full run. Below "
            "the dotted line a gate does worse than leaving at random with the same mean depth.",
            figures,
            after=_own_exit(task, exit_q),
        )
    kind = (
        "This looped model has no exit gate"
        if task.axis.looped
        else "An ordinary transformer has no loops and no gate"
    )
    return Block(title, f"{kind}: there are no exits to show.")


def _own_exit(task: Task, exit_q: float | None) -> str:
    if exit_q is None:
        return ""
    rows = task.exits.filter((pl.col("q") - exit_q).abs() < 1e-6)
    if not rows.height:
        return ""
    r = rows.row(0, named=True)
    return (
        f"At the model's own q = {exit_q:g}: {number(r['mean_exit'])} of {task.axis.n_loops} loops on "
        "average, "
        f"{percent(r['accuracy'])} right, {signed(100 * r['gain'], 1)} points against the mixture of fixed "
        "loops with the same "
        f"mean (95 % interval {points_interval(r['gain_low'], r['gain_high'])})."
    )
