"""One prompt's sweep: cells of patches and cuts, run with `DepthModel.resume`, and what they answer.

A *spec* says what a cell changes; it becomes a `Cell` once for every continuation of the prompt that the answers need
(`scores`). The states that go in are captured for a part of the specs at a time, so that they keep to the memory that
is allowed, however large the sweep is.

Two cells ride in every sweep of a pair whose results are known: the changed word at depth 0, and the last token at the
last depth, both have to give the other story's logits. A sweep in which they do not is worth nothing and stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthprobe.depth import Cell, Coordinate, Cut, Edit
from depthprobe.depth.identity import FLOAT32_TOLERANCE
from depthprobe.depth.suffix_memory import TooLittleMemoryError, kibibytes
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.lens.targets import Path, Target
from depthprobe.patching.scores import Tally
from depthprobe.patching.sites import Patch

#: Share of the allowed memory that states and values may take; the engine has the rest.
_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Source:
    """The run that states come from.

    Attributes:
        prompt: its token ids, as many as the patched prompt's.
        changed: the tokens at which the two prompts' embeddings differ (`footprint`), ascending, one or more.
        name: of the two stories, for errors.
    """

    prompt: Path
    changed: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What one cell changes.

    Attributes:
        source: number of the source; None where none is needed.
        kind: "set", "zero", "mean" or "cut".
        patch: where; of a cut the layers.
        role: what `tokens` are called; of "mean" also whose mean is taken.
        position: the token if it is single.
        tokens: what is patched, or what the last token is cut from.
    """

    source: int | None
    kind: str
    patch: Patch
    role: str
    position: int | None
    tokens: tuple[int, ...]


def engine_bytes(max_bytes: int) -> int:
    """What is left for the engine beside the states."""
    return max(1, int(max_bytes * (1 - _SHARE)))


#: (coordinate, role) → mean state [d].
Means = Callable[[Coordinate, str], Tensor]
#: Number of a source → coordinate → its states [S, d].
_States = Mapping[int, Mapping[Coordinate, Tensor]]


@dataclass(frozen=True, slots=True)
class Swept:
    """What the specs of one prompt gave.

    Attributes:
        tally: of the clean run (cell 0) and the specs, in order.
        n_run, n_filled: of the specs, as `Resumed` counts them, over all continuations.
        flops: of all that ran, clean runs and known cells too.
        engines: those that ran something.
    """

    tally: Tally
    n_run: int
    n_filled: int
    flops: float
    engines: frozenset[str]


@torch.inference_mode()
def sweep(
    model: TappedModel,
    target: Target,
    words: Sequence[int],
    sources: Sequence[Source] = (),
    specs: Sequence[Spec] = (),
    means: Means | None = None,
    *,
    engine: str = "auto",
    max_bytes: int,
) -> Swept:
    """Run a prompt's specs.

    Args:
        target: the prompt that is patched.
        words: indices of its words whose whole answers are scored.
        means: for specs of kind "mean".
        engine, max_bytes: as `DepthModel.resume` takes them; states and values count too.

    Raises:
        UserError: what `resume` raises; an oracle that fails, which names the pair and by how much.
    """
    tally = Tally(target, words, len(specs) + 1)
    counts = _Counts()
    one = _One(model, target, tuple(sources), means, engine, max_bytes, tally, counts)
    cells: list[Spec | None] = [None, *specs]
    for run in tally.first_runs:
        for part in one.parts(cells, run, oracles=run == tally.first_runs[0]):
            one.run([cells[n] for n in part.numbers], part.numbers, run, part)
    while (still := tally.open()) is not None:
        context, rows = still
        wanted = rows.tolist()
        for part in one.parts([cells[n] for n in wanted], context, oracles=False):
            numbers = [wanted[n] for n in part.numbers]
            one.run([cells[n] for n in numbers], numbers, context, part)
    return Swept(tally, counts.n_run, counts.n_filled, counts.flops, frozenset(counts.engines))


