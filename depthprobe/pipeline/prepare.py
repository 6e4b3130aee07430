"""From a configuration to a loaded model and its items: what a run and a dry run begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from depthprobe.errors import UserError
from depthprobe.files import check_place
from depthprobe.pipeline.config import AnalyzeConfig, parse_bytes
from depthprobe.pipeline.questions import questions
from depthprobe.runs import check_free, compare, read_manifest
from depthprobe.tasks.items import Item

if TYPE_CHECKING:
    from depthprobe.depth import DepthModel
    from depthprobe.lens import Prepared, TunedLens

__all__ = ["Ready", "allowed_bytes", "begun", "opened"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A model, its questions, these as its tokens, and the lens: tuned, behind the coda, or neither."""

    model: DepthModel
    items: list[Item]
    prepared: Prepared
    tuned: TunedLens | None = None
    coda: bool = False


def begun(folder: Path, config: AnalyzeConfig, *, resume: bool) -> bool:
    """Whether this very run was begun in the folder; if not, that it can begin there.

    The cheap half of the comparison: nobody wants to load a model to learn of a mistyped option or a full disk.

    Raises:
        UserError: the folder holds another run, an unfinished one without `resume`, or anything else; it cannot be
            written to.
    """
    if not (folder / "manifest.json").exists():
        check_free(folder)
        check_place(folder)
        return False
    compare(read_manifest(folder), {"config": config.as_dict()}, folder)
    if not resume and read_manifest(folder).get("status") != "finished":
        remedy = "continue it with --resume, or choose another --out"
        raise UserError("there is an unfinished run in this folder", where=str(folder), remedy=remedy)
    check_place(folder)
    return True


def opened(
    config: AnalyzeConfig, *, split_given: bool, say: Callable[[str], None], told: Callable[[str, int, int], None]
) -> Ready:
    """Make the questions, load the model, find the tokens.

    Args:
        split_given: whether somebody asked for this split.
        say: is called with a line about anything that is left out.
        told: is called as `analyze`'s progress.

    Raises:
        UserError: bad questions, model or tokens.
    """
    told("questions", 0, 1)
    if config.data is None and config.split == "any" and not split_given:
        say("no chain of one or two relations is held out, so the questions are of any split")
    items = questions(config, remark=say)
    told("model", 0, 1)
    from depthprobe.depth import load
    from depthprobe.lens import as_lens, check_coda, prepare_items

    model = load(
        config.model, revision=config.revision, device=config.device, dtype=config.dtype, route=config.route
    )
    tuned = None if config.tuned is None else as_lens(config.tuned, model)
    if config.lens == "coda":
        check_coda(model)
    told("tokens", 0, 1)
    prepared = prepare_items(model, items, skip_too_long=config.skip_too_long, bos=config.bos, chat=config.chat)
    if prepared.too_long:
        say(f"{len(prepared.too_long)} items exceed the model's context and are left out")
    return Ready(model, items, prepared, tuned, config.lens == "coda")


def allowed_bytes(config: AnalyzeConfig, max_memory: str | int | None) -> int:
    """Bytes that a sweep may take beyond the model.

    Raises:
        UserError: no amount of memory, or one that says nothing.
    """
    if max_memory is None:
        from depthprobe.depth.resume import MAX_BYTES

        return MAX_BYTES
    if config.probes == ("lens",):
        what = "--max-memory says nothing without a probe beside the lens"
        raise UserError(what, remedy="ask for --probes lens,patching, or leave it out")
    return parse_bytes(max_memory)
