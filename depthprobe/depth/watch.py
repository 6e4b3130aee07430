"""Watching a tiny forward: which modules ran, in what order, on which states.

Nothing is known about an architecture beforehand. Two rows of three tokens that differ in the last token are
run once, and everything that `stack` needs to know about a model is read off that record.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.errors import UserError

IDS = ((1, 1, 1), (1, 1, 2))
_SHAPE = (2, 3)
#: Largest difference of a logit, as a share of the largest logit, that is put down to rounding; float32: 1e-3.
ROUNDING = {torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(slots=True)
class Call:
    """One call of a module.

    Attributes:
        path: the module's name.
        number: which of the calls of this module, from 0.
        entered, left: times on a clock that ticks with each event.
        before, after: hidden states [2, 3, ·] that went in first and came out; None if they are something
            else, or if the module is a part of a layer (of which `shaped` alone is known).
        shaped: whether a hidden state came out.
    """

    path: str
    number: int
    entered: int
    before: Tensor | None
    left: int = -1
    after: Tensor | None = None
    shaped: bool = False


@dataclass(slots=True)
class Record:
    """The calls of a forward in the order of entering, and its logits [2, 3, V]."""

    calls: list[Call]
    logits: Tensor
    counts: Counter[str] = field(default_factory=Counter)


def outer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Path → list, of the module lists that lie in no other."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def watch(model: nn.Module, name: str) -> Record:
    """Run the tiny forward.

    Raises:
        UserError: the model does not run on token ids alone, or returns no logits for each token.
    """
    record = Record([], torch.empty(0))
    clock = 0
    stack: list[Call] = []
    inside = tuple(f"{path}." for path in outer_lists(model))

    def part_of_a_layer(path: str) -> bool:
        return any(path.startswith(prefix) and "." in path[len(prefix) :] for prefix in inside)

    def enter(path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal clock
            first = args[0] if args else kwargs.get("hidden_states")
            kept = None if part_of_a_layer(path) else _hidden(first)
            call = Call(path, record.counts[path], clock, None if kept is None else kept.clone())
            record.counts[path] += 1
            clock += 1
            record.calls.append(call)
            stack.append(call)

        return hook

    def leave(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal clock
            call = stack.pop()
            assert call.path == path
            value = _hidden(output)
            call.shaped = value is not None
            call.after = None if value is None or part_of_a_layer(path) else value.clone()
            call.left = clock
            clock += 1

        return hook

    device = next(model.parameters()).device
    with ExitStack() as hooks, torch.inference_mode():
        for path, module in model.named_modules():
            if path:
                hooks.enter_context(module.register_forward_pre_hook(enter(path), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave(path)))
        try:
            record.logits = model(input_ids=torch.tensor(IDS, device=device)).logits
        except Exception as error:
            raise UserError(
                f"{name} does not run on token ids alone: {type(error).__name__}: {error}"[:300],
                where=kind_of(model), remedy="give a causal language model of text",
            ) from error  # fmt: skip
    if record.logits.shape[:2] != _SHAPE:
        raise UserError(f"{name} has no logits for each token", where=kind_of(model), remedy="give a causal model")
    return record


def check_causal(record: Record, model: nn.Module, name: str) -> None:
    """Raises UserError if a token's logits depend on a later token: then the model is an encoder."""
    logits = record.logits[:, :-1].float()
    difference = float((logits[0] - logits[1]).abs().max() / logits.abs().max().clamp(min=1e-6))
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if difference > ROUNDING.get(dtype, 1e-3):
        raise UserError(
            f"{name} is no decoder: its tokens see those behind them", where=kind_of(model),
            remedy="give a causal language model",
        )  # fmt: skip


def kind_of(model: nn.Module) -> str:
    """ "architecture llama", for errors."""
    return f"architecture {getattr(getattr(model, 'config', None), 'model_type', type(model).__name__)}"


def _hidden(value: Any) -> Tensor | None:
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == _SHAPE and value.is_floating_point():
        return value
    return None
