"""Attention of rows with one query each over keys that lie in pages: what a decode tick does in every layer.

`RowPages` is made once a tick and serves all layers: rows come sorted by length and are read in a few groups, each as
long as its longest row. Two ways to attend share it:

* sparse, on a CPU: the scores are a sampled product (a sparse pattern says which page each query meets), the mixed
  values a weighted bag of rows. Pages are read where they lie and nothing is gathered; for 64 rows over 160 tokens
  that took a third of the time of a gather and a fused attention, and less than fused attention over contiguous keys.
* gathered, everywhere else, and the plain twin of the former: one `index_select` and fused attention.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

#: a group of rows is merged with the next if that pads fewer keys than a group's calls are worth
_MERGE = 256
_GROUPS = 8


@dataclass(slots=True)
class _Group:
    start: int
    stop: int
    length: int
    mask: Tensor | None  # [g, 1, L], 0 or −inf
    pages: Tensor | None  # gathered: int64 [g · L]
    pattern: Tensor | None  # sparse: CSR [g · H, rows of the page table seen as [pages · 2G, h]]
    offsets: Tensor | None
    values: Tensor | None


class RowPages:
    """The pages that each row reads. n rows, H query heads, G key/value heads of width h.

    Args:
        pages: integer `[n, L]`, the page of each position, rows in ascending order of length; what lies beyond a
            row's length is ignored.
        lengths: integer `[n]`, how many positions each row reads, its own among them.
        zero: id of the page of zeros that padding reads.
        n_pages: rows of the page tables that `attend` will get.
        heads, kv_heads: H and G.
        dtype, device: of queries and pages.
        sparse: which of the two ways.
    """

    def __init__(
        self,
        pages: NDArray[np.integer],
        lengths: NDArray[np.integer],
        zero: int,
        n_pages: int,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        sparse: bool,
    ) -> None:
        self.heads, self.kv_heads, self.sparse = heads, kv_heads, sparse
        self.groups: list[_Group] = []
        self.longest = 0
        for start, stop in _bounds(lengths, whole=device.type != "cpu"):
            length = int(lengths[stop - 1])
            beyond = np.arange(length) >= lengths[start:stop, None]
            read = np.where(beyond, zero, pages[start:stop, :length])
            mask = None
            if beyond.any():
                hidden = torch.from_numpy(beyond).to(device)[:, None]
                mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            group = _Group(start, stop, length, mask, None, None, None, None)
            if sparse:
                self._pattern(group, read, n_pages, dtype)
            else:
                group.pages = torch.from_numpy(read.astype(np.int64).ravel()).to(device, non_blocking=True)
            self.groups.append(group)
            self.longest = max(self.longest, (stop - start) * length)

    def _pattern(self, group: _Group, read: NDArray[np.integer], n_pages: int, dtype: torch.dtype) -> None:
        n, length = read.shape
        groups, each = self.kv_heads, self.heads // self.kv_heads
        # row of the first key head of each page, in the table seen as [pages · 2G, h]: keys, then values
        first = torch.from_numpy((read * (2 * groups)).astype(np.int32))[:, None, None, :]
        head = torch.arange(groups, dtype=torch.int32)[:, None, None]
        keys = (first + head).expand(n, groups, each, length).reshape(-1)
        group.offsets = torch.arange(0, keys.numel() + 1, length, dtype=torch.int32)
        group.values = keys + groups
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            group.pattern = torch.sparse_csr_tensor(
                group.offsets, keys, torch.zeros(keys.numel(), dtype=dtype),
                size=(n * self.heads, n_pages * 2 * groups), check_invariants=False,
            )  # fmt: skip

    def attend(self, q: Tensor, table: Tensor, out: Tensor) -> Tensor:
        """q `[n, H, h]`, contiguous; table `[pages, 2·G·h]`, a page's keys then its values → out `[n, H, h]`."""
        return self._sparse(q, table, out) if self.sparse else self._gathered(q, table, out)

    def _sparse(self, q: Tensor, table: Tensor, out: Tensor) -> Tensor:
        n, heads, width = q.shape
        seen = table.view(-1, width)
        flat, mixed = q.view(n * heads, width), out.view(n * heads, width)
        for g in self.groups:
            assert g.pattern is not None and g.values is not None and g.offsets is not None
            rows = slice(g.start * heads, g.stop * heads)
            # in place: the pattern is kept, and what stood in its values counts for nothing
            torch.sparse.sampled_addmm(
                g.pattern, flat[rows], seen.t(), beta=0.0, alpha=width**-0.5, out=g.pattern
            )
            scores = g.pattern.values().view(g.stop - g.start, heads, g.length)
            weights = (scores if g.mask is None else scores + g.mask).softmax(-1)
            mixed[rows] = torch.embedding_bag(
                seen, g.values, g.offsets, False, 0, False, weights.view(-1), True
            )[0]  # fmt: skip
        return out

    def _gathered(self, q: Tensor, table: Tensor, out: Tensor) -> Tensor:
        groups, (_, heads, width) = self.kv_heads, q.shape
        gathered = table.new_empty(self.longest, table.shape[1])
        for g in self.groups:
            assert g.pages is not None
            rows, length = g.stop - g.start, g.length
            read = torch.index_select(table, 0, g.pages, out=gathered[: rows * length])
            k, v = read.view(rows, length, 2, groups, width).permute(2, 0, 3, 1, 4)
            # the query heads of a group stand as queries of one head
            queries = q[g.start : g.stop].view(rows, groups, heads // groups, width)
            mask = None if g.mask is None else g.mask[:, None]
            mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
            out[g.start : g.stop] = mixed.reshape(rows, heads, width)
        return out


def _bounds(lengths: NDArray[np.integer], whole: bool) -> list[tuple[int, int]]:
    n = len(lengths)
    if whole or n < 2:
        return [(0, n)]
    edges = np.linspace(0, n, min(_GROUPS, n) + 1).astype(int).tolist()
    bounds: list[tuple[int, int]] = []
    start = 0
    for middle, stop in zip(edges[1:], [*edges[2:], None], strict=True):
        if stop is None:
            bounds.append((start, middle))
        elif (int(lengths[stop - 1]) - int(lengths[middle - 1])) * (middle - start) > _MERGE:
            bounds.append((start, middle))
            start = middle
    return bounds
