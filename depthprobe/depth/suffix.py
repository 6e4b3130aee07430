"""The suffix engine: many changed forwards of one prompt, each from the layer and the token that it changes.

The steps of the model are climbed once. A row joins at the state of its first edit, with the clean run's states of
its own tokens, and from there on rides along; so a block runs once for all rows that are on their way, in chunks.
Tokens before a row's first are not run: their keys and values are those of the clean run (`suffix_attend`). In the
last block, tokens that are not read give their keys and values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.suffix_attend import Asked, Span, SuffixAttend, asked_of, attend, interfaced
from depthprobe.depth.suffix_batch import Batch
from depthprobe.depth.suffix_plan import Row, Slice, chunks, grouped
from depthprobe.depth.suffix_program import Block, Glue, Program
from depthprobe.depth.suffix_record import Record
from depthprobe.depth.taps import hidden, replaced

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: (coordinate, numbers of cells, which of the read tokens, states [n, d]): takes what was read.
Take = Callable[[Coordinate, list[int], int, Tensor], None]


class _Enough(Exception):
    """Keys and values are there; the rest of the block is not wanted."""


class Climb:
    """One climb of a batch of rows.

    Args:
        rows: those that climb.
        end: the state at which it ends.
        read: the tokens that are read; coordinates: where.
        most: tokens that go through a block together.
        take: gets what is read, of patched rows and of the unpatched one (number −1).
    """

    def __init__(
        self, model: TappedModel, program: Program, record: Record, rows: Sequence[Row], end: int,
        read: Sequence[int], coordinates: Sequence[Coordinate], most: int, take: Take,
    ) -> None:  # fmt: skip
        self._program, self._record, self._end = program, record, end
        self._read, self._most, self._take = tuple(read), most, take
        self._last = max((n for n in program.blocks if n < end), default=-1)
        blocks = [step for step in program.steps if isinstance(step, Block)]
        self._modules = {step.path: model.model.get_submodule(step.path) for step in blocks}
        self._inner_modules = {
            place.inner: model.model.get_submodule(place.inner) for place in program.places.values() if place.inner
        }
        self._reads: dict[tuple[int, str | bool], list[Coordinate]] = {}
        for point in coordinates:
            place = program.places[point]
            self._reads.setdefault((place.state, place.inner or place.entering), []).append(point)
        like = next(iter(record.states.values()))
        wide = [row for row in rows if row.join <= self._last]
        latest = max(read)
        self._wide = Batch(grouped(wide, lambda start: tuple(range(start, latest + 1))), like, program.kept)
        asked = sorted(set(read))
        self._narrow = Batch(
            grouped(rows, lambda start: tuple(position for position in asked if position >= start)), like, program.kept
        )
        # state and moment → start of a group → which of its rows are edited there; a group's first rows are the same
        # in both batches
        self._edited: dict[tuple[int, bool], dict[int, list[int]]] = {}
        for group in self._narrow.groups:
            for number, row in enumerate(group.rows):
                for moment in row.values:
                    self._edited.setdefault(moment, {}).setdefault(group.start, []).append(number)
        self._first = min(row.join for row in rows)
        self._batch = self._wide if self._first <= self._last else self._narrow
        inner = {(step, path) for row in rows for step, edits in row.inner.items() for path, _, _ in edits}
        self._inside = {key for key in (*inner, *self._reads) if isinstance(key[1], str)}
        self._cut = {step for row in rows for step in row.cuts}
        self._skip = {step for row in rows for step in row.skips}
        # for the time of a block's call, for whoever is called from within it
        self._step = -1
        self._part: Sequence[Slice] = ()
        self._spans: list[Span] = []
        self._only_keys = False
        self._own: tuple[Tensor, Tensor] | None = None

    def run(self) -> None:
        """Climb, and hand over what is read."""
        with ExitStack() as stack:
            switch = stack.enter_context(interfaced(self._modules.values(), self._interfaced))
            for path in {path for _, path in self._inside if isinstance(path, str)}:
                hook = self._inner_modules[path].register_forward_hook(self._within(path))
                stack.enter_context(hook)
            switch(True)
            for step in range(self._first, self._end + 1):
                self._arrive(step)
                if step == self._end:
                    break
                what = self._program.steps[step]
                if isinstance(what, Glue):
                    self._glue(step, what)
                elif step == self._last:
                    self._last_block(step, what)
                else:
                    for part in chunks(self._batch.groups, step, self._most):
                        state = self._batch.gather(part, self._batch.state)
                        made = self._block(step, what, self._batch, part, state, self._spanned(step, part))
                        self._batch.put(part, made, self._batch.state)

    def _arrive(self, state: int) -> None:
        """Rows join, edits are put, and what is read here is handed over."""
        batch = self._batch
        batch.join(state, self._record)
        before = self._record.states.get(state - 1)
        step = self._program.steps[state - 1] if state else None
        made_by = step.keep if isinstance(step, Glue) and step.keep in batch.kept else None
        for moment in ((state, False), (state, True)):
            among = self._edited.get(moment)
            for part in chunks(batch.groups, state, self._most) if among else ():
                edits = batch.edits(part, lambda row, at=moment: row.values[at], before, whole=True, among=among)
                if edits is not None:
                    batch.state[edits[0]] = edits[1]
                    if made_by is not None and moment == (state, False):  # later glue adds what stands there now
                        batch.kept[made_by][edits[0]] = edits[1]
            for point in self._reads.get(moment, ()):
                for read in batch.read(batch.joined, batch.state, self._read, whole=True):
                    self._take(point, *read)

    def _glue(self, step: int, glue: Glue) -> None:
        batch = self._batch
        for part in chunks(batch.groups, step, self._most):
            kept = {name: batch.gather(part, buffer) for name, buffer in batch.kept.items()}
            if glue.constant is not None:
                kept[glue.constant] = self._record.kept[glue.constant][batch.gather(part, batch.at)]
            made = glue.apply(batch.gather(part, batch.state), kept)
            batch.put(part, made, batch.state)
            if glue.keep is not None:
                batch.put(part, made, batch.kept[glue.keep])

    def _last_block(self, step: int, block: Block) -> None:
        """Keys and values of all tokens; the rest for those that are read."""
        wide, narrow = self._wide, self._narrow
        for part in chunks(wide.groups, step, self._most):
            narrow.narrow(part, wide, self._read)
            own = {group.start: group for group in narrow.groups}
            asking = [Slice(own[piece.group.start], piece.first, piece.last) for piece in part]
            state, spans = wide.gather(part, wide.state), self._spanned(step, part)
            if any(piece.n_tokens < whole.n_tokens for piece, whole in zip(asking, part, strict=True)):
                self._only_keys = True
                try:
                    self._block(step, block, wide, part, state, spans)
                except _Enough:
                    pass
                finally:
                    self._only_keys = False
                state, spans = narrow.gather(asking, narrow.state), self._spanned(step, part, asking)
            made = self._block(step, block, narrow, asking, state, spans)
            self._own = None
            narrow.put(asking, made, narrow.state)
        self._batch = narrow

    def _block(
        self, step: int, block: Block, batch: Batch, part: Sequence[Slice], state: Tensor, spans: list[Span]
    ) -> Tensor:
        """A block's output for the rows of a chunk, [N, d] → [N, d]."""
        at = batch.gather(part, batch.at)
        args, kwargs = self._record.call(step, state[None], at, SuffixAttend(self._attended))
        self._step, self._part, self._spans, self._now = step, part, spans, batch
        made = hidden(self._modules[block.path](*args, **kwargs))[0]
        if step in self._skip:
            skips = batch.edits(part, lambda row: [(None, row.skips.get(step, []))], self._record.states[step])
            if skips is not None:
                made = made.index_copy(0, skips[0], state[skips[0]])
        return made

    def _spanned(
        self, step: int, part: Sequence[Slice], asking: Sequence[Slice] | None = None
    ) -> list[Span]:
        spans: list[Span] = []
        keys = queries = 0
        for number, piece in enumerate(part):
            group, rows = piece.group, piece.last - piece.first
            tokens = group.tokens if asking is None else asking[number].group.tokens
            end = group.start + len(group.tokens)
            cuts = None
            if step in self._cut:
                cuts = _cuts(group.rows[piece.first : piece.last], step, tokens, end, self._wide.at.device)
            narrow = None if len(tokens) == len(group.tokens) else tokens
            spans.append(Span(rows, group.start, end, keys, queries, narrow, cuts))
            keys += piece.n_tokens
            queries += rows * len(tokens)
        return spans

    # -- called from within a block

    def _interfaced(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        return self._mixed(q, k, v, asked_of(module, q, kwargs))[None], None

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._mixed(q, k, v, Asked(q.shape[-1] ** -0.5)).flatten(1)[None]

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        if self._only_keys:
            self._own = k[0], v[0]
            raise _Enough
        keys, values = (k[0], v[0]) if self._own is None else self._own
        return attend(q[0], keys, values, self._spans, self._record.seen[self._step], asked)

    def _within(self, path: str) -> Callable[..., Any]:
        """A hook on a module inside blocks: edits its output, and hands it over where it is read."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            step, batch, part = self._step, self._now, self._part
            if self._only_keys or (step, path) not in self._inside:
                return None
            whole = hidden(output)
            state = whole[0] if whole.dim() == 3 else whole  # some parts work on tokens without a batch
            edits = batch.edits(part, lambda row: [(e, w) for p, e, w in row.inner.get(step, ()) if p == path])
            if edits is not None:
                state = state.index_copy(0, edits[0], edits[1])
            for point in self._reads.get((step, path), ()):
                for read in batch.read(part, state, self._read):
                    self._take(point, *read)
            return None if edits is None else replaced(output, state.view(whole.shape))

        return hook


def _cuts(rows: Sequence[Row], step: int, tokens: Sequence[int], end: int, device: torch.device) -> Tensor | None:
    """bool [R, m, end], the edges that rows cut in a block."""
    if not any(step in row.cuts for row in rows):
        return None
    edges = torch.zeros(len(rows), end, end, dtype=torch.bool)
    for number, row in enumerate(rows):
        for queries, keys in row.cuts.get(step, ()):
            edges[number, torch.tensor(queries)[:, None], torch.tensor(keys)] = True
    return edges[:, list(tokens)].to(device)
