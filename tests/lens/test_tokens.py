"""The table `tokens`: every token of a prompt, against forwards of single prompts."""

from __future__ import annotations

import polars as pl
import pytest
import torch
from test_lens_table import items, tokenizer
from tiny_models import depth_model

from depthprobe import tables
from depthprobe.lens import browse_depths, browsed, prepare_items, token_batch, token_rows
from depthprobe.lens import tokens as tokens_module


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "looped", "looped-plain", "looped-ouro"])
def test_rows_are_those_of_single_prompts(kind: str) -> None:
    made = items()
    model = depth_model(kind, tokenizer("words", made))
    targets = prepare_items(model, made).targets
    depths = browse_depths(model)
    frame = token_batch(model, targets)
    tables.check("tokens", frame)
    assert frame.height == sum(len(t.prompt_ids) for t in targets) * len(depths)
    for target in (targets[0], targets[4]):
        mine = frame.filter(pl.col("item") == target.item.id)
        capture = model.capture(torch.tensor([target.prompt_ids]), positions="all")
        assert mine["token_id"].gather_every(len(depths)).to_list() == list(target.prompt_ids)
        assert mine["depth"].to_list() == list(depths) * len(target.prompt_ids)
        for number, depth in enumerate(depths):
            rows = mine.filter(pl.col("depth") == depth)
            coordinate = model.axis[depth]
            probs, best = model.readout(capture.states[coordinate][0], coordinate).softmax(-1).topk(5)
            got = torch.tensor(rows["top5_probs"].to_list())
            torch.testing.assert_close(got, probs, rtol=1e-4, atol=1e-6)
            assert rows["top1"].to_list() == [model.tokenizer.decode([int(i)]) or f"<{i}>" for i in best[:, 0]]
            assert rows["top1_prob"].to_list() == rows["top5_probs"].list.first().to_list()
            assert (rows["loop"][0], rows["layer"][0], rows["site"][0]) == tuple(coordinate)
            if model.gate and coordinate in model.loop_ends:
                assert capture.gate_lambda is not None
                lambdas = torch.tensor(rows["gate_lambda"].to_list())
                torch.testing.assert_close(lambdas, capture.gate_lambda[0, :, number], rtol=1e-4, atol=1e-5)
            else:
                assert rows["gate_lambda"].null_count() == rows.height


def test_batches_can_be_done_apart() -> None:
    made = items(stories=3)
    model = depth_model("looped", tokenizer("words", made))
    targets = prepare_items(model, made).targets
    whole = dict(token_rows(model, targets, 4))
    rest = dict(token_rows(model, targets, 4, done={0, 2}))
    assert list(whole) == [0, 1, 2] and list(rest) == [1] and whole[1].equals(rest[1])


def test_depths_and_items_are_few_where_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = items(stories=3)
    looped, llama = (depth_model(kind, tokenizer("words", made)) for kind in ("looped", "llama"))
    assert [looped.axis[d] for d in browse_depths(looped)] == [*looped.loop_ends, looped.axis[-1]]
    assert browse_depths(llama) == (0, 1, 2, 3)
    targets = prepare_items(llama, made).targets
    assert browsed(llama, targets) == targets and browsed(llama, targets, 2) == targets[:2]
    monkeypatch.setattr(tokens_module, "MOST_DEPTHS", 3)
    assert browse_depths(llama) in ((0, 1, 3), (0, 2, 3))
    monkeypatch.setattr(tokens_module, "MOST_LOGITS", 1)
    assert browsed(llama, targets) == targets[:1]
