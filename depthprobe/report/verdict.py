"""Does the model use more depth on harder questions? By which measure, and how sure: the top of a page.

Every row is a change per hop, paired by story, with an interval over clusters; the words follow the intervals and
say of each measure whether it is read off a run or changes the model. Nothing is pooled over measures: they mean
different things, and an answer that most of them share is not thereby surer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthprobe.analysis import LEAST_MOVED, NEEDED
from depthprobe.report.causal import least_change, quantity, says
from depthprobe.report.data import Task
from depthprobe.report.text import count, interval, missing, percent, signed

__all__ = ["Measure", "Verdict", "measures", "verdict"]

READ = "read off a run"


@dataclass(frozen=True, slots=True)
class Measure:
    """One row.

    Attributes:
        name: of the measure.
        short: in a sentence: "by …".
        how: "read off a run", or by "patching", "cutting attention", "skipping layers".
        unit: of the change, plural.
        row: slope, low, high, n_stories, n_clusters and reason, as in the table `slopes`.
        note: what else must be said of it.
        source: the table behind it.
        rise: what a rise is called: "later", or "more" of the depth.
        least: a change by less than this per hop, by both bounds, is hardly one.
        place: it says where in the depth something lies, not how much of the depth is used.
    """

    name: str
    short: str
    how: str
    unit: str
    row: dict[str, Any]
    note: str
    source: str
    rise: str = "later"
    least: float = 0.0
    place: bool = False

    @property
    def says(self) -> str:
        """ "later", "earlier", "hardly any change", "no change measured" or "not told"."""
        return says(self.row, self.least)


@dataclass(frozen=True, slots=True)
class Row:
    """A measure as the page shows it; `kind` is later, earlier, none or refused."""

    name: str
    note: str
    change: str
    interval: str
    says: str
    stories: str
    kind: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one task: a sentence, the measures, and what qualifies them."""

    slug: str
    title: str
    lead: str
    words: tuple[str, ...]
    rows: tuple[Row, ...]
    sources: tuple[str, ...]


def verdict(task: Task, name: str, settling: tuple[str, str], shortcut: str = "") -> Verdict | None:
    """None for a task in which nothing was changed: the section's own headline says what the lens says.

    Args:
        name: of the model, for the sentences.
        settling: the column of settling that is told, and its unit.
        shortcut: a sentence on the model's accuracy against the strongest shortcut.
    """
    if not task.is_causal:
        return None
    found = measures(task, settling)
    title = task.name.capitalize() if task.name.islower() else task.name
    words = (*_words(found), *([shortcut] if shortcut else []))
    sources = tuple(dict.fromkeys(one.source for one in found))
    return Verdict(task.slug, title, _lead(found, task, name), words, tuple(map(_row, found)), sources)


def _row(one: Measure) -> Row:
    told = not missing(one.row["slope"])
    digits = 3 if one.says == "hardly any change" else 2  # such bounds round to nothing
    return Row(
        one.name,
        ", ".join(filter(None, (one.how, one.note))),
        f"{signed(one.row['slope'], digits)} {one.unit}" if told else "–",
        interval(one.row["low"], one.row["high"], digits) if told else "–",
        _says(one),
        f"{one.row['n_stories']} ({one.row['n_clusters']})",
        {"later": "later", "earlier": "earlier", "not told": "refused"}.get(one.says, "none"),
    )


def measures(task: Task, settling: tuple[str, str]) -> list[Measure]:
    """Every measure of depth by hops that the task's tables hold, told or refused."""
    found: list[Measure] = []
    column, unit = settling
    row = task.slope_of.get((column, "all"))
    if row is not None:
        least = least_change(task, unit)
        found.append(Measure("Settling of the answer", "settling", READ, unit, row, "", "slopes", least=least))
    row = task.slope_of.get(("gate_exit", "all"))
    if row is not None:
        least = least_change(task, "loops")
        found.append(Measure("Exit of the gate", "the gate", READ, "loops", row, "", "slopes", least=least))
    slopes = {row["quantity"]: row for row in task.window_slopes.iter_rows(named=True)}
    for end, where in (("destination", "last token decides from"), ("source", "changed word decides until")):
        # in loops where there are any: a readout within a loop is a step of its own on the axis
        in_loops = slopes.get(f"{end}_crossed_loop")
        row, unit = (in_loops, "loops") if in_loops is not None else (slopes.get(f"{end}_crossed"), task.step)
        if row is None:
            continue
        words, rise, least = f"the patching window's {end}", "later", least_change(task, unit)
        if end == "source" and NEEDED in slopes:
            # patched in all later loops it crosses the earlier, the more loops before the end need the word
            where, words, rise = "loops that need the changed word", "loops that need the word", "more"
            row = slopes[NEEDED]
        note = _window_note(row)
        found.append(
            Measure(f"Patching: {where}", words, "patching", unit, row, note, "window_slopes", rise, least)
        )
    for row in task.knockout_slopes.iter_rows(named=True):
        note = f"done in {row['n_harmed']} of {count(row['n_asked'], 'question')}"
        found.append(
            Measure("Knock-out: centre of the harm", "knock-out", "cutting attention", task.step, row, note,
                    "knockout_slopes", least=least_change(task, task.step))
        )  # fmt: skip
    for row in task.effective_slopes.iter_rows(named=True):
        of = quantity(row["quantity"])
        points = {key: None if missing(row[key]) else 100 * row[key] for key in ("slope", "low", "high")}
        found.append(
            Measure(f"Effective depth: {of.name}", of.short, "skipping layers", "% of the layers", row | points, "",
                    "effective_slopes", of.rise, 100 * LEAST_MOVED, of.place)
        )  # fmt: skip
    return found


