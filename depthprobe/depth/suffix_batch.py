"""The states of the rows of a climb: one buffer, in which the rows of a group lie end to end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from depthprobe.depth.cells import Edit
from depthprobe.depth.suffix_plan import Group, Row, Slice
from depthprobe.depth.suffix_record import Record

#: Row → its edits at some point, each with those of its positions that matter; None: a skip at these tokens.
Pick = Callable[[Row], Sequence[tuple[Edit | None, list[int]]]]


class Batch:
    """States of rows.

    Attributes:
        groups: the rows, and where their tokens lie.
        state: [n, d].
        kept: what glue keeps, [n, d] by name.
        at: int64 [n], each token's position in the prompt.
    """

    def __init__(self, groups: Sequence[Group], like: Tensor, kept: Sequence[str]) -> None:
        self.groups = tuple(groups)
        n = sum(len(group.rows) * len(group.tokens) for group in groups)
        self.state = like.new_empty(n, like.shape[-1])
        self.kept = {name: torch.empty_like(self.state) for name in kept}
        places = [torch.tensor(group.tokens, device=like.device).repeat(len(group.rows)) for group in groups]
        self.at = torch.cat([like.new_empty(0, dtype=torch.long), *places])
        self._joined = [0] * len(self.groups)

    def join(self, state: int, record: Record) -> None:
        """The rows that join before step `state` get the clean states of their tokens."""
        for number, group in enumerate(self.groups):
            before, now = self._joined[number], group.on_the_way(state)
            if now <= before:
                continue
            self._joined[number] = now
            where = Slice(group, before, now).tokens
            torch.index_select(record.states[state], 0, self.at[where], out=self.state[where])
            for name, kept in self.kept.items():
                if (value := record.kept.get(name)) is not None:
                    torch.index_select(value, 0, self.at[where], out=kept[where])

    @property
    def joined(self) -> list[Slice]:
        """All rows that are on their way."""
        pairs = zip(self.groups, self._joined, strict=True)
        return [Slice(group, 0, count) for group, count in pairs if count]

    def gather(self, part: Sequence[Slice], buffer: Tensor) -> Tensor:
        """[N, …] of a buffer, for the rows of a chunk; a view where they lie together."""
        if len(part) == 1:
            return buffer[part[0].tokens]
        return torch.cat([buffer[piece.tokens] for piece in part])

    def put(self, part: Sequence[Slice], made: Tensor, buffer: Tensor) -> None:
        """The way back."""
        first = 0
        for piece in part:
            buffer[piece.tokens] = made[first : first + piece.n_tokens]
            first += piece.n_tokens

    def narrow(self, part: Sequence[Slice], wide: Batch, read: Sequence[int]) -> None:
        """Take the read tokens of rows of another batch, whose groups have the same first rows."""
        of = {group.start: group for group in self.groups}
        for piece in part:
            own = of[piece.group.start]
            number, count = self.groups.index(own), piece.last - piece.first
            self._joined[number] = max(self._joined[number], piece.last)
            columns = torch.tensor([position - piece.group.start for position in own.tokens], device=self.at.device)
            to = Slice(own, piece.first, piece.last).tokens
            for mine, theirs in ((self.state, wide.state), *((self.kept[k], wide.kept[k]) for k in self.kept)):
                rows = theirs[piece.tokens].view(count, len(piece.group.tokens), -1)
                mine[to] = rows[:, columns].flatten(0, 1)

    def edits(
        self, part: Sequence[Slice], pick: Pick, skipped: Tensor | None = None, whole: bool = False,
        among: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Where edits of rows lie, and what they put there.

        Args:
            part: rows; whole: count tokens as in the buffer, not as in the chunk that these rows make.
            skipped: [S, d], what a skip puts.
            among: start of a group → numbers of its rows, ascending, that alone may have some; None: any row may.

        Returns:
            int64 [m] and [m, d], no place twice; None if there are none.
        """
        index: list[int] = []
        values: list[Tensor] = []
        for piece, first in _begins(part, whole):
            numbers: Sequence[int] = range(piece.first, piece.last)
            if among is not None:
                own = among.get(piece.group.start, ())
                numbers = own[bisect_left(own, piece.first) : bisect_left(own, piece.last)]
                if not numbers:
                    continue
            place = {position: i for i, position in enumerate(piece.group.tokens)}
            each = len(piece.group.tokens)
            for number in numbers:
                for edit, which in pick(piece.group.rows[number]):
                    positions = which if edit is None else [edit.positions[i] for i in which]
                    here = [i for i, position in enumerate(positions) if position in place]
                    if not here:
                        continue
                    index += [first + (number - piece.first) * each + place[positions[i]] for i in here]
                    if edit is None:
                        assert skipped is not None
                        values.append(skipped[[positions[i] for i in here]])
                    elif len(here) == len(edit.positions):
                        values.append(edit.value)  # type: ignore[arg-type]
                    else:
                        values.append(edit.value[[which[i] for i in here]])  # type: ignore[index]
        if not index:
            return None
        values = [value.to(self.state.device, self.state.dtype) for value in values]
        return torch.tensor(index, device=self.state.device), torch.cat(values)

    def read(
        self, part: Sequence[Slice], states: Tensor, read: Sequence[int], whole: bool = False
    ) -> Iterator[tuple[list[int], int, Tensor]]:
        """(cells, which of the read tokens, their states [n, d]) of rows; states: the buffer, or a chunk's."""
        for piece, first in _begins(part, whole):
            rows = states[first : first + piece.n_tokens].view(piece.last - piece.first, len(piece.group.tokens), -1)
            numbers = [row.number for row in piece.group.rows[piece.first : piece.last]]
            place = {position: i for i, position in enumerate(piece.group.tokens)}
            for which, position in enumerate(read):
                if position in place:
                    yield numbers, which, rows[:, place[position]]


def _begins(part: Sequence[Slice], whole: bool) -> Iterator[tuple[Slice, int]]:
    first = 0
    for piece in part:
        yield piece, piece.tokens.start if whole else first
        first += piece.n_tokens