@dataclass(slots=True)
class _Counts:
    n_run: int = 0
    n_filled: int = 0
    flops: float = 0.0
    engines: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _One:
    """A prompt, with all that its runs share."""

    model: TappedModel
    target: Target
    sources: tuple[Source, ...]
    means: Means | None
    engine: str
    max_bytes: int
    tally: Tally
    counts: _Counts

    def parts(self, specs: Sequence[Spec | None], run: Path, *, oracles: bool) -> Iterator[Part]:
        end, reads = len(self.target.prompt_ids), len(self.tally.contexts(run))
        return fitting(self.model, specs, self.sources, end, len(run), reads, self.max_bytes, oracles=oracles)

    def run(self, specs: Sequence[Spec | None], numbers: Sequence[int], run: Path, part: Part) -> None:
        """Run some cells, those of a part, with one continuation and enter their answers."""
        model, prompt = self.model, self.target.prompt_ids
        contexts = self.tally.contexts(run)
        last = model.axis[-1]
        states = {number: self._states(self.sources[number], run, points) for number, points in part.needed.items()}
        cells = [self._cell(spec, run, states) for spec in specs]
        extra = self._oracles(states) if part.oracles else []
        device_ids = torch.tensor((*prompt, *run))
        at = [len(prompt) - 1 + len(context) for context in contexts]
        allowed = engine_bytes(self.max_bytes)
        try:
            done = model.resume(device_ids, [*cells, *extra], at, (last,), engine=self.engine, max_bytes=allowed)
        except TooLittleMemoryError as error:
            # what the user is told to allow is for the states too, and for somewhat longer stories to come
            least = int(1.125 * error.least / (1 - _SHARE)) + 1
            raise TooLittleMemoryError(model.name, least, self.max_bytes) from None
        found = done.states[last]
        # neither the oracles nor the clean run was asked for; an oracle whose value is what stands there does not run
        end, stood = len(prompt) - 1, done.clean[last][0]
        idle = sum(torch.equal(theirs[last][end], stood) for theirs in states.values()) if part.oracles else 0
        self.counts.n_run += done.n_run - (len(extra) - idle)
        self.counts.n_filled += done.n_filled - idle - specs.count(None)
        self.counts.flops += done.flops
        if done.n_run:
            self.counts.engines.add(done.engine)
        if part.oracles:
            self._check(found[len(cells) :, 0], run)
        self.tally.add(model, torch.tensor(numbers), contexts, found[: len(cells)])

    def _states(self, source: Source, run: Path, needed: Collection[Coordinate]) -> dict[Coordinate, Tensor]:
        """coordinate → [S, d] of the source under the same continuation."""
        ids = torch.tensor([(*source.prompt, *run)])
        capture = self.model.capture(ids, positions="all", coordinates=tuple(needed), logits=False)
        return {coordinate: state[0] for coordinate, state in capture.states.items()}

    def _cell(self, spec: Spec | None, run: Path, states: _States) -> Cell:
        def value(spec: Spec, coordinate: Coordinate, tokens: tuple[int, ...]) -> Tensor:
            return self._value(spec, coordinate, tokens, states)

        return cell_of(spec, len(self.target.prompt_ids), len(run), self.sources, value)

    def _value(self, spec: Spec, coordinate: Coordinate, tokens: tuple[int, ...], states: _States) -> Tensor:
        """[tokens, d]"""
        model = self.model
        if spec.kind == "set":
            assert spec.source is not None
            return states[spec.source][coordinate][list(tokens)]
        if spec.kind == "zero":
            return torch.zeros(len(tokens), model.width, dtype=model.dtype, device=model.device)
        assert self.means is not None
        return self.means(coordinate, spec.role).to(model.device, model.dtype).expand(len(tokens), -1)

    def _oracles(self, states: _States) -> list[Cell]:
        """Two cells for each source."""
        first, last = self.model.axis[0], self.model.axis[-1]
        end = len(self.target.prompt_ids) - 1
        cells = []
        for source, theirs in zip(self.sources, states.values(), strict=True):
            cells.append(Cell((Edit(first, source.changed, theirs[first][list(source.changed)]),)))
            cells.append(Cell((Edit(last, (end,), theirs[last][[end]]),)))
        return cells

    def _check(self, found: Tensor, run: Path) -> None:
        """Against the model's own logits of each source. found: [2 · sources, d] at the prompt's end."""
        model, last = self.model, self.model.axis[-1]
        end = len(self.target.prompt_ids) - 1
        allowed = FLOAT32_TOLERANCE.get(model.dtype, 1e-4)
        for number, source in enumerate(self.sources):
            ids = torch.tensor([(*source.prompt, *run)])
            own = model.capture(ids, positions=torch.tensor([end]), coordinates=()).logits
            assert own is not None
            wanted = own[0].float()
            scale = wanted[wanted.isfinite()].abs().max().clamp(min=1.0)
            for which, state in zip(_ORACLES, found[2 * number : 2 * number + 2], strict=True):
                apart = model.readout(state, last) - wanted
                worst = float(apart.nan_to_num(0.0, 0.0, 0.0).abs().max() / scale)
                if not (worst <= allowed and bool(state.isfinite().all())):
                    raise UserError(
                        f"{which} does not give the logits of the story that it comes from: they differ by "
                        f"{worst:.1e} of the largest, at most {allowed:.0e} is allowed",
                        where=f"{model.name}, {source.name}",
                        remedy="a sweep of this model cannot be trusted; in half precision, try --dtype float32",
                    )


