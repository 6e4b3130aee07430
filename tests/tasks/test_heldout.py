"""What is held out, and that it is new."""

from __future__ import annotations

import pytest

from depthprobe.tasks.generate import generate_items
from depthprobe.tasks.heldout import FORMS, MAX_HOPS, TEMPLATES, WAYS, Seen, heldout_by


@pytest.mark.parametrize(("way", "new"), [("chains", "chain"), ("names", "names"), ("lengths", "length")])
def test_what_is_held_out_is_new_at_test(way: str, new: str) -> None:
    settings = {"hops": (1, 2, 3, 4, 5)}
    pool = generate_items("kinship", 80, seed=1, **settings)
    seen = Seen.of(item for item in pool if heldout_by(way, item) == "train")
    test = [i for i in generate_items("kinship", 80, seed=2, **settings) if heldout_by(way, i) == "heldout"]
    assert test
    assert all(new in seen.novelty(item) for item in test)


def test_wording_is_held_out_by_template_and_by_form() -> None:
    train = generate_items("follow", 4, hops=(2,), fact_template=("subject-first", "object-first"), seed=1)
    assert all(heldout_by("templates", item) == "train" for item in train)
    seen = Seen.of(train)
    for settings, new in (({"fact_template": "has"}, "template"), ({"form": "question"}, "form")):
        for item in generate_items("follow", 4, hops=(2,), seed=1, **settings):
            assert heldout_by("templates", item) == "heldout"
            assert new in seen.novelty(item)
    assert TEMPLATES
    assert FORMS


def test_a_tenth_of_the_pairs_of_names_is_held_out() -> None:
    items = generate_items("kinship", 400, hops=(2,), seed=3)
    share = sum(heldout_by("names", item) == "heldout" for item in items) / len(items)
    assert 0.05 < share < 0.16


def test_short_chains_and_short_questions_are_never_held_out() -> None:
    items = generate_items("kinship", 30, hops=(1, 2, MAX_HOPS, MAX_HOPS + 1), seed=4)
    for item in items:
        assert item.hops > 2 or heldout_by("chains", item) == "train"
        assert (heldout_by("lengths", item) == "heldout") == (item.hops == MAX_HOPS + 1)


def test_nothing_of_a_training_item_is_new() -> None:
    items = generate_items("follow", 3, hops=(1, 2), seed=5)
    seen = Seen.of(items)
    assert all(seen.novelty(item) == frozenset() for item in items)
    assert Seen().novelty(items[1]) >= {"chain", "relation", "pair", "names", "length", "form", "template"}


def test_an_unknown_way_is_named() -> None:
    (item,) = generate_items("kinship", 1, hops=(1,))
    with pytest.raises(ValueError, match="no way 'words'"):
        heldout_by("words", item)
    assert set(WAYS) == {"chains", "templates", "lengths", "names"}