def _window_note(row: dict[str, Any]) -> str:
    if missing(row["share_censored"]) or missing(row["share_nonmonotone"]):
        return f"{row['n_pairs']} pairs, right on both stories"
    return (
        f"{row['n_pairs']} pairs, right on both stories; {percent(row['share_censored'])} without a crossing, "
        f"{percent(row['share_nonmonotone'])} not monotone"
    )


def _says(one: Measure) -> str:
    if one.says == "not told":
        return f"not told: {one.row['reason']}" if one.row["reason"] else "not told"
    if one.says not in ("later", "earlier"):
        return one.says
    falls = {"later": "earlier", "more": "less"}[one.rise]
    return f"{one.rise if one.says == 'later' else falls} with more hops"


def _lead(found: Sequence[Measure], task: Task, name: str) -> str:
    """What the measures that change the model say, and apart from it what those say that are read off a run."""
    changed = [one for one in found if one.how != READ and not one.place]
    said = _others(changed)
    more = [one.short for one in changed if one.says == "later"]
    uses = f"{name} uses more depth on harder questions"
    if more and not said:
        every = "the one measure that changes" if len(more) == 1 else f"each of the {len(more)} measures that change"
        lead = f"{uses} by {every} it and can be told: {_listed(more)}"
    elif more:
        lead = f"{uses} by {_listed(more)}; {' and '.join(said)}"
    elif said:
        lead = f"no measure that changes the model shows that {uses}: {' and '.join(said)}"
    else:
        lead = f"no measure that changes the model tells whether {uses}"
    places = [one for one in found if one.place and one.says in ("later", "earlier")]
    moved = " and ".join(f"{one.says} by {one.short}" for one in places)
    why = "Where skipping matters, which is not how much of the depth is used, moves with more hops"
    where = f". {why}: {moved}" if places else ""
    read = [one for one in found if one.how == READ]
    later = [one.short for one in read if one.says == "later"]
    off = [*([f"later with more hops by {_listed(later)}"] if later else []), *_others(read)]
    return f"On {task.name}, {lead}{where}" + (f". Read off a run: {'; '.join(off)}." if off else ".")


def _others(found: Sequence[Measure]) -> list[str]:
    """Of measures that do not rise. What comes earlier is said to come earlier: that is not less of the depth."""
    of = {
        "no change was measured by {}": [one for one in found if one.says == "no change measured"],
        "hardly any change by {}": [one for one in found if one.says == "hardly any change"],
        "earlier with more hops by {}": [one for one in found if one.says == "earlier" and one.rise != "more"],
        "less with more hops by {}": [one for one in found if one.says == "earlier" and one.rise == "more"],
    }
    return [words.format(_listed([one.short for one in some])) for words, some in of.items() if some]


def _words(found: Sequence[Measure]) -> tuple[str, ...]:
    said: list[str] = []
    refused = [one for one in found if one.says == "not told"]
    if refused:
        by: dict[str, list[str]] = {}
        for one in refused:
            by.setdefault(one.row["reason"] or "no reason is given", []).append(one.short)
        said += [_not_told(reason, names) for reason, names in by.items()]
    read = [one.short for one in found if one.how == READ]
    changed = [one.short for one in found if one.how != READ]
    if read and changed:
        verb = "is" if len(read) == 1 else "are"
        said.append(
            f"{_listed(read).capitalize()} {verb} read off a run and show{'s' if len(read) == 1 else ''} what can be "
            "decoded or would be chosen; the others change the model and show what it uses."
        )
    if any(one.says == "no change measured" for one in found):
        said.append("“No change measured” means that the interval includes 0, not that there is no change.")
    if any(one.says == "hardly any change" for one in found):
        said.append(
            f"“Hardly any change” means that the whole interval is in ±{100 * LEAST_MOVED:g} % of the depth per hop."
        )
    n = sum(one.says != "not told" for one in found)
    if n > 1:
        said.append(f"The {n} intervals are not corrected for their number.")
    return tuple(said)


def _not_told(reason: str, names: Sequence[str]) -> str:
    if ":" in reason:  # a reason with words of its own
        return f"{reason[0].upper()}{reason[1:]}, so this is not told: {_listed(names)}."
    return f"Not told, {reason}: {_listed(names)}."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
