"""Packed batches, read back as text: true stories, true questions, and the answers that the solver finds."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.solver import Knowledge
from depthprobe.tasks.splits import split_of
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.packing import NONE, Batch, Pool
from depthprobe.training.pools import make_pool
from depthprobe.training.recipes import RECIPES

WORDS = family_tokenizer()
Facts = list[tuple[str, str, str]]


@pytest.fixture(scope="module", params=[("kinship", 4), ("follow", 4), ("kinship", 1), ("follow", 1)], ids=str)
def made(request: pytest.FixtureRequest) -> tuple[str, int, Pool]:
    task, longest = request.param
    return task, longest, make_pool(longest, replace(RECIPES[task], stories=4, questions=5), 7)


@pytest.fixture
def batch(made: tuple[str, int, Pool]) -> Batch:
    return made[2].draw(np.random.default_rng(3), 5, made[1])


def slots(batch: Batch) -> list[tuple[int, slice]]:
    """(row, where) of every question of a batch, padding with it."""
    told = batch.story_length
    length = (batch.ids.shape[1] - told) // batch.n_questions
    starts = [told + i * length for i in range(batch.n_questions)]
    return [(row, slice(at, at + length)) for row in range(len(batch.ids)) for at in starts]


def facts_of(story: str) -> Facts:
    facts = [re.fullmatch(r"(\w+) is the ([a-z-]+) of (\w+)", sentence) for sentence in story.rstrip(".").split(". ")]
    return [(fact[1], fact[2], fact[3]) for fact in facts if fact is not None or pytest.fail(story)]


def way(facts: Facts, start: str, end: str) -> list[str]:
    """Relations along the one chain of facts from a person to another."""
    ways: list[tuple[str, list[str]]] = [(start, [])]
    while ways:
        person, relations = ways.pop()
        if person == end:
            return relations
        ways += [(s, [*relations, r]) for s, r, o in facts if o == person and len(relations) < len(facts)]
    pytest.fail(f"no chain from {start} to {end}")


def test_every_answer_of_a_batch_is_the_solvers(made: tuple[str, int, Pool], batch: Batch) -> None:
    task, longest, pool = made
    stories = [WORDS.decode(row[: batch.story_length]) for row in batch.ids]
    beginnings = 0
    for row, where in slots(batch):
        ids, answers, hops = batch.ids[row, where], batch.answers[row, where], batch.hops[row, where]
        n = int((ids != pool.pad).sum())
        assert bool((ids[n:] == pool.pad).all()) and bool((answers[n:] == NONE).all())  # padding stands right
        assert answers[n - 1] != NONE  # the whole question has an answer
        assert WORDS(f"{stories[row]} {WORDS.decode(ids[:n])}").input_ids == [
            *batch.ids[row, : batch.story_length].tolist(),
            *ids[:n].tolist(),
        ]
        facts = facts_of(stories[row])
        knowledge = Knowledge.of(facts)
        for at in (answers != NONE).nonzero().flatten().tolist():
            asked, answer = WORDS.decode(ids[: at + 1]), WORDS.decode(answers[at])
            beginnings += at < n - 1
            if task == "kinship":
                subject, person = re.fullmatch(r"(\w+) is (\w+)'s", asked).groups()  # type: ignore[union-attr]
                found, relations = knowledge.between(subject, person), way(facts, person, subject)
            else:
                person, *relations = asked.removesuffix(" is").split("'s ")
                assert (asked != asked.removesuffix(" is")) == (at == n - 1)
                found = knowledge.follow(person, relations)
            assert found == {answer}, (stories[row], asked, answer)
            assert split_of(relations) == "train" and int(hops[at]) == len(relations) <= longest
        assert bool(((hops > 0) == (answers != NONE)).all())
    assert (beginnings > 0) == (task == "follow")


def test_next_tokens_are_those_of_the_text_and_end_with_it(made: tuple[str, int, Pool], batch: Batch) -> None:
    pad = made[2].pad

    def check(ids: Tensor, nexts: Tensor) -> None:
        n = int((ids != pad).sum())
        assert nexts[: n - 1].tolist() == ids[1:n].tolist()
        assert bool((nexts[n - 1 :] == NONE).all())

    for row in range(len(batch.ids)):
        check(batch.ids[row, : batch.story_length], batch.nexts[row, : batch.story_length])
    for row, where in slots(batch):
        check(batch.ids[row, where], batch.nexts[row, where])


def test_positions_and_previous_tokens_are_those_of_a_question_alone(batch: Batch) -> None:
    story, told = batch.ids[:, : batch.story_length], batch.story_length
    for row, where in slots(batch):
        alone = [-1, -1, *story[row].tolist(), *batch.ids[row, where].tolist()]
        positions = [*batch.positions[0, :told].tolist(), *batch.positions[0, where].tolist()]
        assert positions == list(range(len(alone) - 2))
        previous = [*batch.previous[row, :told].tolist(), *batch.previous[row, where].tolist()]
        assert previous == [[alone[i + 1], alone[i]] for i in range(len(alone) - 2)]


def test_a_story_comes_back_under_other_names(made: tuple[str, int, Pool]) -> None:
    pool = made[2]
    batch = pool.draw(np.random.default_rng(0), 24, made[1])  # of four stories: each several times
    stories = {WORDS.decode(row[: batch.story_length]) for row in batch.ids}
    assert len(stories) == 24
    unnamed = {re.sub(r"[A-Z]\w+", "X", story) for story in stories}
    assert len(unnamed) <= len(pool.story)


def test_the_same_seed_draws_the_same_batch(made: tuple[str, int, Pool]) -> None:
    first, second = (made[2].draw(np.random.default_rng(5), 2, made[1]) for _ in range(2))
    assert first.ids.equal(second.ids) and first.answers.equal(second.answers)


@pytest.mark.parametrize("task", ["kinship", "follow"])
def test_questions_are_of_no_more_hops_than_asked_for(task: str) -> None:
    pool = make_pool(4, replace(RECIPES[task], stories=4, questions=6), 7)
    for longest in (1, 2, 4):
        assert int(pool.draw(np.random.default_rng(1), 8, longest).hops.max()) == longest


def test_answers_only_keeps_each_questions_last_token_as_it_was() -> None:
    pool = make_pool(4, replace(RECIPES["kinship"], stories=4, questions=6), 7)
    whole = pool.draw(np.random.default_rng(2), 3, 4)
    short = whole.answers_only()
    told, n = whole.story_length, whole.n_questions
    assert short.ids.shape == (3, told + n) and (short.story_length, short.n_questions) == (told, n)
    for kind in ("ids", "previous", "answers", "nexts", "hops"):
        before, after = getattr(whole, kind), getattr(short, kind)
        assert after[:, :told].equal(before[:, :told]), kind
        assert after[:, told:].equal(before[:, [told + 3 * i + 2 for i in range(n)]]), kind
    assert short.positions.tolist() == [[*range(told), *[told + 2] * n]]
    assert bool((short.answers[:, told:] != NONE).all())


def test_answers_only_refuses_what_it_would_lose() -> None:
    rng = np.random.default_rng(2)
    for longest, message in ((3, "more tokens than"), (1, "answers before their end")):
        pool = make_pool(longest, replace(RECIPES["follow"], stories=2, questions=4), 7)
        with pytest.raises(ValueError, match=message):
            pool.draw(rng, 2, longest).answers_only()
    short = make_pool(2, replace(RECIPES["kinship"], stories=2, questions=4), 7).draw(rng, 2, 2)
    short.answers[0, -1] = NONE
    with pytest.raises(ValueError, match="unequal lengths"):
        short.answers_only()


def test_what_a_pool_cannot_be_made_of_is_refused() -> None:
    names = [f"Zoltan{letter}" for letter in "abcdefghijklmnop"]
    with pytest.raises(UserError, match="the tokenizer does not know"):
        Pool(Generator("kinship", hops=1, names=names), WORDS, 1, 1, prefixes=False)
    with pytest.raises(UserError, match="no single token for ' Zoltan"):
        Pool(Generator("follow", hops=1, names=names), WORDS, 1, 1, prefixes=False)
    with pytest.raises(ValueError, match="inhomogeneous"):  # stories of unequal lengths
        Pool(Generator("kinship", hops=2, fact_template=("subject-first", "has")), WORDS, 9, 1, prefixes=False)
