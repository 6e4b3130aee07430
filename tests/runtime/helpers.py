"""Driving a runner by hand: requests in slots, rows of a tick chosen at random, all against one token at a time."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.runtime.layouts import layout
from depthprobe.runtime.pages import PagePool
from depthprobe.runtime.runner import Runner

VOCABULARY = 17


def configs(**fixed: object) -> st.SearchStrategy[LoopedConfig]:
    """Small models over every option of the architecture, 1–4 query heads to a key/value head."""
    shape = {
        "kv_and_group": st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4])),
        "head_dim": st.sampled_from([4, 8]),
        "n_prelude": st.integers(0, 2),
        "n_core": st.integers(1, 3),
        "n_coda": st.integers(0, 2),
        "n_loops": st.integers(1, 5),
        "partial_rotary_factor": st.sampled_from([0.0, 0.5, 1.0]),
        "n_previous_tokens": st.integers(0, 2),
        "norm": st.sampled_from(["pre", "sandwich"]),
        "norm_per_loop": st.booleans(),
        "input_injection": st.sampled_from(["none", "add", "concat"]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "embedding_multiplier": st.sampled_from([1.0, 3.0]),
    }
    shape |= {name: st.just(value) for name, value in fixed.items()}
    return st.fixed_dictionaries(shape).map(_config)


def _config(chosen: dict) -> LoopedConfig:
    groups, each = chosen.pop("kv_and_group")
    return LoopedConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, initializer_range=0.25,
        num_attention_heads=groups * each, num_key_value_heads=groups, **chosen,
    )  # fmt: skip


def random_model(config: LoopedConfig, seed: int, dtype: torch.dtype = torch.float64) -> LoopedForCausalLM:
    """Random norms and biases, and a gate that leans to staying, so that exits are spread."""
    torch.manual_seed(seed)
    model = LoopedForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("qkv.bias"):
                p.normal_()
        if model.gate is not None:
            model.gate.bias.fill_(-0.5)
    return model.to(dtype)


def make_pool(config: LoopedConfig, kv: str, slots: int, longest: int, seed: int) -> PagePool:
    """A pool in which everything fits, its pages handed out in a random order."""
    kind = layout(kv)
    outer = slots * longest if config.n_prelude + config.n_coda else 0
    pages = slots * longest * kind.reserve(config.n_loops)
    return PagePool(pages, outer, slots, longest, config.n_loops, kind, seed=seed)


class Drive:
    """Serves a few requests on a runner with rows of random company; every token is given, none is sampled.

    Args:
        sequences: ids of each request, of which the first `prompts[i]` are its prompt.
        exits: known exit depths of all tokens of each request; None: the runner's rules decide.
        chunk: most prompt tokens that are prefilled at once.
        poison: NaN in all pages before they are used.

    Attributes:
        logits: of each request, from the prompt's last token on, `[V]` each.
        exits: depths of all tokens, as executed.
    """

    def __init__(
        self,
        runner: Runner,
        sequences: list[list[int]],
        prompts: list[int],
        exits: list[list[int]] | None = None,
        *,
        dense: bool = True,
        chunk: int = 1000,
        seed: int = 0,
        poison: bool = True,
        freeze: bool = False,
        request_seeds: list[int] | None = None,
    ) -> None:
        self.runner, self.sequences, self.prompts, self.known = runner, sequences, prompts, exits
        self.dense, self.chunk, self.freeze = dense, chunk, freeze
        self.random = random.Random(seed)
        self.seeds = request_seeds or [0] * len(sequences)
        self.back = runner.config.n_previous_tokens
        n = len(sequences)
        self.slots = self.random.sample(range(runner.pool.core.shape[0]), n)
        self.logits: list[list[Tensor]] = [[] for _ in range(n)]
        self.exits: list[list[int]] = [[] for _ in range(n)]
        if poison:
            for tables, zero in ((runner.kv.core, runner.kv.core_zero), (runner.kv.outer, runner.kv.outer_zero)):
                for table in tables:
                    table[:zero] = torch.nan

    def run(self) -> None:
        self._prefill()
        at = [p - 1 for p in self.prompts]  # position of the row of each request
        depth = [0] * len(at)
        marked = [False] * len(at)
        going = set(range(len(at)))
        ready: list[int] = []
        for r in going:
            self._prelude([r], at)
        horizon = 0 if self.runner.rule is None else self.runner.rule.horizon
        while going:
            looping = [r for r in going if r not in ready]
            if looping and (not ready or self.random.random() < 0.7):
                rows = self.random.sample(looping, self.random.randint(1, len(looping)))
                # rows that wait for the coda may be computed along, as in lockstep
                cold = [r for r in ready if self.freeze and depth[r] < self.runner.n_loops]
                both = rows + cold
                asked = self.runner.recurrent(
                    [self.slots[r] for r in both], [at[r] for r in both], [depth[r] + 1 for r in both],
                    [False] * len(rows) + [True] * len(cold) if cold else None,
                ).tolist()  # fmt: skip
                left = []
                for r, says in zip(rows, asked, strict=False):
                    depth[r] += 1
                    says, marked[r] = (marked[r], says) if horizon else (says, False)
                    if self.known is not None:
                        says = depth[r] >= self.known[r][at[r]]
                    if says or depth[r] == self.runner.n_loops:
                        left.append(r)
                if left:
                    self.runner.leave(
                        [self.slots[r] for r in left], [at[r] for r in left], [depth[r] for r in left]
                    )
                    ready += left
                continue
            rows = self.random.sample(ready, self.random.randint(1, len(ready)))
            out = self.runner.coda([self.slots[r] for r in rows], [at[r] for r in rows])
            for r, logits in zip(rows, out, strict=True):
                ready.remove(r)
                self.logits[r].append(logits)
                self.exits[r].append(depth[r])
                at[r], depth[r], marked[r] = at[r] + 1, 0, False
                if at[r] == len(self.sequences[r]):
                    going.remove(r)
            if again := [r for r in rows if r in going]:
                self._prelude(again, at)

    def _prefill(self) -> None:
        spans = []
        for r, prompt in enumerate(self.prompts):
            cuts = [*range(0, prompt - 1, self.chunk), prompt - 1]
            spans.append([(r, a, b) for a, b in pairwise(cuts) if b > a])
        while any(spans):
            rows = [queue.pop(0) for queue in spans if queue and self.random.random() < 0.8]
            if not rows:
                continue
            known = None
            if self.known is not None and not self.dense:
                known = [self.known[r][a:b] for r, a, b in rows]
            depths = self.runner.prefill(
                [self.slots[r] for r, _, _ in rows], [(a, b) for _, a, b in rows],
                [self.sequences[r] for r, _, _ in rows], known, [self.seeds[r] for r, _, _ in rows],
            )  # fmt: skip
            for (r, _, _), e in zip(rows, depths, strict=True):
                self.exits[r] += e

    def _prelude(self, rows: list[int], at: list[int]) -> None:
        self.random.shuffle(rows)
        before = [[self.sequences[r][at[r] - b] if at[r] >= b else -1 for b in range(1, self.back + 1)] for r in rows]
        given = None if self.known is None else [self.known[r][at[r]] for r in rows]
        self.runner.prelude(
            [self.slots[r] for r in rows], [self.sequences[r][at[r]] for r in rows], before,
            [at[r] for r in rows], [self.seeds[r] for r in rows], given,
        )  # fmt: skip


def draw_requests(data: st.DataObject, longest: int = 9) -> tuple[list[list[int]], list[int]]:
    """Sequences of 1 to `longest` ids, and how many of each are its prompt."""
    sequences = data.draw(
        st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=longest), min_size=1, max_size=4)
    )
    prompts = [data.draw(st.integers(1, len(s))) for s in sequences]
    return sequences, prompts


def draw_exits(
    data: st.DataObject, sequences: list[list[int]], prompts: list[int], U: int, dense: bool
) -> list[list[int]]:
    """Exit depths of all tokens, U for those of a dense prefill."""
    return [
        [U if dense and i < p - 1 else data.draw(st.integers(1, U)) for i in range(len(s))]
        for s, p in zip(sequences, prompts, strict=True)
    ]

