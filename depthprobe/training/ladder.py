"""The curriculum: from k to k + 1 hops when the questions of k hops are answered."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from depthprobe.training.recipes import Recipe


class Ladder:
    """Where training stands on the hop ladder, from running shares of right answers."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rung, self.since = recipe.first_rung, 0
        self.right = dict.fromkeys(range(1, recipe.longest + 1), 0.0)
        self.one_hop = False  # whether it has ever been learned

    def note(self, right: Tensor, hops: Tensor) -> None:
        """Take in the answers of a step: bool `[n]` and int64 `[n]`, 0 where an answer does not count."""
        for k in hops[hops > 0].unique().tolist():
            share = right[hops == k].float().mean().item()
            self.right[k] += 0.05 * (share - self.right[k])
        self.one_hop |= self.right[1] > 0.93
        self.since += 1
        recipe, level = self.recipe, self.right[self.rung]
        waited = self.since > recipe.patience and self.rung <= recipe.patient_rungs and level > recipe.patient_level
        if self.rung < recipe.longest and (level > recipe.pass_mark or waited):
            self.rung, self.since = self.rung + 1, 0

    def draw(self, rng: np.random.Generator) -> int:
        """The longest k of the next batch: the present rung in seven cases of ten, else one up to it."""
        return self.rung if rng.random() < 0.7 else int(rng.integers(1, self.rung + 1))

    def __str__(self) -> str:
        return " ".join(f"{share:.2f}" for share in self.right.values())
