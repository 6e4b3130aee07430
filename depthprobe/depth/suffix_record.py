"""One unchanged run, and what it leaves for the rows of a sweep: arguments, keys, values and states of every block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from depthprobe.depth.flex import is_block_mask, visible_of
from depthprobe.depth.suffix_attend import Seen, SuffixAttend, configurations, interfaced, own_function
from depthprobe.depth.suffix_plan import Size
from depthprobe.depth.suffix_program import Block, Glue, Program
from depthprobe.depth.taps import first_argument, hidden
from depthprobe.models.attend import Attend, DenseAttend

if TYPE_CHECKING:
    from depthprobe.depth.tapped import TappedModel

#: A hidden state's place among a block's arguments.
_STATE = object()


@dataclass(slots=True)
class Record:
    """What an unchanged run of S tokens left.

    Attributes:
        length: S.
        arguments: step → what the block was called with, `_STATE` standing for its state.
        seen: step → keys, values and mask of its attention.
        states: states [S, d] before each step, and behind the last.
        kept: what glue keeps or adds, [S, d] by name.
        sizes: step → what a block weighs, if it was to be weighed.
        why: why this cannot be run token by token; None if it can.
    """

    length: int
    arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[int, Size] = field(default_factory=dict)
    why: str | None = None

    def call(self, step: int, state: Tensor, at: Tensor, attend: Attend) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a block for tokens at int64 [N] positions with state [1, N, d]."""
        args, kwargs = self.arguments[step]
        return self._with(args, state, at, attend), self._with(kwargs, state, at, attend)

    def _with(self, value: Any, state: Tensor, at: Tensor, attend: Attend) -> Any:
        """A template filled. A method, as a closure that calls itself would keep `state` until it is collected."""
        if value is _STATE:
            return state
        if isinstance(value, Attend):
            return attend
        if isinstance(value, Tensor):
            return self._at(value, at)
        if isinstance(value, dict):
            return {key: self._with(inner, state, at, attend) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            made = [self._with(inner, state, at, attend) for inner in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    def _at(self, value: Tensor, at: Tensor) -> Tensor:
        """The token dimension, if a tensor has one, cut to the tokens."""
        first = 0 if value.dim() == 1 else 1
        if first and value.shape[0] != 1:
            return value
        for dim in range(first, value.dim()):
            if value.shape[dim] == self.length:
                return value.index_select(dim, at)
        return value


@contextmanager
def recorded(model: TappedModel, program: Program, length: int, weigh: bool = False) -> Iterator[Record]:
    """Context in which a run of one row of S tokens is written down; weigh: also which weights each block meets."""
    record = Record(length)
    blocks = {n: step for n, step in enumerate(program.steps) if isinstance(step, Block)}
    at = {(step.path, step.call): n for n, step in blocks.items()}
    calls = dict.fromkeys((step.path for step in blocks.values()), 0)
    now: int | None = None
    met: dict[int, list[int]] = {}  # step → weights before and after its attention

    def meet(module: nn.Module, _args: Any) -> None:
        assert now is not None
        met.setdefault(now, [0, 0])[now in record.seen] += met_weights(module, model.config)

    def keep(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        if now is None or now in record.seen:
            record.why = "a layer attends more than once"
        elif {q.shape[2], k.shape[2], v.shape[2]} != {length} or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            record.why = "its attention hands over keys and values of other tokens than its own"
        else:
            record.seen[now] = Seen(k[0].contiguous(), v[0].contiguous(), q.shape[1], bias)

    def taken(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        if any(kwargs.get(key) is not None for key in ("position_bias", "head_mask", "indices")):
            record.why = "its attention adds what is made of positions"
        keep(q, k, v, _bias_of(mask, kwargs.get("sliding_window"), length, q.device, record))
        return own_function(module, own[id(module.config)])(module, q, k, v, mask, **kwargs)  # type: ignore[index]

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
        record.states[0] = first_argument(args, kwargs)[0]

    def enter(path: str, switch: Callable[[bool], None]) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal now
            now = at[path, calls[path]]
            calls[path] += 1
            state = first_argument(args, kwargs)
            record.states[now] = state[0]
            record.arguments[now] = _template(args, state, length), _template(kwargs, state, length)
            switch(True)
            for attend in (value for value in (*args, *kwargs.values()) if isinstance(value, Attend)):
                return _replaced(args, attend, keep), _replaced(kwargs, attend, keep)
            return None

        return hook

    def leave(switch: Callable[[bool], None]) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal now
            switch(False)
            assert now is not None
            if now not in record.seen:
                record.why = "its attention does not go through the interface of transformers"
            if now + 1 not in blocks:
                record.states[now + 1] = hidden(output)[0]
            now = None

        return hook

    modules = {path: model.model.get_submodule(path) for path in calls}
    with ExitStack() as stack:
        switch = stack.enter_context(interfaced(modules.values(), taken))
        switch(False)
        own = {key: config._attn_implementation for key, config in configurations(modules.values()).items()}
        if 0 not in blocks:  # glue comes first, so no block shows what it gets
            embed = model.model.get_submodule(model.taps[model.axis[0]].path)
            stack.enter_context(embed.register_forward_pre_hook(begin, with_kwargs=True))
        for path, module in modules.items():
            stack.enter_context(module.register_forward_pre_hook(enter(path, switch), with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave(switch)))
        for inner in {part for module in modules.values() for part in module.modules()} if weigh else ():
            stack.enter_context(inner.register_forward_pre_hook(meet))
        yield record
    for step, seen in record.seen.items() if weigh else ():
        before, after = met.get(step, (0, 0))
        record.sizes[step] = Size(before, after, seen.heads, len(seen.k), seen.k.shape[-1] + seen.v.shape[-1])
    if record.why is None and len(record.seen) != len(blocks):
        record.why = "not all of its layers run"
    if record.why is None:
        _between(program, record)


def met_weights(module: nn.Module, config: Any) -> int:
    """Weights of a module itself that a token is multiplied with; of stacked experts, those that it is sent to."""
    count = 0
    for weight in module.parameters(recurse=False):
        if weight.dim() == 2:
            count += weight.numel()
        elif weight.dim() == 3:
            met = int(getattr(config, "num_experts_per_tok", 0) or weight.shape[0])
            count += weight.numel() // weight.shape[0] * met
    return count


def _between(program: Program, record: Record) -> None:
    """States between glue, and what glue keeps, from those around the blocks."""
    for number, step in enumerate(program.steps):
        if not isinstance(step, Glue):
            continue
        state, behind = record.states[number], record.states.get(number + 1)
        if step.constant is not None:
            assert behind is not None
            record.kept[step.constant] = behind.float() - state.float()
        made = step.apply(state, record.kept)
        if step.keep is not None:
            record.kept[step.keep] = made
        record.states.setdefault(number + 1, made)


def _template(value: Any, state: Tensor, length: int) -> Any:
    """Arguments without their state, mask and cache."""
    if value is state:
        return _STATE
    if isinstance(value, Cache):
        return None
    if isinstance(value, Tensor):
        return None if value.dim() == 4 and value.shape[-2:] == (length, length) else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_template(inner, state, length) for inner in value)
    if isinstance(value, dict):
        return {k: None if k == "attention_mask" else _template(inner, state, length) for k, inner in value.items()}
    return value


def _replaced(value: Any, attend: Any, keep: Callable[..., None]) -> Any:
    """Arguments whose `attend` object also keeps what it is given."""

    def also(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = attend.mask.visible if isinstance(attend, DenseAttend) else None
        keep(q, k, v, None if visible is None else visible[0, 0])
        return attend(0, q, k, v)

    if value is attend:
        return SuffixAttend(also)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_replaced(inner, attend, keep) for inner in value)
    return {k: _replaced(inner, attend, keep) for k, inner in value.items()} if isinstance(value, dict) else value


def _bias_of(mask: Any, window: Any, length: int, device: torch.device, record: Record) -> Tensor | None:
    """[S, S] of a layer's mask; None for causality alone."""
    if is_block_mask(mask):
        mask = visible_of(mask, length, device)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-2:] == (length, length):
        if mask.shape[:2] != (1, 1):
            record.why = "its heads have masks of their own"
        return mask[0, 0]
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
        record.why = "its attention takes a mask in a form that is not known"
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    apart = places[:, None] - places
    return (apart >= 0) & (apart < window)
