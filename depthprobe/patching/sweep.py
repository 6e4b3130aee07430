"""One prompt's sweep: cells of patches and cuts, run with `DepthModel.resume`, and what they answer.

A *spec* says what a cell changes; it becomes a `Cell` once for every continuation of the prompt that the answers need
(`scores`). The states that go in are captured for a part of the specs at a time, so that they keep to the memory that
is allowed, however large the sweep is.

Two cells ride in every sweep of a pair whose results are known: the changed word at depth 0, and the last token at the
last depth, both have to give the other story's logits. A sweep in which they do not is worth nothing and stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
_STATES = 0.25


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


#: (coordinate, role) → mean state [d].
Means = Callable[[Coordinate, str], Tensor]


@dataclass(frozen=True, slots=True)
class Swept:
    """What the specs of one prompt gave.

    Attributes:
        tally: of the clean run (cell 0) and the specs, in order.
        n_run, n_filled, flops, engine: as `Resumed` counts them, over all continuations.
    """

    tally: Tally
    n_run: int
    n_filled: int
    flops: float
    engine: str


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
    reads = max(len(tally.contexts(run)) for run in tally.first_runs)
    for part in parts_of(model, cells, len(target.prompt_ids), reads, max_bytes):
        for run in tally.first_runs:
            one.run([cells[n] for n in part], part, run, oracles=part[0] == 0 and run == tally.first_runs[0])
    while (still := tally.open()) is not None:
        context, rows = still
        wanted = rows.tolist()
        for part in parts_of(model, [cells[n] for n in wanted], len(target.prompt_ids), len(context) + 1, max_bytes):
            numbers = [wanted[n] for n in part]
            one.run([cells[n] for n in numbers], numbers, context, oracles=False)
    return Swept(tally, counts.n_run, counts.n_filled, counts.flops, counts.engine)


@dataclass(slots=True)
class _Counts:
    n_run: int = 0
    n_filled: int = 0
    flops: float = 0.0
    engine: str = ""


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

    def run(self, specs: Sequence[Spec | None], numbers: Sequence[int], run: Path, *, oracles: bool) -> None:
        """Run some cells with one continuation and enter their answers."""
        model, prompt = self.model, self.target.prompt_ids
        contexts = self.tally.contexts(run)
        first, last = model.axis[0], model.axis[-1]
        needed = {c for s in specs if s is not None and s.kind == "set" for c in s.patch.coordinates}
        needed |= {first, last} if oracles else set()
        states = [self._states(source, run, needed) for source in self.sources] if needed else []
        cells = [self._cell(spec, run, states) for spec in specs]
        extra = self._oracles(states) if oracles else []
        device_ids = torch.tensor((*prompt, *run))
        at = [len(prompt) - 1 + len(context) for context in contexts]
        with engine_bytes(model, self.max_bytes) as allowed:
            done = model.resume(device_ids, [*cells, *extra], at, (last,), engine=self.engine, max_bytes=allowed)
        found = done.states[last]
        self.counts.n_run += done.n_run
        self.counts.n_filled += done.n_filled
        self.counts.flops += done.flops
        self.counts.engine = done.engine
        if oracles:
            self._check(found[len(cells) :, 0], run)
        self.tally.add(model, torch.tensor(numbers), contexts, found[: len(cells)])

    def _states(self, source: Source, run: Path, needed: set[Coordinate]) -> dict[Coordinate, Tensor]:
        """coordinate → [S, d] of the source under the same continuation."""
        ids = torch.tensor([(*source.prompt, *run)])
        capture = self.model.capture(ids, positions="all", coordinates=tuple(needed), logits=False)
        return {coordinate: state[0] for coordinate, state in capture.states.items()}

    def _cell(self, spec: Spec | None, run: Path, states: Sequence[dict[Coordinate, Tensor]]) -> Cell:
        def value(spec: Spec, coordinate: Coordinate, tokens: tuple[int, ...]) -> Tensor:
            return self._value(spec, coordinate, tokens, states)

        return cell_of(spec, len(self.target.prompt_ids), len(run), self.sources, value)

    def _value(
        self, spec: Spec, coordinate: Coordinate, tokens: tuple[int, ...], states: Sequence[dict[Coordinate, Tensor]]
    ) -> Tensor:
        """[tokens, d]"""
        model = self.model
        if spec.kind == "set":
            assert spec.source is not None
            return states[spec.source][coordinate][list(tokens)]
        if spec.kind == "zero":
            return torch.zeros(len(tokens), model.width, dtype=model.dtype, device=model.device)
        assert self.means is not None
        return self.means(coordinate, spec.role).to(model.device, model.dtype).expand(len(tokens), -1)

    def _oracles(self, states: Sequence[dict[Coordinate, Tensor]]) -> list[Cell]:
        """Two cells for each source."""
        first, last = self.model.axis[0], self.model.axis[-1]
        end = len(self.target.prompt_ids) - 1
        cells = []
        for source, theirs in zip(self.sources, states, strict=True):
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
        tokens = tuple(token for token in tokens if token >= sources[spec.source].changed[0])
    if not tokens:
        return Cell()
    return Cell(tuple(Edit(c, tokens, value(spec, c, tokens)) for c in spec.patch.coordinates))


_ORACLES = ("the changed word patched at depth 0", "the last token patched at the last depth")


def footprint(ours: Tensor, theirs: Tensor) -> tuple[int, ...]:
    """The tokens at which two embeddings [S, d] differ by more than rounding."""
    apart = (ours.float() - theirs.float()).abs().amax(-1)
    scale = torch.maximum(ours.float().abs().amax(), theirs.float().abs().amax())
    return tuple((apart > 1e-5 * scale).nonzero()[:, 0].tolist())


@contextmanager
def engine_bytes(model: TappedModel, max_bytes: int) -> Iterator[int]:
    """Context that gives what the engine may take of a limit; what it asks for instead is told for the whole limit."""
    try:
        yield max(1, int(max_bytes * (1 - _STATES)))
    except TooLittleMemoryError as error:
        raise TooLittleMemoryError(model.name, int(error.least / (1 - _STATES)) + 1, max_bytes) from None


def parts_of(
    model: TappedModel, cells: Sequence[Spec | None], length: int, reads: int, max_bytes: int
) -> Iterator[list[int]]:
    """Indices of cells whose values, and the states that they come from, fit the memory; at least one at a time.

    A cell also leaves a state at each of the tokens that are read.

    Raises:
        UserError: one cell alone does not fit.
    """
    width, limit = model.width * model.dtype.itemsize, int(max_bytes * _STATES)
    part: list[int] = []
    held, states = 0, set[tuple[int | None, Coordinate]]()
    for number, spec in enumerate(cells):
        new = set[tuple[int | None, Coordinate]]()
        own = reads * width
        if spec is not None and spec.kind != "cut":
            own += len(spec.tokens) * len(spec.patch.coordinates) * width
            new = {(spec.source, c) for c in spec.patch.coordinates} if spec.kind == "set" else set()
        size = own + len(new - states) * length * width
        if part and held + size > limit:
            yield part
            part, held, states = [], 0, set()
            size = own + len(new) * length * width
        if size > limit:
            need = kibibytes(int(size / _STATES) + 1)
            what = f"one cell of a sweep of {model.name} needs {need}, and {kibibytes(max_bytes)} are allowed"
            raise UserError(what, where="max_memory", remedy="allow more, or patch fewer places at once")
        part.append(number)
        held, states = held + size, states | new
    if part:
        yield part
