"""From a watched forward to the parts of a decoder: prelude, loops, coda, and what comes after the last layer.

A layer is an element of a module list that maps a hidden state to one of the same shape. Layers that run once
before the first that runs again are the prelude, those after the last the coda; between them a new loop
begins whenever a layer runs again, or another list (or an earlier place in it) is entered. So a stack that is
called at several places of a nested loop is counted in the order of its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth.taps import Tap
from depthprobe.depth.watch import Call, Record, kind_of, outer_lists
from depthprobe.errors import UserError

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe")


class Scale(nn.Module):
    """Multiplies by a constant: what some models do between norm and head without a module for it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, state: Tensor) -> Tensor:
        return state * self.factor


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a decoder in the order of execution.

    Attributes:
        prelude, coda: calls of layers, once each; empty unless some layers run more than once.
        loops: the runs of the core; an ordinary transformer has one, of all its layers.
        looped: whether any layer runs more than once.
        width: d.
    """

    prelude: tuple[Call, ...]
    loops: tuple[tuple[Call, ...], ...]
    coda: tuple[Call, ...]
    looped: bool
    width: int

    @property
    def last(self) -> Call:
        return (self.coda or self.loops[-1])[-1]

    @property
    def first(self) -> Call:
        return (self.prelude or self.loops[0])[0]


@dataclass(frozen=True, slots=True)
class Ending:
    """What runs between the last layer and the logits.

    Attributes:
        norms: modules that map the last state to what the head reads.
        paths: names of the norms.
        final: where the state lies from which the norms start, if it is not the last layer's residual alone.
        transforms: modules that the model runs on its logits.
    """

    norms: tuple[nn.Module, ...]
    paths: tuple[str, ...]
    final: Tap | None
    transforms: tuple[nn.Module, ...]


def find_stack(model: nn.Module, record: Record, name: str) -> Stack:
    """Group the layers that ran.

    Raises:
        UserError: no stack of layers, layers of different width, a stack that is run in part.
    """
    ids = {id(module): path for path, module in model.named_modules()}
    layers: dict[str, tuple[str, int]] = {}  # path → list, place in it
    by_path: dict[str, list[Call]] = {}
    for call in record.calls:
        by_path.setdefault(call.path, []).append(call)
    for path, listed in outer_lists(model).items():
        elements = [ids[id(element)] for element in listed]
        ran = [element for element in elements if element in by_path]
        if not ran or not all(_is_layer(model.get_submodule(e), by_path[e]) for e in ran):
            continue
        if len(ran) != len(elements):
            what = f"{name} does not run all its layers in a forward: {len(ran)} of {len(elements)} in {path}"
            raise UserError(what, where=kind_of(model), remedy="give a model that does")
        for place, element in enumerate(elements):
            layers.setdefault(element, (path, place))
    calls = [call for call in record.calls if call.path in layers]
    if not calls:
        what = f"{name} has no stack of decoder layers that take one residual stream and return it"
        raise UserError(what, where=kind_of(model), remedy="give another decoder-only model")
    widths = {call.after.shape[-1] for call in calls if call.after is not None}
    if len(widths) != 1:
        what = f"{name} has layers of different widths, {', '.join(map(str, sorted(widths)))}"
        raise UserError(what, where=kind_of(model), remedy="give a model with one residual stream")
    counts = Counter(call.path for call in calls)
    again = [number for number, call in enumerate(calls) if counts[call.path] > 1]
    if not again:
        return Stack((), (tuple(calls),), (), False, widths.pop())
    prelude, core, coda = calls[: again[0]], calls[again[0] : again[-1] + 1], calls[again[-1] + 1 :]
    loops: list[list[Call]] = []
    for call in core:
        if not loops or not _follows(layers[loops[-1][-1].path], layers[call.path]):
            loops.append([])
        loops[-1].append(call)
    return Stack(tuple(prelude), tuple(map(tuple, loops)), tuple(coda), True, widths.pop())


def loop_states(stack: Stack, record: Record) -> tuple[Call, ...]:
    """The norm behind each loop, if every loop's last residual goes into one before anything else."""
    if not stack.looped:
        return ()
    layers = {call.path for call in (*stack.prelude, *stack.coda, *(c for loop in stack.loops for c in loop))}
    found: list[Call] = []
    for loop in stack.loops:
        end = loop[-1]
        behind = next((call for call in record.calls if call.entered > end.left), None)
        if behind is None or behind.path in layers or behind.after is None or not _same(behind.before, end.after):
            return ()
        if behind.after.shape[-1] != stack.width:
            return ()
        found.append(behind)
    return tuple(found)


