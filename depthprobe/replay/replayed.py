"""The table `replayed`: served tokens at every loop, under full keys and under the keys as served.

    table = replay(model, served.requests, rule, n_loops=8, ragged_prefill=False)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.halting import ExitRule, cdf, stopping_distribution
from depthprobe.models.modeling import LoopedForCausalLM
from depthprobe.replay.forward import Batch, RowStates, row_states
from depthprobe.replay.rules import AskedRule, check_replayable
from depthprobe.replay.served import ServedRequest
from depthprobe.runtime.exits import ExitWatch

#: logits held at once
_CELLS = 1 << 25

Columns = dict[str, np.ndarray]


def replay(
    model: LoopedForCausalLM,
    requests: Sequence[ServedRequest],
    rule: ExitRule,
    *,
    kv: str = "ragged",
    n_loops: int | None = None,
    ragged_prefill: bool = True,
    batch_tokens: int = 4096,
) -> pl.DataFrame:
    """Run served tokens through whole forwards (Ragged KV, arXiv 2610.09013) and ask the rule at every loop.

    Args:
        model: the one that served, in evaluation mode.
        requests: `read_served(…).requests`.
        rule: the rule that served them. The code that asks it is the runtime's. A planned or sampled one is not asked.
        kv: layout that they were served with.
        n_loops: U of the trace; None: the model's.
        ragged_prefill: False leaves out the pass with only the prompt as served: it is that of full keys.
        batch_tokens: most tokens of a forward, padding included.

    Returns:
        the table `replayed`, in the order of requests, tokens, keys, loops.

    Raises:
        UserError: a layout or rule that has no such forward, by name; a rule that the model cannot serve.
    """
    check_replayable(kv, rule)
    loops = model.config.n_loops if n_loops is None else n_loops
    rule.check(loops)
    if rule.needs_gate and model.gate is None:
        what = "the model has no exit gate"
        raise UserError(what, where=f"exit rule {rule.name}", remedy="replay with the model that served")
    if not requests:
        return tables.empty("replayed")
    asked, device = AskedRule.of(rule), model.embed_tokens.weight.device
    parts: list[pl.DataFrame] = []
    for some in _batches(requests, batch_tokens):
        batch = Batch.of(some, loops, device)
        keys = {"full": None, **({"prompt": batch.prompt} if ragged_prefill else {}), "served": batch.served}
        for name, exits in keys.items():
            read = _read(model, batch, row_states(model, batch, exits, loops), asked)
            parts.append(_table(some, name, read, loops))
    order = pl.DataFrame({"request": [r.id for r in requests]}).with_row_index("place")
    kinds = pl.DataFrame({"kv": ["full", "prompt", "served"], "kind": [0, 1, 2]})
    whole = pl.concat(parts).join(order, on="request").join(kinds, on="kv").sort("place", "index", "kind", "loop")
    return tables.conform("replayed", whole.drop("place", "kind"))


def _batches(requests: Sequence[ServedRequest], most: int) -> Iterator[list[ServedRequest]]:
    """Requests of like length together, at most so many tokens with the padding."""
    some: list[ServedRequest] = []
    for one in sorted(requests, key=lambda r: len(r.ids)):
        if some and (len(some) + 1) * len(one.ids) > most:
            yield some
            some = []
        some.append(one)
    yield some


@torch.inference_mode()
def _read(model: LoopedForCausalLM, batch: Batch, states: RowStates, rule: AskedRule) -> Columns:
    """Columns `[N, U]` of the decode rows."""
    rows = max(1, _CELLS // model.config.vocab_size)
    parts = []
    for start in range(0, len(batch.row), rows):
        part = slice(start, start + rows)
        parts.append(_read_some(model, batch.token[part], [x[part] for x in states.loops],
                                [x[part] for x in states.heads], rule))  # fmt: skip
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read_some(
    model: LoopedForCausalLM, token: Tensor, loops: list[Tensor], heads: list[Tensor], rule: AskedRule
) -> Columns:
    n, count = len(token), len(loops)
    at = torch.arange(n, device=token.device)
    # the runtime's own code asks: once the rule by itself, once as it was served
    watches = [ExitWatch(model, own, None, n, count, record=True) for own in (rule.own, rule.asked)]
    for watch in watches:
        watch.start(at)
    top1, margin, logprob = [], [], []
    before = torch.zeros_like(loops[0])  # what a rule compares with exists from loop 2 on
    for loop, (state, head) in enumerate(zip(loops, heads, strict=True), 1):
        logits = model.lm_head(head)
        depth = torch.full_like(at, loop)
        for watch in watches:
            watch.look(at, at, depth, before, state, lambda _, logits=logits: logits)
        before = state
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best = wide.topk(min(2, wide.shape[-1]), dim=-1)
        top1.append(logits.argmax(-1))
        margin.append(best.values[:, 0] - best.values[:, -1])
        logprob.append(wide.gather(-1, token[:, None])[:, 0] - wide.logsumexp(-1))
    own, served = watches
    columns = {name: _numpy(torch.stack(found, 1)) for name, found in
               (("top1", top1), ("margin", margin), ("logprob", logprob))}  # fmt: skip
    nothing = np.full((n, count), np.nan)
    if own.gated:
        columns["gate_lambda"] = _numpy(own.lam)
        columns["gate_cdf"] = _numpy(cdf(stopping_distribution(own.lam.double())))
    else:
        columns["gate_lambda"] = columns["gate_cdf"] = nothing
    for watch, names in ((own, ("criterion", "met", "distance")), (served, ("asked", "marked", "asked_distance"))):
        numbers = _numpy(watch.criterion).astype(np.float64) if watch.decides else nothing
        columns[names[0]], columns[names[2]] = numbers, rule.distance(numbers)
        columns[names[1]] = _numpy(watch.met) if watch.decides else nothing
    return columns


def _table(requests: Sequence[ServedRequest], kv: str, columns: Columns, n_loops: int) -> pl.DataFrame:
    counts = [len(r.tokens) for r in requests]
    final = columns["top1"][:, -1:]
    flat = {name: np.ascontiguousarray(values).reshape(-1) for name, values in columns.items()}
    flat["equals_final"] = (columns["top1"] == final).reshape(-1)

    def each(values: list[int]) -> np.ndarray:
        return np.repeat(np.array(values), n_loops)

    total = sum(counts)
    frame = pl.DataFrame(
        {
            "request": np.repeat(np.array([r.id for r in requests], dtype=object), np.array(counts) * n_loops).tolist(),
            "index": each([k for count in counts for k in range(count)]),
            "token": each([t for r in requests for t in r.tokens]),
            "exit": each([e for r in requests for e in r.exits]),
            "loop": np.tile(np.arange(1, n_loops + 1), total),
            "kv": [kv] * (total * n_loops),
            **flat,
        }
    )
    numbers = [name for name in flat if frame.schema[name].is_float()]
    # an infinite number has no distance from anything; a criterion that is not there yet is null
    finite = [pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in numbers]
    return tables.conform("replayed", frame.with_columns(finite))


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().numpy() if x.dtype != torch.bfloat16 else x.float().cpu().numpy()
