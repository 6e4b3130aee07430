"""A run folder, read for drawing: its manifest, its depth axis and one bundle of tables per task.

    from depthprobe.report.data import read_run
    run = read_run(Path("runs/demo"))
    run.tasks[0].accuracy            # the accuracy table of the first task
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from depthprobe import tables
from depthprobe.errors import UserError

__all__ = ["SCHEMA_VERSION", "Axis", "Coordinate", "Run", "Task", "read_columns", "read_run", "read_table"]

#: of manifest.json and the tables beside it
SCHEMA_VERSION = 1

_REQUIRED = ("items", "settling", "accuracy", "slopes")
_CAUSAL = (
    "patching_by_role", "windows", "window_slopes", "knockout", "knockout_by_depth", "knockout_slopes",
    "effective_by_hops", "effective_depths", "effective_slopes",
)  # fmt: skip
_SERVED = ("agreement", "agreement_by_hops")
_LENS = ("settling_by_hops", "shortcuts", "differences", "exits", "fixed_exits", "exits_by_hops")
_OPTIONAL = (*_LENS, *_CAUSAL, *_SERVED)
_ORDER = ("kinship", "follow")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One readable depth; its place in `Axis.coordinates` is the depth index of the tables."""

    loop: int
    layer: int
    site: str
    is_loop_end: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """The depth axis of a model, with the words for its ticks.

    Attributes:
        coordinates: in the order of execution; the last is what the model's own head reads.
        n_loops: loops of the core; 1 for an ordinary transformer.
    """

    coordinates: tuple[Coordinate, ...]
    n_loops: int

    @property
    def looped(self) -> bool:
        """Whether depth is counted in loops (else in layers)."""
        return self.n_loops > 1

    @property
    def unit(self) -> str:
        """What one step of depth is called, plural."""
        return "loops" if self.looped else "layers"

    @property
    def steps_per_loop(self) -> int:
        """Readable depths in one loop of the core; 1 makes a depth step and a loop the same thing."""
        return sum(c.loop == 1 for c in self.coordinates)

    @property
    def layers_per_loop(self) -> int:
        """Layers of the core, or of the whole stack of an ordinary transformer."""
        return max((c.layer for c in self.coordinates if c.loop == 1), default=0)

    def short(self, depth: int) -> str:
        """A tick label: "e", "p1", "3", "3.2", "c1", "17"."""
        c = self.coordinates[depth]
        if not self.looped:
            return str(c.layer)
        if c.site == "embed":
            return "e"
        if c.loop < 1:
            return f"p{c.layer}"
        if c.loop > self.n_loops:
            return f"c{c.layer}"
        return str(c.loop) if self.steps_per_loop == 1 or c.is_loop_end else f"{c.loop}.{c.layer}"

    def long(self, depth: int) -> str:
        """A depth in words, for hover texts and tables."""
        c = self.coordinates[depth]
        if c.site == "embed":
            return "embedding"
        if not self.looped:
            return f"layer {c.layer}"
        if c.loop < 1:
            return f"prelude layer {c.layer}"
        if c.loop > self.n_loops:
            return f"coda layer {c.layer}"
        if self.steps_per_loop == 1:
            return f"loop {c.loop}"
        return f"loop {c.loop}, {'end' if c.site == 'loop_state' else f'layer {c.layer}'}"

    @property
    def between_loops(self) -> list[int]:
        """The depths outside the core and at its loop ends. Within a loop a state is not made to be read."""
        return [
            i for i, c in enumerate(self.coordinates)
            if not self.looped or c.is_loop_end or not 1 <= c.loop <= self.n_loops
        ]  # fmt: skip

    @property
    def ends_in_loop(self) -> bool:
        """Whether the last depth is a loop's end, so that settling can be counted in loops."""
        return self.looped and self.coordinates[-1].is_loop_end

    @property
    def title(self) -> str:
        """The title of a depth axis, with the key to its letters; a long one has two lines."""
        if not self.looped:
            return "layer (0 is the embedding)"
        shown = {self.short(depth)[0] for depth in self.ticks()}
        letters = {"e": "e embedding", "p": "p prelude", "c": "c coda"}
        parts = [words for letter, words in letters.items() if letter in shown]
        head = "loop r" if self.steps_per_loop == 1 else f"loop r, {self.steps_per_loop} readouts in each"
        key = ", ".join(parts)
        if not parts:
            return head
        return f"{head} ({key})" if len(head) + len(key) < 32 else f"{head}<br>{key}"

    def ticks(self) -> list[int]:
        """The depths that get a label: all of a short axis, loop ends or every fifth layer of a long one."""
        n = len(self.coordinates)
        if not self.looped:
            step = 1 if n <= 14 else 2 if n <= 20 else 5 if n <= 41 else 10
            return list(range(0, n, step))
        if n <= 14:
            return list(range(n))
        ends = [i for i, c in enumerate(self.coordinates) if c.is_loop_end]
        every = max(1, round(len(ends) / 16))
        kept = [i for j, i in enumerate(ends, 1) if j % every == 0]
        first = [0] if self.coordinates[0].site == "embed" else []
        # a short coda would run into the label of the last loop
        last = [n - 1] if ends and n - 1 - ends[-1] > n / 12 else []
        return sorted({*first, *kept, *last})


