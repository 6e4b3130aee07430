"""Patches of single tokens, packed for the page's item browser.

A question that was patched token by token in some way (kind of donor, direction, what is put there, site) owns
n·m cells from `cell` on, by position and then by depth, in four planes of 16 bits: the effect, p(answer), p(donor's
answer), and whether the best candidate flips. 65535 stands for an effect that is not told, and for a flip where nothing
was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from depthprobe.errors import UserError
from depthprobe.report.names import DONORS, PATCHES, SITES, donor_name, patch_name, site_name

__all__ = ["MAX_PATCHED", "Patches", "pack_patches"]

#: The page holds at most so many patched cells (tokens × depths × ways); a cell takes about four bytes of it.
MAX_PATCHED = 250_000
REACH = 4.0  # effects are packed from −REACH to REACH
_NOTHING = 65535
_WAY = ["donor_kind", "direction", "kind", "span", "site"]
_COLUMNS = ["item", *_WAY, "position", "depth", "effect", "p_answer", "p_donor", "flip"]


@dataclass(frozen=True, slots=True)
class Patches:
    """What the header of the payload gets, and its planes.

    Attributes:
        ways: what a patch may be, with its words.
        of: item -> its patches: way, first cell, positions, depths; of the donor the words that differ and the answer.
        tokens: item -> all tokens of its prompt, where the run kept them.
        planes: effect, p(answer), p(donor's answer), flip; none without patches.
        left_out: questions that were patched token by token and did not fit.
    """

    ways: list[dict[str, str]]
    of: dict[str, list[dict[str, Any]]]
    tokens: dict[str, list[str]]
    planes: list[np.ndarray]
    left_out: int


def pack_patches(folder: Path, items: Sequence[str], n_depths: int) -> Patches:
    """Patches of single tokens of the questions on the page, as many as fit, in the questions' order.

    Raises:
        UserError: the table cannot be read, or names a depth that the run does not have.
    """
    path = folder / "tables" / "patching.parquet"
    if not path.is_file():
        return Patches([], {}, {}, [], 0)
    rows = _read(path, list(items))
    if rows.height and not 0 <= _int(rows["depth"].min()) <= _int(rows["depth"].max()) < n_depths:
        raise UserError(
            f"the table patching has depths beyond the {n_depths} of the axis",
            where=str(path),
            remedy="run `depthprobe analyze` again",
        )
    order = {item: number for number, item in enumerate(items)}
    parts = rows.sort("position", "depth").partition_by(["item", *_WAY], as_dict=True, maintain_order=True)
    keys = sorted(parts, key=lambda key: (order[str(key[0])], _rank(key)))
    donors, tokens = _donors(path.with_name("donors.parquet"), list(items))
    ways: list[tuple[str, ...]] = []
    of: dict[str, list[dict[str, Any]]] = {}
    cells: list[list[np.ndarray]] = []
    at, left_out = 0, set[str]()
    for key in keys:
        item, way, part = str(key[0]), tuple(map(str, key[1:])), parts[key]
        positions, depths = part["position"].unique().sort(), part["depth"].unique().sort()
        size = len(positions) * len(depths)
        if item in left_out or at + size > MAX_PATCHED:
            left_out.add(item)
            continue
        if way not in ways:
            ways.append(way)
        where = np.searchsorted(positions.to_numpy(), part["position"].to_numpy()) * len(depths)
        where += np.searchsorted(depths.to_numpy(), part["depth"].to_numpy())
        cells.append(_planes(part, where, size))
        own = {"way": ways.index(way), "cell": at, "positions": positions.to_list(), "depths": depths.to_list()}
        of.setdefault(item, []).append(own | donors.get((item, way[0]), {}))
        at += size
    planes = [np.concatenate(plane) for plane in zip(*cells, strict=True)]
    words, kept = [_words(way) for way in ways], {item: tokens[item] for item in of if item in tokens}
    return Patches(words, of, kept, planes, len(left_out - of.keys()))


def _donors(path: Path, items: list[str]) -> tuple[dict[tuple[str, str], dict[str, str]], dict[str, list[str]]]:
    """(item, kind) -> what its donor changes and answers; item -> its tokens. Nothing of a run without the table."""
    if not path.is_file():
        return {}, {}
    columns = ["item", "donor_kind", "before", "after", "donor_answer", "tokens"]
    rows = _collect(path, pl.col("item").is_in(items), columns)
    words: dict[tuple[str, str], dict[str, str]] = {}
    tokens: dict[str, list[str]] = {}
    for item, kind, before, after, answer, own in rows.iter_rows():
        words.setdefault((item, kind), {"before": before, "after": after, "answer": answer})
        tokens.setdefault(item, own)
    return words, tokens


def _read(path: Path, items: list[str]) -> pl.DataFrame:
    """Of several donors of one kind the first."""
    single = pl.col("position").is_not_null() & pl.col("item").is_in(items) & ~pl.col("control")
    rows = _collect(path, single, _COLUMNS)
    return rows.unique(["item", *_WAY, "position", "depth"], keep="first", maintain_order=True)


def _collect(path: Path, chosen: pl.Expr, columns: list[str]) -> pl.DataFrame:
    try:
        return pl.scan_parquet(path).filter(chosen).select(columns).collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(
            f"the table {path.stem} cannot be read: {error}", where=str(path), remedy="run `depthprobe analyze` again"
        ) from None


def _planes(part: pl.DataFrame, where: np.ndarray, size: int) -> list[np.ndarray]:
    """Effect, p(answer), p(donor's), flip, each [size] uint16."""
    found = [np.full(size, _NOTHING, np.uint16) for _ in range(4)]
    effect = part["effect"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    told = ~np.isnan(effect)
    scaled = (np.clip(effect[told], -REACH, REACH) + REACH) / (2 * REACH)
    found[0][where[told]] = np.rint(scaled * (_NOTHING - 1)).astype(np.uint16)
    for plane, name in zip(found[1:3], ("p_answer", "p_donor"), strict=True):
        share = np.clip(part[name].cast(pl.Float64).fill_null(0.0).fill_nan(0.0).to_numpy(), 0, 1)
        plane[where] = np.rint(share * 65535).astype(np.uint16)
    found[3][where] = part["flip"].fill_null(False).to_numpy().astype(np.uint16)
    return found


def _rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The ways that are shown first: as the map of the section offers them."""
    _, donor, direction, kind, span, site = map(str, key)
    patch = f"{direction}.{kind}.{span}"

    def place(value: str, known: dict[str, str]) -> tuple[int, str]:
        return (list(known).index(value) if value in known else len(known), value)

    return place(patch, PATCHES), place(donor, DONORS), place(site, SITES)


def _words(way: tuple[str, ...]) -> dict[str, str]:
    donor, direction, kind, span, site = way
    words = f"{donor_name(donor)}, {site_name(site)}"
    patch = f"{direction}.{kind}.{span}"
    if patch != next(iter(PATCHES)):
        words += f", {patch_name(patch)}"
    return dict(zip(_WAY, way, strict=True)) | {"words": words}


def _int(value: Any) -> int:
    return int(value)