def cell_of(
    spec: Spec | None, end: int, behind: int, sources: Sequence[Source],
    value: Callable[[Spec, Coordinate, tuple[int, ...]], Tensor],
) -> Cell:  # fmt: skip
    """The cell of a spec in a run of a prompt of `end` tokens and `behind` more; None is the clean run.

    Args:
        value: (spec, coordinate, tokens) → [tokens, d], what is put there.
    """
    if spec is None:
        return Cell()
    later = tuple(range(end, end + behind))
    if spec.kind == "cut":
        keys = tuple(token for token in spec.tokens if token < end - 1)
        return Cell((), tuple(Cut(c, (end - 1, *later), keys) for c in spec.patch.coordinates)) if keys else Cell()
    # the answer is read behind the prompt's last token too, so what is done there is done to the answer's tokens
    tokens = (*spec.tokens, *later) if spec.tokens[-1] == end - 1 else spec.tokens
    if spec.kind == "set":
        assert spec.source is not None
        # before the two stories differ their states are the same
        changed = sources[spec.source].changed
        tokens = tuple(token for token in tokens if token >= changed[0])
        if all(c.site == "embed" for c in spec.patch.coordinates):  # words that both stories have
            tokens = tuple(token for token in tokens if token in changed)
    if not tokens:
        return Cell()
    return Cell(tuple(Edit(c, tokens, value(spec, c, tokens)) for c in spec.patch.coordinates))


_ORACLES = ("the changed word patched at depth 0", "the last token patched at the last depth")


def footprint(ours: Tensor, theirs: Tensor) -> tuple[int, ...]:
    """The tokens at which two embeddings [S, d] differ by more than rounding."""
    apart = (ours.float() - theirs.float()).abs().amax(-1)
    scale = torch.maximum(ours.float().abs().amax(), theirs.float().abs().amax())
    return tuple((apart > 1e-5 * scale).nonzero()[:, 0].tolist())


@dataclass(frozen=True, slots=True)
class Part:
    """Cells that run together with one continuation.

    Attributes:
        numbers: of the cells.
        needed: number of a source → where its states are captured; sources that no cell needs are not run.
        nbytes: of these states, of the values that cells put, and of what is read.
        oracles: whether those of all sources ride along, behind the cells.
    """

    numbers: list[int]
    needed: dict[int, frozenset[Coordinate]]
    nbytes: int
    oracles: bool


def fitting(
    model: TappedModel, cells: Sequence[Spec | None], sources: Sequence[Source], end: int, behind: int, reads: int,
    max_bytes: int, *, oracles: bool,
) -> Iterator[Part]:  # fmt: skip
    """Parts whose states and values fit the memory; each has a cell at least.

    Args:
        end, behind: tokens of the prompt, and of the continuation.
        reads: tokens that are read.
        oracles: whether they ride in the first part.

    Raises:
        UserError: one cell alone does not fit.
    """
    width, limit, length = model.width * model.dtype.itemsize, int(max_bytes * _SHARE), end + behind
    numbers: list[int] = []
    held, states = 0, set[tuple[int, Coordinate]]()
    if oracles:
        states = {(number, c) for number in range(len(sources)) for c in (model.axis[0], model.axis[-1])}
        held = (len(states) * length + sum(len(source.changed) + 1 + 2 * reads for source in sources)) * width

    def part() -> Part:
        used = sorted({number for number, _ in states})
        needed = {number: frozenset(c for other, c in states if other == number) for number in used}
        return Part(numbers, needed, held, oracles and numbers[0] == 0)

    for number, spec in enumerate(cells):
        new, own = set[tuple[int, Coordinate]](), reads
        if spec is not None and spec.kind != "cut":
            tokens = len(spec.tokens) + (behind if spec.tokens[-1] == end - 1 else 0)
            own += tokens * len(spec.patch.coordinates)
            if spec.kind == "set" and spec.source is not None:
                new = {(spec.source, c) for c in spec.patch.coordinates}
        size = (own + len(new - states) * length) * width
        if numbers and held + size > limit:
            yield part()
            numbers, held, states = [], 0, set()
            size = (own + len(new) * length) * width
        if held + size > limit:
            need = kibibytes(int((held + size) / _SHARE) + 1)
            what = f"one cell of a sweep of {model.name} needs {need}, and {kibibytes(max_bytes)} are allowed"
            raise UserError(what, where="max_bytes, --max-memory", remedy="allow more, or patch fewer places at once")
        numbers.append(number)
        held, states = held + size, states | new
    if numbers:
        yield part()
