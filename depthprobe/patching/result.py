"""`PatchResult`: what a sweep found, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
import polars as pl

#: What a cell in Jupyter shows of a sweep: so many depths.
_SHOWN_DEPTHS = 25
_KEYS = ("task", "donor_kind", "control", "direction", "kind", "span", "site", "role", "depth", "loop", "layer")


@dataclass(frozen=True, slots=True, repr=False)
class PatchResult:
    """What `causal_patch` found.

    Attributes:
        model_name: whose states were patched.
        frame: the table `patching`, one row a cell.
        donors: the table `donors`, one row a pair.
        knockout: the table `knockout`; None unless it was asked for.
        without: ids of items for which no donor was found.
        n_cells: cells that were asked for.
        n_run, n_filled: of these those that ran, and those that provably change nothing and did not. Answers of several
            tokens may take a cell more than once, and each time is counted: then the two are more than n_cells.
        flops: of all matrix products, counted; the runs without a patch and those that check the sweep are among them.
        engines: of `DepthModel.resume`, all that ran any of it.
    """

    model_name: str
    frame: pl.DataFrame
    donors: pl.DataFrame
    knockout: pl.DataFrame | None
    without: tuple[str, ...]
    n_cells: int
    n_run: int
    n_filled: int
    flops: float
    engines: frozenset[str]

    def by_role(self, *, right: bool = True) -> pl.DataFrame:
        """Mean effect and share of flips by role and depth, and of how many pairs.

        Args:
            right: only pairs whose stories the model both answers right; False: all pairs with an effect.
        """
        rows = self.frame.filter("both_right") if right else self.frame
        return (
            rows.filter(pl.col("position").is_null(), pl.col("effect").is_not_null())
            .group_by(_KEYS, maintain_order=True)
            .agg(pl.col("effect").mean(), pl.col("flip").mean(), pl.len().alias("n"))
        )

    @property
    def n_right(self) -> int:
        """Real pairs (no controls) whose stories the model both answers right."""
        return self._right.height

    @property
    def _right(self) -> pl.DataFrame:
        return self.donors.filter(~pl.col("control") & pl.col("item_right") & pl.col("donor_right"))

    def __repr__(self) -> str:
        real = self.donors.filter(~pl.col("control")).height
        return (
            f"PatchResult({self.model_name}: {self.donors['item'].n_unique()} items, {real} donors ({self.n_right} "
            f"answered right on both stories), {self.donors.height - real} controls, {self.n_cells} cells; .frame, "
            ".by_role())"
        )

    def _repr_html_(self) -> str:
        kept = self.by_role()
        note = "mean effect where both stories are answered right"
        if kept.is_empty():
            kept, note = self.by_role(right=False), "mean effect over all pairs: none is answered right twice"
        kept = kept.filter(~pl.col("control"))
        parts = [f"<b>{escape(repr(self))}</b><br>{note}; 0: nothing moved, 1: the other story's answer"]
        for (kind, direction, way, span, site), block in kept.partition_by(
            "donor_kind", "direction", "kind", "span", "site", as_dict=True, maintain_order=True
        ).items():
            parts.append(_grid(f"{kind}, {direction}, {way}, {span}, {site}", block))
        return "".join(parts)


def _grid(title: str, block: pl.DataFrame) -> str:
    depths = block.select("depth", "loop", "layer").unique().sort("depth")
    if depths.height > _SHOWN_DEPTHS:
        depths = depths[np.linspace(0, depths.height - 1, _SHOWN_DEPTHS).round().astype(int).tolist()]
    head = "".join(f"<th>{loop}.{layer}</th>" for _, loop, layer in depths.iter_rows())
    lines = []
    for (role,), row in block.partition_by("role", as_dict=True, maintain_order=True).items():
        found = dict(row.group_by("depth").agg(pl.col("effect").mean()).iter_rows())
        cells = "".join(_cell(found.get(depth)) for depth in depths["depth"])
        lines.append(f"<tr><th style='text-align:left'>{escape(str(role))}</th>{cells}</tr>")
    return f"<table><caption>{escape(title)} (loop.layer)</caption><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def _cell(effect: float | None) -> str:
    if effect is None:
        return "<td></td>"
    shade = min(max(effect, 0.0), 1.0)
    return f"<td style='background:rgba(120,120,120,{0.6 * shade:.2f})'>{effect:.2f}</td>"
