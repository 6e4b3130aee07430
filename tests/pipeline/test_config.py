"""Options and configuration files: what is read, and what is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthprobe.errors import UserError
from depthprobe.pipeline import AnalyzeConfig, parse_hops, read_config
from depthprobe.pipeline.questions import questions
from depthprobe.tasks.generate import generate_items
from depthprobe.tasks.io import write_items


@pytest.mark.parametrize(
    ("text", "hops"),
    [
        ("1-6", (1, 2, 3, 4, 5, 6)),
        ("3", (3,)),
        ("5-6, 1,2", (1, 2, 5, 6)),
        ("1–3", (1, 2, 3)),
        ("2,2-3", (2, 3)),
    ],
)
def test_hops(text: str, hops: tuple[int, ...]) -> None:
    assert parse_hops(text) == hops


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no range"),
        ("x", "no range"),
        ("1-", "no range"),
        ("1..6", "no range"),
        ("-1", "no range"),
        ("1,,2", "no range"),
        ("6-1", "runs backwards"),
        ("0-3", "out of range"),
        ("7-9", "out of range"),
        ("99999999999999999999", "out of range"),
    ],
)
def test_bad_hops(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_hops(text)


def test_defaults_and_kinds() -> None:
    config = AnalyzeConfig.of({"model": None, "hops": "2-3", "task": "follow"})
    assert config.model == "follow-demo"
    assert (config.task, config.hops, config.n) == (("follow",), (2, 3), 100)
    assert AnalyzeConfig.of({}).task == ("follow",)  # an embedded model is asked what it was trained on
    assert AnalyzeConfig.of({"model": "kinship-demo"}).task == ("kinship",)
    assert AnalyzeConfig.of({"model": "kinship-demo", "task": "follow"}).task == ("follow",)
    assert AnalyzeConfig.of({"model": "somewhere"}).task == ("kinship", "follow")
    kinship = AnalyzeConfig.of({"model": "kinship-demo"})  # and told as it was trained
    assert (kinship.order, kinship.n) == ("forward", 400)
    other = AnalyzeConfig.of({"model": "kinship-demo", "order": "shuffled", "n": 7})
    assert (other.task, other.order, other.n) == (("kinship",), "shuffled", 7)
    data = AnalyzeConfig.of({"model": "kinship-demo", "data": "mine.jsonl"})
    assert (data.task, data.order, data.n) == ((), None, None)
    assert AnalyzeConfig.of({"model": "kinship-demo", "task": "kinship"}) == kinship
    assert AnalyzeConfig.of({}).order is None
    assert AnalyzeConfig.of({"task": ["follow", "kinship", "follow"]}).task == ("kinship", "follow")
    assert AnalyzeConfig.of({"hops": [3, 1]}).hops == (1, 3)
    assert AnalyzeConfig.of({"hops": 4}).hops == (4,)
    own = AnalyzeConfig.of({"data": "mine.jsonl"})
    assert (own.task, own.hops, own.n, own.split) == ((), (), None, "any")


def test_words_that_the_config_knows_without_torch_are_those_of_the_rooms() -> None:
    from depthprobe import depth
    from depthprobe.lens import targets
    from depthprobe.pipeline import config

    assert config.ROUTES == depth.ROUTES and config.BOS == targets.BOS


def test_a_split_that_short_chains_do_not_have_is_not_claimed() -> None:
    assert AnalyzeConfig.of({"hops": "1-3"}).split == "heldout"
    assert AnalyzeConfig.of({"hops": "1-2"}).split == "any"
    assert AnalyzeConfig.of({"hops": "1-2", "split": "train"}).split == "train"
    assert AnalyzeConfig.of({"hops": "2-3", "split": "heldout"}).split == "heldout"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modle": "x"}, "unknown option 'modle'"),
        ({"task": "maths"}, "there is no 'maths': one of kinship, follow"),
        ({"task": []}, "one task or more"),
        ({"task": 3}, "one task or more"),
        ({"hops": [1, "2"]}, "whole numbers"),
        ({"hops": [-1]}, "no range"),
        ({"hops": True}, "whole numbers"),
        ({"hops": []}, "whole numbers"),
        ({"n": 0}, "at least 1, got 0"),
        ({"n": True}, "at least 1"),
        ({"n": "5"}, "at least 1, got '5'"),
        ({"batch_size": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
        ({"seed": 2**64}, "at most 9223372036854775807"),
        ({"resamples": 10}, "at least 100"),
        ({"model": ""}, "to be a text"),
        ({"dtype": 16}, "to be a text"),
        ({"split": "test"}, "one of heldout, train, any"),
        ({"split": "heldout", "hops": "1-2"}, "no chain of fewer than 3 relations is held out"),
        ({"skip_too_long": "yes"}, "true or false"),
        ({"chat": "yes"}, "true or false"),
        ({"route": "hooks"}, "one of native, transformer-lens, nnsight"),
        ({"bos": "twice"}, "one of tokenizer, always, never"),
        ({"browse": -1}, "at least 0"),
        ({"data": "x", "task": "kinship"}, "--data brings its own stories"),
        ({"data": "x", "order": "forward"}, "--data or --order, not both"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        AnalyzeConfig.of(options)
    assert "\n" not in str(caught.value)


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: tiny\ntask: [follow]\nhops: 1-3\nbatch-size: 8\nskip_too_long: true\nout: runs/x\n"
    )
    options = read_config(file)
    assert options == {
        "model": "tiny", "task": ["follow"], "hops": "1-3", "batch_size": 8,
        "skip_too_long": True, "out": "runs/x",
    }  # fmt: skip
    file.write_text("# nothing asked\n")
    assert read_config(file) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: tiny\n", "unknown option 'modle'"),
        ("model: tiny\nhops: [1, 2\n", "not YAML: .*line 3"),
        ("- model\n", "not a mapping"),
        ("n: 5\nhops: 1-3\nn: 6\n", "option 'n' stands there twice .*lines 1 and 3"),
        ("batch-size: 5\nbatch_size: 5\n", "option 'batch_size' stands there twice"),
        ("model: !!python/object/apply:os.system ['true']\n", "not YAML"),
        ("\x00", "not YAML"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_config(file)
    assert "c.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_config_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such configuration file"):
        read_config(tmp_path / "no.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe4\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path / "latin.yaml")


def test_a_model_that_knows_one_length_of_story_is_asked_in_such_stories() -> None:
    remarks: list[str] = []
    config = AnalyzeConfig.of({"model": "kinship-demo", "hops": "1-3", "n": 2})
    items = questions(config, remark=remarks.append)
    assert [item.hops for item in items] == [1, 2, 3, 1, 2, 3] and {len(item.facts) for item in items} == {6}
    assert remarks == []
    longer = questions(AnalyzeConfig.of({"model": "kinship-demo", "hops": "7", "n": 1}), remark=remarks.append)
    assert [item.hops for item in longer] == [7] and len(longer[0].facts) == 7
    assert remarks == ["kinship-demo has seen stories of 6 facts, and is asked in stories of 7"]
    other = questions(AnalyzeConfig.of({"model": "somewhere", "task": "kinship", "hops": "1-3", "n": 1}))
    assert len(other[0].facts) == 3


def test_an_item_whose_facts_give_another_answer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    items = generate_items("follow", 2, hops=(1, 2, 3))
    write_items(file, items)
    assert questions(AnalyzeConfig.of({"data": str(file)})) == items
    wrong = [replace(item, answer=item.chain_people[0], plausible=item.candidates) for item in items[1:]]
    write_items(file, [items[0], *wrong])
    told = rf"{items[1].id}: the facts give {items[1].answer}, the item says \w+ \(and 4 more\) .*tasks check"
    with pytest.raises(UserError, match=told) as caught:
        questions(AnalyzeConfig.of({"data": str(file), "n": 1}))
    assert "mine.jsonl" in str(caught.value)
