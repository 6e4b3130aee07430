"""Where a state lies in a forward, and catching it there with module hooks.

A `Tap` is one call of one module: in a looped model the same layer is called once per loop, and hooks count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.model import DepthModel
from depthprobe.depth.reading import HeadAt
from depthprobe.depth.request import Caught, Request


class Tap(NamedTuple):
    """Attributes:
    path: the module's name in the model.
    call: which of its calls in a forward, from 0.
    before: what goes in, not what comes out.
    """

    path: str
    call: int = 0
    before: bool = False


def hidden(value: Any) -> Tensor:
    """The residual among what a module returns; older layers and attentions return it in a tuple."""
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The residual among what a module is given."""
    if args:
        return hidden(args[0])
    named = kwargs.get("hidden_states")
    return hidden(named if named is not None else next(iter(kwargs.values())))


@contextmanager
def tapped(
    model: nn.Module, taps: Mapping[Coordinate, Tap], take: Callable[[Coordinate, Tensor], None]
) -> Iterator[None]:
    """Context in which a forward of `model` calls take(coordinate, hidden state [B, S, d]) at each tap."""
    places: dict[tuple[str, bool], dict[int, list[Coordinate]]] = {}
    for coordinate, tap in taps.items():
        places.setdefault((tap.path, tap.before), {}).setdefault(tap.call, []).append(coordinate)

    def counter(calls: dict[int, list[Coordinate]]) -> Callable[[Tensor | Any], None]:
        count = 0

        def see(value: Any) -> None:
            nonlocal count
            for coordinate in calls.get(count, ()):
                take(coordinate, hidden(value))
            count += 1

        return see

    with ExitStack() as stack:
        for (path, before), calls in places.items():
            module, see = model.get_submodule(path), counter(calls)
            if before:

                def enter(_module: nn.Module, args: Any, kwargs: Any, see: Callable[[Any], None] = see) -> None:
                    see(first_argument(args, kwargs))

                stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            else:

                def leave(_module: nn.Module, _args: Any, output: Any, see: Callable[[Any], None] = see) -> None:
                    see(output)

                stack.enter_context(module.register_forward_hook(leave))
        yield


class TappedModel(DepthModel):
    """A `DepthModel` whose points are taps. A subclass fills `_taps`, in the order of execution, and `_tail`."""

    _taps: dict[Coordinate, Tap]

    @property
    def points(self) -> tuple[Coordinate, ...]:
        return tuple(self._taps)

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
