"""What a batch of items says at every depth, over the vocabulary and over the candidate answers.

In float32, by tiles (`lens.vocabulary`); nothing of size (depths × items × vocabulary) is ever held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth import Coordinate, DepthModel
from depthprobe.lens.reads import Reads
from depthprobe.lens.targets import Target
from depthprobe.lens.vocabulary import Said, read

#: Of the best tokens, so many are named.
TOP = 5


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


@dataclass(frozen=True, slots=True)
class Asked:
    """Which tokens' scores are wanted behind which reads, as `vocabulary.read` takes them.

    Attributes:
        tokens: int64 [B + M, T], of the concatenated reads; the first of a prompt is that of its answer.
        slots: int64 [E], the column of each entry of a `CandidateIndex`, in its row.
        answers: of each item, (row, column) of every token of its whole answer.
    """

    tokens: Tensor
    slots: Tensor
    answers: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, targets: Sequence[Target], reads: Reads, index: CandidateIndex) -> Asked:
        wanted: list[list[int]] = [[] for _ in range(len(targets) + len(reads.after))]

        def slot(row: int, token: int) -> int:
            wanted[row].append(token)
            return len(wanted[row]) - 1

        answers = []
        for number, target in enumerate(targets):
            begun = [target.answer_ids[:length] for length in range(1, len(target.answer_ids))]
            rows = [number, *(len(targets) + reads.after[number, beginning] for beginning in begun)]
            answers.append(tuple((row, slot(row, token)) for row, token in zip(rows, target.answer_ids, strict=True)))
        pairs = zip(index.rows.tolist(), index.tokens.tolist(), strict=True)
        slots = [slot(row, token) for row, token in pairs]
        widest = max(map(len, wanted))
        device = index.rows.device
        tokens = torch.tensor([[*ids, *[0] * (widest - len(ids))] for ids in wanted], device=device)
        return cls(tokens, torch.tensor(slots, device=device), tuple(answers))


@dataclass(frozen=True, slots=True)
class Scores:
    """What B items say at D depths.

    Attributes:
        said: over the whole vocabulary, [B, D]; its one target is the first token of the answer.
        candidates: over the candidate answers, one a depth.
        answers: log-probability of each whole answer at the last depth, teacher-forced.
    """

    said: Said
    candidates: list[CandidateScores]
    answers: list[float]


def score(
    model: DepthModel, targets: Sequence[Target], reads: Reads, places: Mapping[Coordinate, Coordinate] | None = None
) -> Scores:
    """Scores of a batch at every depth of the axis.

    Args:
        places: depth → the depth as which its state is read, where that is another.

    Raises:
        UserError: a readout is not finite (overflow in half precision); names item and depth.
    """
    index = CandidateIndex(targets, reads, model.device)
    asked = Asked.of(targets, reads, index)
    batch, owners = len(targets), [targets[number].item.id for number, _ in reads.after]
    as_read = places or {}

    def depths(states: Mapping[Coordinate, Tensor]) -> list[tuple[Coordinate, Tensor]]:
        return [(as_read.get(c, c), states[c]) for c in model.axis]

    root = read(
        model, depths(reads.root.states), top_k=TOP, targets=asked.tokens[:batch], ranked=1,
        name=lambda row: f"item {targets[row].item.id}",
    )  # fmt: skip
    pieces = [log_targets(root)]
    if owners:
        later = read(
            model, depths(reads.states), top_k=1, targets=asked.tokens[batch:], ranked=0, full=False,
            name=lambda row: f"item {owners[row]}",
        )  # fmt: skip
        pieces.append(log_targets(later))
    logprobs = torch.cat(pieces)  # [B + M, D, T]
    entries = logprobs[index.rows, :, asked.slots]  # [E, D]
    answers = [sum(float(logprobs[row, -1, slot]) for row, slot in places) for places in asked.answers]
    return Scores(root, [index.score(column) for column in entries.unbind(-1)], answers)


def log_targets(said: Said) -> Tensor:
    """Log-probabilities of the targets that were asked for, [N, D, T]."""
    assert said.target_logit is not None
    return said.target_logit - said.log_normaliser[..., None]
