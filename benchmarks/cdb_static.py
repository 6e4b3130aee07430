"""The plain baseline: a static batch at full depth, keys contiguous, fused attention, the same packed products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cdb_load import Load
from torch import Tensor

from depthprobe.models.attend import Attend, Slots, Stage
from depthprobe.models.core import Rotary
from depthprobe.runtime.sampling import sample


class Contiguous(Attend):
    """Keys and values of every executed layer, `[B, G, T, h]` each; one query a row, all rows at one position."""

    def __init__(self, slots: Slots, count: int, shape: tuple[int, int, int, int]) -> None:
        self.slots, self.position, self._first = slots, 0, 0
        self.k = [torch.zeros(shape) for _ in range(count)]
        self.v = [torch.zeros(shape) for _ in range(count)]

    def enter(self, stage: Stage, loop: int = 1) -> None:
        self._first = self.slots.first(stage, loop)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, at = self.k[self._first + layer], self.v[self._first + layer], self.position
        keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
        rows, heads, _, width = q.shape
        groups = k.shape[1]
        # the query heads of a group stand as queries of one head: measured faster than enable_gqa
        queries = q.reshape(rows, groups, heads // groups, width)
        mixed = F.scaled_dot_product_attention(queries, keys[:, :, : at + 1], values[:, :, : at + 1])
        return mixed.reshape(rows, 1, heads * width)


class StaticBatches:
    """Requests in batches of `width`, one after the other; all prompts and answers are equally long, so no row waits.

    Args:
        width: rows of a batch; requests are a multiple of it, those beyond the load's being its first ones again.
    """

    def __init__(self, load: Load, width: int) -> None:
        self.load, self.width, config = load, width, load.model.config
        s = load.shape
        self.requests = -(-s.requests // width) * width
        self.slots = Slots(config.n_prelude, config.n_core, config.n_coda, s.loops)
        shape = (width, config.kv_heads, s.prompt + s.new - 1, config.head_size)
        self.attend = Contiguous(self.slots, config.num_hidden_layers, shape)
        self.kv_bytes = 8 * config.num_hidden_layers * self.attend.k[0].numel()
        self.out: list[list[int]] = []
        self._rows: list[int] = []
        self._last = torch.empty(0)

    def begin(self) -> bool:
        """The next batch, its prompts' keys in place; False where none is left."""
        s, config = self.load.shape, self.load.model.config
        first = len(self.out)
        if first == self.requests:
            return False
        self._rows = list(range(first, first + self.width))
        which = torch.tensor(self._rows) % s.requests % s.prompts
        groups, width = config.kv_heads, config.head_size
        stages: list[tuple[Stage, int, list[Tensor]]] = [
            ("prelude", 1, (self.load.outer_keys or [])[: config.n_prelude]),
            *(("core", loop, [t[:, loop - 1] for t in self.load.core_keys or []]) for loop in range(1, s.loops + 1)),
            ("coda", 1, (self.load.outer_keys or [])[config.n_prelude :]),
        ]
        for stage, loop, tables in stages:
            for layer, table in enumerate(tables):
                pair = table[which].view(len(which), s.prompt - 1, 2, groups, width).permute(2, 0, 3, 1, 4)
                place = self.slots.first(stage, loop) + layer
                self.attend.k[place][:, :, : s.prompt - 1], self.attend.v[place][:, :, : s.prompt - 1] = pair
        self.attend.position = s.prompt - 1
        self._last = torch.tensor([self.load.prompts[i][-1] for i in which.tolist()])
        self.out.extend([] for _ in self._rows)
        return True

    @torch.inference_mode()
    def step(self) -> int:
        """One token of each row; returns how many, 0 at the end of a batch."""
        s, model = self.load.shape, self.load.packed
        at = self.attend.position
        if at == s.prompt + s.new - 1 or not self._rows:
            return 0
        rotary = Rotary.of(torch.tensor([[at]]), model.config)
        x = model.embed(self._last[:, None])
        self.attend.enter("prelude")
        entry = model.prelude(x, rotary, self.attend)
        state: Tensor | None = None
        for loop in range(1, s.loops + 1):
            self.attend.enter("core", loop)
            state = model.loop_output(model.core_step(model.loop_input(state, entry), rotary, self.attend))
        assert state is not None
        if len(model.coda):
            self.attend.enter("coda")
            logits = model.lm_head(model.norm(model.coda(state, rotary, self.attend)))
        else:
            logits = model.readout(state)
        rows = len(self._rows)
        nothing = [0.0] * rows
        self._last = sample(logits[:, 0], nothing, nothing, [0] * rows, [0] * rows).tokens
        for row, token in zip(self._rows, self._last.tolist(), strict=True):
            self.out[row].append(token)
        self.attend.position += 1
        return rows
