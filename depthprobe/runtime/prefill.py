"""Prefill: spans of prompts through prelude, loops and coda, so that their keys are in pages.

Tokens of all spans are packed behind each other and products run on those alone. In the loops the tokens that have
left are compacted away: executed rows are Σ e. Exits are known (a replay), or asked of the prompt rule, or U (dense).
The coda layers run over all tokens once, from the states they left with, for later tokens read their keys there too;
no output is made.

All positions of a span run loop by loop. For layouts that overwrite pages that is their definition of a prefill (a
token at loop d reads those before it, in the same span, at loop d), and a span must then be a whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.halting import Purpose, uniforms
from depthprobe.models.attend import Stage
from depthprobe.models.core import Rotary
from depthprobe.runtime.exits import ExitWatch
from depthprobe.runtime.paged import SpanAttend

if TYPE_CHECKING:
    from depthprobe.runtime.runner import Ints, Runner


class Prefill:
    """Runs spans for a `Runner`, with its model, pool and pages."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._attend = SpanAttend(runner.kv)

    @torch.inference_mode()
    def run(
        self,
        slots: Ints,
        chunks: Sequence[tuple[int, int]],
        tokens: Sequence[Sequence[int]],
        exits: Sequence[Sequence[int] | None] | None,
        seeds: Ints | None,
    ) -> list[list[int]]:
        """See `Runner.prefill`."""
        r = self.runner
        slots = np.asarray(slots, dtype=np.int64)
        lengths = np.array([stop - start for start, stop in chunks])
        request = np.repeat(np.arange(len(chunks)), lengths)
        slot = slots[request]
        position = np.concatenate([np.arange(start, stop) for start, stop in chunks])
        for s, (start, stop) in zip(slots.tolist(), chunks, strict=True):
            r.pool.start_span(s, start, stop)
        known = np.zeros(len(request), dtype=np.int64)  # 0: to be decided
        if exits is not None:
            known = np.concatenate([
                np.zeros(n, dtype=np.int64) if e is None else np.asarray(e, dtype=np.int64)
                for n, e in zip(lengths.tolist(), exits, strict=True)
            ])  # fmt: skip
        if r.prompt_rule is None:
            known[known == 0] = r.n_loops

        x = self._embed(chunks, tokens)
        if len(r.model.prelude):
            x = self._outer("prelude", x, request, slot, position)
        uniform = None
        if seeds is not None:
            drawn = np.asarray(seeds, dtype=np.int64)[request]
            uniform = uniforms(r.put(drawn), r.put(position), Purpose.EXIT)
        final, left = self._loops(x, request, slot, position, known, uniform)
        if len(r.model.coda):
            self._outer("coda", final, request, slot, position)
        r.work.outer_prefill += len(request)
        ends = np.cumsum(lengths)
        return [left[end - n : end].tolist() for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)]

    def _embed(self, chunks: Sequence[tuple[int, int]], tokens: Sequence[Sequence[int]]) -> Tensor:
        """`[N, d]`, with the tokens before mixed in, also those before the span."""
        r, back = self.runner, self.runner.config.n_previous_tokens
        ids, before = [], []
        for (start, stop), sequence in zip(chunks, tokens, strict=True):
            padded = np.concatenate([np.full(back, -1), np.asarray(sequence[:stop], dtype=np.int64)])
            ids.append(padded[start + back : stop + back])
            before.append(np.stack([padded[start + back - b : stop + back - b] for b in range(1, back + 1)], 1)
                          if back else np.zeros((stop - start, 0), dtype=np.int64))  # fmt: skip
        previous = r.put(np.concatenate(before))[None] if back else None
        return r.model.embed(r.put(np.concatenate(ids))[None], previous)[0]

    def _outer(
        self, stage: Stage, x: Tensor, request: NDArray[np.int64], slot: NDArray[np.int64], position: NDArray[np.int64]
    ) -> Tensor:
        r = self.runner
        rotary = self._bind(stage, r.pool.outer, request, slot, position)
        layers = r.model.prelude if stage == "prelude" else r.model.coda
        return layers(x[None], rotary, self._attend)[0]

    def _loops(
        self,
        entry: Tensor,
        request: NDArray[np.int64],
        slot: NDArray[np.int64],
        position: NDArray[np.int64],
        known: NDArray[np.int64],
        uniform: Tensor | None,
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """States `[N, d]` that the tokens leave with, and their exit depths `[N]`."""
        r, total = self.runner, len(request)
        watch = ExitWatch(r.model, r.prompt_rule, r.act, total, r.n_loops, record=False)
        asks = bool((known == 0).any())
        left, due = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=bool)
        final = torch.empty_like(entry)
        active = np.arange(total)
        state: Tensor | None = None
        for loop in range(1, r.n_loops + 1):
            at = r.put(active)
            whole = len(active) == total
            fed = entry if whole else entry[at]
            where = (request[active], slot[active], position[active])
            rotary = self._bind("core", r.pool.core[:, loop - 1], *where)
            x = r.model.loop_input(state, fed)
            before = fed if state is None else state
            state = r.model.loop_output(r.model.core_step(x[None], rotary, self._attend))[0]
            r.work.core_prefill += len(active)

            leaves = (known[active] > 0) & (known[active] <= loop)
            signal = None
            if (asks and loop < r.n_loops) or r.act is not None:
                depth = torch.full_like(at, loop)
                asked = watch.open(np.full(len(active), loop), is_prompt=True)
                if asked is not None:
                    asked = r.put(np.flatnonzero(asked & (known[active] == 0)))
                signal, marks = watch.look(
                    at, at, depth, before, state, self._output, None if uniform is None else uniform[at],
                    r.put(known[active]), is_prompt=True, asked=asked,
                )  # fmt: skip
                marked = marks.cpu().numpy() & (known[active] == 0)
                leaves |= due[active] if watch.horizon else marked
                due[active] = marked
            if loop == r.n_loops:
                leaves[:] = True
            if signal is not None:
                state = watch.weigh(at, at, signal, torch.from_numpy(leaves).to(r.device))
            if not leaves.any():
                continue
            gone = np.flatnonzero(leaves)
            gone_at, tokens = r.put(gone), active[gone]
            final[r.put(tokens)] = state[gone_at]
            left[tokens] = loop
            r.settle(slot[tokens], position[tokens], left[tokens], state[gone_at])
            stay = np.flatnonzero(~leaves)
            if not len(stay):
                break
            active, state = active[stay], state[r.put(stay)]
        return final, left

    def _output(self, state: Tensor) -> Tensor:
        self.runner.work.rule_outputs += len(state)
        return self.runner.model.readout(state)

    def _bind(
        self,
        stage: Stage,
        table: NDArray[np.integer],
        request: NDArray[np.int64],
        slot: NDArray[np.int64],
        position: NDArray[np.int64],
    ) -> Rotary:
        """Prepare attention of packed tokens; `table` `[slots, positions]` says which page each token reads."""
        r = self.runner
        _, first, row = np.unique(request, return_index=True, return_inverse=True)
        read = table[slot[first], : int(position.max()) + 1]
        write = read[row, position]
        self._attend.bind(read, r.put(write), row, position, r.kv.zero(stage))
        self._attend.enter(stage)
        rotary, _ = r.rotary(position)
        return Rotary(rotary.cos.transpose(0, 1), rotary.sin.transpose(0, 1))
