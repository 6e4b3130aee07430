"""The hop ladder: when training goes on, and what is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from depthprobe.training.ladder import Ladder
from depthprobe.training.recipes import FOLLOW, KINSHIP

RECIPE = replace(FOLLOW, longest=3, pass_mark=0.9, patience=10**6)


def note(ladder: Ladder, k: int, share: float, steps: int = 1) -> None:
    """Steps of ten answers at k hops, of which this share is right."""
    for _ in range(steps):
        ladder.note(torch.arange(10) < round(10 * share), torch.full((10,), k))


def test_it_goes_on_when_the_running_share_passes_the_mark() -> None:
    ladder = Ladder(RECIPE)
    note(ladder, 1, 1.0, steps=44)  # 1 − 0.95⁴⁴ = 0.895
    assert ladder.rung == 1 and abs(ladder.right[1] - (1 - 0.95**44)) < 1e-6
    note(ladder, 1, 1.0)
    assert ladder.rung == 2 and ladder.since == 0


def test_only_the_present_rung_counts_and_the_last_one_stays() -> None:
    ladder = Ladder(RECIPE)
    note(ladder, 2, 1.0, steps=60)
    assert ladder.rung == 1
    note(ladder, 1, 1.0, steps=60)
    assert ladder.rung == 3  # two hops had been learned by the way
    note(ladder, 3, 1.0, steps=99)
    assert ladder.rung == 3


def test_hops_are_noted_apart() -> None:
    ladder = Ladder(RECIPE)
    ladder.note(torch.tensor([True, False, True, True, True]), torch.tensor([1, 1, 2, 2, 0]))  # 0: not counted
    assert [round(ladder.right[k], 6) for k in (1, 2, 3)] == [0.025, 0.05, 0.0]
    ladder.note(torch.tensor([True]), torch.tensor([1]))
    assert str(ladder) == "0.07 0.05 0.00"


def test_patience_helps_on_from_the_rungs_that_it_is_meant_for() -> None:
    for patient, expected in ((3, 3), (1, 2)):
        recipe = replace(RECIPE, patience=30, patient_rungs=patient, patient_level=0.6)
        ladder = Ladder(recipe)
        note(ladder, 1, 0.8, steps=30)
        assert ladder.rung == 1
        note(ladder, 1, 0.8)  # 0.8 · (1 − 0.95³¹) = 0.64
        assert ladder.rung == 2
        note(ladder, 2, 0.8, steps=99)
        assert ladder.rung == expected  # every other rung has to be passed


def test_patience_waits_for_some_right_answers() -> None:
    ladder = Ladder(replace(KINSHIP, longest=3, first_rung=1, patience=20))
    note(ladder, 1, 0.3, steps=99)
    assert ladder.rung == 1


def test_one_hop_once_learned_stays_so() -> None:
    ladder = Ladder(RECIPE)
    note(ladder, 1, 1.0, steps=51)
    assert not ladder.one_hop
    note(ladder, 1, 1.0)  # 1 − 0.95⁵² = 0.931
    note(ladder, 1, 0.0, steps=9)
    assert ladder.one_hop


def test_draws_are_mostly_of_the_present_rung_and_never_above() -> None:
    ladder, rng = Ladder(RECIPE), np.random.default_rng(0)
    assert {ladder.draw(rng) for _ in range(50)} == {1}
    ladder.rung = 3
    drawn = np.bincount([ladder.draw(rng) for _ in range(4000)], minlength=5)
    assert drawn[0] == drawn[4] == 0
    np.testing.assert_allclose(drawn[1:4] / 4000, [0.1, 0.1, 0.8], atol=0.03)


def test_a_ladder_may_begin_above_one_hop() -> None:
    assert Ladder(KINSHIP).rung == 2
