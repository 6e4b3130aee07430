"""What the page's item browser reads: questions, their facts, and words at every token and depth, packed small.

    browser = build(read_run(Path("runs/demo")))
    browser.payload                  # text for the page: base64 of gzip of a header and planes of numbers

The payload, unzipped, is the length of a JSON header (uint32, little-endian), the header padded to a multiple of
four bytes, and the planes that it lists (name, dtype, count), each padded likewise. Words are numbers into one
dictionary; a probability p is round(65535 p), so that it is true to 0.000008. A question with n positions and
m depths owns n·m cells from its `cell` on, by position and then by depth; a plane of a rank holds the words or
probabilities of all cells.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl

from depthprobe.errors import UserError
from depthprobe.report.align import roles_of_tokens
from depthprobe.report.data import Run, read_columns, read_table
from depthprobe.report.patches import pack_patches

__all__ = ["MAX_CELLS", "MAX_ITEMS", "Browser", "Limit", "build"]

#: How many questions the page holds if nobody asks for another number, and how many cells (tokens × depths) of
#: theirs: a cell takes two bytes of the page (a model that is sure of its words) to twenty (one that says anything).
MAX_ITEMS = 500
MAX_CELLS = 1_000_000

RANKS = 5
SCALE = 65535
#: a gate's value in these units; the largest number stands for "no gate here"
GATE_SCALE, NO_GATE = 65534, 65535

#: A number of questions, "all", or None for the default cap.
Limit = int | Literal["all"] | None


@dataclass(frozen=True, slots=True)
class Browser:
    """The browser's data and what must be said beside it.

    Attributes:
        payload: see the module.
        shown, total: questions on the page, and in the run.
        with_tokens: of those shown, how many have the grid over all tokens; the others show the answer position.
        roles: roles of facts that occur, in the order of the legend.
        tasks, hops: what can be filtered by.
        capped: whether the default cap, not the user, left questions out.
        with_patches: of those shown, how many can be seen patched token by token.
        patches_left_out: how many more could, did their patches fit.
    """

    payload: str
    shown: int
    total: int
    with_tokens: int
    roles: tuple[str, ...]
    tasks: tuple[str, ...]
    hops: tuple[int, ...]
    capped: bool
    with_patches: int
    patches_left_out: int


_ROLES = ("chain", "branch", "decoy", "offchain", "gender")


def build(run: Run, limit: Limit = None) -> Browser:
    """Choose the questions and pack them.

    Args:
        run: whose tables items, lens, settling and, if there is one, tokens are read.
        limit: how many questions: those with a grid over all tokens first, story by story and task by task in turn.

    Raises:
        UserError: a number below 1; a table that is damaged, or that names an item or a depth the run does not have.
    """
    if isinstance(limit, int) and limit < 1:
        raise UserError(f"{limit} questions cannot be shown", where="--items", remedy="give a number from 1, or 'all'")
    items = pl.concat([task.items for task in run.tasks])
    tokens = read_table(run.folder, "tokens", required=False)
    _check(run, items, tokens)
    cells = _cells(items, tokens, len(run.axis.coordinates))
    chosen = _choose(cells, limit)
    shown = items.join(chosen, on="item", how="semi", maintain_order="left")
    with_tokens = set(chosen.filter(pl.col("positions") > 0)["item"])
    lens = read_columns(run.folder, "lens", _LENS, shown["item"].to_list()).sort("depth")
    grid = pl.concat(
        [
            tokens.join(chosen, on="item", how="semi").select(_GRID),
            _answer_rows(shown, lens, with_tokens),
        ]
    )
    header, planes = _pack(run, shown, lens, grid, with_tokens)
    patches = pack_patches(run.folder, shown["item"].to_list(), len(run.axis.coordinates))
    axes: list[list[int]] = header["axes"]
    for row in header["items"]:
        row["patches"] = [_on_axis(own, axes) for own in patches.of.get(row["id"], [])]
        if row["id"] in patches.tokens:
            row["prompt"] = patches.tokens[row["id"]]
            row["prompt_facts"] = roles_of_tokens(row["text"], row["prompt"], row["facts"])
    header |= {"ways": patches.ways, "patched": len(planes)}
    planes += patches.planes
    roles = {fact["role"] for facts in shown["facts"].to_list() for fact in facts}
    return Browser(
        payload=_encode(header, planes),
        shown=shown.height,
        total=items.height,
        with_tokens=len(with_tokens),
        roles=(*(role for role in _ROLES if role in roles), *sorted(roles.difference(_ROLES))),
        tasks=tuple(task.name for task in run.tasks),
        hops=run.hops,
        capped=limit is None and shown.height < items.height,
        with_patches=len(patches.of),
        patches_left_out=patches.left_out,
    )


def _on_axis(patch: dict[str, Any], axes: list[list[int]]) -> dict[str, Any]:
    """A patch with its depths as one of the header's lists, which grows."""
    own = {name: value for name, value in patch.items() if name != "depths"}
    if patch["depths"] not in axes:
        axes.append(patch["depths"])
    return own | {"axis": axes.index(patch["depths"])}


