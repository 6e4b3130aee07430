"""`logit_lens` against forwards of single rows, by every route, and the coda lens against shorter models."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from tiny_models import VOCABULARY, byte_tokenizer, depth_model, module, word_tokenizer

from depthprobe.depth import Coordinate, wrap
from depthprobe.errors import UserError
from depthprobe.lens import logit_lens

TEXTS = ["Ann is the mother of Bob .", "Bob is kind .", "Ann is kind"]


def ids(rows: int = 3, length: int = 6) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "looped", "looped-ouro-coda"])
def test_it_is_the_readout_at_every_position_and_depth(kind: str) -> None:
    model = depth_model(kind)
    result = logit_lens(model, ids(), "all", top_k=3, targets=[5, 9])
    capture = model.capture(ids(), positions="all")
    logprobs = torch.stack([model.readout(capture.states[c], c).log_softmax(-1) for c in model.axis], dim=2)
    logprobs = logprobs.flatten(0, 1)  # [N, D, V]
    assert result.depths == model.axis and result.identity < 1e-5
    torch.testing.assert_close(result.top_probs, logprobs.exp().topk(3).values, rtol=1e-4, atol=1e-6)
    assert result.target_logprobs is not None and result.target_ranks is not None
    torch.testing.assert_close(result.target_logprobs, logprobs[..., [5, 9]], rtol=1e-5, atol=1e-5)
    ranks = (logprobs[..., None, :] > logprobs[..., [5, 9], None]).sum(-1)
    assert torch.equal(result.target_ranks, ranks)
    frame = result.frame
    assert frame.height == 3 * 6 * len(model.axis) * 2
    line = frame.row(2 * len(model.axis) - 1, named=True)
    assert (line["row"], line["position"], line["depth"], line["target_id"]) == (0, 0, len(model.axis) - 1, 9)
    assert line["kl_final"] == pytest.approx(0.0, abs=1e-5) and line["target_rank"] == int(ranks[0, -1, 1])
    assert ("gate_lambda" in frame.columns) == model.gate
    if model.gate:
        ends = frame.filter(pl.col("gate_cdf").is_not_null())
        assert ends["depth"].unique().sort().to_list() == [model.axis.index(c) for c in model.loop_ends]
    assert f"{kind}, plain lens: 3 rows, 18 positions" in repr(result) and "<table>" in result._repr_html_()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "looped", "looped-ouro-coda"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["all", "last", [0, -2]])
def test_padded_batches_give_the_rows_of_single_texts(kind: str, side: Any, positions: Any) -> None:
    model = depth_model(kind, word_tokenizer(TEXTS))
    together = logit_lens(model, TEXTS, positions, side=side)
    for number, text in enumerate(TEXTS):
        alone = logit_lens(model, text, positions)
        mine = together.rows == number
        assert torch.equal(together.positions[mine], alone.positions)
        assert together.input_ids[number] == alone.input_ids[0]
        for name in ("entropy", "kl_final", "top_probs"):
            torch.testing.assert_close(getattr(together, name)[mine], getattr(alone, name), rtol=1e-4, atol=1e-5)
        assert torch.equal(together.top_ids[mine, :, 0], alone.top_ids[:, :, 0])


def test_few_rows_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = depth_model("looped")
    whole = logit_lens(model, ids(), targets=torch.tensor([3, 4, 5]))
    monkeypatch.setattr("depthprobe.lens.logit._HELD", 1)
    apart = logit_lens(model, ids(), targets=torch.tensor([3, 4, 5]))
    for name in ("entropy", "target_logits", "gate_lambda"):
        torch.testing.assert_close(getattr(whole, name), getattr(apart, name))
    assert torch.equal(whole.target_ranks, apart.target_ranks)  # type: ignore[arg-type]


#: As in tests/depth/test_routes.py, what a lens goes wrong at.
ARCHITECTURES = ("gpt2", "neox", "gemma2", "gemma", "granite", "cohere", "qwen3", "phi", "llama-tied")


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_three_routes_give_one_table(kind: str) -> None:
    pytest.importorskip("transformer_lens")
    pytest.importorskip("nnsight")
    plain = module(kind)
    native = logit_lens(wrap(plain, name=kind), ids(), targets=[7])
    for route in ("transformer-lens", "nnsight"):
        other = logit_lens(wrap(plain, name=kind, route=route), ids(), targets=[7])
        assert other.depths == native.depths
        for name in ("top_probs", "entropy", "kl_final", "target_logits", "target_logprobs"):
            torch.testing.assert_close(getattr(other, name), getattr(native, name), rtol=1e-4, atol=1e-4)
        assert float((other.top_ids[..., 0] == native.top_ids[..., 0]).float().mean()) > 0.99


@pytest.mark.parametrize("kind", ["looped", "looped-ouro-coda"])
@torch.no_grad()
def test_the_coda_lens_is_the_model_with_fewer_loops(kind: str) -> None:
    model = depth_model(kind)
    result = logit_lens(model, ids(), lens="coda", targets=[5])
    assert result.depths == model.loop_ends and result.lens == "coda" and result.target_logits is not None
    for loop in range(1, model.n_loops + 1):
        logits = model.model(ids(), n_loops=loop).logits.flatten(0, 1)
        torch.testing.assert_close(result.target_logits[:, loop - 1, 0], logits[:, 5], rtol=1e-5, atol=1e-5)
    plain = logit_lens(model, ids(), targets=[5], coordinates=model.loop_ends)
    assert plain.target_logits is not None and plain.depths == (*model.loop_ends, model.axis[-1])
    assert float((plain.target_logits[:, :-1] - result.target_logits).abs().max()) > 1e-2


@torch.no_grad()
def test_others_stop_where_their_gate_lets_them() -> None:
    model = depth_model("looped")
    model.exit_q = 0.5
    from depthprobe.halting import QExit

    tokens = ids()
    result = logit_lens(model, tokens, lens="coda-exits", targets=[5])
    left = model.model(tokens, exits=QExit(0.5)).exit_depths
    assert result.target_logits is not None and len(left.unique()) > 1
    got = result.target_logits.view(3, 6, model.n_loops)
    for place in range(6):
        for loop in range(1, model.n_loops + 1):
            exits = left.clone()
            exits[:, place] = loop
            logits = model.model(tokens, exits=exits).logits[:, place, 5]
            torch.testing.assert_close(got[:, place, loop - 1], logits, rtol=1e-4, atol=1e-5)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        logit_lens(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_there_is_not_is_refused() -> None:
    model, named = depth_model("llama"), depth_model("llama", word_tokenizer(TEXTS))
    assert "there is no lens 'best'" in refusal(model, [4, 5], lens="best")
    assert "cannot be stopped at a loop" in refusal(model, [4, 5], lens="coda")
    assert "has no coda" in refusal(depth_model("looped-plain"), [4, 5], lens="coda")
    assert "has no exit gate" in refusal(depth_model("looped-huginn"), [4, 5], lens="coda-exits")
    assert "leave them out" in refusal(model, [4], lens="coda", coordinates=model.axis)
    assert "has no tokenizer" in refusal(model, "Ann")
    assert "taken as they are" in refusal(named, [4, 5], bos="never")
    assert "row 1 has no tokens" in refusal(model, [[4], []])
    assert "outside 0 … 60" in refusal(model, [4, 99])
    assert "position 2 is outside its 2 tokens (row 0)" in refusal(model, [4, 5], positions=2)
    assert "positions is 'first'" in refusal(model, [4, 5], positions="first")
    assert "'Ann Bob' is 2 tokens" in refusal(named, "Ann is", targets="Ann Bob")
    assert "does not know 'Zoe'" in refusal(named, "Ann is", targets="Zoe")
    assert "is not on the axis" in refusal(model, [4], coordinates=[Coordinate(1, 9)])
    model.context_length = 1
    assert "the context of llama 1" in refusal(model, [4, 5])


def test_ids_of_any_kind_are_taken_and_the_rest_is_refused() -> None:
    model = depth_model("llama", word_tokenizer(TEXTS))
    one = logit_lens(model, [4, 5], "last")
    padded = {"input_ids": torch.tensor([[0, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    for given in (torch.tensor([4, 5]), torch.tensor([[4, 5]]), np.array([4, 5]), [np.int64(4), np.int64(5)], padded):
        assert torch.equal(logit_lens(model, given, "last").top_ids, one.top_ids)  # type: ignore[arg-type]
    assert torch.equal(logit_lens(model, [4, 5], np.int64(-1)).top_ids, one.top_ids)  # type: ignore[arg-type]
    assert logit_lens(model, [4, 5], targets=np.int64(7)).target_ids is not None  # type: ignore[arg-type]
    for given in (None, 3, torch.tensor(4), torch.tensor([4.5]), ["Ann", 3], [[["a"]]], {"a": 1}):
        assert refusal(model, given)
    assert "positions are no whole numbers" in refusal(model, [4], positions=[[0, 0]])
    assert "positions are no whole numbers" in refusal(model, [4], positions=None)
    assert "targets are torch.float32" in refusal(model, [4], targets=torch.tensor([1.7]))
    assert "targets are no whole numbers" in refusal(model, [4], targets=[None])
    assert "side is 'middle'" in refusal(model, [4], side="middle")
    assert "coordinates are empty" in refusal(model, [4], coordinates=[])
    assert "top_k is '5'" in refusal(model, [4], top_k="5")
    assert "has no depth axis: open it with" in refusal(model.model, [4])


def test_an_end_of_text_that_is_also_the_unknown_token_can_be_a_target() -> None:
    tokenizer = byte_tokenizer(TEXTS)
    tokenizer.add_special_tokens({"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    model = depth_model("llama", tokenizer)
    assert logit_lens(model, "Ann", targets="<|endoftext|>").target_ids is not None


def test_bos_is_as_asked() -> None:
    with_bos, without = word_tokenizer(TEXTS), byte_tokenizer(TEXTS)
    model = depth_model("llama", with_bos)
    for bos, expected in (("tokenizer", True), ("always", True), ("never", False)):
        result = logit_lens(model, ["Ann is", "[BOS] Ann is"], "last", bos=bos)
        assert result.bos == (expected, expected)
        assert result.input_ids[0] == result.input_ids[1]  # and never twice
    bare = depth_model("llama", without)
    assert without.pad_token_id is None and logit_lens(bare, TEXTS, "last").bos == (False,) * 3
    assert "has no BOS token" in refusal(bare, "Ann", bos="always")
    assert "there is no 'twice'" in refusal(bare, "Ann", bos="twice")


def test_chat_templates_on_request() -> None:
    tokenizer = word_tokenizer([*TEXTS, "user assistant"])
    model = depth_model("llama", tokenizer)
    assert "has no chat template" in refusal(model, "Ann is", chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    (row,) = logit_lens(model, "Ann is", "last", chat=True).input_ids
    assert tokenizer.decode(row) == "user Ann is assistant"


@torch.no_grad()
def test_a_model_that_overflows_says_so() -> None:
    plain = module("llama")
    plain.model.layers[1].mlp.up_proj.weight.mul_(100)
    plain.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    half = wrap(plain.to(torch.float16), name="half")
    said = refusal(half, [4, 5, 6], "last")
    assert "the states of half overflow float16 (its largest number is 65504) (row 0, token 2, depth r1.l2)" in said
    assert "--dtype float32" in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"positions": True}, "positions are no whole numbers but a bool True"),
        ({"positions": [np.bool_(True)]}, "positions are no whole numbers"),
        ({"positions": 1.5}, "positions are no whole numbers"),
        ({"targets": True}, "targets are no whole numbers"),
        ({"top_k": True}, "top_k is True: give a whole number of at least 1"),
        ({"top_k": 2.0}, "top_k is 2.0: give a whole number of at least 1"),
        ({"top_k": 0}, "top_k is 0: give a whole number of at least 1"),
        ({"coordinates": 4}, "coordinates is 4: take them from"),
        ({"coordinates": "r1.l1"}, "coordinates is 'r1.l1': take them from"),
        ({"coordinates": [(1, 1)]}, "is no Coordinate (coordinates)"),
        ({"coordinates": []}, "coordinates are empty"),
        ({"chat": "yes"}, "chat is 'yes': give True or False"),
        ({"lens": None}, "there is no lens 'None'"),
        ({"side": 1}, "side is 1"),
        ({"lens": "tuned", "tuned": 5}, "a int is no tuned lens (tuned)"),
    ],
)
def test_odd_values_from_python(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        logit_lens(depth_model("llama"), [4, 5, 6], **options)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_of_other_libraries_and_one_coordinate() -> None:
    model = depth_model("llama")
    odd = logit_lens(model, np.array([4, 5, 6]), np.int64(-1), np.int64(2), np.int64(7), coordinates=model.axis[1])  # type: ignore[arg-type]
    plain = logit_lens(model, [4, 5, 6], [-1], 2, [7], coordinates=[model.axis[1]])
    assert odd.depths == plain.depths and torch.equal(odd.top_probs, plain.top_probs)
    assert odd.target_ranks is not None and torch.equal(odd.target_ranks, plain.target_ranks)  # type: ignore[arg-type]
