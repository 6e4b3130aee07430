"""What a sweep takes of memory, and what a limit leaves for its batches.

Three things are counted: what is there all the time (results, the states that cells are compared with, the clean
run's record), the rows that ride in a climb, and the tokens that go through a block together. A limit that does not
even hold one row and the unpatched one is refused, and the least that would do is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthprobe.depth.cells import Cell
from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.suffix_plan import TOKENS, Row, climbs
from depthprobe.depth.suffix_program import Glue
from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.depth.suffix_check import Support
    from depthprobe.depth.tapped import TappedModel

#: What allocator and matrix library hold on to beside what is in use (measured).
HELD_BYTES = 6 << 20


class TooLittleMemoryError(UserError):
    """A limit that a sweep cannot keep to. least: the smallest that it can."""

    def __init__(self, name: str, least: int, given: int) -> None:
        self.least = least
        what = f"a sweep of {name} needs {kibibytes(least)} beside the model, and {kibibytes(given)} are allowed"
        remedy = f"allow {kibibytes(least)} or more, or sweep fewer cells"
        super().__init__(what, where="max_bytes, --max-memory", remedy=remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return UserError.__reduce__(self)


def kibibytes(count: int) -> str:
    """Rounded up, so that what is named is enough."""
    return f"{-(-count // 1024)} KiB"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that a sweep holds all the time: what is kept aside, results, compared states, the record."""

    held: int
    result: int
    stood: int
    record: int

    @classmethod
    def of(
        cls, model: TappedModel, length: int, cells: Sequence[Cell], coordinates: Sequence[Coordinate], n_read: int,
        support: Support | None,
    ) -> Fixed:  # fmt: skip
        state = model.width * model.dtype.itemsize
        result = (len(cells) + 2) * len(coordinates) * n_read * state
        points = {edit.coordinate for cell in cells for edit in cell.edits}.union(coordinates)
        record = 0 if support is None else record_bytes(model, support, length)
        return cls(HELD_BYTES, result, len(points) * length * state, record)

    @property
    def nbytes(self) -> int:
        return self.held + self.result + self.stood + self.record


@dataclass(frozen=True, slots=True)
class Room:
    """What a limit leaves for the suffix engine.

    Attributes:
        chunk: tokens that go through a block together; token: bytes of each.
        riding: tokens of rows that climb together, those that are read counted twice; ride: bytes of each.
    """

    chunk: int
    token: int
    riding: int
    ride: int

    @classmethod
    def of(
        cls, model: TappedModel, support: Support, length: int, fixed: Fixed, rows: Iterable[Row], latest: int,
        n_read: int, max_bytes: int,
    ) -> Room:  # fmt: skip
        """Raises TooLittleMemoryError."""
        token, ride = token_bytes(model, length), riding_bytes(model, support)
        longest = latest + 1 - min((row.start for row in rows), default=latest)
        widest = 2 * (longest + min(n_read, longest))  # a row and the unpatched one
        free = max_bytes - fixed.nbytes
        if (least := length * token + widest * ride) > free:
            raise TooLittleMemoryError(model.name, fixed.nbytes + least, max_bytes)
        chunk = max(length, min(TOKENS.get(model.device.type, TOKENS["cpu"]), free // 2 // token))
        return cls(chunk, token, max(widest, (free - chunk * token) // ride), ride)

    def nbytes(self, climb: Sequence[Row], latest: int, n_read: int) -> int:
        """Of a climb."""
        own = sum(latest + 1 - row.start for row in climb)
        return riding_tokens(climb, latest, n_read) * self.ride + min(own, self.chunk) * self.token

    def climbs(self, rows: Sequence[Row], latest: int, n_read: int) -> Iterator[tuple[Row, ...]]:
        return climbs(rows, latest, self.riding, n_read)


def riding_tokens(rows: Iterable[Row], latest: int, n_read: int) -> int:
    """Tokens of rows, those that are read counted twice, as the last block has them in a buffer of their own."""
    return sum(own + min(n_read, own) for own in (latest + 1 - row.start for row in rows))


def hooked_rows(model: TappedModel, length: int, fixed: Fixed, max_bytes: int) -> int:
    """Patched rows of a batch by hooks; one more is unpatched. Raises TooLittleMemoryError."""
    row = row_bytes(model, length)
    fit = (max_bytes - fixed.nbytes) // row
    if fit < 2:
        raise TooLittleMemoryError(model.name, fixed.nbytes + 2 * row, max_bytes)
    return fit - 1


def row_bytes(model: TappedModel, length: int) -> int:
    """Bytes that a row of S tokens takes while it runs: its residuals, the widest inner layer, its attention."""
    return length * token_bytes(model, length)


def token_bytes(model: TappedModel, length: int) -> int:
    """Bytes that a token takes while it goes through a layer with S keys."""
    config = model.config
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    inner = int(getattr(config, "intermediate_size", 0) or 0)
    if not inner or getattr(config, "num_experts_per_tok", 0):
        inner = max(inner, 4 * model.width)
    return model.dtype.itemsize * (12 * model.width + 6 * inner) + 4 * 4 * heads * length


def riding_bytes(model: TappedModel, support: Support) -> int:
    """Bytes that a token takes on its way: its state, and what glue keeps of it."""
    return model.dtype.itemsize * model.width * (1 + len(support.program.kept)) + 16


def record_bytes(model: TappedModel, support: Support, length: int) -> int:
    """Bytes that the clean run leaves: a state a step and behind the last, what glue keeps, keys and values."""
    constants = sum(isinstance(step, Glue) and step.constant is not None for step in support.program.steps)
    states = len(support.program.steps) + 1 + len(support.program.kept) + 2 * constants  # these in float32
    size = states * model.width + sum(s.groups * s.widths for s in support.sizes.values())
    return model.dtype.itemsize * length * size
