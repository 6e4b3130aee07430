"""Which chains of relations are kept out of training.

A chain of three or more relations is held out if the hash of its first three says so, about one chain in ten
at every length. So every longer rung of a held-out ladder is held out too, and no question that begins with a
held-out triple is ever asked in training. (Its later pieces may be: what is new is the whole chain.)

Chains of one or two relations are always "train": there are 27 single relations and 166 pairs with a
composition, and a pair kept out could not be known at all, since what two relations give is what the task
teaches.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Literal

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
HELDOUT_FRACTION = 0.1
HASHED_RELATIONS = 3


def split_of(chain_relations: Sequence[str]) -> Split:
    """The split of a question's chain; the same on every machine and in every version."""
    if len(chain_relations) < HASHED_RELATIONS:
        return "train"
    return _split_of_start(tuple(chain_relations[:HASHED_RELATIONS]))


@functools.cache
def _split_of_start(start: tuple[str, ...]) -> Split:
    return "heldout" if stable_unit("chain", *start) < HELDOUT_FRACTION else "train"


def stable_unit(*parts: str) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
