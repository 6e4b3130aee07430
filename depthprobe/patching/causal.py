"""`causal_patch`: when the information that an answer needs has moved.

    result = depthprobe.causal_patch(model, items)
    result.by_role()                                  # mean effect by role and depth
    result.frame                                      # a row a cell; columns of tables.SCHEMAS["patching"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from depthprobe import tables
from depthprobe.depth import DepthModel
from depthprobe.depth.arguments import flag, shown, whole
from depthprobe.depth.resume import MAX_BYTES
from depthprobe.errors import UserError
from depthprobe.lens.table import check_context, items_of
from depthprobe.lens.targets import resolve
from depthprobe.patching.pairs import subjects
from depthprobe.patching.probe import DEFAULT_ROLES, DEFAULT_SITES, Found, Plan, probe
from depthprobe.patching.result import PatchResult
from depthprobe.patching.table import cannot_cut, fit_context, role_means, tapped_model
from depthprobe.tasks.donors import Donor, Kind
from depthprobe.tasks.items import Item


def causal_patch(
    model: DepthModel,
    items: Sequence[Item] | Item,
    *,
    sites: Sequence[str] | str | None = DEFAULT_SITES,
    positions: Sequence[str | int] | str | int | None = DEFAULT_ROLES,
    donors: Sequence[Kind] | Sequence[Donor] | Kind | Donor | None = None,
    position: str = "role",
    directions: Sequence[str] | str | None = ("donor_to_item",),
    kinds: Sequence[str] | str | None = ("set",),
    at: Sequence[tuple[int, int]] | tuple[int, int] | None = None,
    span: Sequence[str] | str | None = "one",
    window: int = 1,
    controls: bool = True,
    knockout: int | None = None,
    engine: str = "auto",
    max_bytes: int = MAX_BYTES,
    seed: int = 0,
    bos: str = "tokenizer",
    chat: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PatchResult:
    """Put states of one story into the run of another, and see whose answer comes out.

    Where several things can be asked for, one serves, and None is the default.

    Args:
        model: of `depthprobe.load`.
        items: questions with facts (`depthprobe.tasks`).
        sites: "resid_post" (from the embedding to what the head reads), "resid_pre", "attn_out", "mlp_out" and
            "loop_state".
        positions: roles (`patching.roles`), or single tokens of the prompt (negative: from its end).
        donors: kinds of donors to look for (`tasks.donors`; default "relation" for kinship, "name" for follow, and one
            control each), or donors of one's own, whose prompts must have as many tokens as their items'.
        position: "role": all tokens of a role at once; "each": one at a time.
        directions: "donor_to_item", "item_to_donor": whose states go into whose run.
        kinds: "set": the other run's states; "zero"; "mean": over the same role in the other items (`patching.means`).
        at: only these (loop, layer), or this one, both from 1; (0, 0) is the embedding. Of a `Coordinate` its loop and
            layer are taken: what is patched there, `sites` says. It chooses where a span starts, not where it ends:
            rows are those of the sweep over all depths.
        span: "one": this loop and layer alone; "window": `window` places from here on; "later": this layer in this and
            all later loops.
        controls: whether donors that keep the answer are patched too.
        knockout: also cut attention from the last token to each role, in windows of so many layers.
        engine, max_bytes: as `DepthModel.resume` takes them; a sweep that is larger is split.
        seed: with the item's id it decides which donor is taken.
        bos, chat: as `lens.targets.resolve` takes them.
        progress: is called with (items done, items).

    Raises:
        UserError: anything that the model lacks or that says nothing; a story beyond the context; a donor that does not
            fit its item; no item with a donor; an oracle that fails: the changed word at depth 0 and the last token at
            the last depth have to give the other story's logits, in every pair.
    """
    opened = tapped_model(model)
    listed, controls, chat = items_of(items), flag(controls, "controls"), flag(chat, "chat")
    if progress is not None and not callable(progress):
        raise UserError(f"progress is {shown(progress)}", remedy="give a function of (items done, items)")
    seed = whole(seed, "seed")
    plan = Plan.of(
        opened, sites=sites, positions=positions, position=position, directions=directions, kinds=kinds, at=at,
        span=span, window=window, knockout=knockout, engine=engine, max_bytes=max_bytes,
    )  # fmt: skip
    targets = list(resolve(opened.tokenizer, listed, bos=bos, chat=chat))
    for target in targets:
        check_context(opened, target.n_positions, f"item {target.item.id}")
    found = subjects(opened.tokenizer, targets, donors, controls=controls, seed=seed, bos=bos, chat=chat)
    fit_context(opened, found)
    if plan.cuts and (why := cannot_cut(opened, found.found[0].target)) is not None:
        remedy = "leave it out, and patch its residuals (sites='resid_post') or skip its layers (effective_depth)"
        raise UserError(why, where="knockout", remedy=remedy)
    means = role_means(opened, plan, found)
    parts: list[Found] = []
    for number, subject in enumerate(found.found):
        if progress is not None:
            progress(number, len(found.found))
        parts.append(probe(opened, plan, subject, means))
    if progress is not None:
        progress(len(found.found), len(found.found))

    def joined(name: str) -> pl.DataFrame:
        return pl.concat([part.frames.get(name, tables.empty(name)) for part in parts])

    return PatchResult(
        model_name=opened.name,
        frame=joined("patching"),
        donors=joined("donors"),
        knockout=None if knockout is None else joined("knockout"),
        without=found.without,
        n_cells=sum(part.n_cells for part in parts),
        n_run=sum(part.n_run for part in parts),
        n_filled=sum(part.n_filled for part in parts),
        flops=sum(part.flops for part in parts),
        engines=frozenset[str]().union(*(part.engines for part in parts)),
    )
