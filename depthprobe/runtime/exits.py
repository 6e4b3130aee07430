"""Asking an exit rule about rows at different depths, with what it needs to remember of each between its loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.halting import ACT, ExitRule, Lookahead, LoopSignal
from depthprobe.models.modeling import LoopedForCausalLM


class ExitWatch:
    """Makes the signals of rows and carries sums and earlier states from loop to loop, in one entry for each row.

    Args:
        model: gives the gate, norm and widths.
        rule: None: nobody is asked, but gates may be recorded.
        act: the rule that weighs states, if any; also where exits are given and `rule` is not asked.
        entries: how many; one of them may be a scratch entry, for rows whose results are to be dropped.
        n_loops: U.
        record: keep λ and the criterion of each loop.

    Attributes:
        lam, criterion: float32 `[entries, U]`, NaN where not (yet) known; empty without `record`.
        met: bool `[entries, U]`, whether the criterion was met after each loop, least depths apart; likewise.
        gated, decides: whether there is anything in `lam`, and in the other two.
    """

    def __init__(
        self,
        model: LoopedForCausalLM,
        rule: ExitRule | None,
        act: ACT | None,
        entries: int,
        n_loops: int,
        record: bool,
    ) -> None:
        weight = model.embed_tokens.weight
        device, dtype, width = weight.device, weight.dtype, model.config.hidden_size
        self.model, self.rule, self.act, self.n_loops, self.record = model, rule, act, n_loops, record
        self.horizon = 0 if rule is None else rule.horizon
        head = rule.head if isinstance(rule, Lookahead) else None
        self._head = None if head is None else head.check(model)
        needs_gate = act is not None or (rule is not None and rule.needs_gate)
        self._gated = needs_gate or (record and model.gate is not None)

        def kept(needed: bool, *shape: int, of: torch.dtype = dtype) -> Tensor | None:
            return torch.zeros(entries, *shape, dtype=of, device=device) if needed else None

        self._survival = kept(self._gated, of=torch.float32)
        # weights of states are made of it, so it is as exact as they are
        self._halting = kept(act is not None, of=torch.promote_types(dtype, torch.float32))
        self._mean = kept(act is not None, width)
        self._older = kept(rule is not None and rule.needs_second_previous, width)
        self._output = kept(rule is not None and rule.needs_previous_output, model.config.vocab_size)
        trace = (entries, n_loops) if record else (0, 0)
        self.lam = torch.full(trace, torch.nan, device=device)
        self.criterion = torch.full(trace, torch.nan, device=device)
        self.met = torch.zeros(trace, dtype=torch.bool, device=device)
        self.gated = record and self._gated
        self.decides = record and rule is not None and not rule.planned

    def start(self, entries: Tensor) -> None:
        """New tokens begin in these entries, int64 `[n]`."""
        for kept, value in (
            (self._survival, 0.0), (self._halting, 0.0), (self._mean, 0.0),
            (self.lam, torch.nan), (self.criterion, torch.nan), (self.met, False),
        ):  # fmt: skip
            if kept is not None and kept.numel():
                kept.index_fill_(0, entries, value)

    def open(self, depth: NDArray[np.int64], is_prompt: bool = False) -> NDArray[np.bool_] | None:
        """Rows at these loops, `[n]`, whose output the rule needs; None: it never needs one.

        Those that may leave for its answer, not those below their least depth nor those that leave in any case, and
        those whose next answer compares with this output. Without an answer a row's criterion stays NaN.
        """
        if self.rule is None or not self.rule.needs_output:
            return None
        leaves, least = depth + self.horizon, self.rule.least_depth(is_prompt)
        judged = (leaves >= least) & (leaves < self.n_loops)
        if self.rule.needs_previous_output:
            judged |= (leaves + 1 >= least) & (leaves + 1 < self.n_loops)
        return judged

    def look(
        self,
        read: Tensor,
        write: Tensor,
        depth: Tensor,
        before: Tensor,
        state: Tensor,
        output: Callable[[Tensor], Tensor],
        uniform: Tensor | None = None,
        given: Tensor | None = None,
        is_prompt: bool = False,
        asked: Tensor | None = None,
    ) -> tuple[LoopSignal, Tensor]:
        """After a loop: the signal of each row and whether the rule marks it, bool `[n]`.

        Args:
            read, write: int64 `[n]`, entries to read and to write.
            depth: int64 `[n]`, the loop just run.
            before, state: `[n, d]`, the states before and after it.
            output: states `[k, d]` → logits `[k, V]`, of the rows in `asked`; called only for rules that need it.
            uniform, given, is_prompt: as in `LoopSignal`.
            asked: int64 `[k]`, rising: the rows whose output is made, as `open` says; the others are not marked. None:
                all, and the rule answers for all.
        """
        rule, model = self.rule, self.model
        logit = survival = halting = predicted = logits = older = earlier = None
        if self._gated or self._head is not None:
            normed = model.normed(state)
            if self._gated:
                logit = cast(torch.nn.Linear, model.gate)(normed).squeeze(-1)
            if self._head is not None:
                predicted = self._head(normed)
        if logit is not None:
            wide = logit.float()
            assert self._survival is not None
            survival = self._survival[read] + F.logsigmoid(-wide)
            self._survival[write] = survival
            if self._halting is not None:
                halting = self._halting[read] + logit.to(self._halting.dtype).sigmoid()
                self._halting[write] = halting
            if self.record:
                self.lam[write, depth - 1] = wide.sigmoid()
        if self._older is not None:
            older = self._older[read]
            self._older[write] = before
        if rule is not None and rule.needs_output:
            if asked is None:
                logits = output(state)
            else:
                logits = state.new_zeros(len(state), model.config.vocab_size)
                if len(asked):
                    logits[asked] = output(state[asked])
            if self._output is not None:
                earlier = self._output[read]
                self._output[write] = logits
        signal = LoopSignal(
            depth, self.n_loops, state, before, logit, survival, older, given, uniform, is_prompt,
            logits, earlier, predicted, halting,
        )  # fmt: skip
        if rule is None or (logits is not None and asked is not None and not len(asked)):
            return signal, torch.zeros_like(depth, dtype=torch.bool)
        met, criterion = rule.met(signal), rule.criterion(signal).float() if self.decides else None
        if logits is not None and asked is not None:
            judged = torch.zeros_like(met).index_fill_(0, asked, True)
            judged &= depth + self.horizon >= rule.least_depth(is_prompt)  # others have theirs for the next loop
            met = met & judged
            criterion = None if criterion is None else criterion.masked_fill(~judged, torch.nan)
        if criterion is not None:
            self.criterion[write, depth - 1] = criterion
            self.met[write, depth - 1] = met
        return signal, met & rule.past_least(signal)

    def weigh(self, read: Tensor, write: Tensor, signal: LoopSignal, leaves: Tensor) -> Tensor:
        """The state each row goes on or leaves with: under ACT the weighted mean for rows that leave, bool `[n]`."""
        if self.act is None or self._mean is None:
            return signal.state
        weight = self.act.weight(signal, leaves).to(signal.state.dtype).unsqueeze(-1)
        mean = self._mean[read] + weight * signal.state
        self._mean[write] = mean
        return torch.where(leaves.unsqueeze(-1), mean, signal.state)
