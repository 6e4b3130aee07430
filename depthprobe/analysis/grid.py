"""A lens table as matrices: rows are items, columns are depths.

Settling, accuracy and exits all ask along the depth axis, so the long table is turned once into
one [items, depths] array per column, in an order that does not depend on the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from depthprobe.errors import UserError

__all__ = ["DepthGrid", "with_clusters"]

_KEYS = ("item", "story", "cluster", "task", "hops")
_AT = ("item", "depth")
_AXIS = ("depth", "loop", "layer", "is_loop_end")
_READ = (
    "candidate_correct",
    "candidate_plausible",
    "equals_final",
    "p_candidates",
    "candidate_prob",
    "p_plausible",
    "gate_cdf",
)


def with_clusters(items: pl.DataFrame) -> pl.DataFrame:
    """One task's items (item, story, cluster, hops, …) with what their intervals are taken over.

    `whole`, over several hop counts: the cluster of the story's longest question, so that no story is torn.
    `cell`, within one hop count: the question's own cluster, which for a short chain is a larger one; but
    `whole` at a hop count at which a story is asked twice.
    """
    items = items.with_columns(
        whole=pl.col("cluster").sort_by("hops", "item").last().over("story"),
        cell=pl.len().over("story", "hops"),
    ).with_columns(cell=pl.col("cell").max().over("hops"))
    return items.with_columns(cell=pl.when(pl.col("cell") == 1).then("cluster").otherwise("whole"))


@dataclass(frozen=True)
class DepthGrid:
    """One task's lens rows.

    Attributes:
        items: I rows (item, story, cluster, task, hops), sorted by story, hops and item.
        axis: D rows (depth, loop, layer, is_loop_end), sorted by depth; depth is the index on the model's
            axis.
        columns: name → [I, D] array; flags bool, probabilities float64, `gate_cdf` float32 with NaN where
            there is none. `p_correct` is the answer's part of the candidates' mass: scored as `p_plausible`
            is, over answers that exclude each other, it never exceeds it. (`target_prob`, the first token
            alone, may: other answers can begin with that token.)
    """

    items: pl.DataFrame
    axis: pl.DataFrame
    columns: dict[str, np.ndarray]

    @classmethod
    def by_task(cls, lens: pl.DataFrame, *, kind: str | None = None) -> dict[str, DepthGrid]:
        """Task → grid, tasks in alphabetical order.

        Args:
            kind: of the column `lens`; default: all where each depth is read by one, "plain" where one is read by
                several.

        Raises:
            UserError: no rows, an item read twice at one depth, or an item that lacks a depth.
        """
        rows = lens
        if "lens" in lens.columns:
            kinds = lens["lens"].unique().to_list()
            # a coda lens reads loop ends alone, and other depths are plain beside it
            several = kind is None and len(kinds) > 1 and bool(lens.select(_AT).is_duplicated().any())
            wanted = "plain" if several else kind
            rows = lens if wanted is None else lens.filter(pl.col("lens") == wanted)
        if rows.is_empty():
            raise UserError("the lens table has no rows", remedy="run `depthprobe analyze` again")
        names = sorted(rows["task"].unique().to_list())
        return {name: cls._of(rows.filter(pl.col("task") == name)) for name in names}

    @classmethod
    def _of(cls, rows: pl.DataFrame) -> DepthGrid:
        rows = rows.sort("story", "hops", "item", "depth")
        axis = rows.select(_AXIS).unique().sort("depth")
        items = rows.select(_KEYS).unique().sort("story", "hops", "item")
        n_items, n_depths = items.height, axis.height
        depths = rows["depth"].to_numpy()
        whole = rows.height == n_items * n_depths
        if not whole or not (depths.reshape(n_items, n_depths) == axis["depth"].to_numpy()).all():
            raise UserError(
                f"the lens table holds {rows.height} rows for {n_items} items at {n_depths} depths",
                where=f"task {items['task'][0]}",
                remedy="every item is read once at every depth: run `depthprobe analyze` again",
            )
        columns: dict[str, np.ndarray] = {}
        for name in _READ:
            series = rows[name]
            if series.dtype == pl.Boolean:
                values = series.to_numpy().astype(bool)
            else:
                values = series.fill_null(float("nan")).to_numpy()
                values = values.astype(np.float32 if name == "gate_cdf" else np.float64)
            columns[name] = values.reshape(n_items, n_depths)
        columns["p_correct"] = columns.pop("candidate_prob") * columns.pop("p_candidates")
        return cls(items, axis, columns)

    @property
    def hops(self) -> np.ndarray:
        """[I] int64."""
        return self.items["hops"].to_numpy().astype(np.int64)

    @property
    def clusters(self) -> np.ndarray:
        """[I] int64: the cluster of each item's story as 0 … C−1, for what looks at several hop counts."""
        return np.unique(with_clusters(self.items)["whole"].to_numpy(), return_inverse=True)[1]

    @property
    def cell_clusters(self) -> np.ndarray:
        """[I] int64: the cluster of each item, for what looks at one hop count alone."""
        return np.unique(with_clusters(self.items)["cell"].to_numpy(), return_inverse=True)[1]

    @property
    def stories(self) -> np.ndarray:
        """[I] int64: the story of each item as 0 … S−1, in the order of the story's name."""
        return np.unique(self.items["story"].to_numpy(), return_inverse=True)[1]

    @property
    def loop_ends(self) -> np.ndarray:
        """[R] int64: columns at which loop 1 … R ends; empty for a model without loops.

        A prelude or a coda ends no loop. A model whose only loop is its whole stack has no loop to choose.
        """
        ends = np.flatnonzero(self.axis["is_loop_end"].to_numpy())
        return ends if len(ends) > 1 else ends[:0]

    @property
    def relative_depth(self) -> np.ndarray:
        """[D] float64 in 0 … 1: depth as a share of the last one, so that models of different sizes compare.

        Layer l of L lies at l/L and the end of loop r of R at r/R; with a prelude or a coda a loop's end lies at its
        share of the steps of the axis, on which a loop state is a step of its own.
        """
        depth = self.axis["depth"].to_numpy().astype(np.float64)
        return depth / max(depth[-1], 1.0)

    @property
    def read_depths(self) -> np.ndarray:
        """[E] int64: columns whose states are made to be read. With loops their ends, and what lies behind the last."""
        ends = self.loop_ends
        if len(ends) == 0:
            return np.arange(self.axis.height)
        return np.append(ends, np.arange(ends[-1] + 1, self.axis.height))

    @property
    def gate_cdf(self) -> np.ndarray | None:
        """[I, R] float32: the chance of having left by each loop, 1 at the last; None without a gate."""
        ends = self.loop_ends
        cdf = self.columns["gate_cdf"][:, ends]
        if len(ends) == 0 or np.isnan(cdf).any():
            return None
        cdf = cdf.copy()
        cdf[:, -1] = 1.0  # the last loop takes the rest (2107.05407), also where rounding leaves less
        return cdf
