"""How far the logit lens and a tuned lens are from the model's final output, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from depthprobe.depth import DepthModel
from depthprobe.lens.tuned import TunedLens
from depthprobe.lens.tuned_train import Row, captured
from depthprobe.lens.vocabulary import read


@torch.inference_mode()
def divergences(
    model: DepthModel, lens: TunedLens, rows: Sequence[Row], reads: int, draw: torch.Generator
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """KL(final output ‖ readout) in nats, at random positions of some texts.

    Args:
        lens: checked against the model (`as_lens`).
        rows: token ids of each text.
        reads: positions of each text, at most.

    Returns:
        float32 [2, N, D], by the logit lens and by the tuned lens, and the text that each position lies in, [N].

    Raises:
        UserError: the readout does not reproduce the model, or a state is not finite.
    """
    states = captured(model, rows, reads, draw, check=True)
    last = model.axis[-1]
    plain = dict(zip(model.axis, states, strict=True))
    found = []
    for depths in (plain, lens.translated(plain, last)):
        said = read(model, list(depths.items()), top_k=1, name="position {} of a batch".format)
        assert said.kl_final is not None
        found.append(said.kl_final.cpu().numpy())
    most = min(reads, max(map(len, rows)))
    return np.stack(found), [number for number, row in enumerate(rows) for _ in range(min(most, len(row)))]
