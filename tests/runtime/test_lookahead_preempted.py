"""A request that decides a loop ahead leaves where it does with room, however often its pages are taken."""

from __future__ import annotations

import random

import pytest
import torch

from depthprobe.halting import Lookahead, LookaheadHead, QExit
from depthprobe.models import LoopedConfig
from depthprobe.runtime import Completion, Engine, Request, Sampling
from tests.runtime.helpers import VOCABULARY, random_model


@pytest.mark.parametrize("q", [0.5, 0.6, 0.7, 0.8])
def test_exits_do_not_depend_on_pages(q: float) -> None:
    preempted = 0
    for seed in range(8):
        draw = random.Random(seed)
        loops = draw.choice([4, 5, 6])
        config = LoopedConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_loops=loops,
            initializer_range=0.25,
        )  # fmt: skip
        model = random_model(config, seed)
        with torch.no_grad():
            model.gate.bias.fill_(-1.0)  # type: ignore[union-attr]
        rule = Lookahead(QExit(q), LookaheadHead.start(model))
        asked = [
            Request(tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5))), Sampling(draw.randint(2, 8)))
            for _ in range(8)
        ]

        def serve(pages: int, rule=rule, model=model, asked=asked) -> tuple[list[Completion], int]:
            engine = Engine(model, exit=rule, width=4, spare=3, coda_share=0.0, kv_pages=pages, max_len=12)
            return engine.generate(asked), engine.scheduler.counters["preemptions"]

        roomy, none = serve(100_000)
        tight, some = serve(loops * draw.randint(12, 16))
        assert none == 0
        preempted += some
        assert [one.exit_depths for one in tight] == [one.exit_depths for one in roomy]
        assert [one.tokens for one in tight] == [one.tokens for one in roomy]
    assert preempted > 10
