"""Outputs that an exit rule asks for: made for rows that can still leave, and for nobody else."""

from __future__ import annotations

import pytest

from depthprobe.models import LoopedConfig
from depthprobe.runtime import Engine, Sampling
from depthprobe.runtime.record import read_lines
from tests.runtime.helpers import VOCABULARY, random_model

U = 4


@pytest.fixture(scope="module", params=[0, 1], ids=["head", "coda"])
def model(request):
    config = LoopedConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=1, n_loops=U,
        n_coda=request.param, initializer_range=0.25, max_position_embeddings=64,
    )  # fmt: skip
    return random_model(config, 0)


@pytest.mark.parametrize(
    ("exit", "loops"),
    [("confidence:1.0", [1, 2, 3]), ("confidence:1.0,min=3", [3]), ("confidence:1.0,min=4", []),
     ("entropy:1e-9,min=2", [2, 3]), ("kl:1e-300", [1, 2, 3]), ("kl:1e-300,min=3", [2, 3]),
     ("entropy-change:1e-300,min=4", []), ("lookahead:confidence:1.0", [1, 2]),
     ("lookahead:confidence:1.0,min=3", [2]), ("lookahead:kl:1e-300", [1, 2]), ("q:0.5", []), ("l2:0.1", [])],
)  # fmt: skip
def test_only_rows_that_can_still_leave_are_asked(model, tmp_path, exit, loops) -> None:
    """None of these rules is ever met, so that every token passes all loops."""
    with Engine(model, exit=exit, width=3, record=tmp_path / "t") as engine:
        engine.generate([[1, 2], [3], [4, 5, 6]], Sampling(max_new_tokens=5, ignore_eos=True))
        assert engine.runner.work.rule_outputs == 15 * len(loops)
    if exit[0] in "ql" and "kl" not in exit and "confidence" not in exit:
        return
    compared = loops[1:] if "kl" in exit and loops else loops  # the first one has nothing to be compared with
    for row in read_lines(tmp_path / "t", "tokens"):
        assert [d for d, value in enumerate(row["criterion"], 1) if value is not None] == compared
        assert row["exit"] == U and row["reason"] == "cap"


@pytest.mark.parametrize("exit", ["confidence:0.15", "kl:0.05", "kl:0.05,min=3", "entropy:2.5", "lookahead:kl:0.1"])
def test_frozen_rows_are_not_asked_and_nothing_changes(model, exit) -> None:
    work, done = {}, {}
    for policy in ("refill", "no-refill", "lockstep"):
        engine = Engine(model, exit=exit, policy=policy, width=4)
        done[policy] = engine.generate([[i, i + 1] for i in range(8)], Sampling(max_new_tokens=4, ignore_eos=True))
        work[policy] = engine.runner.work
    assert work["lockstep"].core_frozen > 0
    assert len({one.rule_outputs for one in work.values()}) == 1
    for policy in ("no-refill", "lockstep"):
        assert [one.exit_depths for one in done[policy]] == [one.exit_depths for one in done["refill"]]


def test_prompt_tokens_are_asked_from_their_own_least_depth() -> None:
    config = LoopedConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=1, n_loops=U,
        initializer_range=0.25, max_position_embeddings=64,
    )  # fmt: skip
    engine = Engine(random_model(config, 0), exit="confidence:1.0,min=4,min_prompt=3", prefill="ragged", width=2)
    engine.generate([[1, 2, 3, 4, 5]], Sampling(max_new_tokens=3, ignore_eos=True))
    assert engine.runner.work.rule_outputs == 4  # at loop 3, of the prompt but its last token
