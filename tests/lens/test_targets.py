"""Targets in context: boundaries, BOS, words that no token expresses, and the tree of candidate answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from depthprobe.errors import UserError
from depthprobe.lens.targets import Target, branchings, resolve
from depthprobe.tasks.items import Fact, Item, Span

STORY, QUESTION = "Bob is the son of Ann.", "Bob is Ann's"


def item(candidates: tuple[str, ...] = ("son", "father", "father-in-law"), text: str = STORY) -> Item:
    fact = Fact("Bob", "son", "Ann", "chain", 1, Span(0, 22), Span(0, 3), Span(11, 14), Span(18, 21))
    return Item(
        id="s/k1", story_id="s", task="kinship", hops=1, text=f"{text} {QUESTION}", story=text,
        question=QUESTION, answer=candidates[0], candidates=candidates, plausible=candidates[:1],
        facts=(fact,),
        chain_people=("Ann", "Bob"), chain_relations=("son",),
        question_people_spans=(), question_relation_spans=(),
        form="statement", template="subject-first", order="forward", distractors="none", split=None, seed=0,
    )  # fmt: skip


def target(tokenizer: Any, made: Item, **options: Any) -> Target:
    return next(resolve(tokenizer, [made], **options))


def texts(made: Item) -> list[str]:
    return [made.text + made.continuation(word) for word in made.candidates]


def test_answers_are_found_in_context() -> None:
    made = item()
    tokenizer = byte_tokenizer(texts(made))
    got = target(tokenizer, made)
    for word, path in zip(got.words, got.paths, strict=True):
        assert tokenizer.decode([*got.prompt_ids, *path]) == f"{made.text} {word}"
    assert not got.bos and got.answer_ids == got.paths[0]


def test_bos_is_what_the_tokenizer_adds_and_never_twice() -> None:
    made = item()
    with_bos, without = word_tokenizer(texts(made)), word_tokenizer(texts(made), bos=False)
    plain = target(without, made)
    got = target(with_bos, made)
    assert got.bos and got.prompt_ids == (1, *plain.prompt_ids) and not plain.bos
    assert got.paths == plain.paths
    spelled = target(with_bos, item(text="[BOS] " + STORY))
    assert spelled.bos and spelled.prompt_ids == got.prompt_ids


def test_a_word_that_the_tokenizer_lacks_is_named() -> None:
    made = item()
    tokenizer = word_tokenizer(texts(made))
    with pytest.raises(UserError, match=r"cannot express the answer 'niece' \(item s/k1\)"):
        target(tokenizer, item(("son", "niece")))
    with pytest.raises(UserError, match=r"cannot express the question: it has no 'Zoe' \(item s/k1\)"):
        target(tokenizer, item(text="Zoe is the son of Ann."))


def test_a_dropped_word_is_not_an_answer() -> None:
    """A word-level tokenizer without an unknown token drops what it does not know."""
    made = item(("son", "father"))
    vocabulary = {"[PAD]": 0, "Bob": 1, "is": 2, "the": 3, "son": 4, "of": 5, "Ann.": 6, "Ann's": 7}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[PAD]", max_input_chars_per_word=50))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[PAD]")
    with pytest.raises(UserError, match="cannot express the answer 'father'"):
        target(tokenizer, made)


def test_a_merge_across_the_boundary_is_refused() -> None:
    """Without word boundaries in the tokenizer, "s" and " son" can become one token."""
    made = item(("son", "father"))
    vocabulary = {letter: number for number, letter in enumerate(sorted(set("".join(texts(made)))))}
    vocabulary["s "] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocabulary, [("s", " ")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    with pytest.raises(
        UserError, match=r"merges the end of the question with the answer 'son' \(item s/k1\)"
    ):
        target(tokenizer, made)


def test_answers_with_the_same_tokens_are_refused() -> None:
    from tokenizers import normalizers

    made = item(("son", "Son"))
    tokenizer = byte_tokenizer(texts(made))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    with pytest.raises(UserError, match="gives the answers 'son' and 'Son' the same tokens"):
        target(tokenizer, made)


def test_no_tokenizer() -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        target(None, item())


def test_branchings_of_in_laws() -> None:
    paths = [(7,), (5,), (5, 1, 2), (5, 1, 3), (9, 4)]
    nodes, turns = branchings(paths)
    assert [(node.suffix, node.tokens, node.stops) for node in nodes] == [
        ((), (7, 5, 9), False), ((5,), (1,), True), ((5, 1), (2, 3), False),
    ]  # fmt: skip
    assert turns == (
        ((0, 0),),
        ((0, 1), (1, -1)),
        ((0, 1), (1, 0), (2, 0)),
        ((0, 1), (1, 0), (2, 1)),
        ((0, 2),),
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=9, unique=True
    )
)
def test_scores_are_disjoint(paths: list[tuple[int, ...]]) -> None:
    """Whatever the distribution at each node, the scores of all words add up to what their nodes hand out."""
    nodes, turns = branchings(paths)
    generator = torch.Generator().manual_seed(len(paths))
    shares = []
    for node in nodes:
        p = torch.rand(len(node.tokens) + node.stops, generator=generator)
        shares.append((p / p.sum()).tolist())
    total = 0.0
    for path, steps in zip(paths, turns, strict=True):
        score = 1.0
        for node, turn in steps:
            score *= shares[node][turn]
        total += score
        assert {nodes[node].suffix for node, _ in steps} == {
            node.suffix for node in nodes if path[: len(node.suffix)] == node.suffix
        }
    assert total == pytest.approx(1.0)


def test_bos_is_put_and_taken_away() -> None:
    made = item()
    with_bos, without = word_tokenizer(texts(made)), byte_tokenizer(texts(made))
    plain = target(word_tokenizer(texts(made), bos=False), made).prompt_ids
    never = next(resolve(with_bos, [made], bos="never"))
    assert never.prompt_ids == plain and not never.bos
    assert next(resolve(with_bos, [made], bos="always")).prompt_ids == (1, *plain)
    assert without.bos_token_id is None and without.pad_token_id is None and not target(without, made).bos
    with pytest.raises(UserError, match=r"the tokenizer has no BOS token .bos.: ask for"):
        next(resolve(without, [made], bos="always"))


def test_a_chat_template_opens_the_assistants_turn() -> None:
    made = item(("son", "father"))
    tokenizer = byte_tokenizer(texts(made))
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        next(resolve(tokenizer, [made], chat=True))
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    got = next(resolve(tokenizer, [made], chat=True))
    assert tokenizer.decode(got.prompt_ids) == f"<user>{made.text}<assistant>"
    assert [tokenizer.decode(path) for path in got.paths] == ["son", "father"]
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(UserError, match=r"chat template fails: no users .item s/k1."):
        next(resolve(tokenizer, [made], chat=True))


def test_where_the_text_begins() -> None:
    made = item()
    tokenizer = word_tokenizer([*texts(made), "user a helpful assistant"])
    assert target(tokenizer, made).text_start == 1  # behind BOS
    assert target(tokenizer, made, bos="never").text_start == 0
    tokenizer.chat_template = "[BOS] user a helpful {{ messages[0]['content'] }} assistant "
    chat = target(tokenizer, made, chat=True)
    ids = tokenizer(made.text, add_special_tokens=False)["input_ids"]
    assert chat.text_start == 4 and list(chat.prompt_ids[4 : 4 + len(ids)]) == ids
    assert target(tokenizer, made, chat=True, bos="never").text_start == 3
