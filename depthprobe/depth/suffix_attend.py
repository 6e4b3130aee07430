"""Attention of many rows behind one shared prefix.

The tokens of all rows lie end to end in one sequence; a `Span` is a run of rows that start at the same token. A
row's query sees the keys that the unchanged run left of the tokens before its start, shared and neither expanded
nor copied, and those that its own row has just made. One softmax goes over both.

Two kinds of layers hand their queries, keys and values over: those of transformers, through the attention function
that their configuration names (`interfaced`), and those of this package, through their `attend` object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthprobe.models.attend import Attend

_NAME = "depthprobe_suffix"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer asks for beside queries, keys and values.

    Attributes:
        scale: on the scores; cap: c of c · tanh(scores / c); sinks: [H], a score of each head that takes weight and
            gives nothing.
    """

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the unchanged run left of one block call.

    Attributes:
        k: [G, S, h]; v: [G, S, h'].
        heads: H.
        bias: [S, S] added to the scores, or bool, who sees whom; None: causality alone.
    """

    k: Tensor
    v: Tensor
    heads: int
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Span:
    """Rows that start at one token, end to end.

    Attributes:
        rows: R.
        start, end: keys start … end − 1 are the rows' own, those before are shared.
        keys: where the span's keys begin among those handed over; each row has end − start.
        queries: where its queries begin.
        asking: the tokens of a row that ask, ascending; None: all that have keys.
        cuts: bool [R, queries, end], edges that are not seen; None: none are cut.
    """

    rows: int
    start: int
    end: int
    keys: int
    queries: int
    asking: tuple[int, ...] | None = None
    cuts: Tensor | None = None

    @property
    def n_asking(self) -> int:
        return self.end - self.start if self.asking is None else len(self.asking)


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Iterable[Span], seen: Seen, asked: Asked) -> Tensor:
    """Attention of all spans. q [H, N, h], k and v [G, N', h] → [N, H, h'], in the dtype of q."""
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[-1])
    for span in spans:
        rows = span.rows * span.n_asking
        out[span.queries : span.queries + rows] = _span(
            q[:, span.queries : span.queries + rows], k, v, span, seen, asked
        )
    return out


def _span(q: Tensor, k: Tensor, v: Tensor, span: Span, seen: Seen, asked: Asked) -> Tensor:
    heads, groups, rows = q.shape[0], k.shape[0], span.rows
    own, asking, before, each = span.end - span.start, span.n_asking, span.start, heads // groups
    keys = slice(span.keys, span.keys + rows * own)
    kind = torch.promote_types(q.dtype, torch.float32)
    q = q.reshape(groups, each, rows, asking, -1).transpose(1, 2).to(kind)  # [G, R, H/G, m, h]
    q = q.reshape(groups * rows, each * asking, -1)
    k = k[:, keys].to(kind).reshape(groups * rows, own, -1)
    v = v[:, keys].to(kind).reshape(groups * rows, own, -1)
    scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=asked.scale)
    if before:
        shared = seen.k[:, :before].to(kind).transpose(1, 2)
        # q may be a view into a fused projection, whose rows do not lie end to end: reshape, not view
        far = torch.baddbmm(q.new_empty(()), q.reshape(groups, -1, q.shape[-1]), shared, beta=0, alpha=asked.scale)
        scores = torch.cat((far.view(groups * rows, each * asking, before), scores), dim=-1)
    weights = _weights(scores, span, seen, asked, (groups, rows, each, asking, span.end))
    mixed = torch.bmm(weights[..., before:], v)
    if before:
        far = torch.bmm(weights.view(groups, -1, span.end)[..., :before], seen.v[:, :before].to(kind))
        mixed += far.view(mixed.shape)
    mixed = mixed.view(groups, rows, each, asking, -1).permute(1, 3, 0, 2, 4)
    return mixed.reshape(rows * asking, heads, -1)


def _weights(scores: Tensor, span: Span, seen: Seen, asked: Asked, shape: tuple[int, ...]) -> Tensor:
    if asked.cap is not None:
        scores = torch.tanh(scores / asked.cap) * asked.cap
    view = scores.view(shape)
    bias = _bias(span, seen, scores.device)
    if bias is not None:
        view[..., -bias.shape[-1] :] += bias.to(scores.dtype)
    if span.cuts is not None:
        view.masked_fill_(span.cuts[None, :, None], float("-inf"))
    if asked.sinks is None:
        return scores.softmax(-1)
    groups, rows, each, asking, _ = shape
    sinks = asked.sinks.to(scores.dtype).view(groups, 1, each, 1, 1).expand(groups, rows, each, asking, 1)
    weights = torch.cat((view, sinks), dim=-1).softmax(-1)[..., :-1]
    return weights.reshape(scores.shape)


def _bias(span: Span, seen: Seen, device: torch.device) -> Tensor | None:
    """[m, n] of a span's queries: its rows of the layer's own mask, of the last n keys; all see those before."""
    asked = range(span.start, span.end) if span.asking is None else span.asking
    if seen.bias is not None:
        rows = seen.bias[torch.tensor(asked, device=device), : span.end]
        if rows.dtype == torch.bool:
            return torch.zeros(rows.shape, device=device).masked_fill_(~rows, -torch.inf)
        return rows
    if asked[0] == span.end - 1:
        return None  # the last token alone sees all
    own = span.end - span.start
    later = torch.full((own, own), -torch.inf, device=device).triu_(1)
    return later if span.asking is None else later[[token - span.start for token in asked]]


# -- how layers hand them over

#: (attention module, q [1, H, N, h], k, v [1, G, N, h], attention mask, keyword arguments) → [1, N, H, h'] and more
Taken = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, dict[str, Any]], tuple[Tensor, Any]]
_taken: ContextVar[Taken] = ContextVar("taken")


def _function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, Any]:
    return _taken.get()(module, query, key, value, attention_mask, kwargs)


def configurations(blocks: Iterable[nn.Module]) -> dict[int, PreTrainedConfig]:
    """The configurations that the attention of some layers looks its function up in, by identity."""
    found = (getattr(module, "config", None) for block in blocks for module in block.modules())
    return {id(config): config for config in found if isinstance(config, PreTrainedConfig)}


@contextmanager
def interfaced(blocks: Iterable[nn.Module], taken: Taken) -> Iterator[Callable[[bool], None]]:
    """Context that gives a switch: with True, attention of transformers' layers calls `taken`; with False, its own."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _function)
    found = configurations(blocks)
    own = {key: config._attn_implementation for key, config in found.items()}

    def switch(on: bool) -> None:
        for key, config in found.items():
            # "": this one, not the configurations within it
            config._attn_implementation = {"": _NAME if on else own[key]}  # pyright: ignore[reportAttributeAccessIssue]

    token = _taken.set(taken)
    try:
        yield switch
    finally:
        switch(False)
        _taken.reset(token)


def own_function(module: nn.Module, implementation: str | None) -> Callable[..., tuple[Tensor, Any]]:
    """The function that an attention module of transformers would call by itself."""
    names = inspect.unwrap(type(module).forward).__globals__
    known = names.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return known.get_interface(implementation, names.get("eager_attention_forward"))


def asked_of(module: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Asked:
    """What a layer of transformers asks for in the keyword arguments of its attention function."""
    scale, cap = kwargs.get("scaling"), kwargs.get("softcap")
    return Asked(q.shape[-1] ** -0.5 if scale is None else float(scale), cap or None, kwargs.get("s_aux"))


class SuffixAttend(Attend):
    """The `attend` object of a sweep: hands everything over to `taken`, which keeps the place."""

    def __init__(self, taken: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._taken = taken

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, N, h], k and v [1, G, N, h] → [1, N, H·h]."""
        return self._taken(q, k, v)
