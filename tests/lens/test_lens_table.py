"""The lens table against a slow reference: an unpadded forward for each prompt and beginning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
import torch
from tiny_models import byte_tokenizer, depth_model, word_tokenizer
from torch import Tensor

from depthprobe import tables
from depthprobe.analysis import analyse
from depthprobe.depth import Capture, DepthModel
from depthprobe.errors import UserError
from depthprobe.halting import cdf, stopping_distribution
from depthprobe.lens import Target, lens_batch, lens_rows, n_batches, prepare_items, token_batch
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item


def items(task: str = "kinship", stories: int = 2, **settings: Any) -> list[Item]:
    generator = Generator(task, hops=(1, 2, 3), seed=3, **settings)
    return [item for number in range(stories) for item in generator.story(number)]


def tokenizer(kind: str, made: list[Item]) -> Any:
    texts = [item.text + item.continuation(word) for item in made for word in item.candidates]
    return word_tokenizer(texts) if kind == "words" else byte_tokenizer(texts)


class Reference:
    """What the columns mean, written for one item at a time."""

    def __init__(self, model: DepthModel, item: Item) -> None:
        self.model, self.item = model, item
        self.captures: dict[tuple[int, ...], Capture] = {}
        self.bos = [1] if model.tokenizer.bos_token_id is not None else []
        self.prompt = self.encode(item.text)
        self.paths = {w: self.after(w) for w in dict.fromkeys((*item.candidates, *item.plausible))}

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer(text, add_special_tokens=False)["input_ids"]

    def after(self, word: str) -> tuple[int, ...]:
        both = self.encode(self.item.text + " " + word)
        assert both[: len(self.prompt)] == self.prompt
        return tuple(both[len(self.prompt) :])

    def logprobs(self, depth: int, suffix: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([[*self.bos, *self.prompt, *suffix]])
        if suffix not in self.captures:
            self.captures[suffix] = self.model.capture(ids)
        coordinate = self.model.axis[depth]
        state = self.captures[suffix].states[coordinate]
        return self.model.readout(state, coordinate)[0].double().log_softmax(-1)

    def score(self, depth: int, word: str) -> float:
        """Product over the places on the word's path where another word turns off, and of the first token."""
        path, score = self.paths[word], 1.0
        for place in range(len(path) + 1):
            here = [other for other in self.paths.values() if other[:place] == path[:place]]
            nexts = {other[place] for other in here if len(other) > place}
            ends = any(len(other) == place for other in here)
            if place and len(nexts) + ends < 2:
                continue
            p = self.logprobs(depth, path[:place]).exp()
            score *= (
                float(p[path[place]]) if place < len(path) else 1.0 - sum(float(p[token]) for token in nexts)
            )
        return score

    def row(self, depth: int) -> dict[str, Any]:
        item, last = self.item, len(self.model.axis) - 1
        own, final = self.logprobs(depth, ()), self.logprobs(last, ())
        first = self.paths[item.answer][0]
        scores = {word: self.score(depth, word) for word in self.paths}
        mass = sum(scores[word] for word in item.candidates)
        best = max(item.candidates, key=lambda word: scores[word])
        whole = None
        if depth == last:
            path = self.paths[item.answer]
            whole = sum(float(self.logprobs(last, path[:i])[token]) for i, token in enumerate(path))
        return {
            "target_logprob": float(own[first]),
            "target_prob": math.exp(float(own[first])),
            "target_rank": int((own > own[first]).sum()),
            "p_plausible": sum(scores[word] for word in item.plausible),
            "p_candidates": mass,
            "candidate_prob": scores[item.answer] / mass,
            "candidate_correct": best == item.answer,
            "candidate_plausible": best in item.plausible,
            "answer_logprob": whole,
            "top1_id": int(own.argmax()),
            "equals_final": bool(own.argmax() == final.argmax()),
            "entropy": float(-(own.exp() * own).sum()),
            "kl_final": float((final.exp() * (final - own)).sum()),
        }


CASES = [
    ("llama", "words", "kinship"),
    ("llama", "bytes", "kinship"),
    ("llama", "bytes", "follow"),
    ("gpt2", "bytes", "kinship"),
    ("neox", "words", "follow"),
    ("gemma2", "bytes", "kinship"),
    ("looped", "words", "kinship"),
    ("looped", "bytes", "kinship"),
    ("looped-ouro", "bytes", "follow"),
]


