"""A looped model the slow way: one token, one loop, one layer at a time, in float64, from the weights alone.

It shares no code with the package: every read of a key says in so many words at which depth it happens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthprobe.models import LoopedForCausalLM


@dataclass
class Token:
    """What came of one token; loops are counted from 1, `states[d - 1]` belongs to loop d."""

    exit: int
    logits: Tensor
    states: list[Tensor] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)


class Reference:
    """Runs one unpadded sequence token by token; `exits` are depths, or the quantile of a Q-exit."""

    def __init__(self, model: LoopedForCausalLM, n_loops: int | None = None) -> None:
        self.c = model.config
        self.w = {name: p.detach().double() for name, p in model.state_dict().items()}
        self.w.setdefault("lm_head.weight", self.w["embed_tokens.weight"])
        self.n_loops = n_loops or self.c.n_loops
        #: (stage, loop, layer) -> token -> (key, value); in the core only loops up to the token's exit stay
        self.kv: dict[tuple[str, int, int], dict[int, tuple[Tensor, Tensor]]] = {}
        self.exits: list[int] = []

    def run(self, ids: list[int], exits: list[int] | float | None) -> list[Token]:
        return [self._token(ids, i, exits) for i in range(len(ids))]

    def _token(self, ids: list[int], i: int, exits: list[int] | float | None) -> Token:
        x = self._embed(ids, i)
        for layer in range(self.c.n_prelude):
            x = self._block("prelude", 1, layer, x, i)
        entry, state = x, None
        states: list[Tensor] = []
        gates: list[float] = []
        survival, leave = 1.0, None
        for loop in range(1, self.n_loops + 1):
            state = self._inject(state, entry)
            for layer in range(self.c.n_core):
                state = self._block("core", loop, layer, state, i)
            if self.c.norm_per_loop:
                state = self._rms(state, "norm")
            states.append(state)
            if self.c.exit_gate:
                normed = state if self.c.norm_per_loop else self._rms(state, "norm")
                gates.append(float(self.w["gate.weight"][0] @ normed + self.w["gate.bias"][0]))
                survival *= 1.0 - 1.0 / (1.0 + math.exp(-gates[-1]))
            if isinstance(exits, float) and leave is None and 1.0 - survival >= exits:
                leave = loop
        if isinstance(exits, list):
            leave = exits[i]
        leave = self.n_loops if leave is None else leave
        self.exits.append(leave)
        for (stage, loop, _), tokens in self.kv.items():
            if stage == "core" and loop > leave:
                del tokens[i]  # what a token would have computed later reaches nobody
        x = states[leave - 1]
        for layer in range(self.c.n_coda):
            x = self._block("coda", 1, layer, x, i)
        if self.c.n_coda or not self.c.norm_per_loop:
            x = self._rms(x, "norm")
        return Token(leave, self.w["lm_head.weight"] @ x, states, gates)

    def _embed(self, ids: list[int], i: int) -> Tensor:
        table = self.w["embed_tokens.weight"]
        x = table[ids[i]]
        if self.c.n_previous_tokens:
            before = [table[ids[i - b]] if i >= b else torch.zeros_like(x)
                      for b in range(1, self.c.n_previous_tokens + 1)]  # fmt: skip
            x = x + self.w["mix.weight"] @ torch.cat(before)
        return x * self.c.embedding_multiplier

    def _inject(self, state: Tensor | None, entry: Tensor) -> Tensor:
        if self.c.input_injection == "concat":
            return self.w["adapter.weight"] @ torch.cat([entry if state is None else state, entry])
        if state is None:
            return entry
        return state + entry if self.c.input_injection == "add" else state

    def _block(self, stage: str, loop: int, layer: int, x: Tensor, i: int) -> Tensor:
        name, c = f"{stage}.{layer}.", self.c
        h, heads, groups = c.head_size, c.num_attention_heads, c.kv_heads
        qkv = self.w[name + "qkv.weight"] @ self._rms(x, name + "attention_norm")
        if c.attention_bias:
            qkv = qkv + self.w[name + "qkv.bias"]
        rows = qkv.view(heads + 2 * groups, h)
        q = torch.stack([self._turn(r, i) for r in rows[:heads]])
        k = torch.stack([self._turn(r, i) for r in rows[heads : heads + groups]])
        self.kv.setdefault((stage, loop, layer), {})[i] = (k, rows[heads + groups :])
        out = []
        for head in range(heads):
            group = head // (heads // groups)
            read = []
            for j in range(i + 1):
                depth = loop
                if stage == "core" and j < i:
                    depth = min(loop, self.exits[j])
                read.append(self.kv[stage, depth, layer][j])
            scores = torch.stack([q[head] @ key[group] / math.sqrt(h) for key, _ in read])
            weights = torch.softmax(scores, 0)
            out.append(sum(w * value[group] for w, (_, value) in zip(weights, read, strict=True)))
        branch = self.w[name + "out.weight"] @ torch.cat(out)
        x = x + self._after(branch, name + "attention_out_norm")
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

    def _turn(self, row: Tensor, i: int) -> Tensor:
        half = round(self.c.head_size * self.c.partial_rotary_factor) // 2
        row = row.clone()
        for p in range(half):
            angle = i * self.c.rope_theta ** (-p / half)
            a, b = row[p].item(), row[p + half].item()
            row[p] = a * math.cos(angle) - b * math.sin(angle)
            row[p + half] = b * math.cos(angle) + a * math.sin(angle)
        return row
