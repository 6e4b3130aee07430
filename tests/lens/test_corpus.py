"""Where the texts of a tuned lens come from: nothing is in both halves, and bad input is one line."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from tiny_models import depth_model, word_tokenizer

from depthprobe.errors import UserError
from depthprobe.lens.corpus import Document, _side, open_corpus, token_rows
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item
from depthprobe.tasks.splits import split_of


def refusal(name: str, split: str = "all") -> str:
    with pytest.raises(UserError) as caught:
        list(open_corpus(name).documents(split))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_topics_that_are_held_out_share_no_block_with_the_others() -> None:
    corpus = open_corpus("pydoc")
    assert corpus.license == "PSF-2.0"
    train, held = list(corpus.documents("train")), list(corpus.documents("heldout"))
    assert len(train) > 100 and len(held) > 20
    assert {d.group for d in train}.isdisjoint(d.group for d in held)
    seen = {block for d in train for block in d.text.split("\n\n")}
    assert seen.isdisjoint(block for d in held for block in d.text.split("\n\n"))
    assert list(corpus.documents("train")) == train


@pytest.mark.parametrize("name", ["stories", "stories:follow", "stories:kinship"])
def test_stories_are_of_their_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chain of every story that is read: held out in the one half, seen in training in the other."""
    made: dict[str, Item] = {}
    story = Generator.story

    def kept(self: Generator, number: int) -> list[Item]:
        ladder = story(self, number)
        made.update({item.text: max(ladder, key=lambda rung: rung.hops) for item in ladder})
        return ladder

    monkeypatch.setattr(Generator, "story", kept)
    corpus = open_corpus(name)
    assert corpus.license == "Apache-2.0"
    train, held = (list(islice(corpus.documents(split), 24)) for split in ("train", "heldout"))
    assert {d.text for d in train}.isdisjoint(d.text for d in held)
    assert len({d.group for d in held}) == 24
    for split, documents in (("train", train), ("heldout", held)):
        for document in documents:
            (item,) = (longest for text, longest in made.items() if document.text.startswith(f"{text} "))
            assert len(item.chain_relations) == 6 and item.story_id == document.group
            assert split_of(item.chain_relations) == split, document
            follows = all(name in document.text for name in item.chain_people)
            assert follows, "the document tells the chain"


def test_files_are_cut_and_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"Block {n}. " + "word " * 150 for n in range(60)))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n\n" for n in range(40)))
    (tmp_path / "c.md").write_text("not read")
    corpus = open_corpus(str(tmp_path))
    whole, train, held = (list(corpus.documents(split)) for split in ("all", "train", "heldout"))
    assert len(whole) == 70 and sorted(train + held) == sorted(whole) and 0.05 < len(held) / 70 < 0.4
    assert all(len(d.text) >= 1000 for d in whole if d.group.startswith("a.txt"))
    (line,) = [d for d in whole if d.text == "line 7"]
    assert line.group == "b.jsonl:7"
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("one\n\ntwo")
    assert "3.txt" in {d.group for d in open_corpus(str(tmp_path)).documents("all")}  # many files stay whole


def test_bad_texts(tmp_path: Path) -> None:
    assert "there is no such text (nowhere.txt)" in refusal("nowhere.txt")
    assert "no stories of 'chess'" in refusal("stories:chess")
    assert "for training or for a test" in refusal("stories") and "leave out --all" in refusal("stories")
    assert "holds no text" in refusal(str(tmp_path))
    (tmp_path / "a.md").write_text("x")
    assert "is no text" in refusal(str(tmp_path / "a.md"))
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"words": 1}\n')
    assert "a.jsonl, line 2" in refusal(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in refusal(str(tmp_path / "a.txt"))


def test_a_text_too_small_to_split_is_told(tmp_path: Path) -> None:
    """Whichever side its one document falls to; how texts are cut is said, for that is what is to be mended."""
    found: dict[bool, Path] = {}
    for number in range(40):
        path = tmp_path / f"{number}.txt"
        path.write_text("One line of text.\n")
        found.setdefault(bool(_side(f"{path.name}:0") == "train"), path)
    trains, tests = found[True], found[False]
    assert len(list(open_corpus(str(trains)).documents("train"))) == 1
    said = refusal(str(trains), "heldout")
    assert "the text is 1 document, of which none is held out: about one in five is" in said
    said = refusal(str(tests), "train")
    assert "the text is 1 document, of which none is left to train on: about one in five is held out" in said
    assert f"({tests}): give more text; documents are cut at blank lines, 1000 characters or more each" in said
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "there is no text in it" in refusal(str(tmp_path / "empty.txt"), "all")


def test_documents_become_rows() -> None:
    model = depth_model("llama", word_tokenizer(["a b c d e f g h i j"]))
    rows = list(token_rows(model, iter([Document("x", "a b c d e f g h i j"), Document("y", "")]), 6, shortest=5))
    assert [len(row.ids) for row in rows] == [6, 6] and all(row.ids[0] == 1 for row in rows)  # BOS in front of each
    words = [token for row in rows for token in row.ids[1:]]
    assert model.tokenizer.decode(words) == "a b c d e f g h i j"
    for length, said in ((1, "at least 2"), (257, "the context of llama is 256")):
        with pytest.raises(UserError, match=said):
            list(token_rows(model, iter([]), length))
    with pytest.raises(UserError, match="has no tokenizer"):
        list(token_rows(depth_model("llama"), iter([])))
