"""The hop ladder: when a task goes on, and what it is asked."""

from __future__ import annotations

import numpy as np
import torch

from depthprobe.training.family_demo import Ladder, Recipe

BOTH = ("kinship", "follow")
RECIPE = Recipe(longest=3, pass_mark=0.9, patience=10**6)


def note(ladder: Ladder, task: str, k: int, share: float, steps: int = 1) -> None:
    """Steps of ten answers at k hops, of which this share is right."""
    for _ in range(steps):
        ladder.note(task, torch.arange(10) < round(10 * share), torch.full((10,), k))


def test_a_task_goes_on_when_its_running_share_passes_the_mark() -> None:
    ladder = Ladder(RECIPE, BOTH)
    note(ladder, "kinship", 1, 1.0, steps=44)  # 1 − 0.95⁴⁴ = 0.895
    assert ladder.rung == {"kinship": 1, "follow": 1} and abs(ladder.right["kinship", 1] - (1 - 0.95**44)) < 1e-6
    note(ladder, "kinship", 1, 1.0)
    assert ladder.rung == {"kinship": 2, "follow": 1} and ladder.since["kinship"] == 0


def test_only_the_present_rung_counts_and_the_last_one_stays() -> None:
    ladder = Ladder(RECIPE, BOTH)
    note(ladder, "follow", 2, 1.0, steps=60)
    assert ladder.rung["follow"] == 1
    note(ladder, "follow", 1, 1.0, steps=60)
    assert ladder.rung["follow"] == 3  # two hops had been learned by the way
    note(ladder, "follow", 3, 1.0, steps=99)
    assert ladder.rung["follow"] == 3


def test_hops_are_noted_apart() -> None:
    ladder = Ladder(RECIPE, BOTH)
    ladder.note(
        "follow", torch.tensor([True, False, True, True, True]), torch.tensor([1, 1, 2, 2, 0])
    )  # 0: not counted
    assert [round(ladder.right["follow", k], 6) for k in (1, 2, 3)] == [0.025, 0.05, 0.0]
    ladder.note("follow", torch.tensor([True]), torch.tensor([1]))
    assert str(ladder) == "kinship 0.00 0.00 0.00  follow 0.07 0.05 0.00"


def test_patience_helps_where_some_is_right() -> None:
    ladder = Ladder(Recipe(longest=3, pass_mark=0.9, patience=20, first_patience=30), BOTH)
    for task in BOTH:
        note(ladder, task, 1, 0.8, steps=20)  # 0.8 · (1 − 0.95²⁰) = 0.51
    assert ladder.rung == {"kinship": 1, "follow": 1}
    for task in BOTH:
        note(ladder, task, 1, 0.8, steps=11)
    assert ladder.rung == {"kinship": 2, "follow": 2}
    for task in BOTH:
        note(ladder, task, 2, 0.8, steps=99)
    assert ladder.rung == {"kinship": 3, "follow": 2}  # follow has to pass every other rung


def test_patience_waits_for_some_right_answers() -> None:
    ladder = Ladder(Recipe(longest=3, pass_mark=0.9, patience=20), BOTH)
    note(ladder, "kinship", 1, 0.3, steps=99)
    assert ladder.rung["kinship"] == 1


def test_forgetting_begins_with_follow_and_once_one_hop_is_learned() -> None:
    ladder = Ladder(RECIPE, BOTH)
    for task in BOTH:
        note(ladder, task, 1, 1.0, steps=52)  # 1 − 0.95⁵² = 0.931
    note(ladder, "follow", 1, 0.0, steps=9)
    assert ladder.forgetting == {"kinship": False, "follow": True}  # and stays


def test_draws_are_mostly_of_the_present_rung_and_never_above() -> None:
    ladder, rng = Ladder(RECIPE, BOTH), np.random.default_rng(0)
    assert {ladder.draw("follow", rng) for _ in range(50)} == {1}
    ladder.rung["follow"] = 3
    drawn = np.bincount([ladder.draw("follow", rng) for _ in range(4000)], minlength=5)
    assert drawn[0] == drawn[4] == 0
    np.testing.assert_allclose(drawn[1:4] / 4000, [0.1, 0.1, 0.8], atol=0.03)


def test_kinship_joins_when_follow_has_come_to_its_rung_or_is_not_there() -> None:
    ladder = Ladder(Recipe(longest=3, join=2), BOTH)
    assert ladder.due("follow", 1) and not ladder.due("kinship", 1)
    ladder.rung["follow"] = 2
    assert ladder.due("kinship", 1)
    assert Ladder(Recipe(join=2), ("kinship",)).due("kinship", 1)


def test_follow_rests_once_its_last_rung_is_passed() -> None:
    ladder = Ladder(Recipe(longest=3, rest=3), BOTH)
    ladder.rung["follow"] = 3
    assert all(ladder.due("follow", step) for step in range(6))
    ladder.right["follow", 3] = 0.95
    assert [ladder.due("follow", step) for step in range(6)] == [True, False, False, True, False, False]
    assert all(ladder.due("kinship", step) for step in range(6))