_GRID = ["item", "position", "token", "depth", "top5", "top5_probs", "gate_lambda", "gate_cdf"]
_LENS = [
    "item", "depth", "target_prob", "target_rank", "candidate_correct", "top1", "top5", "top5_probs",
    "gate_lambda", "gate_cdf",
]  # fmt: skip


def _check(run: Run, items: pl.DataFrame, tokens: pl.DataFrame) -> None:
    """The rows of `tokens` belong to this run."""
    where, remedy = str(run.folder / "tables" / "tokens.parquet"), "run `depthprobe analyze` again"
    unknown = set(tokens["item"].unique()) - set(items["item"])
    if unknown:
        raise UserError(f"the table tokens has an unknown item, '{min(unknown)}'", where=where, remedy=remedy)
    n = len(run.axis.coordinates)
    wrong = tokens.filter(~pl.col("depth").is_between(0, n - 1))["depth"]
    if wrong.len():
        raise UserError(
            f"the table tokens has depth {wrong[0]}, the axis has {n} depths", where=where, remedy=remedy
        )


def _cells(items: pl.DataFrame, tokens: pl.DataFrame, n_depths: int) -> pl.DataFrame:
    """Per item: positions of its grid (0 without one), cells, and its place in the order of choice."""
    sizes = tokens.group_by("item").agg(positions=pl.col("position").n_unique(), cells=pl.len())
    found = items.select("item", "task", "story", "hops").join(sizes, on="item", how="left", maintain_order="left")
    return found.with_columns(
        pl.col("positions").fill_null(0),
        pl.col("cells").fill_null(n_depths),
        turn=pl.col("story").rank("dense").over("task"),
    ).sort(pl.col("positions") == 0, "turn", "task", "hops", maintain_order=True)


def _choose(cells: pl.DataFrame, limit: Limit) -> pl.DataFrame:
    if limit == "all":
        return cells
    if limit is not None:
        return cells.head(limit)
    within = (cells["cells"].cum_sum() <= MAX_CELLS).sum()
    return cells.head(min(max(int(within), 1), MAX_ITEMS))


def _answer_rows(items: pl.DataFrame, lens: pl.DataFrame, with_tokens: set[str]) -> pl.DataFrame:
    """Grid rows of the answer position, from `lens`, for items that `tokens` does not have."""
    place = items.select("item", position=pl.col("n_tokens") - 1, token=_last_word(items))
    rows = lens.filter(~pl.col("item").is_in(list(with_tokens))).join(place, on="item", how="inner")
    return rows.select(_GRID)


def _last_word(items: pl.DataFrame) -> pl.Series:
    """What stands at the answer position, nearly: the run may not hold its token's text."""
    words = [text.split()[-1] if text.split() else "" for text in items["text"].to_list()]
    return pl.Series("token", words, dtype=pl.String)


