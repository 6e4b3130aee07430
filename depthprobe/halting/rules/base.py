"""What exit rules are made of: the signal that they look at, and the interface that they have.

A rule sees a `LoopSignal` after each loop and answers with a bool tensor, True where a token leaves. It keeps no state
of its own: what has to be carried from loop to loop (the log-survival of the gate, the state before) is in the signal,
so that the same object serves a forward over whole sequences, where all tokens are at one depth, and a batch whose
rows are at different depths. A rule says which fields it needs; those that it does not name may be None. Whoever asks
lets every token that is still there leave after the last loop, and ignores answers for those that left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting.distribution import check_min_depth


@dataclass(frozen=True, slots=True)
class LoopSignal:
    """What a rule may look at after a loop. `[...]` is the shape of the tokens, e.g. `[B, S]` or `[rows]`.

    Fields:
        depth: the loop just finished, 1…U: an int where all tokens share it, else int64 `[...]`.
        max_depth: U.
        state: float `[..., d]`, the loop state (normed where the model norms after every loop).
        previous: float `[..., d]`, the state before this loop; None at the first. Rows at their first loop may hold
            anything here. (`needs_previous`)
        gate_logit: float `[...]`, logit of λ at this depth. (`needs_gate`)
        log_survival: float32 `[...]`, log ∏_{j≤depth}(1 − λ_j). (`needs_gate`)
        second_previous: float `[..., d]`, the state two loops before; None up to the second. (`needs_second_previous`)
        given: integer `[...]`, the exit depth recorded for each token. (`needs_given`)
        uniform: float in (0, 1) `[...]`, one number for each *token*, the same at all of its loops:
            `uniforms(seed, position, Purpose.EXIT)`. (`needs_uniform`)
        is_prompt: bool `[...]`, or one bool for all: whether a token belongs to the prompt; None: none does.
        output_logits: float `[..., V]`, what the model would answer if the token left now, through its coda if it has
            one. (`needs_output`)
        previous_output_logits: float `[..., V]`, the same after the loop before; None at the first.
            (`needs_previous_output`)
        next_gate_logit: float `[...]`, the rule's `head` at the normed state: predicted logit of λ at depth + 1.
            (`needs_lookahead`)
        halting_sum: float32 `[...]`, Σ_{j≤depth} λ_j. (`needs_halting_sum`)
    """

    depth: int | Tensor
    max_depth: int
    state: Tensor
    previous: Tensor | None = None
    gate_logit: Tensor | None = None
    log_survival: Tensor | None = None
    second_previous: Tensor | None = None
    given: Tensor | None = None
    uniform: Tensor | None = None
    is_prompt: Tensor | bool | None = None
    output_logits: Tensor | None = None
    previous_output_logits: Tensor | None = None
    next_gate_logit: Tensor | None = None
    halting_sum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens."""
        return self.state.shape[:-1]

    def full(self, value: bool) -> Tensor:
        """bool `[...]`, all of one value."""
        return torch.full(self.shape, value, dtype=torch.bool, device=self.state.device)

    def at_least(self, depth: int) -> Tensor:
        """bool `[...]`: whether each token has run at least `depth` loops."""
        return self.depth >= depth if isinstance(self.depth, Tensor) else self.full(self.depth >= depth)

    def depths(self) -> Tensor:
        """int64 `[...]`, the depth of each token."""
        if isinstance(self.depth, Tensor):
            return self.depth
        return torch.full(self.shape, self.depth, dtype=torch.int64, device=self.state.device)


class ExitRule(ABC):
    """Base of the rules. A subclass says what it needs and defines `criterion` and `met`.

    Attributes:
        name: as `parse_rule` knows it.
        needs_…: the fields of the signal that must be there; see `LoopSignal`.
        horizon: 0: the tokens marked after loop d leave after loop d. 1: they leave after loop d + 1, which they run.
        sampled: whether the exits are drawn, so that there is no one depth to compare with.
        planned: whether the exit is known before the first loop.
        reprojects: whether keys of tokens that have left are made anew at every later loop (ACT).
        first_depth: the first depth at which what the rule compares exists.
        min_depth, min_depth_prompt: nobody leaves before this depth; the latter holds for tokens of the prompt (None:
            the former does).
    """

    name: str = ""
    needs_gate: bool = False
    needs_previous: bool = False
    needs_second_previous: bool = False
    needs_output: bool = False
    needs_previous_output: bool = False
    needs_uniform: bool = False
    needs_given: bool = False
    needs_lookahead: bool = False
    needs_halting_sum: bool = False
    horizon: int = 0
    sampled: bool = False
    planned: bool = False
    reprojects: bool = False
    first_depth: int = 1
    min_depth: int = 1
    min_depth_prompt: int | None = None

    @abstractmethod
    def criterion(self, signal: LoopSignal) -> Tensor:
        """float `[...]`: the number that the decision compares, for the record; infinite where there is none yet."""

    @abstractmethod
    def met(self, signal: LoopSignal) -> Tensor:
        """bool `[...]`: whether the criterion is met, least depths apart."""

    def __call__(self, signal: LoopSignal) -> Tensor:
        """bool `[...]`, True where a token leaves (after this loop, or after the next with `horizon` 1)."""
        return self.met(signal) & self.past_least(signal)

    def past_least(self, signal: LoopSignal) -> Tensor:
        """bool `[...]`: whether a token may leave at the signal's depth, by `min_depth` and `min_depth_prompt`."""
        decode = signal.at_least(self.min_depth)
        if self.min_depth_prompt is None or signal.is_prompt is None or signal.is_prompt is False:
            return decode
        prompt = signal.at_least(self.min_depth_prompt)
        return prompt if signal.is_prompt is True else torch.where(signal.is_prompt, prompt, decode)

    def least_depth(self, prompt: bool = False) -> int:
        """The smallest depth at which a token can leave."""
        chosen = self.min_depth_prompt if prompt and self.min_depth_prompt is not None else self.min_depth
        return max(chosen, self.first_depth)

    def check(self, n_loops: int) -> None:
        """Raise `UserError` if the rule cannot serve a model of `n_loops` loops."""
        check_min_depth(self.min_depth, n_loops)
        if self.min_depth_prompt is not None:
            check_min_depth(self.min_depth_prompt, n_loops, "min_depth_prompt")

    def _check_least(self) -> None:
        """For `__post_init__`: least depths of 1 or more, or `UserError`."""
        check_min_depth(self.min_depth)
        if self.min_depth_prompt is not None:
            check_min_depth(self.min_depth_prompt, where="min_depth_prompt")

    # -- as text

    def spec(self) -> str:
        """The rule as text that `parse_rule` reads, e.g. "q:0.5,min=2"."""
        value = self._value()
        text = f"{self.name}:{value}" if value else self.name
        if self.min_depth != 1:
            text += f",min={self.min_depth}"
        if self.min_depth_prompt is not None:
            text += f",min_prompt={self.min_depth_prompt}"
        return text

    def _value(self) -> str:
        """The part of `spec` behind the colon."""
        return ""


def check_threshold(name: str, value: float, low: float, high: float, *, low_too: bool = False) -> None:
    """Refuse a threshold outside (low, high], or [low, high] with `low_too`, or that is no number (`UserError`)."""
    inside = low <= value <= high if low_too else low < value <= high
    if not inside:  # also NaN
        span = f"{'[' if low_too else '('}{low:g}, {high:g}]" if high != float("inf") else f"above {low:g}"
        words = f"not in {span}" if high != float("inf") else f"not {span}"
        raise UserError(f"the threshold is {value}, {words}", where=f"exit rule {name}")
