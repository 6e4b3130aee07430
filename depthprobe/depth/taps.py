"""Where a state lies in a forward, and catching it there with module hooks.

A `Tap` is one call of one module: in a looped model the same layer is called once per loop, and hooks count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate


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


def replaced(value: Any, state: Tensor) -> Any:
    """What a module takes or returns, with another residual in it."""
    return state if isinstance(value, Tensor) else type(value)((replaced(value[0], state), *value[1:]))


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