def _pack(
    run: Run, items: pl.DataFrame, lens: pl.DataFrame, grid: pl.DataFrame, with_tokens: set[str]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    every = list(range(len(run.axis.coordinates)))
    sparse = sorted(grid.filter(pl.col("item").is_in(list(with_tokens)))["depth"].unique().to_list())
    order = pl.DataFrame({"item": items["item"], "number": np.arange(items.height)})
    grid = grid.join(order, on="item", how="inner").sort("number", "position", "depth")
    words = _Words()
    columns = [grid["top5"].list.get(rank, null_on_oob=True).fill_null("") for rank in range(RANKS)]
    ids = [words.numbers(column) for column in columns]
    probs = [
        np.rint(np.clip(grid["top5_probs"].list.get(rank, null_on_oob=True).fill_null(0.0).to_numpy(), 0, 1) * SCALE)
        for rank in range(RANKS)
    ]
    rows = _rows(run, items, lens)
    parts = grid.partition_by("number", maintain_order=True)
    # cells of a (position, depth) that the table lacks stay without a word
    axes, at, n_cells = [], [], 0
    for row, part, start in zip(rows, parts, items["text_start"], strict=True):
        own = sparse if row["id"] in with_tokens else every
        of_position = part["position"].rank("dense").to_numpy() - 1
        of_depth = np.searchsorted(own, part["depth"].to_numpy())
        at.append(n_cells + of_position * len(own) + of_depth)
        heads = part.unique("position", keep="first", maintain_order=True)
        row |= {
            "cell": n_cells,
            "positions": heads["position"].to_list(),
            "tokens": words.numbers(heads["token"]).tolist(),
            "full": row["id"] in with_tokens,
        }
        # a lone token at the end has no tokens before it to be found by
        row["facts_of"] = [-1]
        if row["full"]:
            row["facts_of"] = roles_of_tokens(row["text"], heads["token"].to_list(), row["facts"], start)
        axes.append(own)
        n_cells += heads.height * len(own)
    where = np.concatenate(at).astype(np.int64)
    planes: list[np.ndarray] = []
    kind = np.uint16 if len(words.found) <= 65536 else np.uint32
    for values, dtype in (*((v, kind) for v in ids), *((v, np.uint16) for v in probs)):
        plane = np.zeros(n_cells, dtype)
        plane[where] = values.astype(dtype)
        planes.append(plane)
    if grid["gate_lambda"].null_count() < grid.height:
        planes += [_gate(grid[column], where, n_cells) for column in ("gate_lambda", "gate_cdf")]
    distinct = [list(axis) for axis in dict.fromkeys(map(tuple, axes))]
    for row, axis in zip(rows, axes, strict=True):
        row["axis"] = distinct.index(list(axis))
    coordinates = run.axis.coordinates
    header = {
        "run": run.folder.resolve().name,
        "unit": run.axis.unit[:-1],
        "axisTitle": run.axis.title.replace("<br>", " "),
        "depths": [
            {
                "short": run.axis.short(d), "long": run.axis.long(d), "loop": c.loop, "layer": c.layer,
                "site": c.site, "end": c.is_loop_end,
            }
            for d, c in enumerate(coordinates)
        ],
        "axes": distinct,
        "words": words.found,
        "items": rows,
        "gate": len(planes) > 2 * RANKS,
        "tasks": [task.name for task in run.tasks],
    }  # fmt: skip
    return header, planes


def _rows(run: Run, items: pl.DataFrame, lens: pl.DataFrame) -> list[dict[str, Any]]:
    """What the header says of each item, in the order of `items`."""
    of = {str(key[0]): part for key, part in lens.partition_by("item", as_dict=True, maintain_order=True).items()}
    settling = pl.concat([task.settling for task in run.tasks])
    settled = {row["item"]: row for row in settling.iter_rows(named=True)}
    ends = [i for i, c in enumerate(run.axis.coordinates) if c.is_loop_end]
    rows: list[dict[str, Any]] = []
    for item in items.iter_rows(named=True):
        read = of.get(item["item"])
        if read is None or item["item"] not in settled:
            raise UserError(
                f"the tables lens and settling lack item '{item['item']}'",
                where=str(run.folder),
                remedy="run `depthprobe analyze` again",
            )
        own = settled[item["item"]]

        def depth(name: str, own: dict[str, Any] = own) -> int | None:
            # in loops where the model ends with one, as in the strips: a state within a loop is not made to be read
            if not run.axis.ends_in_loop:
                return own[f"{name}_depth"]
            loop = own[f"{name}_loop"]
            return None if loop is None else ends[loop - 1]

        rows.append(
            {
                "id": item["item"], "story": item["story"], "task": item["task"], "k": item["hops"],
                "text": item["text"], "question": item["question"], "answer": item["answer"],
                "plausible": item["plausible"],
                "facts": [[f["start"], f["end"], f["role"], f["hop"]] for f in item["facts"]],
                "right": bool(read["candidate_correct"][-1]),
                "said": read["top1"][-1],
                "p": [round(p, 5) for p in read["target_prob"].to_list()],
                "rank": read["target_rank"].to_list(),
                "settled": depth("settling"),
                "correct": depth("correct"),
                "exit": own["gate_exit"],
            }
        )  # fmt: skip
    return rows


class _Words:
    """A dictionary that grows: number 0 is no word."""

    def __init__(self) -> None:
        self.found: list[str] = [""]
        self._number: dict[str, int] = {"": 0}

    def numbers(self, words: pl.Series) -> np.ndarray:
        """The words' numbers, int64 of the same length."""
        new = words.unique(maintain_order=True).to_list()
        for word in new:
            if word not in self._number:
                self._number[word] = len(self.found)
                self.found.append(word)
        return words.replace_strict(new, [self._number[word] for word in new], return_dtype=pl.Int64).to_numpy()


def _gate(values: pl.Series, where: np.ndarray, n_cells: int) -> np.ndarray:
    plane = np.full(n_cells, NO_GATE, np.uint16)
    known = values.is_not_null().to_numpy()
    plane[where[known]] = np.rint(np.clip(values.drop_nulls().to_numpy(), 0, 1) * GATE_SCALE).astype(np.uint16)
    return plane


def _encode(header: dict[str, Any], planes: Sequence[np.ndarray]) -> str:
    header["planes"] = [[plane.dtype.name, len(plane)] for plane in planes]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    parts = [_padded(text)]
    parts += [_padded(plane.astype(plane.dtype.newbyteorder("<")).tobytes()) for plane in planes]
    whole = len(text).to_bytes(4, "little") + b"".join(parts)
    # no time stamp: the same tables give the same page
    return base64.b64encode(gzip.compress(whole, compresslevel=6, mtime=0)).decode("ascii")


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)