@dataclass(frozen=True, slots=True, repr=False)
class Task:
    """The tables of one task (schemas: `depthprobe.tables`); those a run does not have are without rows.

    Attributes:
        accuracy_of: hops -> its rows of `accuracy`, by depth.
        settling_of: hops -> its rows of `settling`.
        slope_of: (quantity, group) -> its row of `slopes`.
    """

    name: str
    axis: Axis
    hops: tuple[int, ...]
    n_stories: int
    accuracy_of: Mapping[int, pl.DataFrame]
    settling_of: Mapping[int, pl.DataFrame]
    slope_of: Mapping[tuple[str, str], dict[str, Any]]
    items: pl.DataFrame
    settling: pl.DataFrame
    settling_by_hops: pl.DataFrame
    accuracy: pl.DataFrame
    slopes: pl.DataFrame
    shortcuts: pl.DataFrame
    differences: pl.DataFrame
    exits: pl.DataFrame
    fixed_exits: pl.DataFrame
    exits_by_hops: pl.DataFrame
    patching_by_role: pl.DataFrame
    windows: pl.DataFrame
    window_slopes: pl.DataFrame
    knockout: pl.DataFrame
    knockout_by_depth: pl.DataFrame
    knockout_slopes: pl.DataFrame
    effective_by_hops: pl.DataFrame
    effective_depths: pl.DataFrame
    effective_slopes: pl.DataFrame
    agreement: pl.DataFrame
    agreement_by_hops: pl.DataFrame

    def __repr__(self) -> str:
        return f"Task({self.name!r}, hops {list(self.hops)}, {self.n_stories} stories, {self.items.height} questions)"

    @property
    def slug(self) -> str:
        """The name as an id of the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "task"

    @property
    def has_gate(self) -> bool:
        return self.exits_by_hops.height > 0

    @property
    def is_causal(self) -> bool:
        """Whether anything was changed in the model, or skipped, to see what follows."""
        return any(getattr(self, name).height for name in _CAUSAL)

    @property
    def step(self) -> str:
        """What one step of the depth axis is called, plural."""
        if not self.axis.looped:
            return "layers"
        return "loops" if self.axis.steps_per_loop == 1 else "readouts"

    def final(self) -> pl.DataFrame:
        """The accuracy table at the last depth, one row per hops."""
        return self.accuracy.filter(pl.col("depth") == len(self.axis.coordinates) - 1).sort("hops")

    def chance(self) -> dict[int, float]:
        """hops → what naming one of the candidates at random gets right, averaged over the questions."""
        return dict(self.items.group_by("hops").agg(pl.col("chance").cast(pl.Float64).mean()).sort("hops").iter_rows())

    def best_shortcuts(self) -> pl.DataFrame:
        """The strongest shortcut of each hops; of equal ones the first by name."""
        return (
            self.shortcuts.sort("hops", "accuracy", "shortcut", descending=[False, True, False])
            .group_by("hops", maintain_order=True)
            .first()
        )


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A finished run."""

    folder: Path
    manifest: Mapping[str, Any]
    axis: Axis
    tasks: tuple[Task, ...]

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {', '.join(map(repr, self.tasks))})"

    def task(self, name: str) -> Task:
        """The task of that name.

        Raises:
            UserError: the run did not ask it.
        """
        for task in self.tasks:
            if task.name == name:
                return task
        known = ", ".join(task.name for task in self.tasks)
        raise UserError(f"the run has no task '{name}'", where=str(self.folder), remedy=f"it has {known}")

    @property
    def hops(self) -> tuple[int, ...]:
        """All hop counts of the run; a rung keeps its colour over all tasks."""
        return tuple(sorted({k for task in self.tasks for k in task.hops}))


