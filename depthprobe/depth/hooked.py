"""Changed forwards by hooks: whole rows, each with its own edits. The reference, and the way for every architecture.

Nothing of a model is known here but where its states lie (`Tap`). Cuts need an attention module that takes a mask
(or, in a model of this package, an `attend` object).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth.cells import Cell, layer_of
from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.flex import is_block_mask, visible_of
from depthprobe.depth.taps import Tap, first_argument, hidden, replaced
from depthprobe.errors import UserError
from depthprobe.models.attend import Attend, attention
from depthprobe.models.masks import Mask

#: (row, its tokens, [P, d] or None for a skip)
_Row = tuple[int, list[int], Tensor | None]
#: What can be done with a layer whose attention edges cannot be cut.
_INSTEAD = "patch its residual (an Edit at resid_post), or skip the layer (an Edit there with value None)"


@contextmanager
def edited(
    model: nn.Module, taps: Mapping[Coordinate, Tap], cells: Sequence[Cell | None], length: int, name: str
) -> Iterator[None]:
    """Context in which row i of a forward of `model` is changed as cells[i] says; None leaves a row alone.

    Args:
        taps: where each point lies.
        cells: one a row of the batch.
        length: S, the tokens of a row (all rows are whole and unpadded).

    Raises:
        UserError: a cut in a layer whose attention takes no mask.
    """
    edits: defaultdict[Tap, list[_Row]] = defaultdict(list)
    cuts: defaultdict[tuple[int, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for row, cell in enumerate(cells):
        for edit in cell.edits if cell else ():
            edits[taps[edit.coordinate]].append((row, list(edit.positions), edit.value))
        for cut in cell.cuts if cell else ():
            edges = torch.zeros(length, length, dtype=torch.bool)  # goes to the layer's device when it is called
            edges[torch.tensor(cut.queries)[:, None], torch.tensor(cut.keys)] = True
            cuts[layer_of(cut.coordinate)].append((row, edges))
    with ExitStack() as stack:
        for handle in _edit_hooks(model, edits):
            stack.enter_context(handle)
        for layer, rows in cuts.items():
            hidden_edges = torch.zeros(len(cells), 1, length, length, dtype=torch.bool)
            for row, edges in rows:
                hidden_edges[row, 0] |= edges
            stack.enter_context(_cut_hook(model, taps, Coordinate(*layer), hidden_edges, name))
        yield


def _edit_hooks(model: nn.Module, edits: Mapping[Tap, list[_Row]]) -> Iterator[Any]:
    by_place: defaultdict[tuple[str, bool], dict[int, list[_Row]]] = defaultdict(dict)
    for tap, rows in edits.items():
        by_place[tap.path, tap.before][tap.call] = rows
    for (path, before), calls in sorted(by_place.items(), key=lambda place: not place[0][1]):
        module = model.get_submodule(path)
        if before:
            yield module.register_forward_pre_hook(_before(calls), with_kwargs=True)
            continue
        if any(value is None for rows in calls.values() for _, _, value in rows):
            enter, leave = _skipping(calls)
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, with_kwargs=True)
        else:
            yield module.register_forward_hook(_after(calls), with_kwargs=True)


def _changed(state: Tensor, rows: Sequence[_Row], entered: Tensor | None = None) -> Tensor:
    state = state.clone()
    for row, positions, value in rows:
        if value is None:
            assert entered is not None
            state[row, positions] = entered[row, positions]
        else:
            state[row, positions] = value.to(state.device, state.dtype)
    return state


def _before(calls: Mapping[int, list[_Row]]) -> Callable[..., Any]:
    count = 0

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        rows, count = calls.get(count), count + 1
        if rows is None:
            return None
        changed = _changed(first_argument(args, kwargs), rows)
        if args:
            return (replaced(args[0], changed), *args[1:]), kwargs
        key = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, key: replaced(kwargs[key], changed)}

    return enter


def _after(calls: Mapping[int, list[_Row]]) -> Callable[..., Any]:
    count = 0

    def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        nonlocal count
        rows, count = calls.get(count), count + 1
        return None if rows is None else replaced(output, _changed(hidden(output), rows))

    return leave


def _skipping(calls: Mapping[int, list[_Row]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    count = 0
    entered: Tensor | None = None

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal entered
        # hooks that change what goes in are registered before this one
        entered = first_argument(args, kwargs) if count in calls else None

    def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        nonlocal count
        rows, count = calls.get(count), count + 1
        return None if rows is None else replaced(output, _changed(hidden(output), rows, entered))

    return enter, leave


@contextmanager
def _cut_hook(
    model: nn.Module, taps: Mapping[Coordinate, Tap], layer: Coordinate, edges: Tensor, name: str
) -> Iterator[None]:
    """Context in which one call of a layer's attention does not see `edges`, bool [B, 1, S, S]."""
    block = model.get_submodule(taps[layer].path)
    call, ours = taps[layer].call, _takes(block, "attend")
    place = taps.get(layer._replace(site="attn_out"))
    if not ours and place is None:  # a recurrent layer, say, would take a mask and do nothing with it
        what = f"no attention is known there in {name} whose edges could be cut"
        raise UserError(what, where=str(layer), remedy=_INSTEAD)
    module = block if ours or place is None else model.get_submodule(place.path)
    if not ours and not _takes(module, "attention_mask"):
        what = f"the attention of {name} takes no mask, so its edges cannot be cut"
        raise UserError(what, where=str(layer), remedy=_INSTEAD)
    parameters = inspect.signature(module.forward)
    count = 0

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        count += 1
        if count != call + 1:
            return None
        bound = parameters.bind(*args, **kwargs)
        state = first_argument(args, kwargs)
        here = edges.to(state.device)
        if ours:
            bound.arguments["attend"] = _CutAttend(bound.arguments["attend"], here)
            return bound.args, bound.kwargs
        mask = bound.arguments.get("attention_mask")
        bound.arguments["attention_mask"] = _without(mask, here, state.dtype, name)
        if is_block_mask(mask):
            eager(True)
        return bound.args, bound.kwargs

    with ExitStack() as stack:
        stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
        eager = stack.enter_context(_eager_switch(module))
        yield


