"""Lens tables of known answers: an item is correct, and equal to its final self, from a chosen depth on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from depthprobe import tables

Settle = Callable[[np.random.Generator, int, int], int]


def lens_table(
    settle: Settle,
    *,
    n_stories: int = 20,
    hops: tuple[int, ...] = (1, 2, 3, 4),
    loops: int = 6,
    layers: int = 1,
    gate: Callable[[int, int], float] | None = None,
    right: Callable[[np.random.Generator, int, int], bool] = lambda rng, story, k: True,
    task: str = "kinship",
    cluster: Callable[[int, int], str] | None = None,
    seed: int = 0,
) -> pl.DataFrame:
    """`loops` × `layers` depths after an embedding; an item is final from `settle(rng, story, k)` on.

    `gate(k, loop)` is λ at a loop's end; without it the gate columns are null. With one loop the model is
    an ordinary transformer of `layers` layers.
    """
    rng = np.random.default_rng(seed)
    axis = [(0, 0, "embed", False)]
    axis += [(r, k, "resid_post", k == layers) for r in range(1, loops + 1) for k in range(1, layers + 1)]
    rows = []
    for story in range(n_stories):
        for k in hops:
            at = int(np.clip(settle(rng, story, k), 0, len(axis) - 1))
            ends_right = right(rng, story, k)
            stay = 1.0
            for depth, (loop, layer, site, is_end) in enumerate(axis):
                settled = depth >= at
                value = gate(k, loop) if gate is not None and is_end else None
                stay *= 1.0 if value is None else 1 - value
                row = {
                    "item": f"{task}-{story}/k{k}",
                    "story": f"{task}-{story}",
                    "cluster": f"{task}-{story}" if cluster is None else cluster(story, k),
                    "task": task,
                    "hops": k,
                    "depth": depth,
                    "loop": loop,
                    "layer": layer,
                    "site": site,
                    "lens": "plain",
                    "target_logit": 1.0,
                    "target_logprob": np.log(0.9 if settled and ends_right else 0.1),
                    "target_prob": 0.9 if settled and ends_right else 0.1,
                    "target_rank": 0 if settled and ends_right else 3,
                    "p_plausible": 0.95 if settled else 0.2,
                    "p_candidates": 0.97,
                    "candidate_prob": 0.9 if settled and ends_right else 0.1,
                    "candidate_correct": settled and ends_right,
                    "candidate_plausible": settled,
                    "answer_logprob": -0.1 if depth == len(axis) - 1 else None,
                    "top1_id": 7 if settled else depth + 10,
                    "top1": "x",
                    "equals_final": settled,
                    "entropy": 0.5,
                    "kl_final": 0.0 if settled else 1.0,
                    "top5": list("abcde"),
                    "top5_probs": [0.2] * 5,
                    "is_loop_end": is_end,
                    "gate_lambda": value,
                    "gate_cdf": None if value is None else (1.0 if loop == loops else 1 - stay),
                }
                rows.append(row)
    return tables.conform("lens", rows)
