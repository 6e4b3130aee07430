"""What runs between the embedding and the last state: block calls, and what a model does between them.

A `Program` is a model's execution as steps on one token stream, each of which can be called on any set of tokens:
a *block* mixes tokens by attention alone (`suffix_attend` takes that over), a *glue* acts on each token by itself.
Of an ordinary stack all steps are blocks. Of a looped model of this package the glue is its own `loop_input` and
`loop_output`; of others it is found from a clean run: a module behind the last block, and at most one earlier
state, or something that no block has touched, added to it. Whether that is right is tried (`suffix_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate, layer_points
from depthprobe.depth.taps import first_argument, hidden
from depthprobe.models import LoopedForCausalLM

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: kept states of the same tokens, by name
Kept = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """One call of a layer. path: its module; call: which of its calls."""

    path: str
    call: int


@dataclass(frozen=True, slots=True)
class Glue:
    """What happens to each token between two blocks.

    Attributes:
        apply: (state [N, d], kept) → state [N, d].
        keep: the name under which later glue finds its output.
        constant: the name of something that it adds and that no block has touched: the difference between the next
            block's input and this glue's output without it, in the clean run.
    """

    apply: Callable[[Tensor, Kept], Tensor]
    keep: str | None = None
    constant: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a coordinate lies.

    Attributes:
        state: what stands before step `state` (and behind step `state` − 1).
        inner: the module within block `state` whose output it is instead; None: the state itself.
        entering: the state as it enters step `state`, after what the step before has left was read and edited.
    """

    state: int
    inner: str | None = None
    entering: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of a model, and where its coordinates lie among them."""

    steps: tuple[Block | Glue, ...]
    places: Mapping[Coordinate, Place]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the steps that are blocks."""
        return tuple(n for n, step in enumerate(self.steps) if isinstance(step, Block))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of kept states, each of which takes as much memory as the state itself."""
        return tuple(step.keep for step in self.steps if isinstance(step, Glue) and step.keep)


def program_of(model: TappedModel, ids: Tensor) -> Program | str:
    """The program of a model, or why there is none. ids: int64 [S], a prompt to find it with."""
    layers = layer_points(model)
    between: list[list[Glue]] = [[] for _ in range(len(layers) + 1)]  # before each layer, and behind the last
    if isinstance(model.model, LoopedForCausalLM):
        _looped_glue(model.model, between)
    elif model.loop_ends and (why := _found_glue(model, ids, layers, between)) is not None:
        return why
    if any(point.site == "final_state" for point in model.axis):
        return "it ends in more than its last layer's residual"
    return _assembled(model, layers, between)


def _assembled(model: TappedModel, layers: tuple[Coordinate, ...], between: list[list[Glue]]) -> Program:
    steps: list[Block | Glue] = list(between[0])
    first = model.taps[layers[0]._replace(site="resid_pre")]
    places = {
        point: Place(0, entering=model.taps[point] == first) for point in model.points if point.site == "embed"
    }
    for number, layer in enumerate(layers):
        tap = model.taps[layer]
        step = len(steps)
        places[layer._replace(site="resid_pre")] = Place(step, entering=True)
        for site in ("attn_out", "mlp_out"):
            if (inner := model.taps.get(layer._replace(site=site))) is not None:
                places[layer._replace(site=site)] = Place(step, inner.path)
        steps.append(Block(tap.path, tap.call))
        places[layer] = Place(step + 1)
        # the first glue behind a loop's last layer makes the loop state, where there is one
        places[layer._replace(site="loop_state")] = Place(step + 2)
        steps += between[number + 1]
    return Program(tuple(steps), {point: places[point] for point in model.points})


def _looped_glue(model: LoopedForCausalLM, between: list[list[Glue]]) -> None:
    config = model.config
    injects = model.adapter is not None or config.input_injection == "add"
    for loop in range(config.n_loops):
        before = between[config.n_prelude + loop * config.n_core]
        if loop == 0 and injects:
            before.append(Glue(_same, keep="entry"))
        if injects:
            first = loop == 0

            def enter(state: Tensor, kept: Kept, first: bool = first) -> Tensor:
                return model.loop_input(None if first else state, kept["entry"])

            before.append(Glue(enter))
        if config.norm_per_loop:
            behind = between[config.n_prelude + (loop + 1) * config.n_core]
            behind.append(Glue(lambda state, _: model.loop_output(state)))


def _same(state: Tensor, _kept: Kept) -> Tensor:
    return state


@dataclass(slots=True)
class _Boundary:
    """What was seen from one block to the next: the state behind it, and modules that took just that."""

    after: Tensor
    modules: list[tuple[str, Tensor]]


def _found_glue(
    model: TappedModel, ids: Tensor, layers: tuple[Coordinate, ...], between: list[list[Glue]]
) -> str | None:
    befores, boundaries = _watched(model, ids, layers)
    states = {point._replace(site="resid_post") for point in model.axis if point.site == "loop_state"}
    earlier: dict[str, Tensor] = {}
    wanted: set[int] = set()  # boundaries whose state is kept
    for number, boundary in enumerate(boundaries):
        target = befores[number + 1] if number + 1 < len(befores) else None
        glue = between[number + 1]
        tap = model.taps[layers[number]._replace(site="loop_state")] if layers[number] in states else None
        options: list[tuple[str | None, Tensor]] = [(None, boundary.after), *boundary.modules]
        if tap is not None:
            options = [option for option in options if option[0] == tap.path][:1]
            if not options:
                return f"what makes its state behind {layers[number]} is not known"
        found = None if target is None else _explained(target, options, earlier, number)
        if target is not None and found is None:
            found = (*options[-1], "constant")
        path, current, other = found or (*options[0], None)
        earlier[f"behind {number}"] = current
        if path is not None or other is not None:
            glue.append(Glue(_same if path is None else _module(model.model, path)))
        if other == "constant":
            glue.append(Glue(_plus(f"constant {number}"), constant=f"constant {number}"))
        elif other is not None:
            wanted.add(int(other.split()[1]))
            glue.append(Glue(_plus(other)))
    for number in wanted:
        glue = between[number + 1]
        first = glue[0].apply if glue else _same
        glue[:1] = [Glue(first, keep=f"behind {number}")]
    return None


def _explained(
    target: Tensor, options: list[tuple[str | None, Tensor]], earlier: Mapping[str, Tensor], number: int
) -> tuple[str | None, Tensor, str | None] | None:
    """(module, its output, name of what is added to it) that make `target`."""
    for path, current in options:
        if _close(target, current):
            return path, current, None
    for path, current in options:
        for name, other in {**earlier, f"behind {number}": current}.items():
            if _close(target, current + other):
                return path, current, name
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(b.float().abs().max())
    return float((a.float() - b.float()).abs().max()) <= (1e-6 if a.dtype == torch.float32 else 1e-2) * scale


def _module(model: nn.Module, path: str) -> Callable[[Tensor, Kept], Tensor]:
    return lambda state, _: hidden(model.get_submodule(path)(state))


def _plus(name: str) -> Callable[[Tensor, Kept], Tensor]:
    return lambda state, kept: (state.float() + kept[name].float()).to(state.dtype)


def _watched(
    model: TappedModel, ids: Tensor, layers: tuple[Coordinate, ...]
) -> tuple[list[Tensor], list[_Boundary]]:
    """What each block got, and the boundaries behind them, of one run."""
    befores: list[Tensor] = []
    boundaries: list[_Boundary] = []
    paths = {model.taps[layer].path for layer in layers}
    handles: list[Any] = []

    def enter(_module: Any, args: Any, kwargs: Any) -> None:
        befores.append(first_argument(args, kwargs)[0].clone())

    def leave(_module: Any, _args: Any, output: Any) -> None:
        boundaries.append(_Boundary(hidden(output)[0].clone(), []))

    def seen(path: str) -> Any:
        def hook(_module: Any, args: Any, output: Any) -> None:
            if len(befores) != len(boundaries) or not boundaries or not args or not isinstance(args[0], Tensor):
                return
            behind = boundaries[-1]
            shaped = isinstance(output, Tensor) and output.shape == args[0].shape == (1, *behind.after.shape)
            if shaped and torch.equal(args[0][0], behind.after):
                behind.modules.append((path, output[0].clone()))

        return hook

    try:
        for path, module in model.model.named_modules():
            if path in paths:
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave))
            elif path and not any(path.startswith(f"{block}.") or block.startswith(f"{path}.") for block in paths):
                handles.append(module.register_forward_hook(seen(path)))
        model.capture(ids[None], logits=False)
    finally:
        for handle in handles:
            handle.remove()
    return befores, boundaries

