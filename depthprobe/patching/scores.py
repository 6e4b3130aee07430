"""What changed forwards answer: whole answers teacher-forced, and the best candidate, for many cells at once.

A prompt is read in *contexts*: nothing behind it, the beginnings of the answers that are scored, and the beginnings at
which candidates part (`lens.targets`). One run of the prompt with some continuation gives every context that this
continuation begins with. Most prompts need one run; where candidates share first tokens, the later places at which they
part are run only for the cells in which a candidate behind them could still be the best: a product of probabilities
only falls, so what is known of it bounds it. (The tests hold the best candidate to the full tree.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthprobe.depth import DepthModel
from depthprobe.lens.targets import Path, Target

#: Logits held at once, in elements (16 MiB of float32).
_CHUNK = 1 << 22


class Tally:
    """The answers of C cells to one prompt, filled as contexts are run.

    Attributes:
        target: the prompt and its words.
        words: indices in `target.words` whose whole answers are scored.
    """

    def __init__(self, target: Target, words: Sequence[int], n_cells: int) -> None:
        self.target, self.words = target, tuple(dict.fromkeys(words))
        tokens: dict[Path, list[int]] = {node.suffix: list(node.tokens) for node in target.nodes}
        asked: dict[Path, None] = {(): None}
        for word in self.words:
            path = target.paths[word]
            for length, token in enumerate(path):
                of = tokens.setdefault(path[:length], [])
                if token not in of:
                    of.append(token)
                asked[path[:length]] = None
            if path in tokens:  # a word that others go on from
                asked[path] = None
        self._tokens = tokens
        self._asked = tuple(asked)
        #: context → log-probabilities [C, tokens], float64; NaN where the context was not run
        self._found = {
            context: torch.full((n_cells, len(of)), torch.nan, dtype=torch.float64) for context, of in tokens.items()
        }

    @property
    def first_runs(self) -> tuple[Path, ...]:
        """The continuations that all cells are run with; the first of them is enough for the prompt's own end."""
        return tuple(c for c in self._asked if not any(c == o[: len(c)] for o in self._asked if len(o) > len(c)))

    def contexts(self, run: Path) -> tuple[Path, ...]:
        """What a run with this continuation shows, the shortest first."""
        return tuple(run[:n] for n in range(len(run) + 1) if run[:n] in self._tokens)

    @torch.inference_mode()
    def add(self, model: DepthModel, rows: Tensor, contexts: Sequence[Path], states: Tensor) -> None:
        """Take in what some cells say.

        Args:
            rows: int64 [n], the cells.
            contexts: what was read, P of `contexts`.
            states: [n, P, d] at the model's last depth.
        """
        for number, context in enumerate(contexts):
            ids = torch.tensor(self._tokens[context], device=states.device)
            self._found[context][rows] = token_logprobs(model, states[:, number], ids).double().cpu()

    def logprob(self, word: int) -> Tensor:
        """float64 [C], of the whole answer; `word` is one of `words`."""
        path = self.target.paths[word]
        total = torch.zeros(len(self._found[()]), dtype=torch.float64)
        for length, token in enumerate(path):
            context = path[:length]
            total = total + self._found[context][:, self._tokens[context].index(token)]
        return total

    def open(self) -> tuple[Path, Tensor] | None:
        """A continuation that is still to be run, and for which cells (int64); None when the best are known."""
        scores, known = self._candidates()
        sure = scores.masked_fill(~known, -torch.inf).amax(-1, keepdim=True)
        live = ~known & (scores > sure)  # [C, candidates]
        if not bool(live.any()):
            return None
        for context in sorted((node.suffix for node in self.target.nodes), key=len, reverse=True):
            behind = [
                word for word in range(self.target.n_candidates)
                if any(self.target.nodes[node].suffix == context for node, _ in self.target.turns[word])
            ]  # fmt: skip
            rows = (live[:, behind].any(-1) & self._found[context].isnan().any(-1)).nonzero()[:, 0]
            if len(rows):
                return context, rows
        raise AssertionError("a word is unknown and none of its contexts is open")

    def best(self) -> Tensor:
        """int64 [C]: the index of the best candidate."""
        return self._candidates()[0].argmax(-1)

    def _candidates(self) -> tuple[Tensor, Tensor]:
        """log scores [C, candidates], upper bounds where they are not known, and whether they are."""
        target, n = self.target, len(self._found[()])
        scores = torch.zeros(n, target.n_candidates, dtype=torch.float64)
        known = torch.ones(n, target.n_candidates, dtype=torch.bool)
        for word in range(target.n_candidates):
            for place, turn in target.turns[word]:
                node = target.nodes[place]
                found = self._found[node.suffix]
                if turn >= 0:
                    value = found[:, self._tokens[node.suffix].index(node.tokens[turn])]
                else:  # what the tokens that go on leave over
                    at = [self._tokens[node.suffix].index(token) for token in node.tokens]
                    value = (1 - found[:, at].exp().sum(-1)).clamp(min=1e-300).log()
                known[:, word] &= ~value.isnan()
                scores[:, word] += value.nan_to_num(0.0)
        return scores, known


@torch.inference_mode()
def token_logprobs(model: DepthModel, states: Tensor, ids: Tensor) -> Tensor:
    """float32 [n, T]: log-probabilities of tokens ids [T] at states [n, d] of the model's last depth.

    Norm, head and logit transform in float32; logits are held for so many states at a time as the chunk allows.
    """
    tail, last = model.tail32, model.axis[-1]
    rows = max(1, _CHUNK // model.vocab_size)
    parts = []
    for start in range(0, len(states), rows):
        logits = tail(model.normed(states[start : start + rows], last), normed=True).float()
        parts.append(logits[:, ids] - logits.logsumexp(-1, keepdim=True))
    return torch.cat(parts)
