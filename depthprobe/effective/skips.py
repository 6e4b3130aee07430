"""What the output is without a part: divergence, the best tokens, the whole answer, the best candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth import Capture
from depthprobe.depth.tapped import TappedModel
from depthprobe.effective.parts import LOOP, STATE_BYTES, Part, around, cell_bytes, chunks
from depthprobe.lens.reads import Reads
from depthprobe.lens.scores import TOP, Asked, CandidateIndex, log_targets
from depthprobe.lens.targets import Path, Target
from depthprobe.lens.vocabulary import Said, read


@dataclass(frozen=True, slots=True)
class Skipped:
    """The output without each of C parts, on the CPU.

    Attributes:
        kl: float32 [C], KL(final ‖ skipped final) in nats, at the token that predicts the answer.
        top: float32 [C], share of the best tokens that both have.
        logprob: float32 [C], of the whole answer.
        correct: bool [C], the answer is the best candidate (as `lens.scores` tells candidates apart).
    """

    kl: Tensor
    top: Tensor
    logprob: Tensor
    correct: Tensor


@torch.inference_mode()
def skip_effects(
    model: TappedModel,
    target: Target,
    parts: Sequence[Part],
    *,
    spared: int,
    engine: str,
    max_bytes: int,
    state_bytes: int = STATE_BYTES,
) -> Skipped:
    """Skip each part at all tokens (but the `spared` first) of the prompt and of what is read behind it.

    Args:
        spared: fewer than the prompt has tokens.
        engine, max_bytes: as `DepthModel.resume` takes them.
        state_bytes: of clean states that are held at once.

    Raises:
        UserError: without a part, an output is NaN or overflows (names item and part).
    """
    last = model.axis[-1]
    suffixes = wanted_suffixes(target)
    found: dict[Path, Tensor] = {}  # suffix → [C + 1, d], the unchanged forward last
    for leaf in leaves(suffixes):
        ids = torch.tensor((*target.prompt_ids, *leaf), device=model.device)
        here = [suffix for suffix in suffixes if suffix not in found and leaf[: len(suffix)] == suffix]
        at = [len(target.prompt_ids) - 1 + len(suffix) for suffix in here]
        positions = tuple(range(spared, len(ids)))
        rows: list[Tensor] = []  # [cells, P, d] of each chunk
        clean = torch.empty(0)
        for some in chunks(parts, state_bytes // cell_bytes(model, ids, parts)):
            cells = [
                part.skipped(positions, before, behind)
                for part, before, behind in around(model, ids, some, state_bytes)
            ]
            resumed = model.resume(ids, cells, at, engine=engine, max_bytes=max_bytes)
            rows.append(resumed.states[last])
            clean = resumed.clean[last][None]
        whole = torch.cat([*rows, clean])
        found |= {suffix: whole[:, place] for place, suffix in enumerate(here)}
    states = torch.stack([found[suffix] for suffix in suffixes])  # [N, C + 1, d]
    return _scored(model, target, parts, suffixes, states)


def wanted_suffixes(target: Target) -> list[Path]:
    """Beginnings of answers behind which something is read; the first is empty."""
    after = [node.suffix for node in target.nodes if node.suffix]
    after += [target.answer_ids[:length] for length in range(1, len(target.answer_ids))]
    return list(dict.fromkeys([(), *after]))


def leaves(suffixes: Sequence[Path]) -> list[Path]:
    """Those that no other one begins with: running them runs all."""
    return [own for own in suffixes if not any(len(o) > len(own) and o[: len(own)] == own for o in suffixes)]


def _scored(
    model: TappedModel, target: Target, parts: Sequence[Part], suffixes: Sequence[Path], states: Tensor
) -> Skipped:
    """states: [N, C + 1, d] at the last depth, behind each of N suffixes, without each of C parts and clean."""
    nothing = Capture({}, None, None, torch.empty(0))
    reads = Reads(nothing, {(0, suffix): number for number, suffix in enumerate(suffixes[1:])}, {})
    index = CandidateIndex([target], reads, model.device)
    asked = Asked.of([target], reads, index)
    said = _read(model, target, parts, states, asked.tokens)
    assert said.kl_final is not None
    logprobs = log_targets(said)[:, :-1]  # [N, C, T]
    entries = logprobs[index.rows, :, asked.slots]  # [E, C]
    best, clean = said.top_ids[0, :-1], said.top_ids[0, -1]
    common = (best[:, :, None] == clean).any(-1).float().mean(-1)
    same = (states[0, :-1] == states[0, -1:]).all(-1)  # what is the same has a divergence of 0, not of rounding
    return Skipped(
        kl=said.kl_final[0, :-1].masked_fill(same, 0.0).cpu(),
        top=common.cpu(),
        logprob=torch.stack([logprobs[row, :, slot] for row, slot in asked.answers[0]]).sum(0).cpu(),
        correct=torch.stack([index.score(column).correct[0] for column in entries.unbind(-1)]).cpu(),
    )


def _read(model: TappedModel, target: Target, parts: Sequence[Part], states: Tensor, tokens: Tensor) -> Said:
    last, bad = model.axis[-1], (~states.isfinite()).any(-1)  # [N, C + 1]
    if bool(bad.any()):
        number = int(bad.any(0).nonzero()[0])
        where = f"item {target.item.id} without {named(parts[number])}" if number < len(parts) else target.item.id
    else:
        where = f"item {target.item.id} with a part skipped"
    return read(
        model, [(last, state) for state in states.unbind(1)], top_k=TOP, targets=tokens, ranked=0, name=lambda _: where
    )


def named(part: Part) -> str:
    return f"loop {part.coordinate.loop}" if part.site == LOOP else str(part.coordinate)
