"""Which token plays which part, on an example that is written out."""

from __future__ import annotations

import pytest
from tiny_models import word_tokenizer
from worlds import items, opened, subject, targets, tokenizer

from depthprobe.errors import UserError
from depthprobe.lens.targets import resolve
from depthprobe.patching.probe import pair_roles
from depthprobe.patching.roles import offsets, role_of, roles_of, single, tokens_of
from depthprobe.tasks.items import Fact, Item, Span

TEXT = "Bob is the son of Ann . Carl is the brother of Bob . Carl is Ann 's"
STORY = "Bob is the son of Ann . Carl is the brother of Bob ."


def span(word: str, nth: int = 0) -> Span:
    at = -1
    for _ in range(nth + 1):
        at = TEXT.index(word, at + 1)
    return Span(at, at + len(word))


def written() -> Item:
    facts = (
        Fact("Bob", "son", "Ann", "chain", 1, Span(0, 23), span("Bob"), span("son"), span("Ann")),
        Fact("Carl", "brother", "Bob", "chain", 2, Span(24, len(STORY)), span("Carl"), span("brother"), span("Bob", 1)),
    )
    return Item(
        "i", "s", "kinship", 2, TEXT, STORY, "Carl is Ann 's", "son", ("son", "brother"), ("son",), facts,
        ("Ann", "Bob", "Carl"), ("son", "brother"), (span("Carl", 1), span("Ann", 1)), (), "statement",
        "subject-first", "forward", "none", None, 0,
    )  # fmt: skip


def test_roles_of_a_written_story() -> None:
    """[BOS] and 17 words: 0 [BOS] 1 Bob 2 is 3 the 4 son 5 of 6 Ann 7 . 8 Carl … 14 . 15 Carl 16 is 17 Ann 18 's"""
    item = written()
    words = word_tokenizer([f"{TEXT} {word}" for word in ("son", "brother")])
    (target,) = resolve(words, [item])
    where = offsets(words, target)
    assert where[0] == (0, 0) and TEXT[slice(*where[4])] == "son"
    word = tokens_of(where, [item.facts[0].relation_span])
    assert word == (4,)
    roles = roles_of(item, where, 0, word)
    last = len(where) - 1
    assert roles["changed_word"] == (4,)
    assert roles["changed_fact"] == (1, 2, 3, 5, 6, 7)
    assert roles["other_facts"] == tuple(range(8, 15))
    assert [TEXT[slice(*where[t])] for t in roles["question_names"]] == ["Carl", "Ann"]
    assert roles["last"] == (last,) and roles["all"] == tuple(range(last + 1))
    assert role_of(roles, 0) == "all" and role_of(roles, 9) == "other_facts"
    # a footprint that reaches on is the changed word's, and no longer its fact's
    assert roles_of(item, where, 0, (4, 5))["changed_fact"] == (1, 2, 3, 6, 7)


def test_single_positions() -> None:
    roles = {"changed_word": (4,), "last": (9,), "all": tuple(range(10))}
    assert single(roles, ("changed_word", "last"), False, 10, "x") == [
        ("changed_word", None, (4,)), ("last", None, (9,)),
    ]  # fmt: skip
    assert single(roles, ("other_facts",), False, 10, "x") == []  # a story of one fact has no other
    each = single(roles, ("changed_word", "all"), True, 10, "x")
    assert [(role, position) for role, position, _ in each][:3] == [("changed_word", 4), ("all", 0), ("all", 1)]
    assert len(each) == 10 and ("last", 9, (9,)) in each
    assert single(roles, (-1, 4), False, 10, "x") == [("last", 9, (9,)), ("changed_word", 4, (4,))]
    for position in (10, -11):
        with pytest.raises(UserError, match=rf"position {position} is outside the prompt of 10 tokens \(x\)"):
            single(roles, (position,), False, 10, "x")
    with pytest.raises(UserError, match="there is no role 'first'"):
        single(roles, ("first",), False, 10, "x")


@pytest.mark.parametrize(("kind", "reach"), [("llama", 0), ("looped", 2), ("looped-ouro-coda", 1)])
@pytest.mark.parametrize("words", ["word", "byte"])
def test_the_changed_word_is_where_embeddings_differ(kind: str, reach: int, words: str) -> None:
    """Previous tokens that are mixed into an embedding carry the word on."""
    model = opened(kind, words)
    one = subject(model, items()[1])
    roles, changed = pair_roles(model, one, one.pairs[0])
    word = one.pairs[0].word
    assert set(changed) <= set(range(word[0], word[-1] + reach + 1)) and changed[-1] - reach in word
    assert roles["changed_word"] == tuple(sorted({*word, *changed}))
    parts = [roles[role] for role in roles if role != "all"]
    assert sum(map(len, parts)) == len({token for part in parts for token in part})
    for place, pair in enumerate(one.pairs):
        both = zip(one.target.prompt_ids, pair.target.prompt_ids, strict=True)
        differ = {n for n, (a, b) in enumerate(both) if a != b}
        assert differ <= set(pair.word), place


def test_a_tokenizer_without_offsets_is_told() -> None:
    model = opened("llama")
    (target,) = targets(model, items(n=1, hops=(2,)))

    class Slow:
        is_fast = False

    with pytest.raises(UserError, match=r"does not say which characters a token stands for.*fast tokenizer"):
        offsets(Slow(), target)
    assert offsets(tokenizer("word"), target)[0] == (0, 0)
