"""`analyze`: how a model uses its depth on questions of known hop count."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from depthprobe import analysis, tables
from depthprobe.errors import UserError
from depthprobe.pipeline.config import AnalyzeConfig
from depthprobe.pipeline.prepare import Ready, allowed_bytes, begun, opened
from depthprobe.pipeline.probes import PROBES
from depthprobe.pipeline.questions import digest, shortcut_rows
from depthprobe.runs import RunFolder, compare, read_manifest, user_errors

if TYPE_CHECKING:
    from depthprobe.depth import DepthModel
    from depthprobe.lens import Prepared

__all__ = ["AnalyzeResult", "analyze"]

#: Called with (what is being done, how much of it is done, how much there is).
Progress = Callable[[str, int, int], None]

RUNS = Path("runs")


@dataclass(frozen=True, repr=False)
class AnalyzeResult:
    """A finished run.

    Attributes:
        folder: the run folder.
        report: its page.
        summary: headline and numbers, as `analysis.summarise` returns them.
        manifest: what manifest.json holds.
    """

    folder: Path
    report: Path
    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"AnalyzeResult({str(self.folder)!r}: {self.summary['headline']})"

    def _repr_html_(self) -> str:
        from depthprobe.pipeline.show import summary_html

        return summary_html(self.summary, self.report)

    def table(self, name: str) -> pl.DataFrame:
        """A table of the run by its name in `depthprobe.tables.SCHEMAS`."""
        return tables.check(name, pl.read_parquet(self.folder / "tables" / f"{name}.parquet"))


def analyze(
    model: str | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    remark: Callable[[str], None] | None = None,
    command: str | None = None,
    max_memory: str | int | None = None,
    **options: Any,
) -> AnalyzeResult:
    """Ask a model questions of rising hop count, read every depth, analyse, write a run folder and a report.

    Args:
        model: a name, folder or hub id; default the embedded model.
        out: the run folder. Default: a new runs/<model>-<time>; with `resume` the newest unfinished one that
            was asked the same. A folder that holds the same run, finished, is not computed again.
        resume: continue a run that was stopped.
        progress: is called as work goes on.
        remark: is called with a line about anything that was left out.
        command: how the run was asked for; kept in the manifest.
        max_memory: what sweeps may take beyond the model, e.g. "2GiB" (1 GiB); larger ones are split.
        **options: the other fields of `AnalyzeConfig`; hops may be written "1-6".

    Raises:
        UserError: bad options, data, model or run folder, or a full disk. What was finished is kept, and
            nothing is half-written.
    """
    config = AnalyzeConfig.of({"model": model, **options})
    say, told = remark or _silent, progress or _silent
    limit = allowed_bytes(config, max_memory)
    folder = _folder(config, out, resume)
    there = begun(folder, config, resume=resume)
    ready = opened(config, split_given=options.get("split") is not None, say=say, told=told)
    identity: dict[str, dict[str, Any]] = {
        "config": config.as_dict(),
        "model": _about(ready.model, config),
        "items": {"digest": digest(ready.items)},
    }
    if (tuned := ready.tuned) is not None:  # another lens under the same path is another run
        identity["model"] |= {"tuned_lens": tuned.digest(), "tuned_on": tuned.about.get("data")}
    if there:
        run = RunFolder.resume(folder, identity)
    else:
        run = RunFolder.create(folder, identity, {"command": command, "seed": config.seed})
    with run, user_errors(folder):
        if run.finished:
            run.drop_parts()
            say(f"this run is finished already: {folder}")
        else:
            try:
                _compute(run, ready, config, limit, told, say)
            except BaseException:
                run.remove_if_empty()
                raise
        from depthprobe.report import write_report

        told("report", 0, 1)
        report = write_report(folder)
        told("report", 1, 1)
        return AnalyzeResult(folder, report, run.manifest["summary"], run.manifest)


def _compute(
    run: RunFolder,
    ready: Ready,
    config: AnalyzeConfig,
    limit: int,
    told: Progress,
    say: Callable[[str], None],
) -> None:
    from depthprobe.lens import lens_rows, n_batches

    model, prepared = ready.model, ready.prepared
    n_parts = n_batches(len(prepared.targets), config.batch_size)
    done = run.parts("lens")
    n_items = len(prepared.targets)
    told("lens", min(len(done) * config.batch_size, n_items), n_items)
    lens: dict[str, Any] = {"tuned": ready.tuned, "coda": ready.coda}
    for number, rows in lens_rows(model, prepared.targets, config.batch_size, done=done, **lens):
        run.write_part("lens", number, rows)
        done.add(number)
        told("lens", min(len(done) * config.batch_size, n_items), n_items)
    n_browsed = _browse(run, model, prepared, config, told, say, lens)
    more: dict[str, pl.DataFrame] = {}
    probed: dict[str, int] = {}
    for name in config.probes[1:]:
        found, counted = _probe(run, name, ready, config, limit, told, say)
        more |= found
        probed |= counted
    run.write_table("items", prepared.table)
    lens_table = run.join_parts("lens", n_parts)
    told("shortcuts", 0, 1)
    kept = set(prepared.table["item"])
    asked = [item for item in ready.items if item.id in kept]
    shortcuts = tables.conform("shortcuts", shortcut_rows(asked))
    run.write_table("shortcuts", shortcuts)
    told("analysis", 0, 1)
    found = analysis.analyse(lens_table, more=more, exit_q=model.exit_q, seed=config.seed, resamples=config.resamples)
    for name, table in found.items():
        run.write_table(name, table)
    summary = analysis.summarise(
        {**found, "shortcuts": shortcuts}, name=_short_name(config.model), exit_q=model.exit_q
    )
    counts = {
        "items": n_items,
        "stories": prepared.table.select("task", "story").n_unique(),
        "too_long": len(prepared.too_long),
        "lens_rows": lens_table.height,
        "browsed": n_browsed,
        **probed,
    }
    run.finish(counts=counts, summary=summary)


def _probe(
    run: RunFolder,
    name: str,
    ready: Ready,
    config: AnalyzeConfig,
    limit: int,
    told: Progress,
    say: Callable[[str], None],
) -> tuple[dict[str, pl.DataFrame], dict[str, int]]:
    """The tables of one probe, and its counts for the manifest."""
    probe = PROBES[name]
    told(name, 0, 1)
    work = probe.prepare(ready.model, ready.prepared, config, limit, say)
    done = set.intersection(*(run.parts(table) for table in probe.tables))
    told(name, len(done), work.n_parts)
    for number, frames in work.rows(done):
        for table in probe.tables:
            run.write_part(table, number, frames[table])
        done.add(number)
        told(name, len(done), work.n_parts)
    return {table: run.join_parts(table, work.n_parts) for table in probe.tables}, dict(work.counts)


def _browse(
    run: RunFolder,
    model: DepthModel,
    prepared: Prepared,
    config: AnalyzeConfig,
    told: Progress,
    say: Callable[[str], None],
    lens: Mapping[str, Any],
) -> int:
    """The table `tokens`, unless nobody wants it; returns how many items it has."""
    from depthprobe.lens import browsed, n_batches, token_rows

    if config.browse == 0:
        return 0
    chosen = browsed(model, prepared.targets, config.browse)
    n_items = len(chosen)
    if config.browse is None and n_items < len(prepared.targets):
        say(f"the browser shows {n_items} of {len(prepared.targets)} questions token by token; --browse asks for more")
    done = run.parts("tokens")
    told("words", min(len(done) * config.batch_size, n_items), n_items)
    for number, rows in token_rows(model, chosen, config.batch_size, done=done, **lens):
        run.write_part("tokens", number, rows)
        done.add(number)
        told("words", min(len(done) * config.batch_size, n_items), n_items)
    run.join_parts("tokens", n_batches(n_items, config.batch_size))
    return n_items


def _about(model: DepthModel, config: AnalyzeConfig) -> dict[str, Any]:
    return {
        "name": model.name,
        "revision": config.revision,
        "fingerprint": model.fingerprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "route": model.route,
        "n_loops": model.n_loops,
        "n_layers": model.n_layers,
        "n_depths": len(model.axis),
        "gate": model.gate,
        "exit_q": model.exit_q,
        "context_length": model.context_length,
    }


def _folder(config: AnalyzeConfig, out: str | Path | None, resume: bool) -> Path:
    """Where the run goes. Raises UserError if there is nothing to resume."""
    if out is not None:
        folder = Path(out).expanduser()
        if resume and not (folder / "manifest.json").exists():
            raise UserError("there is no run to resume", where=str(folder), remedy="leave out --resume")
        return folder
    slug = re.sub(r"[^\w.-]+", "-", _short_name(config.model)).strip("-.") or "model"
    if resume:
        for folder in sorted(RUNS.glob(f"{slug}-*"), reverse=True):
            try:
                manifest = read_manifest(folder)
                compare(manifest, {"config": config.as_dict()}, folder)
            except UserError:
                continue
            if manifest.get("status") != "finished":
                return folder
        where = f"{RUNS / slug}-*, unfinished and asked the same"
        raise UserError("there is no run to resume", where=where, remedy="name its folder with --out")
    stem = RUNS / f"{slug}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, again = stem, 1
    while folder.exists():
        again += 1
        folder = stem.with_name(f"{stem.name}-{again}")
    return folder


def _short_name(model: str) -> str:
    """As the user named it; of a path the last part."""
    return Path(model).name if model.startswith((".", "/", "~")) or Path(model).is_dir() else model


def _silent(*_: object) -> None:
    """Progress and remarks that nobody asked for."""
