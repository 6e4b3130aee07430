"""The blocks of a task's section about interventions: patches, windows, knock-out, skipped layers.

Each stands where the run has its table; a run of the lens alone has none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from depthprobe.analysis import LEAST_MOVED, MIN_CLUSTERS, NEEDED, site_of
from depthprobe.report import panels
from depthprobe.report.blocks import Block, Chip
from depthprobe.report.data import Run, Task
from depthprobe.report.figures import Grid
from depthprobe.report.manifest import spared_first
from depthprobe.report.names import site_name
from depthprobe.report.palette import hop_token
from depthprobe.report.text import count, interval, missing, percent, percent_interval, signed

__all__ = [
    "causal_blocks", "least_change", "quantity", "says", "window_change", "window_name", "window_quantities",
]  # fmt: skip


def causal_blocks(run: Run, task: Task) -> tuple[Block, ...]:
    """In the order of the page; none for a run without interventions."""
    blocks = (_map(task), _controls(task), _windows(task), _knockout(task), *_effective(run, task))
    return tuple(block for block in blocks if block is not None)


# -- patches -----------------------------------------------------------------------------------------------------------


def _map(task: Task) -> Block | None:
    figure = panels.patching_map(task)
    if figure is None:
        return None
    pairs = task.patching_by_role.filter(~pl.col("control"))["n_items"].max()
    return Block(
        "Where does what the answer needs sit, and when?",
        "Two stories differ in one word, and so in their answer. A state of one is put into the run of the other, at "
        "the tokens of one role and one depth. The effect is how far the answer moves: 0, nothing; 1, all the way to "
        "the donor's answer; below 0, away from it.",
        (figure,),
        after=f"Means over at most {count(_whole(pairs), 'pair')}; whiskers of 95 % stand in the table and at the "
        "pointer. An effect says that a state carries the difference and that what follows uses it; states that carry "
        "it elsewhere too, or in parts, may show none.",
    )


def _controls(task: Task) -> Block | None:
    figures = panels.controls_beside_donors(task)
    if not figures:
        return None
    return Block(
        "Would any other change do the same?",
        "Control donors differ in one word as well, but not in the answer: a fact beside the chain, or a word that "
        "leads to the same end. What they do is the noise of patching; only what stands above it is about the answer.",
        figures,
    )


def _whole(value: Any) -> int:
    return int(value) if value is not None else 0


# -- windows -----------------------------------------------------------------------------------------------------------

_WINDOWS = {
    "source_crossed": "source (changed word), crossing",
    "destination_crossed": "destination (last token), crossing",
    "source_area": "source, area",
    "destination_area": "destination, area",
}


_LATER = (
    " In a model with loops the source is patched at what a block reads, in this and all later loops: a loop that "
    "reads the input again would have the old word back. Patched so, a word that more loops need is over earlier. "
    "Patched behind a block, in one loop, it says little there."
)


def _sites(task: Task) -> str:
    """Where each end is patched whose slope is told."""
    found = {end: site_of(task.windows, end) for end in dict.fromkeys(task.windows["end"].sort(descending=True))}
    told = "; ".join(f"{end}: {site_name(site)}" for end, site in found.items())
    return f" ({told})" if told else ""


def window_name(task: Task, quantity: str) -> str:
    """A quantity of `window_slopes` with its unit."""
    if quantity == NEEDED:
        return "source, loops before the end that need the word, loops"
    stem = quantity.removesuffix("_relative")
    name = _WINDOWS.get(stem, stem.replace("_", " "))
    if quantity.endswith("_crossed_loop"):
        return f"{_WINDOWS.get(stem.removesuffix('_loop'), stem)}, loops"
    share = quantity.endswith("_relative") or stem.endswith("_area")
    return f"{name}, {'% of the depth' if share else task.step}"


def window_change(row: dict[str, Any]) -> str:
    """A slope with its interval in the unit of `window_name`, or the reason why there is none."""
    if missing(row["slope"]):
        return row["reason"] or "–"
    share = row["quantity"].endswith(("_relative", "_area"))
    scale = 100 if share else 1
    return f"{signed(scale * row['slope'])} ({interval(scale * row['low'], scale * row['high'])})"


def _windows(task: Task) -> Block | None:
    figures = panels.windows_by_hops(task)
    slopes = list(task.window_slopes.iter_rows(named=True))
    if not figures and not slopes:
        return None
    nothing = panels.no_windows(task)
    rows = () if nothing else tuple(
        (
            window_name(task, row["quantity"]),
            window_change(row),
            _moved(task, row),
            f"{row['n_stories']} ({row['n_clusters']})",
            percent(row["share_censored"]),
            percent(row["share_nonmonotone"]),
            str(row["n_pairs"]),
        )
        for row in window_quantities(task)
    )
    head = ("quantity, unit", "change per hop (95 % interval)", "with more hops", "stories (clusters)",
            "no crossing", "not monotone", "pairs")  # fmt: skip
    return Block(
        "When has the information moved?",
        "The changed word's state decides until others have read it (source); the last token's state decides from "
        "where it has gathered what it needs (destination). Each depth is where an item's effect crosses ½, not where "
        "one flip is first or last seen. Only pairs that the model answers right on both stories are counted."
        + (_LATER if task.axis.looped else ""),
        figures,
        table=Grid(head, rows, "window_slopes") if rows else None,
        table_title=f"Change per hop, paired by story{_sites(task)}" if rows else "",
        after=nothing
        or "Pairs whose effect does not cross ½ on its way (it never does, or is across at its first depth) have no "
        "depth and are left out of the crossing, not of the area. "
        "Where many do not cross, or go up and down, a crossing says little and the area more. "
        f"A change from fewer than {MIN_CLUSTERS} clusters is not told.",
    )


def window_quantities(task: Task) -> list[dict[str, Any]]:
    """Rows of `window_slopes`, each change once: where a step of the axis is a loop, both units are one."""
    rows = list(task.window_slopes.iter_rows(named=True))
    names = {row["quantity"] for row in rows}
    twice = {name.removesuffix("_loop") for name in names if name.endswith("_crossed_loop") and task.step == "loops"}
    return [row for row in rows if row["quantity"] not in twice]


def least_change(task: Task, unit: str) -> float:
    """`LEAST_MOVED` of the depth in loops, or in steps of the axis."""
    return LEAST_MOVED * (task.axis.n_loops if unit == "loops" else len(task.axis.coordinates) - 1)


def _moved(task: Task, row: dict[str, Any]) -> str:
    name = row["quantity"]
    share = name.endswith(("_relative", "_area"))
    unit = "loops" if name.endswith("_loop") else task.step
    found = says(row, LEAST_MOVED if share else least_change(task, unit))
    return {"later": "more", "earlier": "fewer"}.get(found, found) if name == NEEDED else found


def says(row: dict[str, Any], least: float = 0.0) -> str:
    """What a slope and its interval say; a destination's area shrinks as it moves later.

    Args:
        least: where both bounds are nearer to 0, there is hardly any change, however sure its sign.
    """
    if missing(row["slope"]):
        return "not told"
    if not (missing(row["low"]) or missing(row["high"])) and max(abs(row["low"]), abs(row["high"])) < least:
        return "hardly any change"
    if row["low"] <= 0 <= row["high"]:
        return "no change measured"
    shrinks = str(row.get("quantity", "")).startswith("destination_area")
    return "later" if (row["low"] > 0) != shrinks else "earlier"


# -- knock-out ---------------------------------------------------------------------------------------------------------


def _knockout(task: Task) -> Block | None:
    figures = panels.knockout_curves(task)
    if not figures:
        return None
    windows = sorted(task.knockout_by_depth["window"].unique().to_list())
    cut = "one layer" if windows == [1] else f"{' or '.join(map(str, windows))} layers from each depth on"
    return Block(
        "What does the last token read, and when?",
        f"Attention from the last token to the words of one role is cut in {cut}; the other tokens see what they saw. "
        "Where the answer loses probability, the last token was reading there.",
        figures,
        after="A cut that does nothing may mean that the words were read at another depth too, or by another token.",
    )


# -- effective depth ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of `effective_slopes`: its name, what it is by in a sentence, what a rise of it is called, and whether
    it says where in the depth something lies instead of how much of the depth is used."""

    name: str
    short: str
    rise: str = "later"
    place: bool = True


