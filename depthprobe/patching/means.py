"""Mean ablation: what a role's tokens hold on average in the other items of a sweep.

The mean is over all tokens of the same role, at the same coordinate, in the unpatched runs of all other items (an item
never enters its own mean). It is taken once over the whole set, so a sweep that is continued later has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from depthprobe.depth import Coordinate
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.patching.pairs import Subject
from depthprobe.patching.roles import ROLES
from depthprobe.patching.sweep import Means


class RoleMeans:
    """Sums over subjects; `without` gives the means for one of them.

    Args:
        roles: of each subject's first pair.
        coordinates: where means are wanted.

    Raises:
        UserError: fewer than two subjects.
    """

    def __init__(
        self,
        model: TappedModel,
        subjects: Sequence[Subject],
        roles: Sequence[Mapping[str, tuple[int, ...]]],
        coordinates: Sequence[Coordinate],
    ) -> None:
        if len(subjects) < 2:
            what = "a mean over the other items needs at least one other"
            raise UserError(what, where="kind mean", remedy="give more items, or take kind 'zero'")
        self._model, self._coordinates = model, tuple(coordinates)
        self._roles = {subject.item.id: own for subject, own in zip(subjects, roles, strict=True)}
        shape = (len(self._coordinates), len(ROLES), model.width)
        self._total, self._count = torch.zeros(shape, dtype=torch.float64), torch.zeros(len(ROLES), dtype=torch.float64)
        for subject in subjects:
            total, count = self._own(subject)
            self._total += total
            self._count += count

    def _own(self, subject: Subject) -> tuple[Tensor, Tensor]:
        """Sums [coordinates, roles, d] and counts [roles] of one subject."""
        ids = torch.tensor([subject.target.prompt_ids])
        total, count = torch.zeros_like(self._total), torch.zeros_like(self._count)
        roles = self._roles[subject.item.id]
        capture = self._model.capture(ids, positions="all", coordinates=self._coordinates, logits=False)
        for place, coordinate in enumerate(self._coordinates):
            state = capture.states[coordinate][0].double().cpu()
            for number, role in enumerate(ROLES):
                if role in roles:
                    total[place, number] = state[list(roles[role])].sum(0)
        for number, role in enumerate(ROLES):
            count[number] = len(roles.get(role, ()))
        return total, count

    def without(self, subject: Subject) -> Means:
        """(coordinate, role) → float64 [d] over all subjects but this one."""
        own, count = self._own(subject)
        left = self._count - count

        def mean(coordinate: Coordinate, role: str) -> Tensor:
            number = ROLES.index(role)
            if not left[number]:
                what = f"no other item has a token of the role '{role}'"
                raise UserError(what, where=f"item {subject.item.id}", remedy="give more items, or take kind 'zero'")
            place = self._coordinates.index(coordinate)
            return (self._total[place, number] - own[place, number]) / left[number]

        return mean
