"""Serving the slow way: one request, one token, one layer at a time, in float64, from the weights alone.

Every layout and every rule, in so many words: keys and values lie in a dict under (stage, layer, token, page), and
`_page` says which page of token j a query at loop d reads. Only exit rules are taken from the package, and each is
asked about one token with everything it could need. `prefill` runs a span loop by loop, all of its tokens before the
next loop, which is what a prefill is; for layouts that overwrite pages it is not the same as token by token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthprobe.halting import ACT, ExitRule, Lookahead, LoopSignal, Purpose, uniforms
from depthprobe.models import LoopedForCausalLM

END = 0  # the page of a final state projected anew; loops count from 1


@dataclass
class Token:
    """One token on its way. `states[d - 1]` and `gates[d - 1]` belong to loop d; `final` is what it leaves with."""

    index: int
    entry: Tensor
    states: list[Tensor] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    mean: Tensor | None = None
    due: bool = False
    final: Tensor | None = None


class SlowRequest:
    """A request with its pages.

    Args:
        layout: name of the KV layout.
        rule, prompt_rule: for decoded tokens and for prefill; None: U loops.
        seed: for rules that draw.

    Attributes:
        exits: exit depth of each token so far.
    """

    def __init__(
        self,
        model: LoopedForCausalLM,
        ids: list[int],
        layout: str = "ragged",
        rule: ExitRule | None = None,
        prompt_rule: ExitRule | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.c, self.ids, self.layout = model, model.config, ids, layout
        self.rule, self.prompt_rule, self.seed = rule, prompt_rule, seed
        self.w = {name: p.detach().double() for name, p in model.state_dict().items()}
        self.w.setdefault("lm_head.weight", self.w["embed_tokens.weight"])
        self.n_loops = self.c.n_loops
        self.kv: dict[tuple[str, int, int, int], tuple[Tensor, Tensor]] = {}
        self.exits: dict[int, int] = {}

    # -- stages

    def prefill(self, start: int, stop: int, exits: list[int] | None = None) -> list[int]:
        """Positions start…stop − 1, with known exits, by `prompt_rule`, or in full."""
        xs = [self._embed(i) for i in range(start, stop)]
        for layer in range(self.c.n_prelude):
            xs = [self._block("prelude", layer, 1, x, i) for i, x in zip(range(start, stop), xs, strict=True)]
        tokens = [Token(i, x) for i, x in zip(range(start, stop), xs, strict=True)]
        for loop in range(1, self.n_loops + 1):
            active = [t for t in tokens if t.final is None]
            xs = [self._inject(t) for t in active]
            for layer in range(self.c.n_core):
                xs = [self._block("core", layer, loop, x, t.index) for t, x in zip(active, xs, strict=True)]
            for t, x in zip(active, xs, strict=True):
                known = None if exits is None else exits[t.index - start]
                if known is None and self.prompt_rule is None:
                    known = self.n_loops
                self._after_loop(t, x, loop, self.prompt_rule, known, prompt=True)
        xs = [t.final for t in tokens if t.final is not None]
        for layer in range(self.c.n_coda):
            xs = [self._block("coda", layer, 1, x, t.index) for t, x in zip(tokens, xs, strict=True)]
        return [self.exits[t.index] for t in tokens]

    def decode(self, i: int, exit_depth: int | None = None) -> Tensor:
        """Logits `[V]` behind token i, which leaves at a known depth, or by `rule`."""
        x = self._embed(i)
        for layer in range(self.c.n_prelude):
            x = self._block("prelude", layer, 1, x, i)
        token = Token(i, x)
        known = self.n_loops if exit_depth is None and self.rule is None else exit_depth
        for loop in range(1, self.n_loops + 1):
            x = self._inject(token)
            for layer in range(self.c.n_core):
                x = self._block("core", layer, loop, x, i)
            self._after_loop(token, x, loop, self.rule, known, prompt=False)
            if token.final is not None:
                return self._output(token.final, i)
        raise AssertionError("a token leaves after loop U")

    # -- leaving

    def _after_loop(
        self, t: Token, x: Tensor, loop: int, rule: ExitRule | None, known: int | None, prompt: bool
    ) -> None:
        state = self._rms(x, "norm") if self.c.norm_per_loop else x
        t.states.append(state)
        if self.c.exit_gate:
            t.gates.append(float(self.w["gate.weight"][0] @ self._normed(state) + self.w["gate.bias"][0]))
        if known is not None:
            leaves = loop >= known
        elif loop == self.n_loops:
            leaves = True
        else:
            assert rule is not None
            marked = bool(rule(self._signal(t, loop, rule, prompt)))
            leaves, t.due = (t.due, marked) if rule.horizon else (marked, False)
        if isinstance(self.rule, ACT):
            scores = [1.0 / (1.0 + math.exp(-g)) for g in t.gates]
            left = max(0.0, 1.0 - sum(scores[:-1]))
            weight = left if leaves else min(scores[-1], left)
            t.mean = weight * state + (0.0 if t.mean is None else t.mean)
        if leaves:
            t.final = state if t.mean is None else t.mean
            self._leave(t, loop)

    def _leave(self, t: Token, e: int) -> None:
        self.exits[t.index] = e
        assert t.final is not None
        for layer in range(self.c.n_core):
            if self.layout == "last-exited":
                for deeper in range(e + 1, self.n_loops + 1):
                    self.kv["core", layer, t.index, deeper] = self.kv["core", layer, t.index, e]
            if self.layout == "state-copied":
                _, k, v = self._qkv(f"core.{layer}.", t.final, t.index)
                self.kv["core", layer, t.index, END] = k, v

    def _page(self, j: int, loop: int) -> int:
        """Which page of token j is written (while it loops) or read at this loop."""
        e = self.exits.get(j, self.n_loops)  # one that has not left has them all
        if self.layout == "shared":
            return 1
        if self.layout == "first-then-shared":
            return min(loop, e, 2)
        if self.layout == "ragged":
            return min(loop, e)
        if self.layout == "state-copied":
            return loop if loop <= e else END
        return loop  # depth-indexed, last-exited

    def _signal(self, t: Token, loop: int, rule: ExitRule, prompt: bool) -> LoopSignal:
        def one(x: Tensor | float) -> Tensor:
            return torch.as_tensor(x, dtype=torch.float64)[None]

        logit = survival = halting = predicted = None
        if t.gates:
            scores = [1.0 / (1.0 + math.exp(-g)) for g in t.gates]
            logit = one(t.gates[-1])
            survival = one(sum(math.log1p(-s) for s in scores)).float()
            halting = one(sum(scores))
        if isinstance(rule, Lookahead) and rule.head is not None:
            predicted = rule.head(self._normed(t.states[-1]))[None]
        if rule.needs_output:
            t.outputs.append(self._output(t.states[-1], t.index))
        return LoopSignal(
            depth=loop,
            max_depth=self.n_loops,
            state=t.states[-1][None],
            previous=t.states[-2][None] if loop > 1 else None,
            gate_logit=logit,
            log_survival=survival,
            second_previous=t.states[-3][None] if loop > 2 else None,
            uniform=uniforms(torch.tensor([self.seed]), torch.tensor([t.index]), Purpose.EXIT),
            is_prompt=prompt,
            output_logits=t.outputs[-1][None] if t.outputs else None,
            previous_output_logits=t.outputs[-2][None] if len(t.outputs) > 1 else None,
            next_gate_logit=predicted,
            halting_sum=halting,
        )

    # -- the model

    def _output(self, state: Tensor, i: int) -> Tensor:
        x = state
        for layer in range(self.c.n_coda):
            x = self._block("coda", layer, 1, x, i)
        if self.c.n_coda or not self.c.norm_per_loop:
            x = self._rms(x, "norm")
        return self.w["lm_head.weight"] @ x

    def _normed(self, state: Tensor) -> Tensor:
        return state if self.c.norm_per_loop else self._rms(state, "norm")

    def _embed(self, i: int) -> Tensor:
        table = self.w["embed_tokens.weight"]
        x = table[self.ids[i]]
        if self.c.n_previous_tokens:
            before = [table[self.ids[i - b]] if i >= b else torch.zeros_like(x)
                      for b in range(1, self.c.n_previous_tokens + 1)]  # fmt: skip
            x = x + self.w["mix.weight"] @ torch.cat(before)
        return x * self.c.embedding_multiplier

    def _inject(self, t: Token) -> Tensor:
        state = t.states[-1] if t.states else None
        if self.c.input_injection == "concat":
            return self.w["adapter.weight"] @ torch.cat([t.entry if state is None else state, t.entry])
        if state is None:
            return t.entry
        return state + t.entry if self.c.input_injection == "add" else state

    def _qkv(self, name: str, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = self.c.num_attention_heads, self.c.kv_heads
        qkv = self.w[name + "qkv.weight"] @ self._rms(x, name + "attention_norm")
        if self.c.attention_bias:
            qkv = qkv + self.w[name + "qkv.bias"]
        rows = qkv.view(heads + 2 * groups, self.c.head_size)
        turned = self._turn(rows[: heads + groups], i)
        return turned[:heads], turned[heads:], rows[heads + groups :]

    def _block(self, stage: str, layer: int, loop: int, x: Tensor, i: int) -> Tensor:
        name, each = f"{stage}.{layer}.", self.c.num_attention_heads // self.c.kv_heads

        def page(j: int) -> int:
            return self._page(j, loop) if stage == "core" else 1

        q, k, v = self._qkv(name, x, i)
        self.kv[stage, layer, i, page(i)] = k, v
        read = [self.kv[stage, layer, j, page(j)] for j in range(i + 1)]
        keys, values = (torch.stack(side) for side in zip(*read, strict=True))  # [i + 1, G, h]
        out = []
        for head in range(self.c.num_attention_heads):
            scores = keys[:, head // each] @ q[head] / math.sqrt(self.c.head_size)
            out.append(torch.softmax(scores, 0) @ values[:, head // each])
        x = x + self._after(self.w[name + "out.weight"] @ torch.cat(out), name + "attention_out_norm")
        y = self._rms(x, name + "mlp_norm")
        gate = self.w[name + "mlp_gate.weight"] @ y
        branch = self.w[name + "mlp_down.weight"] @ (
            gate * torch.sigmoid(gate) * (self.w[name + "mlp_up.weight"] @ y)
        )
        return x + self._after(branch, name + "mlp_out_norm")

    def _after(self, branch: Tensor, name: str) -> Tensor:
        return self._rms(branch, name) if self.c.norm == "sandwich" else branch

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.c.rms_norm_eps) * self.w[name + ".weight"]

    def _turn(self, rows: Tensor, i: int) -> Tensor:
        half = round(self.c.head_size * self.c.partial_rotary_factor) // 2
        rows = rows.clone()
        for p in range(half):
            angle = i * self.c.rope_theta ** (-p / half)
            a, b = rows[:, p].clone(), rows[:, p + half].clone()
            rows[:, p] = a * math.cos(angle) - b * math.sin(angle)
            rows[:, p + half] = b * math.cos(angle) + a * math.sin(angle)
        return rows
