"""Stories with several questions behind each, as token arrays that a training step can use at once.

One row is a story of T tokens and Q questions of up to L tokens. Every question sees the story and itself, at the
positions that it would have alone. Names are permuted anew each time a row is drawn, so a pool of some thousand
stories never shows the same text twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from depthprobe.errors import UserError
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item
from depthprobe.tasks.names import NAMES
from depthprobe.training.family_tokenizer import PAD

NONE = -100  # no target, as in torch's cross entropy


@dataclass(frozen=True, slots=True)
class Batch:
    """B stories with Q questions each; S = T + Q·L tokens a row.

    Attributes:
        ids: int64 `[B, S]`, padded with the pad token inside each question's L slots.
        positions: int64 `[1, S]`, of a question as if it stood alone behind the story.
        previous: int64 `[B, S, 2]`, the token before and the one before that, −1 for none.
        answers: int64 `[B, S]`, the answer that follows this token, −100 elsewhere.
        nexts: int64 `[B, S]`, the next token of the text, −100 where it is unknown or padding.
        hops: int64 `[B, S]`, hops of the question behind `answers`, 0 elsewhere.
        story_length, n_questions: T and Q.
        prefixes: whether the beginnings of questions are answered too.
    """

    ids: Tensor
    positions: Tensor
    previous: Tensor
    answers: Tensor
    nexts: Tensor
    hops: Tensor
    story_length: int
    n_questions: int
    prefixes: bool

    def answers_only(self) -> Batch:
        """The same stories, with the last token of each question alone: Q tokens behind the story and not Q·L.

        That token is told the two before it, so a question of three tokens is still there.

        Raises:
            ValueError: questions of unequal lengths or of more tokens than the last one is told of, or beginnings that
                are answered too.
        """
        told, n = self.story_length, self.n_questions

        def cut(x: Tensor) -> Tensor:
            asked = x[:, told:].unflatten(1, (n, -1))
            return torch.cat([x[:, :told], asked[:, :, -1]], dim=1)

        answered = (self.answers[:, told:] != NONE).unflatten(1, (n, -1))
        if answered.shape[-1] > 1 + self.previous.shape[-1]:
            raise ValueError("questions of more tokens than the last one is told of")
        if not bool(answered[..., -1].all()):
            raise ValueError("questions of unequal lengths")
        if bool(answered[..., :-1].any()):
            raise ValueError("questions with answers before their end")
        return replace(
            self,
            ids=cut(self.ids),
            positions=cut(self.positions),
            previous=cut(self.previous),
            answers=cut(self.answers),
            nexts=cut(self.nexts),
            hops=cut(self.hops),
        )


class Pool:
    """`n` tokenised stories of one task and one longest k, to draw batches from.

    Args:
        generator: makes the stories; all of them must have equally many tokens (one fact template, no gender facts).
        tokenizer: with one token a name.
        n: stories first … first + n − 1 of the generator.
        questions: Q, how many questions are drawn for a row.
        prefixes: also ask the beginnings of a question: in "Ann's son's wife is" the token after "son" may be the son's
            name, and the token after "wife" the wife's. Follow in its possessive form only.

    Raises:
        UserError: a word of a story or an answer is not one token of the tokenizer.
        ValueError: stories of unequal lengths.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: PreTrainedTokenizerFast,
        n: int,
        questions: int,
        prefixes: bool,
        first: int = 0,
    ) -> None:
        self.questions, self.prefixes = questions, prefixes
        self.vocabulary = tokenizer.get_vocab()
        self.pad = self.vocabulary[PAD]
        self.name_ids = np.array([[self._word(f" {name}"), self._word(f" {name}'s")] for name in NAMES])  # [names, 2]
        stories: list[list[int]] = []
        rows: list[list[tuple[list[int], list[int], list[int]]]] = []
        for i in range(first, first + n):
            items = generator.story(i) + generator.questions(i, 4 * questions)
            stories.append(tokenizer(items[0].story).input_ids)
            encoded = tokenizer([item.question for item in items], return_offsets_mapping=True)
            rows.append(
                [
                    self._question(item, ids, offsets, prefixes)
                    for item, ids, offsets in zip(items, encoded.input_ids, encoded.offset_mapping, strict=True)
                ]
            )
        length = max(len(ids) for row in rows for ids, _, _ in row)
        self.story = np.array(stories, dtype=np.int64)  # [n, T]; ragged stories fail here
        if (self.story == tokenizer.unk_token_id).any():
            raise UserError("the stories have words that the tokenizer does not know", remedy="give it their names")
        most = max(len(row) for row in rows)
        shape = (n, most, length)
        self.ids = np.full(shape, self.pad, dtype=np.int64)
        self.answers, self.hops = np.full(shape, NONE, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for i, row in enumerate(rows):
            for j, (ids, answers, hops) in enumerate(row):
                self.ids[i, j, : len(ids)] = ids
                self.answers[i, j, : len(ids)], self.hops[i, j, : len(ids)] = answers, hops
        self.weights = self.hops.max(-1)  # [n, most], hops of each question, 0 where there is none

    def _question(
        self, item: Item, ids: list[int], offsets: list[tuple[int, int]], prefixes: bool
    ) -> tuple[list[int], list[int], list[int]]:
        answers, hops = [NONE] * len(ids), [0] * len(ids)
        answers[-1], hops[-1] = self._word(item.continuation()), item.hops
        if prefixes:
            ends = {end: i for i, (_, end) in enumerate(offsets)}
            for j, span in enumerate(item.question_relation_spans):
                at = ends[span.end - len(item.story) - 1]
                answers[at], hops[at] = self._word(item.continuation(item.chain_people[j + 1])), j + 1
        return ids, answers, hops

    def _word(self, text: str) -> int:
        token = self.vocabulary.get(text)
        if token is None:
            raise UserError(f"the tokenizer has no single token for '{text}'", remedy="train with family_tokenizer()")
        return token

    def draw(self, rng: np.random.Generator, rows: int, longest: int) -> Batch:
        """`rows` stories, `questions` of up to `longest` hops of each (long ones more often), with names permuted."""
        picks = rng.integers(0, len(self.story), rows)
        asked = np.empty((rows, self.questions), dtype=np.int64)
        for b, pick in enumerate(picks):
            weights = np.where(self.weights[pick] <= longest, self.weights[pick], 0)
            again = bool((weights > 0).sum() < self.questions)
            asked[b] = rng.choice(len(weights), self.questions, replace=again, p=weights / weights.sum())
        names = np.tile(np.arange(len(self.vocabulary)), (rows, 1))
        order = np.argsort(rng.random((rows, len(self.name_ids))), axis=1)
        for spelling in self.name_ids.T:
            names[:, spelling] = spelling[order]
        chosen = picks[:, None], asked
        return self._assemble(self.story[picks], self.ids[chosen], self.answers[chosen], self.hops[chosen], names)

    def _assemble(
        self, story: np.ndarray, ids: np.ndarray, answers: np.ndarray, hops: np.ndarray, names: np.ndarray
    ) -> Batch:
        rows, n_questions, length = ids.shape
        told = story.shape[1]
        row = np.arange(rows)[:, None]
        story = names[row, story]
        ids = names[row[..., None], ids]
        answers = np.where(answers == NONE, NONE, names[row[..., None], np.maximum(answers, 0)])
        # the two tokens before each: within the story, and of a question behind the story's end
        behind = np.concatenate([np.broadcast_to(story[:, None, -2:], (rows, n_questions, 2)), ids], axis=2)
        head = np.concatenate([np.full((rows, 2), -1), story], axis=1)
        previous = np.concatenate(
            [
                np.stack([head[:, 1:-1], head[:, :-2]], -1),
                np.stack([behind[:, :, 1:-1], behind[:, :, :-2]], -1).reshape(rows, -1, 2),
            ],
            axis=1,
        )
        after = np.full(ids.shape, NONE)
        after[:, :, :-1] = np.where(ids[:, :, 1:] == self.pad, NONE, ids[:, :, 1:])
        story_after = np.full(story.shape, NONE)
        story_after[:, :-1] = story[:, 1:]
        flat = lambda first, rest: torch.from_numpy(np.concatenate([first, rest.reshape(rows, -1)], 1))  # noqa: E731
        positions = np.concatenate([np.arange(told), np.tile(told + np.arange(length), n_questions)])
        return Batch(
            ids=flat(story, ids),
            positions=torch.from_numpy(positions)[None],
            previous=torch.from_numpy(previous),
            answers=flat(np.full(story.shape, NONE), answers),
            nexts=flat(story_after, after),
            hops=flat(np.zeros_like(story), hops),
            story_length=told,
            n_questions=n_questions,
            prefixes=self.prefixes,
        )