_QUANTITIES = {
    "half_depth": Quantity("half of what skipping does lies before", "skipped layers"),
    "half_later": Quantity("half of what later layers owe earlier tokens lies before", "layers that others build on"),
    "used_share": Quantity("share of the layers whose skip shows", "the share of layers in use", "more", False),
}


def quantity(name: str) -> Quantity:
    """The words for a quantity; an unknown one keeps its own."""
    plain = name.replace("_", " ")
    return _QUANTITIES.get(name, Quantity(plain, plain))


def _effective(run: Run, task: Task) -> tuple[Block, ...]:
    chips = tuple(Chip(k, hop_token(run.hops.index(k))) for k in task.hops)
    loops = (task.effective_by_hops["site"] == "loop").any() and task.axis.steps_per_loop > 1
    part = "layer or loop" if loops else "layer"
    asked = (
        (
            f"What does each {part} add?",
            "Δ is what it adds to the state h that it got, at the position that predicts the answer or at the others"
            f"{_spared(run)}. "
            "A cosine below 0 takes away from what was there.",
            panels.contributions(task, run.hops),
            "",
        ),
        (
            f"What breaks when a {part} is skipped?",
            f"It is left out for {_skipped(run)}, and the output compared with the full model's, at the position that "
            "predicts the answer. If harder questions used more depth, skipping late would harm them more.",
            panels.skips(task, run.hops),
            "A model was never trained without one of its layers: harm shows that it is used, not how.",
        ),
        (
            "Do later layers build on it?",
            "Relative change of what later layers add: at the same token, with the layer skipped there alone; and at "
            f"later tokens, with it skipped at earlier ones alone{_spared(run)}. Where the second fades first, the "
            "layers behind only refine a token's own output.",
            panels.later_layers(task, run.hops),
            "",
        ),
        (
            "How near is the output?",
            "Every depth read through the model's own norm and head, against the final output.",
            panels.output_reached(task, run.hops),
            "",
        ),
    )
    blocks = [Block(title, about, drawn, hops=chips, after=after) for title, about, drawn, after in asked if drawn]
    table = _depths(task)
    if table is not None:
        blocks.append(
            Block(
                "How much of its depth does it use?",
                "Numbers for each question, as shares of the layers that run (those of all loops), averaged at each "
                "hop count, with 95 % intervals.",
                table=table,
                table_title="Effective depth by hops",
            )
        )
    return tuple(blocks)


