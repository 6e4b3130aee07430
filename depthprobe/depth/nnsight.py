"""The route over nnsight: states are asked for inside a trace of an `NNsight`-wrapped model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.reading import HeadAt
from depthprobe.depth.request import Caught, Request
from depthprobe.depth.tapped import Collected, TappedModel
from depthprobe.depth.taps import hidden
from depthprobe.errors import UserError

_INSTALL = "`pip install 'depthprobe[interp]'`"


class NNsightModel(TappedModel):
    """A model whose states are caught in an nnsight trace.

    Axis, points, norm and head are those of the wrapped module opened natively (`inner`); only the catching
    differs. Layers that run more than once are asked for by `tracer.iter`.

    Args:
        wrapped: an `nnsight.NNsight` (or `TransformersModel`, `LanguageModel`) over the module of `inner`.
        inner: the same module, opened natively.
    """

    route = "nnsight"

    def __init__(self, wrapped: Any, inner: TappedModel) -> None:
        super().__init__(inner.model, inner.tokenizer, inner.name)
        self._wrapped, self._inner = wrapped, inner
        for name in ("axis", "loop_ends", "n_loops", "n_layers", "width", "gate", "exit_q", "can_continue"):
            setattr(self, name, getattr(inner, name))
        self.bridges_gaps, self._parameters = inner.bridges_gaps, inner._parameters
        self._taps, self._tail = inner._taps, inner._tail
        self._envoys = {tap.path: wrapped.get(tap.path) for tap in self._taps.values()}

    @property
    def _beneath(self) -> TappedModel:
        return self._inner  # the same module; a trace around each forward would only cost

    def _is_normed(self, coordinate: Coordinate) -> bool:
        return self._inner._is_normed(coordinate)

    def _gate(self, state: Tensor) -> Tensor:
        return self._inner._gate(state)

    def _forward(self, request: Request) -> Caught:
        collected = Collected(self, request)
        # one request a place: what a first layer reads is both "embed" and its "resid_pre"
        places: dict[tuple[str, int, bool], list[Coordinate]] = {}
        for coordinate, tap in collected.taps.items():
            places.setdefault(tap, []).append(coordinate)
        envoys, wrapped, take = self._envoys, self._wrapped, collected.take
        output: Any = None
        # the trace takes its body from the source text, so it is a `with` statement of its own
        with HeadAt(self._tail.head, request.read, request.logits) as head:  # noqa: SIM117
            with wrapped.trace(**self._arguments(request)) as tracer:
                for (path, call, before), coordinates in places.items():
                    for _ in tracer.iter[call]:
                        value = envoys[path].input if before else envoys[path].output
                        for coordinate in coordinates:
                            take(coordinate, hidden(value))
                output = tracer.result.save()
        return collected.caught(head.logits(output.logits), getattr(output, self._cache_name(), None))


def nnsight_model(inner: TappedModel) -> NNsightModel:
    """An `NNsightModel` over a model opened natively; the module is wrapped, not changed.

    Raises:
        UserError: nnsight is not installed.
    """
    try:
        from nnsight import NNsight
    except ImportError as error:
        raise UserError("nnsight is not installed", where="route nnsight", remedy=_INSTALL) from error
    return NNsightModel(NNsight(inner.model), inner)


def unwrap(wrapped: Any) -> nn.Module:
    """The module under an nnsight wrapper."""
    return wrapped._module
