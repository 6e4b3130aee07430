"""Keys and values in pages, and the `attend` objects that read and write them.

A core page holds keys and values of one token at one depth over all core layers; an outer page those of one token over
all prelude and coda layers. Which page belongs to what is the business of `PagePool`; here they are numbers. Two pages
beyond the pool's are never given out: SCRATCH takes writes that nobody is to see, ZERO is read by padding, so that
whatever lies in unused pages, NaN too, cannot leak through a weight of zero.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.models.attend import Attend, Stage, attention
from depthprobe.models.configuration import LoopedConfig
from depthprobe.models.masks import Mask
from depthprobe.runtime.rows import RowPages

#: a table smaller than this, in bytes, is not worth huge memory pages of 2 MiB
_HUGE = 1 << 23


class PagedKV:
    """Page tables, one tensor `[pages + 2, 2·G·h]` for each layer: a row is a token's G keys, then its G values.

    Attributes:
        core, outer: tensors of the core layers, and of prelude then coda layers.
        core_scratch, core_zero, outer_scratch, outer_zero: ids of the two extra pages.
    """

    def __init__(
        self, config: LoopedConfig, n_core: int, n_outer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.n_prelude, self.width = config.n_prelude, 2 * config.kv_heads * config.head_size
        self.core_scratch, self.core_zero = n_core, n_core + 1
        self.outer_scratch, self.outer_zero = n_outer, n_outer + 1
        outer = config.n_prelude + config.n_coda
        self.core = [_zeros(n_core + 2, self.width, dtype, device) for _ in range(config.n_core)]
        self.outer = [_zeros(n_outer + 2, self.width, dtype, device) for _ in range(outer)]
        self._row_bytes = self.width * torch.empty((), dtype=dtype).element_size()

    @property
    def bytes_per_core_page(self) -> int:
        return self._row_bytes * len(self.core)

    @property
    def bytes_per_outer_page(self) -> int:
        return self._row_bytes * len(self.outer)

    def tables(self, stage: Stage) -> list[Tensor]:
        """Tables of the layers of a stage."""
        if stage == "core":
            return self.core
        return self.outer[: self.n_prelude] if stage == "prelude" else self.outer[self.n_prelude :]

    def zero(self, stage: Stage) -> int:
        return self.core_zero if stage == "core" else self.outer_zero

    def pages(self, stage: Stage) -> int:
        """Rows of each table of a stage."""
        return (self.core_zero if stage == "core" else self.outer_zero) + 1

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy core pages, int64 `[n]` each, in all layers: what layout last-exited does at an exit."""
        for table in self.core:
            table.index_copy_(0, target, table.index_select(0, source))


def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros `[rows, width]`; on a CPU that can, in huge memory pages: rows are read at random, and looking up small
    ones takes an eighth of attention's time. Such memory is taken from the machine as it is first written."""
    size = rows * width * torch.empty((), dtype=dtype).element_size()
    if device.type == "cpu" and size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, size)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype).view(rows, width)
        except OSError:  # a kernel without them
            pass
    return torch.zeros(rows, width, dtype=dtype, device=device)


class RowAttend(Attend):
    """Rows with one query each, `[n, ·, 1, ·]`: a decode tick. `bind` comes before each stage."""

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv
        self._pages: RowPages | None = None
        self._write: Tensor | None = None
        self._tables: list[Tensor] = []

    def bind(self, pages: RowPages, write: Tensor) -> None:
        """What the rows read, and the page, int64 `[n]`, that each writes first."""
        self._pages, self._write = pages, write

    def enter(self, stage: Stage, loop: int = 1) -> None:
        self._tables = self.kv.tables(stage)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._pages is not None and self._write is not None
        table = self._tables[layer]
        n, heads, _, width = q.shape
        written = torch.cat((k[:, :, 0].flatten(1), v[:, :, 0].flatten(1)), dim=1)
        table.index_copy_(0, self._write, written)
        queries = q[:, :, 0].contiguous()
        out = self._pages.attend(queries, table, torch.empty_like(queries))
        return out.view(n, 1, heads * width)


class SpanAttend(Attend):
    """Spans of several requests, their tokens packed behind each other as one sequence `[1, ·, N, ·]`: prefill.

    The products run on real tokens alone; attention runs on a padded batch of R requests, S queries and T keys.
    """

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv
        self._tables: list[Tensor] = []

    def bind(
        self,
        read: NDArray[np.integer],
        write: Tensor,
        request: NDArray[np.integer],
        position: NDArray[np.integer],
        zero: int,
    ) -> None:
        """What comes next reads and writes.

        Args:
            read: integer `[R, T]`, page of each position of each request, −1 for none.
            write: int64 `[N]`, page of each token.
            request: integer `[N]`, ascending, 0…R−1, each at least once.
            position: integer `[N]`, position of each token, ascending within a request.
            zero: page that padding reads.
        """
        self._write, self._shape, device = write, read.shape, write.device
        pages = np.where(read < 0, zero, read).astype(np.int64)
        self._read = torch.from_numpy(pages.ravel()).to(device)
        counts = np.bincount(request, minlength=len(read))
        self._queries = int(counts.max())
        place = request * self._queries + np.arange(len(request)) - (counts.cumsum() - counts)[request]
        self._place = torch.from_numpy(place).to(device)
        # a padded query stands at position 0, whose key every request has
        queries = np.zeros(len(read) * self._queries, dtype=np.int64)
        queries[place] = position
        keys = torch.arange(read.shape[1], device=device)
        visible = keys <= torch.from_numpy(queries).to(device).view(len(read), self._queries, 1)
        self._mask = Mask(visible[:, None], causal=False)

    def enter(self, stage: Stage, loop: int = 1) -> None:
        self._tables = self.kv.tables(stage)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table = self._tables[layer]
        groups, width = k.shape[1], k.shape[3]
        heads, (requests, keys) = q.shape[1], self._shape
        written = torch.cat((k[0].transpose(0, 1).flatten(1), v[0].transpose(0, 1).flatten(1)), dim=1)
        table.index_copy_(0, self._write, written)
        seen = table.index_select(0, self._read).view(requests, keys, 2, groups, width)
        seen_k, seen_v = seen.permute(2, 0, 3, 1, 4)
        if requests == 1:
            return attention(q, seen_k, seen_v, self._mask)
        padded = q.new_zeros(requests * self._queries, heads, width)
        padded[self._place] = q[0].transpose(0, 1)
        queries = padded.view(requests, self._queries, heads, width).transpose(1, 2)
        mixed = attention(queries, seen_k, seen_v, self._mask)
        return mixed.flatten(0, 1).index_select(0, self._place)[None]
