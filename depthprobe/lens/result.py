"""`LensResult`: what a lens found, as tensors and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from depthprobe.depth import Coordinate
from depthprobe.lens.gate import gate_columns
from depthprobe.lens.words import Words

#: What a cell in Jupyter shows of a row: so many tokens and depths.
_SHOWN_TOKENS, _SHOWN_DEPTHS = 40, 13


@dataclass(frozen=True, slots=True, repr=False)
class LensResult:
    """What N positions say at D depths. Tensors are on the CPU, float32 unless noted.

    Attributes:
        model_name: whose states were read.
        lens: "plain", "tuned", "coda" or "coda-exits".
        depths: the D coordinates, in the order of execution; of a coda lens the ends of the loops.
        depth_index: their indices on the model's axis.
        input_ids: the tokens of each row, unpadded, with BOS if there is one.
        rows, positions: int64 [N], which row each position lies in, and where in it.
        top_ids, top_probs: [N, D, k], int64 and float32; best first.
        entropy, kl_final: [N, D], in nats; KL(last depth ‖ this depth).
        target_ids: int64 [N, T]; None without targets. Likewise:
        target_logits, target_logprobs, target_ranks: [N, D, T]; rank int64, 0 = best.
        gate_lambda: [N, R], conditional stop probability after each loop; None without a gate.
        loop_ends: the R coordinates that these belong to.
        identity: the largest difference of the last depth from the model's own logits, as a share of the largest
            |logit|, over all N positions.
        bos: whether each row begins with a BOS token.
        words: token id → text.
    """

    model_name: str
    lens: str
    depths: tuple[Coordinate, ...]
    depth_index: tuple[int, ...]
    input_ids: tuple[tuple[int, ...], ...]
    rows: Tensor
    positions: Tensor
    top_ids: Tensor
    top_probs: Tensor
    entropy: Tensor
    kl_final: Tensor
    target_ids: Tensor | None
    target_logits: Tensor | None
    target_logprobs: Tensor | None
    target_ranks: Tensor | None
    gate_lambda: Tensor | None
    loop_ends: tuple[Coordinate, ...]
    identity: float
    bos: tuple[bool, ...]
    words: Words

    @property
    def frame(self) -> pl.DataFrame:
        """One line a position and depth (and target): columns row, position, token, token_id, depth, loop, layer,
        site, lens, top1, top1_prob, top, top_probs, entropy, kl_final; target, target_id, target_logit,
        target_logprob, target_prob, target_rank with targets; gate_lambda, gate_cdf with a gate.
        """
        n, d, k = self.top_ids.shape
        repeat = np.repeat(np.arange(n), d)
        rows, positions = self.rows.numpy()[repeat], self.positions.numpy()[repeat]
        tokens = np.array([self.input_ids[r][p] for r, p in zip(rows, positions, strict=True)])
        probs = np.ascontiguousarray(self.top_probs.numpy().reshape(n * d, k))
        columns: dict[str, Any] = {
            "row": rows,
            "position": positions,
            "token": self.words.column(tokens),
            "token_id": tokens,
            "depth": list(self.depth_index) * n,
            "loop": [c.loop for c in self.depths] * n,
            "layer": [c.layer for c in self.depths] * n,
            "site": [c.site for c in self.depths] * n,
            "lens": [self.lens] * (n * d),
            "top1": self.words.column(self.top_ids[..., 0].numpy()),
            "top1_prob": probs[:, 0],
            "top": self.words.column(self.top_ids.numpy()).reshape((n * d, k)).arr.to_list(),
            "top_probs": pl.Series(probs).arr.to_list(),
            "entropy": self.entropy.numpy().ravel(),
            "kl_final": self.kl_final.numpy().ravel(),
        }
        if self.gate_lambda is not None:
            found = gate_columns(self.gate_lambda, self.loop_ends, self.depths, np.arange(n))
            columns |= dict(zip(("gate_lambda", "gate_cdf"), found, strict=True))
        frame = pl.DataFrame(columns)
        if self.target_ids is None:
            return frame
        assert self.target_logits is not None and self.target_logprobs is not None and self.target_ranks is not None
        t = self.target_ids.shape[1]
        ids = np.repeat(self.target_ids.numpy(), d, axis=0).ravel()
        logprobs = self.target_logprobs.numpy().ravel()
        return frame[np.repeat(np.arange(n * d), t)].with_columns(
            self.words.column(ids).alias("target"),
            pl.Series("target_id", ids),
            pl.Series("target_logit", self.target_logits.numpy().ravel()),
            pl.Series("target_logprob", logprobs),
            pl.Series("target_prob", np.exp(logprobs)),
            pl.Series("target_rank", self.target_ranks.numpy().ravel()),
        )

    def top(self, row: int = 0) -> pl.DataFrame:
        """The best word of each position (lines) at each depth (columns) of a row."""
        mine = (self.rows == row).nonzero()[:, 0]
        tokens = [self.input_ids[row][int(p)] for p in self.positions[mine]]
        grid: dict[str, Any] = {
            "position": self.positions[mine].numpy(), "token": [self.words(token) for token in tokens],
        }  # fmt: skip
        for number, coordinate in enumerate(self.depths):
            grid[str(coordinate)] = self.words.column(self.top_ids[mine, number, 0].numpy())
        return pl.DataFrame(grid)

    def __repr__(self) -> str:
        n, d, k = self.top_ids.shape
        return (
            f"LensResult({self.model_name}, {self.lens} lens: {len(self.input_ids)} rows, {n} positions × {d} depths, "
            f"top {k}; .frame, .top())"
        )

    def _repr_html_(self) -> str:
        grid = self.top()
        names = grid.columns[2:]
        if len(names) > _SHOWN_DEPTHS:
            names = [names[i] for i in np.linspace(0, len(names) - 1, _SHOWN_DEPTHS).round().astype(int)]
        head = "".join(f"<th>{escape(name)}</th>" for name in ("token", *names))
        lines = [
            "<tr>" + "".join(f"<td>{escape(repr(line[name])[1:-1])}</td>" for name in ("token", *names)) + "</tr>"
            for line in grid.tail(_SHOWN_TOKENS).iter_rows(named=True)
        ]
        return f"<table><caption>{escape(repr(self))}</caption><tr>{head}</tr>{''.join(lines)}</table>"
