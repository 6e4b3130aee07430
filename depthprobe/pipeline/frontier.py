"""What leaving early costs and saves, served: `depthprobe frontier`.

    found = frontier("follow-demo", n=60, exit=("q:0.5", "q:0.9"), out="runs/frontier")
    found.tables["frontier"]          # accuracy, mean depth, work, latency and KV, by setting and hops

For each layout of keys and values the same questions are served by every rule asked for, by every fixed depth, by a
confidence exit of each rule's mean depth (its threshold set on other stories of another split), with each rule's exits
permuted over the tokens, and by two oracles. All of them run in the engine, because exits change the keys that later
tokens read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from depthprobe.errors import UserError
from depthprobe.files import check_place
from depthprobe.pipeline.config import AnalyzeConfig
from depthprobe.pipeline.frontier_serving import target_of
from depthprobe.pipeline.frontier_work import PARTS, Work
from depthprobe.pipeline.trace import QUESTIONS
from depthprobe.runs import RunFolder, check_free, compare, read_manifest, user_errors

__all__ = ["ANSWERS", "EXITS", "Frontier", "frontier"]

#: Rules that are served unless told otherwise.
EXITS = ("q:0.3", "q:0.5", "q:0.7", "q:0.9")
#: Answers of each task under each setting, unless `n` or a file says how many stories.
ANSWERS = 2000
_SET_ASIDE = ("fixed", "full", "replay")


@dataclass(frozen=True, slots=True)
class Frontier:
    """What came of it.

    Attributes:
        folder: the run folder.
        report: its page.
        tables: frontier_answers, frontier_served, frontier, frontier_differences.
    """

    folder: Path
    report: Path
    tables: dict[str, pl.DataFrame]


def frontier(
    model: str = "follow-demo",
    *,
    out: Path | str | None = None,
    exit: Sequence[str] = EXITS,
    kv: Sequence[str] = ("ragged",),
    prefill: str = "dense",
    width: int = 64,
    permutations: int = 2,
    calibrate: int = 60,
    lookahead: str | None = None,
    resume: bool = False,
    engine: Mapping[str, Any] | None = None,
    remark: Callable[[str], None] = lambda line: None,
    progress: Callable[[str, int, int], None] | None = None,
    command: str | None = None,
    **questions: Any,
) -> Frontier:
    """Serve questions at every threshold, and beside it what it has to be better than; write tables and a page.

    Args:
        model: a looped model, as `depthprobe.load` takes it.
        out: run folder; None: runs/frontier-MODEL-TIME.
        exit: exit rules as text; "q:mean=2.5" sets a threshold so that it has this mean depth on other stories.
        kv: layouts of keys and values.
        prefill: dense, or ragged: tokens of prompts leave early, too.
        width: most rows of a batch.
        permutations: seeds of the permuted exits; 0: none.
        calibrate: stories that thresholds are set on, of another split and seed than the questions reported.
        lookahead: file or folder with a lookahead head; None: the one beside the model.
        resume: continue a run that was stopped.
        engine: further options of `runtime.EngineOptions`.
        questions: options of `analyze` that say which questions: task, data, hops, n, split, seed, … `n` is by default
            as many stories as have `ANSWERS` answers.

    Raises:
        UserError: anything that cannot be served or written, in one line; a folder with another configuration.
    """
    for name in questions:
        if name not in QUESTIONS:
            raise UserError(f"frontier has no option {name}", where=name)
    given = {"model": model, **{k: v for k, v in questions.items() if v is not None}}
    config = AnalyzeConfig.of(given)
    if "n" not in given and config.data is None:
        given["n"] = math.ceil(ANSWERS / len(config.hops))
        config = AnalyzeConfig.of(given)
    _check(exit, kv, permutations, calibrate, config)
    serving = {"prefill": prefill, "width": width, **(engine or {})}
    asked = {
        **config.as_dict(), "exit": list(exit), "kv": list(kv), "permutations": permutations, "calibrate": calibrate,
        "lookahead": lookahead, "engine": {k: v for k, v in serving.items() if v is not None},
    }  # fmt: skip
    folder = _folder(model, out, resume)
    there = _begun(folder, asked, resume)
    say = progress or (lambda stage, done, total: None)
    work = Work.opened(config, given, list(exit), list(kv), permutations, calibrate, lookahead, serving, remark, say)
    identity = {"config": asked, "model": work.about, "items": {"digest": work.digest}}
    run = (
        RunFolder.resume(folder, identity) if there
        else RunFolder.create(folder, identity, {"command": command, "seed": config.seed})
    )  # fmt: skip
    with run, user_errors(folder):
        if run.finished:
            remark(f"this run is finished already: {folder}")
            run.drop_parts()
        else:
            try:
                work.serve(run, say)
                say("analysis", 0, 1)
                _analyse(run, len(work.plan), config)
            except BaseException:
                run.remove_if_empty()
                raise
        from depthprobe.report.frontier import write_frontier

        page = write_frontier(folder)
        names = (*PARTS, "frontier", "frontier_differences")
        return Frontier(folder, page, {name: run.read_table(name) for name in names})


def _check(exit: Sequence[str], kv: Sequence[str], permutations: int, calibrate: int, config: AnalyzeConfig) -> None:
    for name, given in (("exit", exit), ("kv", kv)):
        if not given or len(set(given)) < len(given):
            raise UserError(f"{name} names {'nothing' if not given else 'one twice'}", where=name)
    for text in exit:
        rule = re.split("[:=,]", text.strip())[0].strip().lower()
        if rule in _SET_ASIDE:
            what = f"{rule} is no rule to be compared with fixed depths"
            raise UserError(what, where=f"exit {text}", remedy="leave it out: every fixed depth is served anyway")
        if target_of(text) is not None and config.data is not None:
            what = "a threshold is set on stories of another split, and a file has none"
            raise UserError(what, where=f"exit {text}", remedy="give the threshold itself")
    if permutations < 0:
        raise UserError(f"permutations is {permutations}", where="permutations", remedy="give a whole number from 0")
    if calibrate < 1:
        raise UserError(f"calibrate is {calibrate}", where="calibrate", remedy="give a whole number from 1")


def _analyse(run: RunFolder, n_parts: int, config: AnalyzeConfig) -> None:
    from depthprobe.analysis.frontier import frontier_tables

    answers, served = (run.join_parts(name, n_parts) for name in PARTS)
    for name, table in frontier_tables(answers, served, seed=config.seed, resamples=config.resamples).items():
        run.write_table(name, table)
    run.finish(counts={"settings": n_parts, "answers": answers.height, "questions": answers["item"].n_unique()})


def _folder(model: str, out: Path | str | None, resume: bool) -> Path:
    if out is not None:
        return Path(out).expanduser()
    if resume:
        raise UserError("there is no folder to resume", where="--resume", remedy="name it with --out")
    slug = re.sub(r"[^\w.-]+", "-", Path(model).name).strip("-.") or "model"
    return Path("runs") / f"frontier-{slug}-{datetime.now():%Y%m%d-%H%M%S}"


def _begun(folder: Path, asked: Mapping[str, Any], resume: bool) -> bool:
    """Whether this very run was begun there; before a model is loaded."""
    if not (folder / "manifest.json").exists():
        if resume:
            raise UserError("there is no run to resume", where=str(folder), remedy="leave out --resume")
        check_free(folder)
        check_place(folder)
        return False
    manifest = read_manifest(folder)
    compare(manifest, {"config": asked}, folder)
    if not resume and manifest.get("status") != "finished":
        remedy = "continue it with --resume, or choose another --out"
        raise UserError("there is an unfinished run in this folder", where=str(folder), remedy=remedy)
    check_place(folder)
    return True
