"""The runner: executes the stages of a tick on a `LoopedForCausalLM`, on any device.

    runner = Runner(model, pool, rule=QExit(0.5))
    runner.prefill([0], [(0, 9)], [prompt])                # all but the prompt's last token, dense
    runner.prelude([0], [prompt[9]], None, [9])            # which is a decode row like any other
    left = runner.recurrent([0], [9], [1])                 # loop 1; True where the row leaves
    runner.leave([0], [9], [1])                            # pages: free what lies deeper, alias
    logits = runner.coda([0], [9])

A slot is a request in flight; what must outlive a tick (state, prelude output, sums of the gate) lies in arrays over
slots, preallocated. Rows of a tick may be of any requests at any depths: the core's weights are the same for all, and
each row reads key j through the page table of its own depth. The runner makes all calls to the pool that follow from a
stage (`start`, `start_span`, `leave`); whoever drives it only gives slots back with `release`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting import ACT, ExitRule, Purpose, uniforms
from depthprobe.models.attend import Stage
from depthprobe.models.core import Block, Rotary
from depthprobe.models.modeling import LoopedForCausalLM
from depthprobe.runtime.exits import ExitWatch
from depthprobe.runtime.packed import can_pack, pack
from depthprobe.runtime.paged import PagedKV, RowAttend
from depthprobe.runtime.prefill import Prefill
from depthprobe.runtime.rows import RowPages

if TYPE_CHECKING:
    from depthprobe.runtime.pages import PagePool

Ints = Sequence[int] | NDArray[np.integer]


@dataclass(slots=True)
class Work:
    """Rows executed so far. Core rows: of decode ticks, of those past their exit, of prefill; rows of prelude and
    coda in decode ticks, of either in prefill, and of outputs (head, and coda where there is one) that an exit rule
    asked for: of rows that could leave for its answer, or whose next answer compares with it."""

    core: int = 0
    core_frozen: int = 0
    core_prefill: int = 0
    prelude: int = 0
    coda: int = 0
    outer_prefill: int = 0
    rule_outputs: int = 0


class Runner:
    """Runs stages over slots. U loops, width d, vocabulary V; n is the number of rows of a call.

    Args:
        model: in evaluation mode; its weights must not change while it is served (they may be kept packed).
        pool: says which page holds what, and how many slots and loops there are.
        rule: decides decode rows; None: all run U loops (also for policy full).
        prompt_rule: decides prompt tokens in prefill; None: they run U loops.
        record: keep λ and criterion of each loop, `watch.lam` and `watch.criterion`.
        tap: how many tokens of the readout to keep after each loop (0: none), `tap_ids` and `tap_logprobs`.
        packed: keep weights in the processor's layout; None: where that is possible.
        sparse: attend to pages where they lie; None: where that is possible.

    Attributes:
        kv: the page tables.
        state: `[n_slots + 1, d]`, what each slot's token goes on with; the last is scratch.
        work: rows executed.

    Raises:
        UserError: a rule that model, loops or layout cannot serve.
    """

    def __init__(
        self,
        model: LoopedForCausalLM,
        pool: PagePool,
        rule: ExitRule | None = None,
        prompt_rule: ExitRule | None = None,
        *,
        record: bool = True,
        tap: int = 0,
        packed: bool | None = None,
        sparse: bool | None = None,
    ) -> None:
        weight = model.embed_tokens.weight
        self.config, self.pool, self.rule, self.prompt_rule = model.config, pool, rule, prompt_rule
        self.n_loops, self.device, self.dtype = pool.n_loops, weight.device, weight.dtype
        self.act = rule if isinstance(rule, ACT) else None
        self._check(model)
        if packed is None:
            packed = can_pack(self.dtype, self.device)
        self.model = pack(model) if packed else model
        able = self.device.type == "cpu" and self.dtype in (torch.float32, torch.float64)
        self.sparse = able if sparse is None else sparse
        self.work = Work()
        self._drawn, self._played = rule is not None and rule.needs_uniform, rule is not None and rule.needs_given

        n, d, device = pool.n_slots + 1, self.config.hidden_size, self.device
        self.kv = PagedKV(self.config, pool.n_core, pool.n_outer, self.dtype, device)
        self.state = torch.zeros(n, d, dtype=self.dtype, device=device)
        injects = self.config.input_injection != "none"
        self.entry = torch.zeros(n if injects else 0, d, dtype=self.dtype, device=device)
        self.given = torch.zeros(n, dtype=torch.int64, device=device)
        self.uniform = torch.full((n,), 0.5, dtype=torch.float64, device=device)
        self.watch = ExitWatch(model, rule, self.act, n, self.n_loops, record)
        self.tap = tap
        self.tap_ids = torch.zeros(n if tap else 0, self.n_loops, tap, dtype=torch.int64, device=device)
        self.tap_logprobs = torch.zeros(self.tap_ids.shape, device=device)
        table = Rotary.of(torch.arange(pool.max_len, device=device)[None], self.config, self.dtype)
        self._cos, self._sin = table.cos[0].to(self.dtype), table.sin[0].to(self.dtype)
        self._attend = RowAttend(self.kv)
        self._prefill = Prefill(self)

    def _check(self, model: LoopedForCausalLM) -> None:
        for rule in (self.rule, self.prompt_rule):
            if rule is None:
                continue
            rule.check(self.n_loops)
            if rule.needs_gate and model.gate is None:
                raise UserError("the model has no exit gate", where=f"exit rule {rule.name}",
                                remedy="use a rule that needs none, such as fixed or l2")  # fmt: skip
            if rule.reprojects != self.pool.layout.terminal:
                what = f"exit rule {rule.name} and layout {self.pool.layout.name} do not go together"
                remedy = "act is served with layout state-copied, which serves nothing else"
                raise UserError(what, where="kv", remedy=remedy)
        if self.pool.layout.terminal and self.act is None:
            raise UserError("layout state-copied serves act alone", where="kv", remedy="use layout ragged")
        prompt = self.prompt_rule
        if prompt is not None and prompt.needs_output and len(model.coda):
            what = "prompt tokens cannot leave by their output where that needs coda layers, which run once a prefill"
            raise UserError(what, where=f"exit rule {prompt.name}", remedy="use dense prefill")

    # -- the stages

    def prefill(
        self,
        slots: Ints,
        chunks: Sequence[tuple[int, int]],
        tokens: Sequence[Sequence[int]],
        exits: Sequence[Sequence[int] | None] | None = None,
        seeds: Ints | None = None,
    ) -> list[list[int]]:
        """Run spans of prompts through all stages; `prefill.Prefill` says how.

        Args:
            slots: one for each span.
            chunks: (start, stop) of each span, positions in its request; what lies before is in pages already.
            tokens: ids of each request from position 0 on, at least up to `stop`.
            exits: known exit depths of a span's tokens, or None where `prompt_rule` decides.
            seeds: int64 `[n]`, of each request, for rules that draw.

        Returns:
            exit depth of each token of each span.
        """
        return self._prefill.run(slots, chunks, tokens, exits, seeds)

    @torch.inference_mode()
    def prelude(
        self,
        slots: Ints,
        token_ids: Ints,
        previous_ids: Sequence[Sequence[int]] | NDArray[np.integer] | None,
        positions: Ints,
        seeds: Ints | None = None,
        given: Ints | None = None,
    ) -> None:
        """Begin a token in each slot: reserve its pages, embed it, run the prelude layers.

        Args:
            token_ids: `[n]`.
            previous_ids: `[n, n_previous_tokens]`, the token before, then the one before that, −1 for none; None
                for models that mix none in.
            positions: `[n]`, of the tokens in their requests.
            seeds, given: `[n]`, for rules that draw, or that play back exit depths.
        """
        slot, position = _array(slots), _array(positions)
        self.pool.start(slot, position)
        order = np.argsort(position, kind="stable")
        slot, position = slot[order], position[order]
        ids = self.put(_array(token_ids)[order])[:, None]
        back = self.config.n_previous_tokens
        before = None
        if back and previous_ids is not None:
            before = self.put(_array(previous_ids).reshape(-1, back)[order])[:, None]
        x = self.model.embed(ids, before)
        if len(self.model.prelude):
            self._bind_outer("prelude", slot, position)
            x = self.model.prelude(x, self.rotary(position)[0], self._attend)
        entry, where = x[:, 0], self.put(slot)
        if self.config.input_injection == "none":
            self.state[where] = entry
        else:
            self.entry[where] = entry
            # at loop 1 an adding model gets the entry alone, others start from it
            self.state[where] = 0.0 if self.config.input_injection == "add" else entry
        self.watch.start(where)
        if (self._drawn and seeds is None) or (self._played and given is None):
            raise ValueError("the exit rule needs seeds, or given depths, of every token")
        if seeds is not None:
            self.uniform[where] = uniforms(self.put(_array(seeds)[order]), self.put(position), Purpose.EXIT)
        if given is not None:
            self.given[where] = self.put(_array(given)[order])
        self.work.prelude += len(slot)

    @torch.inference_mode()
    def recurrent(
        self,
        slots: Ints,
        positions: Ints,
        depths: Ints,
        frozen: Sequence[bool] | NDArray[np.bool_] | None = None,
        floors: Ints | None = None,
    ) -> Tensor:
        """One pass of the core over rows, each at its own loop.

        Args:
            depths: `[n]`, the loop, 1…U, that each row runs now.
            frozen: rows that have left and are computed for company's sake: nothing of theirs is kept.
            floors: exit depths; rows that would leave at smaller ones are not asked.

        Returns:
            bool `[n]` on the model's device: rows that leave after this loop (with a rule of horizon 1: after the
            next). Loop U, or U − 1 with horizon 1, is always True.
        """
        slot, position, depth = _array(slots), _array(positions), _array(depths)
        order = np.argsort(position, kind="stable")
        slot, position, depth = slot[order], position[order], depth[order]
        pages = self.pool.core[slot, depth - 1, : int(position[-1]) + 1]
        write = pages[np.arange(len(slot)), position].astype(np.int64)
        keep = slot
        if frozen is not None:
            ice = np.asarray(frozen, dtype=bool)[order]
            write, keep = np.where(ice, self.kv.core_scratch, write), np.where(ice, len(self.state) - 1, slot)
            self.work.core_frozen += int(ice.sum())
        self._attend.bind(self._row_pages("core", pages, position + 1), self.put(write))
        self._attend.enter("core")
        at, kept, loop = self.put(slot), self.put(keep), self.put(depth)

        before = self.state.index_select(0, at)
        entry = self.entry.index_select(0, at) if len(self.entry) else before
        x = self.model.loop_input(before, entry)
        rotary, _ = self.rotary(position)
        state = self.model.loop_output(self.model.core_step(x[:, None], rotary, self._attend))[:, 0]

        asked = self.watch.open(depth)
        if asked is not None:
            asked = np.flatnonzero(asked & (keep < len(self.state) - 1))
        signal, marks = self.watch.look(
            at, kept, loop, before, state, lambda s: self._rule_output(s, slot[asked], position[asked]),
            self.uniform[at] if self._drawn else None, self.given[at] if self._played else None,
            asked=None if asked is None else self.put(asked),
        )  # fmt: skip
        if floors is not None:
            marks = marks & (loop + self.watch.horizon >= self.put(_array(floors)[order]))
        marks = marks | (loop + self.watch.horizon >= self.n_loops)
        if self.tap:
            self._read_out(kept, loop, state)
        self.state[kept] = self.watch.weigh(at, kept, signal, marks)
        self.work.core += len(slot)
        leaves = torch.empty_like(marks)
        leaves[self.put(order)] = marks
        return leaves

    @torch.inference_mode()
    def leave(self, slots: Ints, positions: Ints, exits: Ints) -> None:
        """Tokens have left after loop `exits`, `[n]`: give back and alias their pages, copy or project anew."""
        slot, position, exit_ = _array(slots), _array(positions), _array(exits)
        self.settle(slot, position, exit_, self.state.index_select(0, self.put(slot)))

    @torch.inference_mode()
    def coda(self, slots: Ints, positions: Ints) -> Tensor:
        """Logits `[n, V]` of the tokens that have left, from the states they left with."""
        slot, position = _array(slots), _array(positions)
        self.work.coda += len(slot)
        if not len(self.model.coda):
            return self.model.readout(self.state.index_select(0, self.put(slot)))
        order = np.argsort(position, kind="stable")
        state = self.state.index_select(0, self.put(slot[order]))
        x = self._coda_layers(state, slot[order], position[order])
        return self.model.lm_head(x.index_select(0, self.put(np.argsort(order))))

    def sound(self, slots: Ints) -> list[bool]:
        """Whether the states that tokens left with are finite; what follows from others is not an answer."""
        return self.state.index_select(0, self.put(_array(slots))).isfinite().all(-1).tolist()

    def release(self, slot: int) -> None:
        """The request in this slot is done or dropped: all of its pages go back."""
        self.pool.release(slot)

    # -- parts that prefill shares

    def put(self, x: NDArray[np.integer]) -> Tensor:
        """int64 array on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(self.device, non_blocking=True)

    def rotary(self, position: NDArray[np.integer]) -> tuple[Rotary, Tensor]:
        """Rotary tables of rows `[n, 1, …]` at these positions, and the positions on the device."""
        where = self.put(position)
        return Rotary(self._cos[where][:, None], self._sin[where][:, None]), where

    def settle(
        self, slot: NDArray[np.int64], position: NDArray[np.int64], exits: NDArray[np.int64], state: Tensor
    ) -> None:
        """What `leave` does, for tokens whose final states `[n, d]` are given."""
        plan = self.pool.leave(slot, position, exits)
        if plan is not None:
            self.kv.copy(self.put(plan.source), self.put(plan.target))
        early = np.flatnonzero(exits < self.n_loops)
        if self.pool.layout.terminal and len(early):
            slot, position, exits = slot[early], position[early], exits[early]
            self._project(state[self.put(early)], position, self.pool.core[slot, exits, position])

    def _project(self, state: Tensor, position: NDArray[np.int64], pages: NDArray[np.integer]) -> None:
        # a halted token passes through every layer unchanged: each projects keys and values from the same state
        c, (rotary, _), write = self.config, self.rotary(position), self.put(pages)
        heads, groups = c.num_attention_heads, c.kv_heads
        for block, table in zip(self.model.core, self.kv.core, strict=True):
            assert isinstance(block, Block)
            qkv = block.qkv(block.attention_norm(state)).view(-1, 1, heads + 2 * groups, c.head_size)
            k = rotary.turn(qkv[:, :, heads : heads + groups])
            table[write] = torch.cat((k.flatten(1), qkv[:, :, heads + groups :].flatten(1)), dim=1)

    def _row_pages(self, stage: Stage, pages: NDArray[np.integer], lengths: NDArray[np.integer]) -> RowPages:
        return RowPages(
            pages, lengths, self.kv.zero(stage), self.kv.pages(stage), self.config.num_attention_heads,
            self.config.kv_heads, self.dtype, self.device, self.sparse,
        )  # fmt: skip

    def _bind_outer(self, stage: Stage, slot: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        pages = self.pool.outer[slot, : int(position[-1]) + 1]
        write = self.put(pages[np.arange(len(slot)), position])
        self._attend.bind(self._row_pages(stage, pages, position + 1), write)
        self._attend.enter(stage)

    def _coda_layers(self, state: Tensor, slot: NDArray[np.int64], position: NDArray[np.int64]) -> Tensor:
        self._bind_outer("coda", slot, position)
        x = self.model.coda(state[:, None], self.rotary(position)[0], self._attend)
        return self.model.norm(x)[:, 0]

    def _rule_output(self, state: Tensor, slot: NDArray[np.int64], position: NDArray[np.int64]) -> Tensor:
        # what a coda writes here is overwritten by the next, and read by nobody else before the last
        self.work.rule_outputs += len(slot)
        if not len(self.model.coda):
            return self.model.readout(state)
        return self.model.lm_head(self._coda_layers(state, slot, position))

    def _read_out(self, kept: Tensor, loop: Tensor, state: Tensor) -> None:
        top = self.model.readout(state).float().log_softmax(-1).topk(self.tap)
        self.tap_ids[kept, loop - 1] = top.indices
        self.tap_logprobs[kept, loop - 1] = top.values


def _array(x: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer]) -> NDArray[np.int64]:
    return np.asarray(x, dtype=np.int64)
