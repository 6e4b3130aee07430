"""What is held out, and that it is new."""

from __future__ import annotations

import pytest

from depthprobe.tasks.generate import Generator, generate_items
from depthprobe.tasks.heldout import (
    FORMS,
    MAX_HOPS,
    NOVELTIES,
    TEMPLATES,
    WAYS,
    Seen,
    heldout_by,
    novelty_counts,
)


@pytest.mark.parametrize(("way", "new"), [("chains", "chain"), ("names", "names"), ("lengths", "length")])
def test_what_is_held_out_is_new_at_test(way: str, new: str) -> None:
    settings = {"hops": (1, 2, 3, 4, MAX_HOPS + 1)}
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
    assert Seen().novelty(items[1]) == set(NOVELTIES)


def test_the_longest_held_out_length_can_be_asked_and_the_default_ladder_is_trained() -> None:
    assert max(Generator("kinship").hops) == MAX_HOPS < 8


def test_novelty_is_counted_by_task_and_hops_within_the_task() -> None:
    train = generate_items("kinship", 20, hops=(1, 2, 3), split="train", seed=1)
    test = generate_items("kinship", 6, hops=(1, 3, 4), split="heldout", seed=2)
    rows = novelty_counts([*test, *train[:2], *generate_items("follow", 2, hops=(1,))], train)
    by_key = {(row["task"], row["hops"]): row for row in rows}
    assert set(by_key) == {("follow", 1), ("kinship", 1), ("kinship", 2), ("kinship", 3), ("kinship", 4)}
    assert by_key["kinship", 3]["items"] == by_key["kinship", 3]["new"]["chain"] == 6
    assert by_key["kinship", 4]["new"]["length"] == 6 and by_key["kinship", 3]["new"]["length"] == 0
    assert by_key["kinship", 2] == {
        "task": "kinship", "hops": 2, "items": 1, "new": dict.fromkeys(NOVELTIES, 0), "nothing_new": 1,
    }  # fmt: skip
    assert by_key["kinship", 1]["nothing_new"] >= 1
    assert by_key["follow", 1]["new"]["chain"] == 2  # of follow nothing was trained


def test_an_unknown_way_is_named() -> None:
    (item,) = generate_items("kinship", 1, hops=(1,))
    with pytest.raises(ValueError, match="no way 'words'"):
        heldout_by("words", item)
    assert set(WAYS) == {"chains", "templates", "lengths", "names"}
