"""Which page holds what: a fixed pool of page ids, and tables from (slot, loop, position) to pages.

A core page is one token at one depth over all core layers, an outer page one token over all prelude and coda layers.
`core[slot, d - 1, j]` is the page that a query at depth d reads for token j, and that loop d writes while token j is
in flight; where j left before d, it is an *alias* of a page of an earlier loop, through which nothing may be written.
What is taken and given back when is the scheduler's business: driven by its ticks, the pool has its counts.

    tick planned      release the slots of `tick.preempted`; prefill: `start_span`; prelude: `start`
    tick committed    recurrent: `leave` for `Outcome.exited`; prefill: `leave` for the prompt's exits, which may
                      be left out where all are U; then `release` the slots of `Outcome.freed`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from depthprobe.runtime.layouts import Layout

Ints = NDArray[np.int64] | NDArray[np.int32] | Sequence[int]
#: positions that the tables have at first
_FIRST = 256


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Pages to copy, `source[i]` into `target[i]`: int32 `[n]` each. The sources are written already."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]


class PagePool:
    """Page ids and tables. Methods take many rows at once and never loop over them.

    Args:
        n_core, n_outer: pages of either kind; n_outer 0 where the model has neither prelude nor coda layers.
        n_slots, max_len, n_loops: most of the tables; sequences are shorter than max_len + 1. The tables begin short
            and grow with the longest sequence seen, so that a long `max_len` costs nothing until it is used.
        layout: see `layouts`.
        seed: hand pages out in a random order (for tests); None: from 0 up.

    Fields:
        core: int32 `[n_slots, U, L]`, −1 where there is no token; L ≤ max_len grows. `start` may replace the arrays.
        outer: int32 `[n_slots, L]`, likewise.
        exits: int32 `[n_slots, L]`, exit depth of a token, 0 in flight or where there is none.
        length: int64 `[n_slots]`, tokens that have pages.
        peak_core, peak_outer: most pages that were taken at a time, reservations included.
    """

    def __init__(
        self,
        n_core: int,
        n_outer: int,
        n_slots: int,
        max_len: int,
        n_loops: int,
        layout: Layout,
        seed: int | None = None,
    ) -> None:
        self.n_core, self.n_outer, self.n_loops, self.layout = n_core, n_outer, n_loops, layout
        self.n_slots, self.max_len = n_slots, max_len
        first_length = min(max_len, _FIRST)
        self.core = np.full((n_slots, n_loops, first_length), -1, np.int32)
        self.outer = np.full((n_slots, first_length), -1, np.int32)
        self.exits = np.zeros((n_slots, first_length), np.int32)
        self.length = np.zeros(n_slots, np.int64)
        self.peak_core = self.peak_outer = 0
        self._core = _Stack(n_core, seed)
        self._outer = _Stack(n_outer, seed)
        depths = range(1, n_loops + 1)
        self._reserve = layout.reserve(n_loops)
        self._index = np.array([layout.index(d, n_loops) for d in depths])
        first = np.array([bool((self._index[:d] != self._index[d]).all()) for d in range(n_loops)])
        # by exit depth (row 0: in flight): which loops stand for a page held, each page once; which loops' pages are
        # given back; whose page each loop reads; which loops may write
        self._owns = np.array([first] + [first & (self._index < layout.held(e, n_loops)) for e in depths])
        self._frees = first & ~self._owns
        self._reads = np.tile(np.arange(n_loops), (n_loops + 1, 1))
        self._writes = np.ones((n_loops + 1, n_loops), bool)
        for e in depths:
            alias = layout.alias(e, n_loops)
            if alias is not None:
                self._reads[e, e:] = int(np.argmax(self._index == alias))
                self._writes[e, e:] = False
                self._writes[e, e : e + 1] = layout.terminal

    @property
    def free_core(self) -> int:
        """Core pages that no token has."""
        return self._core.top

    @property
    def free_outer(self) -> int:
        """Outer pages that no token has."""
        return self._outer.top

    def start(self, slots: Ints, positions: Ints) -> None:
        """Give tokens in flight their pages: `reserve(U)` core pages and, where there are any, an outer one.

        Args:
            slots, positions: int `[n]`; pairs are distinct and have no pages.
        """
        s, p = np.asarray(slots, np.int64), np.asarray(positions, np.int64)
        self._reach(int(p.max(initial=-1)) + 1)
        ids = self._core.take(len(s) * self._reserve).reshape(len(s), self._reserve)
        self.core[s, :, p] = ids[:, self._index]
        if self.n_outer:
            self.outer[s, p] = self._outer.take(len(s))
        np.maximum.at(self.length, s, p + 1)
        self.peak_core = max(self.peak_core, self.n_core - self.free_core)
        self.peak_outer = max(self.peak_outer, self.n_outer - self.free_outer)

    def _reach(self, length: int) -> None:
        """Make the tables at least so long: at least twice as long as they were, so that growing is rare."""
        had = self.exits.shape[1]
        if length <= had:
            return
        if length > self.max_len:
            raise RuntimeError(f"position {length - 1} lies behind the {self.max_len} of a sequence")
        more = min(self.max_len, max(length, 2 * had)) - had
        self.core = np.pad(self.core, ((0, 0), (0, 0), (0, more)), constant_values=-1)
        self.outer = np.pad(self.outer, ((0, 0), (0, more)), constant_values=-1)
        self.exits = np.pad(self.exits, ((0, 0), (0, more)))

    def start_span(self, slot: int, start: int, stop: int) -> None:
        """`start` for positions start…stop − 1 of one slot."""
        self.start(np.full(stop - start, slot), np.arange(start, stop))

    def leave(self, slots: Ints, positions: Ints, exits: Ints) -> CopyPlan | None:
        """Tokens in flight left: pages deeper than the exit are given back, and deeper loops read the exit's.

        Args:
            slots, positions, exits: int `[n]`, exits 1…U; for a layout without early exits all U.

        Returns:
            what is to be copied before a later loop reads these tokens (layout last-exited), else None. Where the
            layout projects the final state anew, the runner writes it to `core[slot, e, position]` for e < U.
        """
        s, p, e = (np.asarray(x, np.int64) for x in (slots, positions, exits))
        if not self.layout.early and (e != self.n_loops).any():
            raise ValueError(f"layout {self.layout.name} has no early exits")
        pages = self.core[s, :, p]  # [n, U]
        self._core.give(pages[self._frees[e]])
        self.core[s, :, p] = np.take_along_axis(pages, self._reads[e], axis=1)
        self.exits[s, p] = e
        if not self.layout.copies:
            return None
        deeper = np.arange(self.n_loops) >= e[:, None]  # [n, U]
        source = np.repeat(pages[np.arange(len(e)), e - 1], self.n_loops - e)
        return CopyPlan(source, pages[deeper])

    def release(self, slot: int) -> None:
        """Give back all pages of a slot."""
        n = int(self.length[slot])
        self._core.give(self._held(slot))
        if self.n_outer:
            held = self.outer[slot, :n]
            self._outer.give(held[held >= 0])
        self.core[slot, :, :n] = -1
        self.outer[slot, :n] = -1
        self.exits[slot, :n] = 0
        self.length[slot] = 0

    def pages_held(self, slot: int) -> int:
        """Core pages of a slot."""
        return len(self._held(slot))

    def writable(self, slots: Ints, depths: Ints, positions: Ints) -> NDArray[np.bool_]:
        """bool `[n]`: whether loop d may write the page that the table has for it: there is one, and it is no alias.

        Where the layout projects the final state anew, loop e + 1 of a token that left at e is writable too.
        """
        s, d, p = (np.asarray(x, np.int64) for x in (slots, depths, positions))
        return (self.core[s, d - 1, p] >= 0) & self._writes[self.exits[s, p], d - 1]

    def _held(self, slot: int) -> NDArray[np.int32]:
        n = int(self.length[slot])
        pages = self.core[slot, :, :n].T  # [n, U]
        return pages[self._owns[self.exits[slot, :n]] & (pages >= 0)]

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a page is lost, free and in use, of two tokens, or read by a wrong loop."""
        tokens = np.arange(self.core.shape[2]) < self.length[:, None]  # [n_slots, L]
        pages = self.core.transpose(0, 2, 1)  # [n_slots, L, U]
        present = pages >= 0
        assert (present.all(-1) == present.any(-1)).all(), "a token has pages for some loops only"
        assert not (present.any(-1) & ~tokens).any(), "a page lies behind the end of its sequence"
        assert not ((self.exits > 0) & ~present.any(-1)).any(), "a token without pages has an exit"
        if self.n_outer:
            assert ((self.outer >= 0) == present.any(-1)).all(), "outer and core pages are of different tokens"
        owned = pages[self._owns[self.exits] & present]
        for kind, stack, used in (("core", self._core, owned), ("outer", self._outer, self.outer[self.outer >= 0])):
            everything = np.concatenate([stack.free(), used])
            assert len(everything) == stack.size, f"{stack.size} {kind} pages became {len(everything)}"
            count = np.bincount(everything, minlength=stack.size)
            assert len(count) == stack.size and (count == 1).all(), f"{kind} pages of two tokens, or free and in use"
        # what each loop reads, from the meaning of the layout: its own page, or behind an exit the exit's
        s, p = np.nonzero(present.any(-1))
        for slot, position in zip(s.tolist(), p.tolist(), strict=True):
            row, e = pages[slot, position].tolist(), int(self.exits[slot, position])
            alias = self.layout.alias(e, self.n_loops) if e else None
            number = [
                alias if alias is not None and d > e else self.layout.index(d, self.n_loops)
                for d in range(1, self.n_loops + 1)
            ]
            pairs = set(zip(number, row, strict=True))
            distinct = len(pairs) == len(set(number)) == len(set(row))
            assert distinct, f"loops of token {position} of slot {slot} read {row}"


class _Stack:
    """Free ids, last in, first out."""

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = self.top = size
        self.ids = np.arange(size, dtype=np.int32)[::-1].copy()
        if seed is not None:
            np.random.default_rng(seed).shuffle(self.ids)

    def take(self, n: int) -> NDArray[np.int32]:
        if n > self.top:
            raise RuntimeError(f"{n} pages are taken, {self.top} are free: not what the scheduler counted")
        self.top -= n
        return self.ids[self.top : self.top + n][::-1].copy()

    def give(self, ids: NDArray[np.int32]) -> None:
        if self.top + len(ids) > self.size:
            raise RuntimeError(f"{len(ids)} pages are given back, {self.size - self.top} are in use")
        self.ids[self.top : self.top + len(ids)] = ids[::-1]
        self.top += len(ids)

    def free(self) -> NDArray[np.int32]:
        return self.ids[: self.top]
