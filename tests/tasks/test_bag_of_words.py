"""The baseline that reads words without their order."""

from __future__ import annotations

import numpy as np
import pytest

from depthprobe.tasks.bag_of_words import BagOfWords


def test_learns_a_word_that_decides() -> None:
    words = ("red", "blue", "son-in-law")
    texts = [f"{noise} {word} said" for noise in ("one", "two", "three") for word in words]
    answers = [{"red": "a", "blue": "b", "son-in-law": "c"}[text.split()[1]] for text in texts]
    model = BagOfWords().fit(texts, answers)
    odds = model.log_odds(["four red", "four blue", "four son-in-law"])
    assert model.classes == ("a", "b", "c")
    assert odds.argmax(1).tolist() == [0, 1, 2]


def test_hyphenated_words_are_whole_words() -> None:
    model = BagOfWords().fit(["son", "son-in-law"], ["x", "y"])
    assert set(model.words) == {"son", "son-in-law"}


def test_order_is_invisible() -> None:
    model = BagOfWords().fit(["a b", "b a c"], ["x", "y"])
    assert np.allclose(model.log_odds(["a b c"]), model.log_odds(["c b a"]))


def test_reaches_the_optimum_of_its_objective() -> None:
    rng = np.random.default_rng(0)
    words = np.array(["ape", "bee", "cat", "dog"])
    texts = [" ".join(words[rng.random(4) < 0.5]) or "ape" for _ in range(80)]
    answers = ["x" if ("ape" in t) ^ (rng.random() < 0.1) else "y" for t in texts]
    short, long = BagOfWords(steps=200).fit(texts, answers), BagOfWords(steps=4000).fit(texts, answers)
    assert np.allclose(short.log_odds(texts), long.log_odds(texts), atol=0.02)


@pytest.mark.parametrize(("texts", "answers"), [([], []), (["a"], ["x", "y"])])
def test_refuses_nothing_to_learn_from(texts: list[str], answers: list[str]) -> None:
    with pytest.raises(ValueError, match="as many texts"):
        BagOfWords().fit(texts, answers)
