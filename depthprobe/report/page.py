"""The page: everything that the report says, put into one HTML file that needs no network.

from depthprobe.report import write_report
write_report(Path("runs/demo"))             # runs/demo/report.html
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl

from depthprobe import analysis
from depthprobe.files import atomic_write
from depthprobe.report import palette, words
from depthprobe.report.browser import Limit, build
from depthprobe.report.data import Run, read_run
from depthprobe.report.figures import Figure
from depthprobe.report.manifest import exit_q, model_name, run_facts, version
from depthprobe.report.sections import Section, section, settling_quantity
from depthprobe.report.text import MINUS, NARROW, count
from depthprobe.report.verdict import verdict

__all__ = ["render", "write_report"]


def write_report(run_folder: Path, out: Path | None = None, items: Limit = None) -> Path:
    """Draw the report of a finished run.

    Args:
        run_folder: the folder that `depthprobe analyze` wrote.
        out: where to; `run_folder/report.html` if None. Written whole or not at all.
        items: how many questions the item browser holds: a number, "all", or None for at most 500 and a million
            cells; the page says how many it has.

    Returns:
        The path of the page.

    Raises:
        UserError: the folder is not a finished run of this version (see `report.data.read_run`), or the page
            cannot be written.
    """
    html = render(read_run(run_folder), items)
    path = run_folder / "report.html" if out is None else out
    remedy = "choose another place with `depthprobe report RUN --out FILE`"
    atomic_write(path, html.encode(), what="the report cannot be written", remedy=remedy)
    return path


def render(run: Run, items: Limit = None) -> str:
    """The page as text; `items` as in `write_report`."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    q, name = exit_q(run.manifest), model_name(run.manifest)
    said = {task["task"]: task["headline"] for task in _summary(run, name, q)["tasks"]}
    sections = [section(run, task, said[task.name], q) for task in run.tasks]
    gate = any(task.has_gate for task in run.tasks)
    verdicts = [verdict(task, name, settling_quantity(task), _shortcut(said[task.name])) for task in run.tasks]
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=_typeset,
    )
    return environment.from_string(_asset("page.html.j2")).render(
        title=f"How {name} uses its depth",
        name=name,
        lede=_lede(run, gate),
        sections=sections,
        verdicts=[found for found in verdicts if found is not None],
        facts=run_facts(run),
        reading=words.reading(run.axis, gate, _shortcuts(run), words.probes(run.tasks), _lens(run)),
        limits=words.limits(run.axis, gate, words.probes(run.tasks), _lens(run)),
        version=version(run.manifest),
        folder=run.folder.resolve().name,
        variables=palette.css(len(run.hops)),
        style=_asset("style.css"),
        figures=_embedded({f.id: f.spec for f in _all(sections)}),
        # a closing tag inside a script would end it
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        run_name=_embedded(run.folder.resolve().name),
        sheets=_embedded({f.id: f.csv() for f in _all(sections)}),
        scripts=[_asset(name) for name in ("page.js", "export.js", "items.js", "patch.js", "grid.js", "browser.js")],
        browser=build(run, items),
        ways=words.ROLES,
    )


def _shortcut(headline: str) -> str:
    """What a headline says of the model's accuracy against the strongest shortcut: its last sentence, if any."""
    at = headline.find("Its accuracy is ")
    return headline[at:] if at >= 0 else ""


def _shortcuts(run: Run) -> list[str]:
    """Names of the run's shortcuts, in the order of its tasks and of the table."""
    return list(dict.fromkeys(name for task in run.tasks for name in task.shortcuts["shortcut"].to_list()))


def _summary(run: Run, name: str, q: float | None) -> dict[str, Any]:
    kinds = (
        "settling",
        "accuracy",
        "slopes",
        "differences",
        "exits",
        "fixed_exits",
        "exits_by_hops",
        "shortcuts",
    )
    found = {kind: pl.concat([getattr(task, kind) for task in run.tasks]) for kind in kinds}
    return analysis.summarise(found, name=name, exit_q=q)


def _lens(run: Run) -> str:
    return str(run.manifest.get("config", {}).get("lens", "plain"))


def _lede(run: Run, gate: bool) -> str:
    axis = run.axis
    if axis.looped:
        layers = axis.layers_per_loop
        core = f"{axis.n_loops} loops of {'one layer' if layers == 1 else f'{layers} layers'}"
        model = f"A looped transformer, {core}, {'with an exit gate' if gate else 'without an exit gate'}"
    else:
        model = f"An ordinary transformer of {axis.layers_per_loop} layers, without loops or a gate"
    stories = sum(task.n_stories for task in run.tasks)
    items = sum(task.items.height for task in run.tasks)
    low, high = run.hops[0], run.hops[-1]
    ladder = f"{low} to {high} hops" if high > low else count(low, "hop")
    asked = f"{count(stories, 'story')} asked at {ladder}: {count(items, 'question')}"
    return f"{model}. {asked}, read at every depth."


def _all(sections: list[Section]) -> list[Figure]:
    return [f for s in sections for block in s.blocks for f in block.figures]


def _embedded(values: Any) -> str:
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # inside <script>: no text of a user may close the tag or open a comment
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _typeset(value: Any) -> Any:
    """Real minus signs, and no line break between a number and its %; markup stays as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return re.sub(r"(\d) %", rf"\1{NARROW}%", re.sub(r"(?<=[ (])-(?=\d)", MINUS, value))


def _asset(name: str) -> str:
    return (files("depthprobe.report") / "assets" / name).read_text(encoding="utf-8")
