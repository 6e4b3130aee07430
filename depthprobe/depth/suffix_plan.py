"""Which rows a sweep runs, from where, and in which batches: numbers alone, no tensor is touched.

A cell becomes a *row*: the tokens from the first that it changes to the last that is read. Rows that start at the same
token are a *group*. A row joins the climb at the state of its first change, so the rows of a group are sorted by that,
and those that are on their way at a state are the first so many. A *climb* takes as many groups as the memory limit
allows, and one unpatched row with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from depthprobe.depth.cells import Cell, Edit
from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.suffix_program import Place, Program

#: Tokens that go through a block together, unless memory says less: enough for its matrix products to be fast, few
#: enough for what lies between them to stay in a processor's cache.
TOKENS = {"cpu": 512, "cuda": 16384}


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A cell on its way. Only what reaches a read token is left of it.

    Attributes:
        number: of the cell in the sweep; −1: unpatched.
        start: its first token.
        join: the state before which nothing of it differs from the clean run.
        values: (state, entering) → the edits that stand there, each with those of its positions that matter (indices
            into them); None: the clean state before the last step, at these tokens.
        inner: step → (module, edit) within the block.
        skips: step → tokens that keep what they entered the block with.
        cuts: step → edges (queries, keys).
    """

    number: int
    start: int
    join: int
    values: Mapping[tuple[int, bool], list[tuple[Edit | None, list[int]]]] = field(default_factory=dict)
    inner: Mapping[int, list[tuple[str, Edit, list[int]]]] = field(default_factory=dict)
    skips: Mapping[int, list[int]] = field(default_factory=dict)
    cuts: Mapping[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that start at one token, sorted by `join`; tokens: the positions that each of them has."""

    start: int
    tokens: tuple[int, ...]
    rows: tuple[Row, ...]
    first: int  # where its tokens begin in the buffer of its climb

    def on_the_way(self, state: int) -> int:
        """How many of its rows have joined at a state."""
        count = len(self.rows)
        while count and self.rows[count - 1].join > state:
            count -= 1
        return count


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows first … last − 1 of a group, which go through a step together with other slices."""

    group: Group
    first: int
    last: int

    @property
    def tokens(self) -> slice:
        """In the buffer."""
        each = len(self.group.tokens)
        return slice(self.group.first + self.first * each, self.group.first + self.last * each)

    @property
    def n_tokens(self) -> int:
        return (self.last - self.first) * len(self.group.tokens)


@dataclass(frozen=True, slots=True)
class Size:
    """What a block weighs, from an unchanged run.

    Attributes:
        before: weights that a token meets up to its block's attention; after: the others.
        heads: H; groups: G, those of keys and values; widths: h + h'.
    """

    before: int
    after: int
    heads: int
    groups: int
    widths: int

    def flops(self, tokens: int) -> float:
        return 2.0 * (self.before + self.after) * tokens

    def attention(self, queries: int, keys: int) -> float:
        return 2.0 * self.heads * queries * keys * self.widths


def end_of(program: Program, coordinates: Sequence[Coordinate]) -> int:
    """The state at which a sweep that reads at `coordinates` ends."""
    places = (program.places[point] for point in coordinates)
    return max(place.state + (place.inner is not None) for place in places)


def row_of(cell: Cell, number: int, program: Program, end: int, latest: int) -> Row | None:
    """A cell as a row that ends at a state and at token `latest`; None if nothing of it reaches that far."""
    values: dict[tuple[int, bool], list[tuple[Edit | None, list[int]]]] = {}
    inner: dict[int, list[tuple[str, Edit, list[int]]]] = {}
    skips: dict[int, list[int]] = {}
    cuts: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    taken: dict[Place, set[int]] = {}
    starts: list[int] = []
    joins: list[int] = []
    for edit in reversed(cell.edits):  # of two edits of one token at one point the later holds
        place = program.places[edit.coordinate]
        if place.state + (place.inner is not None) > end:
            continue
        used = taken.setdefault(place, set())
        left = [i for i, position in enumerate(edit.positions) if position <= latest and position not in used]
        if not left:
            continue
        used.update(edit.positions)
        starts.append(edit.positions[left[0]])
        joins.append(place.state)
        if edit.value is None:
            skips.setdefault(place.state - 1, []).extend(edit.positions[i] for i in left)
            joins[-1] -= 1
        elif place.inner is None:
            values.setdefault((place.state, place.entering), []).append((edit, left))
        else:
            inner.setdefault(place.state, []).append((place.inner, edit, left))
    for cut in cell.cuts:
        state = program.places[cut.coordinate._replace(site="resid_pre")].state
        queries = tuple(query for query in cut.queries if cut.keys[0] < query <= latest)
        if queries and state < end:
            cuts.setdefault(state, []).append((queries, tuple(key for key in cut.keys if key < queries[-1])))
            starts.append(queries[0])
            joins.append(state)
    if not starts:
        return None
    join = min(joins)
    early = any((join, entering) in values for entering in (False, True)) or join in inner or join in cuts
    if join in skips and not early:
        # what such a token enters the block with is known, so the block need not run for it
        values.setdefault((join + 1, False), []).append((None, skips.pop(join)))
        join += 1
    return Row(number, min(starts), join, values, inner, skips, cuts)


def climbs(rows: Sequence[Row], latest: int, most: int, n_read: int) -> Iterator[tuple[Row, ...]]:
    """Rows of at most `most` tokens together, those that are read counted twice; an unpatched row among them."""
    rows = sorted(rows, key=lambda row: (-row.start, row.join))
    at = 0
    while at < len(rows):
        join, taken, tokens = rows[at].join, 0, 0
        while at + taken < len(rows):
            row = rows[at + taken]
            own = latest + 1 - row.start
            own += min(n_read, own)
            tokens += own
            if taken and tokens + own > most:  # the unpatched row starts where the last does
                break
            join, taken = min(join, row.join), taken + 1
        yield (*rows[at : at + taken], Row(-1, rows[at + taken - 1].start, join))
        at += taken


def grouped(rows: Iterable[Row], tokens: Callable[[int], tuple[int, ...]]) -> tuple[Group, ...]:
    """Rows by their start, those that start last first. tokens: a row's start → the positions that it has."""
    rows = list(rows)
    found: list[Group] = []
    first = 0
    for start in sorted({row.start for row in rows}, reverse=True):
        own = sorted((row for row in rows if row.start == start), key=lambda row: row.join)
        group = Group(start, tokens(start), tuple(own), first)
        first += len(own) * len(group.tokens)
        found.append(group)
    return tuple(found)


def chunks(groups: Sequence[Group], state: int, most: int) -> list[list[Slice]]:
    """The rows that are on their way at a state, in chunks of about equally many tokens, at most `most`."""
    whole = [Slice(group, 0, count) for group in groups if (count := group.on_the_way(state))]
    total = sum(part.n_tokens for part in whole)
    if not total:
        return []
    share = -(-total // -(-total // most))
    found: list[list[Slice]] = [[]]
    room = share
    for part in whole:
        each, first = len(part.group.tokens), 0
        while first < part.last:
            fits = min(part.last - first, max(room, 0) // each)
            # a chunk takes a row more rather than leaving a small rest for the next
            if not fits and room * 2 >= each and share + each <= most:
                fits = 1
            if not fits:
                if found[-1]:
                    found.append([])
                    room = share
                    continue
                fits = 1
            found[-1].append(Slice(part.group, first, first + fits))
            room -= fits * each
            first += fits
    return found


@dataclass(slots=True)
class Work:
    """What a climb computes."""

    token_layers: int = 0
    flops: float = 0.0


def work_of(
    rows: Sequence[Row], program: Program, sizes: Mapping[int, Size], end: int, read: Sequence[int]
) -> Work:
    """Counted from the plan: tokens × blocks of which the whole was computed, and the matrix products of all."""
    work, asked, latest = Work(), sorted(set(read)), max(read)
    blocks = [n for n in program.blocks if n < end]
    starts = sorted({row.start for row in rows})
    for step in blocks:
        size = sizes[step]
        counts = dict.fromkeys(starts, 0)
        for row in rows:
            counts[row.start] += row.join <= step
        for start, count in counts.items():
            own = latest + 1 - start
            asking = sum(position >= start for position in asked) if step == blocks[-1] else own
            if asking < own:
                work.flops += count * 2.0 * size.before * own
            work.token_layers += count * asking
            work.flops += count * (size.flops(asking) + size.attention(asking, latest + 1))
    return work