def _skipped(run: Run) -> str:
    spared = spared_first(run.manifest)
    if not spared:
        return "all tokens, the first among them"
    first = "the first, on" if spared == 1 else f"the first {spared}, on"
    return f"all tokens but {first} which models park attention"


def _spared(run: Run) -> str:
    spared = spared_first(run.manifest)
    return "" if not spared else f" (but the first {'one' if spared == 1 else spared})"


def _depths(task: Task) -> Grid | None:
    df = task.effective_depths
    if not df.height:
        return None
    names = list(dict.fromkeys(df["quantity"].to_list()))
    cell = {(row["hops"], row["quantity"]): row for row in df.iter_rows(named=True)}

    def shown(k: int, name: str) -> str:
        row = cell.get((k, name))
        if row is None or missing(row["mean"]):
            return "–"
        bounds = percent_interval(row["low"], row["high"])
        return f"{percent(row['mean'])} ({bounds}; {count(row['n_items'], 'question')})"

    rows = tuple((f"k = {k}", *(shown(k, name) for name in names)) for k in task.hops)
    slopes = {row["quantity"]: row for row in task.effective_slopes.iter_rows(named=True)}
    if slopes:
        rows += (("change per hop", *(_slope(slopes.get(name)) for name in names)),)
    return Grid(("hops", *(quantity(name).name for name in names)), rows, "effective_depths")


def _slope(row: dict[str, Any] | None) -> str:
    """In points of the depth."""
    if row is None:
        return "–"
    if missing(row["slope"]):
        return row["reason"] or "–"
    return f"{signed(100 * row['slope'], 1)} points ({interval(100 * row['low'], 100 * row['high'], 1)})"
