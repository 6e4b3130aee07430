"""The loop over the core: dense, or ragged, where each token leaves when it is told to.

Ragged semantics (the oracle of everything that serves or trains with early exits). Token i has an exit depth
e_i, 1…U, given beforehand or chosen by a rule that is asked after each loop. All positions run in parallel,
and

* a query at loop d reads key and value of token j as they were at depth min(d, e_j): where e_j < d, those of
  j's last loop;
* the *output* of token i (what coda, norm and head get) is its state after loop e_i; it is frozen from there
  on, and what i would compute later never reaches another token;
* if states or gates of all loops are asked for, token i is run on past e_i "in the shadow", as if it alone
  had stayed: its query at d > e_i reads its own key and value at d, and those of all others at min(d, e_j).
  This is what a served token would have been with more loops, given the cache as served. Without such a
  request the loop ends when all have left;
* with a rule that looks ahead (horizon 1), tokens marked after loop d leave after loop d + 1;
* executed core rows are Σ e_i over real tokens: shadow passes are a measurement and are not counted, nor is
  padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting import ExitRule, GivenExits, Lookahead, LoopSignal, Purpose, uniforms
from depthprobe.halting.head import GatedModel
from depthprobe.models.attend import Attend, RaggedAttend
from depthprobe.models.core import Rotary


class LoopParts(GatedModel, Protocol):
    """The parts of a looped model that a loop is made of; see `LoopedForCausalLM`."""

    def core_step(self, x: Tensor, positions: Rotary, attend: Attend) -> Tensor: ...
    def loop_input(self, state: Tensor | None, entry: Tensor) -> Tensor: ...
    def loop_output(self, x: Tensor) -> Tensor: ...
    def gate_logit(self, loop_state: Tensor) -> Tensor: ...
    def normed(self, loop_state: Tensor) -> Tensor: ...
    def readout(self, loop_state: Tensor) -> Tensor: ...


@dataclass(slots=True)
class LoopResult:
    """What the loop leaves. B rows, S tokens, U loops, width d.

    Fields:
        state: `[B, S, d]`, each token's state at its exit.
        states: U tensors `[B, S, d]`, empty unless asked for.
        gates: U tensors `[B, S]`, logits of λ, empty unless asked for.
        exit_depths: int64 `[B, S]`, 0 at padding; None without exits.
        rows: int64 scalar, executed core rows; None without exits.
    """

    state: Tensor
    states: list[Tensor]
    gates: list[Tensor]
    exit_depths: Tensor | None = None
    rows: Tensor | None = None


def dense_loops(
    model: LoopParts,
    entry: Tensor,
    positions: Rotary,
    attend: Attend,
    n_loops: int,
    states: bool,
    gates: bool,
) -> LoopResult:
    """Run every token through all loops. entry: the prelude's output `[B, S, d]`."""
    state: Tensor | None = None
    result = LoopResult(entry, [], [])
    for loop in range(1, n_loops + 1):
        attend.enter("core", loop)
        state = model.loop_output(model.core_step(model.loop_input(state, entry), positions, attend))
        if states:
            result.states.append(state)
        if gates:
            result.gates.append(model.gate_logit(state))
    assert state is not None
    result.state = state
    return result


def ragged_loops(
    model: LoopParts,
    entry: Tensor,
    positions: Rotary,
    attend: RaggedAttend,
    n_loops: int,
    rule: ExitRule,
    real: Tensor,
    states: bool,
    gates: bool,
    uniform: Tensor | None = None,
    is_prompt: Tensor | None = None,
) -> LoopResult:
    """Run each token until `rule` lets it go, with the semantics at the top of this module.

    Args:
        entry: the prelude's output `[B, S, d]`.
        real: bool `[B, S]`, False at padding, which leaves after the first loop.
        states, gates: whether to run on in the shadow and return the states, or gate logits, of all loops.
        uniform, is_prompt: float64 and bool `[B, S]`, as in `LoopSignal`.
    """
    result = LoopResult(entry, [], [])
    watch = _Watch(model, rule, n_loops, uniform, is_prompt)
    state: Tensor | None = None
    active = real
    due = torch.zeros_like(real)  # marked a loop ago by a rule that looks ahead
    depths = torch.zeros(real.shape, dtype=torch.int64, device=real.device)
    rows = torch.zeros((), dtype=torch.int64, device=real.device)
    for loop in range(1, n_loops + 1):
        attend.enter("core", loop)
        state = model.loop_output(model.core_step(model.loop_input(state, entry), positions, attend))
        logit = model.gate_logit(state) if gates or rule.needs_gate else None
        if states:
            result.states.append(state)
        if gates and logit is not None:
            result.gates.append(logit)
        rows = rows + active.sum()
        leaves = active
        if loop < n_loops:
            marked = active & rule(watch.signal(loop, state, logit))
            leaves, due = (active & due, marked) if rule.horizon else (marked, due)
        result.state = state if loop == 1 else torch.where(leaves.unsqueeze(-1), state, result.state)
        depths = torch.where(leaves, loop, depths)
        active = active & ~leaves
        attend.leave(~active)
        if not (states or gates) and not bool(active.any()):
            attend.finish(loop)
            break
    result.exit_depths, result.rows = depths, rows
    return result


