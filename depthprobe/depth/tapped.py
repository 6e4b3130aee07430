"""`TappedModel`: a model whose states are caught, and changed, at taps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from depthprobe.depth.cells import Cell, Resumed, asked
from depthprobe.depth.coordinates import Coordinate, layer_points
from depthprobe.depth.model import DepthModel
from depthprobe.depth.reading import HeadAt
from depthprobe.depth.request import Caught, Request
from depthprobe.depth.resume import MAX_BYTES, ResumePlan, plan_resume, resume
from depthprobe.depth.suffix_check import Support
from depthprobe.depth.suffix_record import met_weights
from depthprobe.depth.taps import Tap, tapped


class TappedModel(DepthModel):
    """A `DepthModel` whose points are taps. A subclass fills `_taps`, in the order of execution, and `_tail`."""

    _taps: dict[Coordinate, Tap]
    _suffix: Support | str | None = None
    _cuts_tried: frozenset[tuple[int, int]] = frozenset()

    @property
    def points(self) -> tuple[Coordinate, ...]:
        return tuple(self._taps)

    @property
    def taps(self) -> Mapping[Coordinate, Tap]:
        """Where each point lies in `self.model`."""
        return self._taps

    @property
    def _beneath(self) -> TappedModel:
        """The model that runs changed forwards: this one, or one over the same module that does it better."""
        return self

    def resume(
        self,
        input_ids: Tensor,
        cells: Sequence[Cell],
        read: Sequence[int] | None = None,
        coordinates: Sequence[Coordinate] | None = None,
        *,
        engine: str = "auto",
        max_bytes: int = MAX_BYTES,
    ) -> Resumed:
        """Many changed forwards of one prompt, from where each is changed.

        Args:
            input_ids: int64 [S], a whole prompt without padding (with BOS if it has one).
            cells: what is changed, one forward each; several edits and cuts in one apply together.
            read: the P tokens to read; default: the last.
            coordinates: the depths to read there; default: the last of the axis, which `readout` turns into logits.
            engine: "suffix" recomputes only the layers and tokens that a cell can change, "hooks" runs whole rows
                (slow, and the reference); "auto": the first where it has been tried to give the same (once a model).
            max_bytes: memory for the sweep beyond the model and the cells; it is split accordingly.

        Raises:
            UserError: a cell that does not fit the model or the prompt; an engine that cannot run it; a limit that
                does not hold one row and the unpatched one (it names the least that does); a batch in which the
                unpatched row does not reproduce the clean run.
        """
        call = asked(input_ids, cells, read, coordinates, max_bytes)
        return resume(self._beneath, call.input_ids, call.cells, call.read, call.coordinates, engine, call.max_bytes)

    def plan_resume(
        self,
        input_ids: Tensor,
        cells: Sequence[Cell],
        read: Sequence[int] | None = None,
        coordinates: Sequence[Coordinate] | None = None,
        *,
        engine: str = "auto",
        max_bytes: int = MAX_BYTES,
    ) -> ResumePlan:
        """What such a call of `resume` would take, without running it: cells, batches, FLOPs and bytes.

        Arguments and errors are those of `resume`. Values are not looked at: a cell that puts what stands there
        counts as one that runs.
        """
        call = asked(input_ids, cells, read, coordinates, max_bytes)
        return plan_resume(
            self._beneath, call.input_ids, call.cells, call.read, call.coordinates, engine, call.max_bytes
        )

    def flops_per_token(self, length: int) -> float:
        """Of the matrix products of all layers (not the head) for one token of a row of S, attention included."""
        counts = Counter(self._taps[layer].path for layer in layer_points(self))
        weights = sum(
            n * met_weights(module, self.config)
            for path, n in counts.items()
            for module in self.model.get_submodule(path).modules()
        )
        return 2.0 * weights + 2.0 * sum(counts.values()) * self.width * (length + 1)

    @property
    def head_flops(self) -> float:
        """Of the head for one state."""
        return 2.0 * self.width * self.vocab_size

    def _gate(self, state: Tensor) -> Tensor:
        """λ [...] of a loop's end [..., d]; asked of models with a gate alone."""
        raise NotImplementedError(type(self).__name__)

    def _forward(self, request: Request) -> Caught:
        collected = Collected(self, request)
        with HeadAt(self._tail.head, request.read, request.logits) as head, self._tapped(collected):
            output = self.model(**self._arguments(request))
        return collected.caught(head.logits(output.logits), getattr(output, self._cache_name(), None))

    def _tapped(self, collected: Collected) -> Any:
        """Context in which a forward fills `collected`."""
        return tapped(self.model, collected.taps, collected.take)


class Collected:
    """Takes the states that a request wants, as they come by, and computes the gate where a loop ends."""

    def __init__(self, model: TappedModel, request: Request) -> None:
        self._model, self._request = model, request
        self._states: dict[Coordinate, Tensor] = {}
        self._gates: dict[Coordinate, Tensor] = {}
        self._ends = frozenset(model.loop_ends) if model.gate else frozenset()
        self.taps = {c: tap for c, tap in model._taps.items() if c in request.wanted or c in self._ends}

    def take(self, coordinate: Coordinate, state: Tensor) -> None:
        """state: [B, S, d]."""
        read, request = self._request.read, self._request
        if coordinate in self._ends:
            self._gates[coordinate] = self._model._gate(read(state))
        if coordinate in request.wanted:
            self._states[coordinate] = read(state, request.dtype)

    def caught(self, logits: Tensor | None, cache: Any) -> Caught:
        gate = None
        if self._ends:
            gate = torch.stack([self._gates[end] for end in self._model.loop_ends], dim=-1)  # [B, [P,] R]
        return Caught(self._states, logits, gate, cache)