def find_ending(model: nn.Module, record: Record, stack: Stack, head: nn.Module, name: str) -> Ending:
    """Follow the state from the last layer to the head.

    Raises:
        UserError: something between them that no module does and that is no multiplication.
    """
    norms: list[nn.Module] = []
    paths: list[str] = []
    final: Tap | None = None
    transforms: list[nn.Module] = []
    state, clock, read = stack.last.after, stack.last.left, False
    for call in record.calls:
        module = model.get_submodule(call.path)
        # what holds the head is looked into: BERT's decoders put a projection and a norm beside it
        if call.entered < clock or (module is not head and any(part is head for part in module.modules())):
            continue
        clock = call.left
        if read:
            if call.shaped:
                transforms.append(module)
            continue
        if module is head:
            read = True
            if not _same(state, call.before):
                factor = _factor(state, call.before)
                if factor is not None:
                    norms.append(Scale(factor))
                elif call.before is not None and call.before.shape[-1] == stack.width:
                    norms, paths, final = [], [], Tap(call.path, call.number, before=True)
                else:
                    what = f"{name} changes its last state before the head in a way that depthprobe does not know"
                    raise UserError(what, where=kind_of(model), remedy="please report it")
        elif call.after is not None:
            if _same(state, call.before):
                norms.append(module)
                paths.append(call.path)
            elif call.before is not None and call.before.shape[-1] == stack.width:
                norms, paths, final = [module], [call.path], Tap(call.path, call.number, before=True)
            else:
                norms, paths, final = [], [], Tap(call.path, call.number)
            state = call.after
    return Ending(tuple(norms), tuple(paths), final, tuple(transforms))


def part(model: nn.Module, record: Record, layer: str, site: str) -> str | None:
    """The module of a layer that is its attention or feed-forward part, if one runs once a call."""
    names = _ATTENTION if site == "attn_out" else _FEED_FORWARD
    for name, _ in model.get_submodule(layer).named_children():
        path = f"{layer}.{name}"
        calls = [call for call in record.calls if call.path == path]
        if name in names and len(calls) == record.counts[layer] and all(call.shaped for call in calls):
            return path
    return None


def the_head(model: nn.Module, name: str) -> nn.Module:
    """The output embeddings. Raises UserError if there are none."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if not isinstance(head, nn.Module):
        raise UserError(
            f"{name} has no language-model head", where=kind_of(model), remedy="give a causal language model"
        )
    return head


def _is_layer(module: nn.Module, calls: Sequence[Call]) -> bool:
    """More than one linear map, from a hidden state to one of the same shape."""
    return any(True for _ in module.children()) and all(
        call.before is not None and call.after is not None and call.before.shape == call.after.shape for call in calls
    )


def _follows(before: tuple[str, int], after: tuple[str, int]) -> bool:
    return before[0] == after[0] and before[1] < after[1]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(torch.allclose(a.float(), b.float(), rtol=1e-3 if a.dtype != b.dtype else 0, atol=0, equal_nan=True))


def _factor(a: Tensor | None, b: Tensor | None) -> float | None:
    """f with b = f · a, if there is one."""
    if a is None or b is None or a.shape != b.shape:
        return None
    x, y = a.double(), b.double()
    factor = float((x * y).sum() / (x * x).sum())
    rounding = 1e-5 if b.dtype == torch.float32 else 1e-2
    return factor if bool(torch.allclose(factor * x, y, rtol=rounding, atol=rounding * float(y.abs().max()))) else None