class _Watch:
    """Makes the signals of a forward loop by loop, and keeps what the next one needs of the one before."""

    def __init__(
        self,
        model: LoopParts,
        rule: ExitRule,
        n_loops: int,
        uniform: Tensor | None,
        is_prompt: Tensor | None,
    ) -> None:
        self.model, self.rule, self.n_loops = model, rule, n_loops
        self.uniform, self.is_prompt = uniform, is_prompt
        head = rule.head if isinstance(rule, Lookahead) else None
        self.head = None if head is None else head.check(model)
        self.before: LoopSignal | None = None

    def signal(self, loop: int, state: Tensor, logit: Tensor | None) -> LoopSignal:
        """After `loop`; called once for each, in order. state `[B, S, d]`, logit `[B, S]` if the rule needs a gate."""
        rule, before = self.rule, self.before
        survival = output = predicted = None
        if logit is not None:
            survival = torch.nn.functional.logsigmoid(-logit.detach().float())
            if before is not None and before.log_survival is not None:
                survival = before.log_survival + survival
        if rule.needs_output:
            output = self.model.readout(state)
        if self.head is not None:
            predicted = self.head(self.model.normed(state))
        self.before = LoopSignal(
            depth=loop,
            max_depth=self.n_loops,
            state=state,
            previous=None if before is None else before.state,
            gate_logit=logit,
            log_survival=survival,
            second_previous=None if before is None or not rule.needs_second_previous else before.previous,
            uniform=self.uniform,
            is_prompt=self.is_prompt,
            output_logits=output,
            previous_output_logits=None if before is None else before.output_logits,
            next_gate_logit=predicted,
        )
        return self.before


def exit_uniforms(seed: int | Tensor, positions: Tensor, batch: int) -> Tensor:
    """The numbers that sampled exits are drawn with: float64 `[B, S]`, of seeds and positions alone.

    Args:
        seed: int for all rows, or int64 `[B]`.
        positions: int64 `[B or 1, S]`.

    Raises:
        UserError: seeds of another shape or kind.
    """
    if isinstance(seed, Tensor):
        if seed.shape != (batch,) or seed.dtype != torch.int64:
            what = f"exit_seed is {seed.dtype} of shape {list(seed.shape)}, not int64 of shape [{batch}]"
            raise UserError(what, where="exit_seed")
        seed = seed.to(positions.device)[:, None]
    return uniforms(seed, positions, Purpose.EXIT).expand(batch, -1)


def exit_rule(
    exits: Tensor | ExitRule, real: Tensor, n_loops: int, *, coda: bool = False, seeded: bool = False
) -> ExitRule:
    """A checked rule from what a caller gave: a rule, or exit depths, integer `[B, S]`; those at padding do
    not matter.

    Args:
        coda: whether the model has layers behind the loop.
        seeded: whether there are numbers to draw exits with.

    Raises:
        UserError: not a rule nor a tensor, another shape, depths outside 1…U, a rule that cannot serve U
            loops, or one that a forward over all positions at once cannot follow.
    """
    if isinstance(exits, Tensor):
        if exits.shape != real.shape:
            what = f"exits have shape {list(exits.shape)}, the tokens {list(real.shape)}"
            raise UserError(what, where="exits")
        exits = GivenExits(exits.to(real.device).masked_fill(~real, 1))
    elif not isinstance(exits, ExitRule):
        what = f"exits is {type(exits).__name__}, not a tensor of depths nor an exit rule"
        raise UserError(what, where="exits")
    exits.check(n_loops)
    where = f"exit rule {exits.name}"
    if exits.reprojects:
        what = "ACT projects the keys of halted tokens anew at every loop, which no ragged forward does"
        raise UserError(what, where=where, remedy="serve it with layout state-copied")
    if exits.needs_output and coda:
        what = "the output at each loop needs the coda, whose layers run once in a forward of all positions"
        remedy = "serve the model with this rule and give the recorded exits, or take a rule on gate or states"
        raise UserError(what, where=where, remedy=remedy)
    if exits.needs_given:
        raise UserError("a replay needs recorded depths", where=where, remedy="give them as exits, integer [B, S]")
    if exits.needs_uniform and exits.planned and not seeded:
        raise UserError("random exits need a seed", where=where, remedy="give exit_seed")
    return exits
