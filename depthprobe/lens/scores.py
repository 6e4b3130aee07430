"""What one depth says: scores over the vocabulary and over the candidate answers, for a batch of items.

All in float32, one chunk of logits at a time; nothing of size (depths × items × vocabulary) is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth import Coordinate, DepthModel
from depthprobe.errors import UserError
from depthprobe.lens.reads import Reads
from depthprobe.lens.targets import Target

#: Logits held at once, in elements (64 MiB of float32).
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class VocabularyScores:
    """Over the whole vocabulary; each [B] unless noted. Log-probabilities natural, entropy and KL in nats."""

    target_logit: Tensor
    target_logprob: Tensor
    target_rank: Tensor  # int64, 0 = best
    entropy: Tensor
    kl_final: Tensor
    top_ids: Tensor  # int64 [B, 5]
    top_probs: Tensor  # [B, 5]


@dataclass(frozen=True, slots=True)
class CandidateScores:
    """Over the candidate answers; each [B]."""

    p_plausible: Tensor
    p_candidates: Tensor
    candidate_prob: Tensor
    correct: Tensor  # bool
    plausible: Tensor  # bool


class CandidateIndex:
    """The turns of a batch's words as flat index tensors, built once and used at every depth.

    An *entry* is one turn that some word takes: (row of the concatenated reads, token). Entries come node by
    node; a node at which a word stops has one entry more, of the probability that its tokens leave over.
    """

    def __init__(self, targets: Sequence[Target], reads: Reads, device: torch.device) -> None:
        batch = len(targets)
        rows: list[int] = []
        tokens: list[int] = []
        stops: list[tuple[int, int]] = []  # (first entry, entries) of nodes at which a word stops
        word_turns: list[tuple[int, int]] = []  # (flat word, entry); stops are counted from −1 down
        width = max(len(target.words) for target in targets)
        for number, target in enumerate(targets):
            first_entry: list[int] = []
            stop_entry: dict[int, int] = {}
            for position, node in enumerate(target.nodes):
                row = number if not node.suffix else batch + reads.after[number, node.suffix]
                first_entry.append(len(rows))
                if node.stops:
                    stops.append((len(rows), len(node.tokens)))
                    stop_entry[position] = -len(stops)
                rows += [row] * len(node.tokens)
                tokens += node.tokens
            for word, turns in enumerate(target.turns):
                for position, turn in turns:
                    entry = stop_entry[position] if turn < 0 else first_entry[position] + turn
                    word_turns.append((number * width + word, entry))
        total = len(rows)
        word_turns = [(word, total - entry - 1 if entry < 0 else entry) for word, entry in word_turns]
        self.shape = (batch, width)
        self.rows = torch.tensor(rows, device=device)
        self.tokens = torch.tensor(tokens, device=device)
        self.stops = stops
        self.word = torch.tensor([word for word, _ in word_turns], device=device)
        self.entry = torch.tensor([entry for _, entry in word_turns], device=device)
        #: rows of the concatenated reads that any entry needs
        self.needed = sorted(set(rows) - set(range(batch)))
        self.candidates = torch.zeros(batch, width, dtype=torch.bool)
        self.plausible = torch.zeros(batch, width, dtype=torch.bool)
        for number, target in enumerate(targets):
            self.candidates[number, : target.n_candidates] = True
            self.plausible[number, list(target.plausible)] = True
        self.candidates, self.plausible = self.candidates.to(device), self.plausible.to(device)
        self.answer = torch.tensor([target.answer for target in targets], device=device)

    def score(self, entries: Tensor) -> CandidateScores:
        """Log-probabilities of the entries, [E] float32 → scores of the items."""
        if self.stops:
            left = [1.0 - entries[start : start + count].double().exp().sum() for start, count in self.stops]
            entries = torch.cat([entries, torch.stack(left).clamp(min=1e-12).log().to(entries.dtype)])
        words = torch.zeros(self.shape[0] * self.shape[1], dtype=entries.dtype, device=entries.device)
        words = words.index_add(0, self.word, entries[self.entry]).view(self.shape)
        among = words.masked_fill(~self.candidates, -torch.inf)
        mass = among.logsumexp(-1)
        best = among.argmax(-1, keepdim=True)
        return CandidateScores(
            p_plausible=words.masked_fill(~self.plausible, -torch.inf).logsumexp(-1).exp(),
            p_candidates=mass.exp(),
            candidate_prob=(among.gather(-1, self.answer[:, None])[:, 0] - mass).exp(),
            correct=best[:, 0] == self.answer,
            plausible=self.plausible.gather(-1, best)[:, 0],
        )


def score_depth(
    model: DepthModel,
    coordinate: Coordinate,
    reads: Reads,
    index: CandidateIndex,
    first: Tensor,
    final: Tensor,
    names: Sequence[str],
) -> tuple[VocabularyScores, CandidateScores]:
    """Scores of one depth.

    Args:
        first: int64 [B], the first token of each answer.
        final: float32 [B, V], log-probabilities of the last depth.
        names: of the items, for an error.

    Raises:
        UserError: the readout gives NaN (overflow in half precision); names item and depth.
    """
    batch = len(names)
    logits = _readout(model, reads.root.states[coordinate], coordinate, names)
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    target_logit = logits.gather(-1, first[:, None])
    top_probs, top_ids = probs.topk(min(5, probs.shape[-1]), dim=-1)
    vocabulary = VocabularyScores(
        target_logit=target_logit[:, 0],
        target_logprob=logprobs.gather(-1, first[:, None])[:, 0],
        target_rank=(logits > target_logit).sum(-1),
        entropy=-torch.xlogy(probs, probs).sum(-1),
        kl_final=(final.exp() * (final - logprobs)).nan_to_num(nan=0.0).sum(-1).clamp(min=0.0),
        top_ids=top_ids,
        top_probs=top_probs,
    )
    entries = torch.empty(len(index.rows), dtype=torch.float32, device=logits.device)
    at_root = index.rows < batch
    entries[at_root] = logprobs[index.rows[at_root], index.tokens[at_root]]
    rows_a_chunk = max(1, _CHUNK // logits.shape[-1])
    for start in range(0, len(index.needed), rows_a_chunk):
        rows = torch.tensor(index.needed[start : start + rows_a_chunk], device=logits.device)
        later = _readout(model, reads.states[coordinate][rows - batch], coordinate, None).log_softmax(-1)
        slot = torch.full((int(index.rows.max()) + 1,), -1, device=logits.device)
        slot[rows] = torch.arange(len(rows), device=logits.device)
        mine = slot[index.rows] >= 0
        entries[mine] = later[slot[index.rows[mine]], index.tokens[mine]]
    return vocabulary, index.score(entries)


def answer_logprobs(model: DepthModel, targets: Sequence[Target], reads: Reads, final: Tensor) -> list[float]:
    """Teacher-forced log-probability of each whole answer at the last depth. final: float32 [B, V]."""
    last = model.axis[-1]
    total = [float(final[number, target.answer_ids[0]]) for number, target in enumerate(targets)]
    wanted = [
        (number, reads.after[number, target.answer_ids[:length]], target.answer_ids[length])
        for number, target in enumerate(targets)
        for length in range(1, len(target.answer_ids))
    ]
    rows_a_chunk = max(1, _CHUNK // final.shape[-1])
    for start in range(0, len(wanted), rows_a_chunk):
        chunk = wanted[start : start + rows_a_chunk]
        rows = torch.tensor([row for _, row, _ in chunk], device=final.device)
        logprobs = model.readout(reads.states[last][rows], last).log_softmax(-1)
        for place, (number, _, token) in enumerate(chunk):
            total[number] += float(logprobs[place, token])
    return total


def _readout(
    model: DepthModel, states: Tensor, coordinate: Coordinate, names: Sequence[str] | None
) -> Tensor:
    logits = model.readout(states, coordinate)
    bad = logits.isnan().any(-1)
    if bool(bad.any()):
        item = f"item {names[int(bad.nonzero()[0])]}, " if names else ""
        remedy = "a half-precision state overflowed or the weights are damaged; try --dtype float32"
        raise UserError(
            f"{model.name} gives NaN in the lens", where=f"{item}depth {coordinate}", remedy=remedy
        )
    return logits