@pytest.mark.parametrize(("kind", "words", "task"), CASES)
def test_rows_are_those_of_the_reference(kind: str, words: str, task: str) -> None:
    made = items(task)
    model = depth_model(kind, tokenizer(words, made))
    prepared = prepare_items(model, made)
    table = pl.concat([rows for _, rows in lens_rows(model, prepared.targets, 4)])
    tables.check("lens", table)
    assert table.height == len(made) * len(model.axis)
    assert [prepared.table["item"][i] for i in range(len(made))] == [item.id for item in made]
    for number in (0, 5):
        reference = Reference(model, made[number])
        rows = table.filter(pl.col("item") == made[number].id)
        assert rows["depth"].to_list() == list(range(len(model.axis)))
        for depth in (0, len(model.axis) // 2, len(model.axis) - 1):
            got = rows.row(depth, named=True)
            for column, value in reference.row(depth).items():
                if isinstance(value, float):
                    assert got[column] == pytest.approx(value, rel=2e-5, abs=1e-5), column
                else:
                    assert got[column] == value, column
            assert (got["loop"], got["layer"], got["site"]) == tuple(model.axis[depth])


@pytest.mark.parametrize("task", ["kinship", "follow"])
def test_the_answer_has_no_more_probability_than_the_plausible_answers(task: str) -> None:
    """Also where first tokens collide: there the first token alone has more than all plausible answers."""
    made = items(task)
    model = depth_model("looped", tokenizer("bytes", made))
    prepared = prepare_items(model, made)
    assert prepared.table["n_collisions"].max() > 0
    table = pl.concat([rows for _, rows in lens_rows(model, prepared.targets, 4)])
    answer = table["candidate_prob"].cast(pl.Float64) * table["p_candidates"]
    assert (answer <= table["p_plausible"] + 1e-6).all()
    assert (table["target_prob"] > table["p_plausible"]).any()
    by_hops = analyse(table, resamples=100)["accuracy"]
    assert (by_hops["p_correct"] <= by_hops["p_plausible"] + 1e-6).all()


@pytest.mark.parametrize("words", ["words", "bytes"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "looped"])
def test_batches_do_not_change_rows(kind: str, words: str) -> None:
    made = items()
    model = depth_model(kind, tokenizer(words, made))
    targets = prepare_items(model, made).targets
    alone = pl.concat([rows for _, rows in lens_rows(model, targets, 1)])
    together = pl.concat([rows for _, rows in lens_rows(model, targets, 6)])
    for column, dtype in alone.schema.items():
        if dtype == pl.Float32:
            assert alone[column].is_null().equals(together[column].is_null())
            difference: Any = (alone[column] - together[column]).abs().max()
            assert (difference or 0.0) <= 2e-5, column
        elif column != "top5_probs" and column != "top5":
            assert alone[column].equals(together[column]), column


def test_a_resumed_run_gives_equal_tables() -> None:
    made = items(stories=3)
    model = depth_model("looped", tokenizer("words", made))
    targets = prepare_items(model, made).targets
    assert n_batches(len(targets), 4) == 3
    whole = dict(lens_rows(model, targets, 4))
    rest = dict(lens_rows(model, targets, 4, done={0, 2}))
    assert list(whole) == [0, 1, 2] and list(rest) == [1]
    assert whole[1].equals(rest[1])


def test_gate_columns_stand_at_loop_ends() -> None:
    made = items(stories=1)
    model = depth_model("looped-ouro-coda", tokenizer("words", made))
    targets = prepare_items(model, made).targets
    rows = lens_batch(model, targets)
    ends = rows.filter(pl.col("is_loop_end"))
    assert ends["site"].unique().to_list() == ["loop_state"]
    assert ends["loop"].to_list() == [1, 2, 3] * len(made)
    assert rows.filter(~pl.col("is_loop_end"))["gate_lambda"].null_count() == rows.height - ends.height
    for target in targets:
        mine = ends.filter(pl.col("item") == target.item.id)
        out = model.model(torch.tensor([target.prompt_ids]), output_gate_logits=True)
        lambdas = out.gate_logits[0, -1].sigmoid()
        assert mine["gate_lambda"].to_list() == pytest.approx(lambdas.tolist(), abs=1e-5)
        assert mine["gate_cdf"].to_list() == pytest.approx(
            cdf(stopping_distribution(lambdas)).tolist(), abs=1e-5
        )
        assert mine["gate_cdf"][-1] == 1.0
    ordinary = depth_model("llama", tokenizer("words", made))
    rows = lens_batch(ordinary, prepare_items(ordinary, made).targets)
    assert not rows["is_loop_end"].any() and rows["gate_lambda"].null_count() == rows.height


def test_the_items_table_carries_tokens_and_facts() -> None:
    made = items()
    model = depth_model("llama", tokenizer("words", made))
    table = prepare_items(model, made).table
    tables.check("items", table)
    row = table.row(2, named=True)
    assert row["bos"] and row["prompt_ids"][0] == 1 and 2 not in row["prompt_ids"]
    assert row["n_tokens"] == len(row["prompt_ids"]) and row["answer"] == made[2].answer
    fact = row["facts"][0]
    assert row["text"][fact["start"] : fact["end"]].startswith(fact["subject"])
    assert model.tokenizer.decode(row["answer_ids"]).replace(" - ", "-") == made[2].answer


def test_nan_logits_name_the_item() -> None:
    made = items()
    model = depth_model("llama", tokenizer("words", made))
    targets = prepare_items(model, made).targets
    names = set(targets[3].prompt_ids) - set(targets[0].prompt_ids)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[names.pop()] = torch.nan
    with pytest.raises(UserError, match=f"llama gives NaN logits .item {targets[3].item.id}."):
        lens_batch(model, targets)


def test_a_broken_readout_stops_the_run() -> None:
    made = items(stories=1)
    model = depth_model("cohere", tokenizer("words", made))
    targets = prepare_items(model, made).targets
    model._tail = replace(model._tail, scale=1.0)
    with pytest.raises(UserError, match="differs from the model's own logits"):
        lens_batch(model, targets)


def test_long_stories_are_named_or_counted() -> None:
    made = items()
    model = depth_model("llama", tokenizer("words", made))
    lengths = {target.item.id: target.n_positions for target in prepare_items(model, made).targets}
    longest = max(lengths.values())
    model.context_length = longest - 1
    with pytest.raises(
        UserError, match=rf"its {longest} tokens exceed the context of llama, {longest - 1} tokens"
    ):
        prepare_items(model, made)
    prepared = prepare_items(model, made, skip_too_long=True)
    assert set(prepared.too_long) == {name for name, length in lengths.items() if length == longest}
    assert prepared.table.height == len(prepared.targets) == len(made) - len(prepared.too_long)
    model.context_length = 3
    with pytest.raises(UserError, match="all 6 items exceed the context"):
        prepare_items(model, made, skip_too_long=True)


def test_no_items_and_twins_are_refused() -> None:
    made = items(stories=1)
    model = depth_model("llama", tokenizer("words", made))
    with pytest.raises(UserError, match="there are no items"):
        prepare_items(model, [])
    with pytest.raises(UserError, match="two items have the id"):
        prepare_items(model, [made[0], made[0]])
    with pytest.raises(UserError, match="batch size 0"):
        list(lens_rows(model, [], 0))


def test_first_token_flag_follows_collisions() -> None:
    made = items(stories=1)
    flags: dict[str, Target] = {}
    for words in ("words", "bytes"):
        model = depth_model("llama", tokenizer(words, made))
        flags[words] = prepare_items(model, made).targets[0]
    # both tokenizers cut father-in-law after father; the words stay apart by their later turns
    assert flags["bytes"].n_collisions > 0 and not flags["bytes"].first_token_only
    assert flags["words"].n_collisions > 0 and len(flags["words"].nodes) > 1


@pytest.mark.parametrize("words", ["words", "bytes"])
@pytest.mark.parametrize("kind", ["looped", "looped-ouro-coda"])
@torch.no_grad()
def test_behind_the_coda_a_loop_says_what_the_model_says_with_so_many_loops(kind: str, words: str) -> None:
    made = items(stories=1)
    model = depth_model(kind, tokenizer(words, made))
    targets = prepare_items(model, made).targets
    plain, coda = lens_batch(model, targets), lens_batch(model, targets, coda=True)
    ends = pl.col("is_loop_end")
    assert set(coda.filter(ends)["lens"]) == {"coda"} and set(coda.filter(~ends)["lens"]) == {"plain"}
    assert coda.filter(~ends).drop("lens").equals(plain.filter(~ends).drop("lens"))
    for target in targets:
        rows = coda.filter(ends & (pl.col("item") == target.item.id))
        for row in rows.iter_rows(named=True):
            logits = model.model(torch.tensor([target.prompt_ids]), n_loops=row["loop"]).logits[0, -1]
            logprobs = logits.double().log_softmax(-1)
            assert row["target_logprob"] == pytest.approx(float(logprobs[target.answer_ids[0]]), abs=2e-5)
            assert row["top1_id"] == int(logits.argmax())
    depths = coda.filter(ends)["depth"].unique().to_list()
    shown = token_batch(model, targets, coda=True).filter(pl.col("depth").is_in(depths))
    last = shown.filter(pl.col("position") == pl.col("position").max().over("item")).sort("item", "depth")
    assert last["top1"].to_list() == coda.filter(ends).sort("item", "depth")["top1"].to_list()
    again = pl.concat([rows for _, rows in lens_rows(model, targets, 2, coda=True)])
    assert (again["candidate_prob"] - coda["candidate_prob"]).abs().max() < 2e-5
