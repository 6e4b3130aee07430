"""What a step is fed and what its loss is, by hand; and that the gate's training touches the gate alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.models import LoopedForCausalLM
from depthprobe.training import family_demo
from depthprobe.training.family_demo import loop_states
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.ladder import Ladder
from depthprobe.training.packing import NONE, Batch
from depthprobe.training.pools import make_pool
from depthprobe.training.recipes import RECIPES, Recipe, demo_config

WORDS = family_tokenizer()
FEW = {"rows": 2, "questions": 3, "stories": 3, "longest": 3, "loops": 4, "gate_batches": 1}


def small(task: str, **changes: object) -> tuple[Recipe, LoopedForCausalLM]:
    recipe = replace(RECIPES[task], **FEW, **changes)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    return recipe, LoopedForCausalLM(demo_config(recipe, WORDS))


class Here:
    """Pools that are made when they are asked for."""

    def __init__(self, recipe: Recipe) -> None:
        self.made = {k: make_pool(recipe.longest if recipe.one_length else k, recipe, 0) for k in (1, 2, 3)}

    def __getitem__(self, longest: int) -> object:
        return self.made[longest]

    def ready(self, longest: int) -> bool:
        return True


@pytest.mark.parametrize("every", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("task", RECIPES)
def test_the_loss_is_the_answers_and_a_little_of_the_text(task: str, every: float) -> None:
    recipe, model = small(task)
    batch = make_pool(3, recipe, 0).draw(np.random.default_rng(0), 2, 3)
    loss, right, hops = family_demo._loss(model, batch, 3, 0.0, every, 0.05)
    at, known = batch.answers != NONE, batch.nexts != NONE
    logits = [model.lm_head(state) for state in loop_states(model, batch, 3)]
    answers = [F.cross_entropy(each[at], batch.answers[at]) for each in logits]
    text = F.cross_entropy(logits[-1][known], batch.nexts[known])
    expected = (1 - every) * answers[-1] + every * sum(answers) / 3 + 0.05 * text
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert right.equal(logits[-1][at].argmax(-1) == batch.answers[at])
    whole = batch.nexts[at] == NONE  # a question's last token; in follow it only copies
    assert hops.equal(batch.hops[at] * ~whole if task == "follow" else batch.hops[at])
    assert bool(hops.any())


@pytest.mark.parametrize("task", RECIPES)
def test_while_climbing_few_loops_and_for_kinship_the_answers_alone(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model = small(task, steps=6, climb=0.5, first_rung=1)
    seen: list[tuple[int, int, float]] = []

    def watch(model: LoopedForCausalLM, batch: Batch, n_loops: int, forget: float = 0.0) -> list[Tensor]:
        seen.append(((batch.ids.shape[1] - batch.story_length) // batch.n_questions, n_loops, forget))
        return loop_states(model, batch, n_loops, forget)

    monkeypatch.setattr(family_demo, "loop_states", watch)
    pools = Here(recipe)
    family_demo._climb(model, Ladder(recipe), pools, recipe, np.random.default_rng(0), lambda line: None)  # type: ignore[arg-type]
    asked = pools.made[1].ids.shape[-1]
    assert seen[:3] == [(1 if task == "kinship" else asked, 3, 0.0)] * 3  # k = 1: one hop is not learned yet
    assert seen[3:] == [(asked, 4, 0.0)] * 3


def test_forgetting_begins_with_one_hop_and_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, model = small("follow", steps=4, climb=1.0)
    seen: list[float] = []
    monkeypatch.setattr(
        family_demo, "loop_states", lambda m, b, n, forget=0.0: seen.append(forget) or loop_states(m, b, n, forget)
    )
    ladder = Ladder(recipe)
    ladder.one_hop = True
    family_demo._climb(model, ladder, Here(recipe), recipe, np.random.default_rng(0), lambda line: None)  # type: ignore[arg-type]
    assert seen == pytest.approx([0.5, 0.5 * (1 - 1.3 / 4), 0.5 * (1 - 1.3 / 2), 0.5 * (1 - 1.3 * 3 / 4)])


def test_the_gate_is_trained_alone() -> None:
    recipe, model = small("kinship")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    family_demo._train_gate(model, Here(recipe), recipe, np.random.default_rng(0), lambda line: None)  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != name.startswith("gate."), name
        assert (p.grad is None) != name.startswith("gate."), name


def test_a_recipe_begins_on_a_rung_that_it_has() -> None:
    with pytest.raises(ValueError, match="first_rung"):
        replace(RECIPES["kinship"], longest=1)