@contextmanager
def _eager_switch(module: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Context that gives a switch to a module's eager attention, the one form that takes any mask; its call ends it.

    Flex attention compiles anew for a mask of its own, which not every machine survives.
    """
    config: Any = getattr(module, "config", None)
    own, switched = getattr(config, "_attn_implementation", None), False

    def switch(on: bool) -> None:
        nonlocal switched
        if on != switched:
            config._attn_implementation = {"": "eager" if on else own}
            switched = on

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        switch(False)

    with module.register_forward_hook(leave, always_call=True):
        try:
            yield switch
        finally:
            switch(False)


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters


def _without(mask: Any, edges: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A mask of transformers, None (all that causality shows), bool or additive, without some edges; that of flex
    attention becomes additive, in `dtype`."""
    if mask is None:
        return ~edges & _causal(edges)
    if is_block_mask(mask):
        seen = visible_of(mask, edges.shape[-1], edges.device) & ~edges
        return torch.zeros(seen.shape, dtype=dtype, device=edges.device).masked_fill_(~seen, torch.finfo(dtype).min)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        what = f"the attention of {name} takes a mask in a form that edges cannot be cut from"
        raise UserError(what, remedy="load it with attn_implementation='eager' or 'sdpa'")
    if mask.dtype != torch.bool:
        return mask.masked_fill(edges, torch.finfo(mask.dtype).min)
    # True is what a query sees, or (MPT) what it does not; every token sees itself, so the first one tells
    return mask & ~edges if bool(mask[0, 0, 0, 0]) else mask | edges


def _causal(edges: Tensor) -> Tensor:
    length = edges.shape[-1]
    return torch.ones(length, length, dtype=torch.bool, device=edges.device).tril()


class _CutAttend(Attend):
    """Dense attention without some edges."""

    def __init__(self, plain: Any, edges: Tensor) -> None:
        visible = plain.mask.visible
        self._mask = Mask((_causal(edges) if visible is None else visible) & ~edges, causal=False)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self._mask)
