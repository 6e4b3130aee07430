"""From the answers of a sweep's cells to rows of the tables `donors`, `patching` and `knockout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import torch
from torch import Tensor

from depthprobe import tables
from depthprobe.depth import DepthModel
from depthprobe.lens.targets import Target
from depthprobe.lens.words import Words
from depthprobe.patching.pairs import Subject
from depthprobe.patching.roles import role_of
from depthprobe.patching.scores import Tally
from depthprobe.patching.sites import Place
from depthprobe.patching.sweep import Spec
from depthprobe.tasks.intervals import cluster_of

#: Two answers that differ by less, in nats, between the stories say nothing about what moved: a difference that
#: rounding in the model's dtype explains must not be divided by.
LEAST_APART = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(slots=True)
class Side:
    """One of the two runs of a pair: its prompt, its clean answers, its best candidate."""

    target: Target
    tally: Tally = field(repr=False)

    def contrast(self, one: str, other: str, cell: Any = 0) -> Any:
        """log p(one) − log p(other), of a cell or of all."""
        return (self.logprob(one) - self.logprob(other))[cell]

    def logprob(self, word: str) -> Tensor:
        return self.tally.logprob(self.target.words.index(word))

    @property
    def right(self) -> bool:
        return int(self.tally.best()[0]) == self.target.answer


def patch_rows(
    about: dict[str, Any],
    specs: Sequence[Spec],
    side: Side,
    part: slice,
    ends: tuple[str, str, Any],
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Rows of `patching`.

    Args:
        specs: cells `part` of a side.
        ends: its own answer, the other, their contrast there.
        dtype: the model's; an effect is None where the stories' contrasts are no farther apart than rounding in it.
    """
    own, foreign, reference = ends
    clean, donor = float(side.contrast(own, foreign)), float(reference)
    patched = side.contrast(own, foreign, part).tolist()
    p_own, p_foreign = (side.logprob(word)[part].exp().tolist() for word in (own, foreign))
    best = side.tally.best()
    mine, theirs = (side.target.words.index(word) for word in (own, foreign))
    flips = ((best[part] == theirs) & bool(best[0] == mine)).tolist()
    apart = clean - donor
    says = abs(apart) > LEAST_APART.get(dtype, LEAST_APART[torch.float32])
    return [
        about
        | _place(spec.patch.place)
        | {
            "kind": spec.kind,
            "span": spec.patch.span,
            "window": len(spec.patch.coordinates),
            "role": spec.role,
            "position": spec.position,
            "n_positions": len(spec.tokens),
            "ld_clean": clean,
            "ld_donor": donor,
            "ld_patched": patched[n],
            "effect": (clean - patched[n]) / apart if says else None,
            "p_answer": p_own[n],
            "p_donor": p_foreign[n],
            "flip": flips[n],
        }
        for n, spec in enumerate(specs)
    ]


def cut_table(
    keys: dict[str, Any], specs: Sequence[Spec], side: Side, start: int, answer: str, against: str
) -> pl.DataFrame:
    contrast, logprob = side.contrast(answer, against, slice(None)).tolist(), side.logprob(answer).tolist()
    correct = (side.tally.best() == side.target.answer).tolist()
    rows = []
    for cell, spec in enumerate(specs, start):
        where = _place(spec.patch.place)
        where.pop("site")
        rows.append(
            keys
            | where
            | {
                "role": spec.role,
                "window": len(spec.patch.coordinates),
                "ld_clean": contrast[0],
                "ld_cut": contrast[cell],
                "logprob_clean": logprob[0],
                "logprob_cut": logprob[cell],
                "p_answer": float(torch.tensor(logprob[cell]).exp()),
                "correct": correct[cell],
                "flip": correct[0] and not correct[cell],
            }
        )
    return tables.conform("knockout", rows)


def donor_table(
    model: DepthModel,
    subject: Subject,
    keys: dict[str, Any],
    about: Sequence[tuple[Mapping[str, tuple[int, ...]], tuple[int, ...]]],
    ours: Side,
    theirs: Sequence[Side],
) -> pl.DataFrame:
    words = Words(model.tokenizer)
    tokens = [words(token) for token in subject.target.prompt_ids]
    rows = []
    for pair, (roles, _), side in zip(subject.pairs, about, theirs, strict=True):
        named = [role_of(dict(roles), position) for position in range(len(tokens))]
        rows.append(
            keys
            | {
                "donor_kind": pair.donor.kind,
                "control": pair.control,
                "donor": pair.donor.item.id,
                "hop": pair.donor.hop,
                "before": pair.donor.before,
                "after": pair.donor.after,
                "answer": subject.item.answer,
                "donor_answer": pair.against,
                "text": pair.donor.item.text,
                "tokens": tokens,
                "roles": ["" if role == "all" else role for role in named],
                "item_right": ours.right,
                "donor_right": side.right,
            }
        )
    return tables.conform("donors", rows)


def item_keys(target: Target) -> dict[str, Any]:
    item = target.item
    return {
        "item": item.id, "story": item.story_id, "cluster": cluster_of(item), "task": item.task, "hops": item.hops,
    }  # fmt: skip


def _place(place: Place) -> dict[str, Any]:
    coordinate = place.coordinate
    return {"site": place.site, "loop": coordinate.loop, "layer": coordinate.layer, "depth": place.depth}