def read_run(folder: Path) -> Run:
    """Read what the report draws.

    Raises:
        UserError: no such folder, no manifest or another version's, a table that is missing, unreadable,
            empty or not of its schema.
    """
    again = "run `depthprobe analyze` again"
    if not folder.is_dir():
        raise UserError(
            "there is no such run folder", where=str(folder), remedy="give the --out of `depthprobe analyze`"
        )
    manifest = _manifest(folder)
    found = {name: read_table(folder, name, required=True) for name in _REQUIRED}
    found |= {name: read_table(folder, name, required=False) for name in _OPTIONAL}
    if not found["items"].height or not found["accuracy"].height:
        raise UserError("the run has no items", where=str(folder), remedy=again)
    axis = _axis(folder)
    if found["accuracy"]["depth"].max() != len(axis.coordinates) - 1:
        raise UserError("the tables accuracy and lens have different depths", where=str(folder), remedy=again)
    names = found["items"]["task"].unique().to_list()
    names.sort(key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    return Run(folder, manifest, axis, tuple(_task(name, axis, found) for name in names))


def _task(name: str, axis: Axis, found: Mapping[str, pl.DataFrame]) -> Task:
    # partitions, not a filter for each figure: on a busy machine every query waits its turn
    own = {key: df.partition_by("task", as_dict=True).get((name,), df.clear()) for key, df in found.items()}
    own["accuracy"] = own["accuracy"].sort("hops", "depth")
    return Task(
        name=name,
        axis=axis,
        hops=tuple(dict.fromkeys(own["accuracy"]["hops"].to_list())),
        n_stories=own["items"]["story"].n_unique(),
        accuracy_of=_by_hops(own["accuracy"]),
        settling_of=_by_hops(own["settling"]),
        slope_of={(row["quantity"], row["group"]): row for row in own["slopes"].iter_rows(named=True)},
        **own,
    )


def _by_hops(df: pl.DataFrame) -> dict[int, pl.DataFrame]:
    parts = df.partition_by("hops", as_dict=True, maintain_order=True)
    return {int(key[0]): part for key, part in parts.items()}


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / "manifest.json"
    again = "give the folder of a finished run, or run `depthprobe analyze` again"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "there is no manifest.json, so this is no run folder", where=str(folder), remedy=again
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"the manifest cannot be read: {error}", where=str(path), remedy=again) from None
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"the run folder has schema version {version}, this depthprobe draws version {SCHEMA_VERSION}",
            where=str(path),
            remedy="run `depthprobe analyze` again into a new folder",
        )
    return manifest


def read_table(folder: Path, name: str, *, required: bool) -> pl.DataFrame:
    """A table of a run, checked; without rows if it is not there and need not be.

    Raises:
        UserError: it is missing, unreadable or not of its schema.
    """
    path = folder / "tables" / f"{name}.parquet"
    if not path.is_file():
        if not required:
            return tables.empty(name)
        raise UserError(
            f"the table {name} is missing, so the run is not finished",
            where=str(path),
            remedy="finish it with `depthprobe analyze --resume`",
        )
    try:
        df = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(
            f"the table cannot be read: {error}", where=str(path), remedy="run `depthprobe analyze` again"
        ) from None
    return tables.check(name, df)


def read_columns(folder: Path, name: str, columns: list[str], items: list[str]) -> pl.DataFrame:
    """Some columns of some items' rows; for tables that may be large.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / "tables" / f"{name}.parquet"
    try:
        return pl.scan_parquet(path).filter(pl.col("item").is_in(items)).select(columns).collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(
            f"the {name} table cannot be read: {error}", where=str(path), remedy="run `depthprobe analyze` again"
        ) from None


def _axis(folder: Path) -> Axis:
    """The distinct coordinates of the lens table; it may be large, so only their columns are read."""
    path = folder / "tables" / "lens.parquet"
    columns = ["depth", "loop", "layer", "site", "is_loop_end"]
    try:
        rows = pl.scan_parquet(path).select(columns).unique().sort("depth").collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(
            f"the lens table cannot be read: {error}",
            where=str(path),
            remedy="finish the run with `depthprobe analyze --resume`",
        ) from None
    if rows["depth"].to_list() != list(range(rows.height)):
        raise UserError(
            "the lens table's depths are not 0, 1, 2, …",
            where=str(path),
            remedy="run `depthprobe analyze` again",
        )
    ends = rows.filter(pl.col("is_loop_end"))["loop"].n_unique()
    return Axis(
        tuple(
            Coordinate(r["loop"], r["layer"], r["site"], r["is_loop_end"]) for r in rows.iter_rows(named=True)
        ),
        n_loops=max(ends, 1),
    )
