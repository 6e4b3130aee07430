"""A training run of a few steps: the same weights twice, and no process left behind, whatever ends it."""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing import active_children

import pytest
import torch

from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM
from depthprobe.training import family_demo
from depthprobe.training.family_demo import Pools, train
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.packing import Pool
from depthprobe.training.pools import make_pool
from depthprobe.training.recipes import KINSHIP, RECIPES, Recipe, demo_config
from depthprobe.training.starts import start_associative

FEW = {"steps": 2, "rows": 2, "questions": 2, "stories": 2, "longest": 2, "climb": 0.5, "gate_batches": 1}
TINY = {task: replace(recipe, **FEW) for task, recipe in RECIPES.items()}


class PoolsHere:
    """As `Pools`, without a process: so that the two runs below differ in when a pool is there."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed = recipe, seed

    def __getitem__(self, longest: int) -> Pool:
        return make_pool(self.recipe.longest if self.recipe.one_length else longest, self.recipe, self.seed)

    def ready(self, longest: int) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize("task", RECIPES)
def test_a_seed_gives_the_same_weights_twice(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    recipe = TINY[task]
    first, words = train(recipe, 3, say=lines.append)
    monkeypatch.setattr(family_demo, "Pools", PoolsHere)
    second, _ = train(recipe, 3, say=lambda line: None)
    torch.manual_seed(3)
    start = LoopedForCausalLM(demo_config(recipe, words))
    start_associative(start, words, recipe.copy, recipe.look_back)
    for (name, a), b, began in zip(first.named_parameters(), second.parameters(), start.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, began), f"{name} was not trained"
        assert bool(a.isfinite().all()), name
    assert not first.training
    told = [line for line in lines if line != "making 2 stories"]  # where it has to wait for them
    assert [line.split()[0] for line in told] == ["step", "gate:"] and told[0].startswith("step 2/2")
    assert active_children() == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_what_ends_the_training_ends_the_other_process(
    monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def climb(*_: object) -> None:
        assert len(active_children()) == 1
        raise stop

    monkeypatch.setattr(family_demo, "_climb", climb)
    began = time.monotonic()
    with pytest.raises(stop):
        train(KINSHIP, 0)  # whose pools take minutes
    assert active_children() == []
    assert time.monotonic() - began < 10


def test_a_pools_process_that_dies_is_told_in_a_line() -> None:
    pools = Pools(TINY["kinship"], 0)
    try:
        for child in active_children():
            child.kill()
        with pytest.raises(UserError, match="the process that makes the stories has ended"):
            pools[1]
    finally:
        pools.close()
    assert active_children() == []


@pytest.mark.parametrize("task", RECIPES)
def test_tokenizer_and_configuration_agree(task: str) -> None:
    words = family_tokenizer()
    config = demo_config(RECIPES[task], words)
    assert config.vocab_size == len(words) and config.pad_token_id == words.pad_token_id
    assert config.eos_token_id == words.eos_token_id
