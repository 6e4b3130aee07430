"""The table `effective`: against one forward at a time, and on models of which the answer is known."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from slow_effective import Slow, kl
from tiny_models import byte_tokenizer, depth_model, module, word_tokenizer
from torch import nn

import depthprobe
from depthprobe import tables
from depthprobe.depth import Coordinate, DecoderModel, DepthModel, LoopedModel
from depthprobe.depth.suffix_memory import HELD_BYTES
from depthprobe.depth.tapped import TappedModel
from depthprobe.effective import effective_batch, effective_depth, effective_rows, n_batches, parts_of
from depthprobe.effective.parts import STATE_BYTES
from depthprobe.errors import UserError
from depthprobe.lens import Target, prepare_items
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import Item

MEASURES = list(tables.SCHEMAS["effective"])[9:]


def items(task: str = "kinship", stories: int = 1, hops: tuple[int, ...] = (1, 2)) -> list[Item]:
    generator = Generator(task, hops=hops, seed=3)
    return [item for number in range(stories) for item in generator.story(number)]


def tokenizer(made: list[Item]) -> Any:
    return word_tokenizer([item.text + item.continuation(word) for item in made for word in item.candidates])


def opened(kind: str, made: list[Item]) -> TappedModel:
    model = depth_model(kind, tokenizer(made))
    assert isinstance(model, TappedModel)
    return model


def targets(model: DepthModel, made: list[Item]) -> tuple[Target, ...]:
    return prepare_items(model, made).targets


def assert_slow(model: TappedModel, made: list[Item], rows: pl.DataFrame, spared: int = 0) -> None:
    for item in made:
        slow = Slow(model, item, spared)
        mine = rows.filter(pl.col("item") == item.id).to_dicts()
        assert [row["depth"] for row in mine] == [part.depth for part in parts_of(model)]
        for row in mine:
            coordinate = model.axis[row["depth"]]
            assert (row["loop"], row["layer"]) == (coordinate.loop, coordinate.layer)
            for name, expected in slow.row(coordinate, row["site"]).items():
                near = None if expected is None else pytest.approx(expected, rel=2e-4, abs=2e-5)
                assert row[name] == near, (row["site"], coordinate, name)


@pytest.mark.parametrize(
    ("kind", "spared"),
    [
        ("llama", 0),
        ("gpt2", 1),
        ("gemma2", 0),
        ("neox", 2),
        ("looped", 0),
        ("looped-plain", 1),
        ("looped-ouro", 0),
        ("looped-ouro-coda", 0),
        ("looped-huginn", 0),
    ],
)
def test_rows_are_those_of_one_forward_at_a_time(kind: str, spared: int) -> None:
    made = items(hops=(2,) if kind.startswith("looped") else (1, 2))
    model = opened(kind, made)
    assert_slow(model, made, effective_batch(model, targets(model, made), spared=spared), spared)


@pytest.mark.parametrize("kind", ["llama", "looped-plain"])
def test_answers_and_candidates_of_several_tokens(kind: str) -> None:
    (item,) = items(hops=(2,))
    words = byte_tokenizer([item.text + item.continuation(word) for word in item.candidates])
    item = replace(item, answer="father-in-law", candidates=("father", "father-in-law", "son"), plausible=("father",))
    model = depth_model(kind, words)
    assert isinstance(model, TappedModel)
    (target,) = targets(model, [item])
    assert len(target.answer_ids) > 1 and not target.first_token_only
    assert_slow(model, [item], effective_batch(model, [target], spared=0))


def test_a_looped_model_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, DoryConfig

    made = items(hops=(2,))
    words = tokenizer(made)
    torch.manual_seed(0)
    config = DoryConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1,
        n_recurrent_loops=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = DecoderModel(AutoModelForCausalLM.from_config(config).eval(), words, "dory")
    rows = effective_batch(model, targets(model, made))
    assert rows["site"].to_list().count("loop") == len(model.loop_ends) == 2
    assert_slow(model, made, rows)


@pytest.mark.parametrize("kind", ["looped", "looped-plain", "looped-ouro", "looped-ouro-coda", "looped-huginn"])
def test_a_model_without_a_loop_is_the_model_with_one_loop_less(kind: str) -> None:
    made = items(hops=(3,))
    model = opened(kind, made)
    (target,) = targets(model, made)
    loops = effective_batch(model, [target]).filter(pl.col("site") == "loop")
    ids = torch.tensor([target.prompt_ids])
    with torch.no_grad():
        whole, less = (model.model(input_ids=ids, n_loops=n).logits[0, -1].double().log_softmax(-1) for n in (3, 2))
    assert loops["skip_kl"].to_list() == pytest.approx([kl(whole, less)] * 3, rel=1e-3)
    assert loops["later_same"].n_unique() > 1  # other tokens do run it, so these can differ


def silent(model: nn.Module, *layers: int) -> nn.Module:
    """A Llama of which some layers (from 0) add nothing."""
    with torch.no_grad():
        for layer in layers:
            block: Any = model.get_submodule(f"model.layers.{layer}")
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model


def test_a_layer_that_adds_nothing_is_missed_by_nobody() -> None:
    made = items(hops=(1, 3))
    words = tokenizer(made)
    model = DecoderModel(silent(module("llama", len(words)), 1), words, "llama")
    rows = effective_batch(model, targets(model, made)).filter(pl.col("layer") == 2)
    nothing = ("contribution", "cosine", "contribution_all", "cosine_all", "skip_kl", "later_same", "later_others")
    for name in nothing:
        assert rows[name].to_list() == [0.0, 0.0], name
    assert rows["skip_top5"].to_list() == [1.0, 1.0]


def test_a_model_of_which_the_last_layer_alone_matters() -> None:
    made = items(hops=(1, 3))
    words = tokenizer(made)
    model = DecoderModel(silent(module("llama", len(words)), 0, 1), words, "llama")
    result = effective_depth(model, made)
    by_layer = result.frame.sort("layer", "item")
    assert by_layer.filter(pl.col("layer") < 3)["skip_kl"].to_list() == [0.0] * 4
    last = by_layer.filter(pl.col("layer") == 3)
    assert min(last["skip_kl"]) > 1e-3 and last["later_same"].null_count() == last["later_others"].null_count() == 2
    assert last["lens_kl"].to_list() == [0.0, 0.0] and last["lens_top5"].to_list() == [1.0, 1.0]
    # without its last layer it says what the lens reads before it
    before = by_layer.filter(pl.col("layer") == 2)["lens_kl"].to_list()
    assert last["skip_kl"].to_list() == pytest.approx(before, rel=1e-4)
    depths = depthprobe.analysis.item_depths(result.frame)
    assert depths["half_depth"].to_list() == pytest.approx([2.5 / 3] * 2)
    assert depths["half_later"].to_list() == [None, None]


def test_neither_batch_nor_memory_changes_a_row() -> None:
    made = items("follow", stories=2, hops=(1, 2, 3))
    model = opened("looped-ouro-coda", made)
    prepared = targets(model, made)
    assert len({len(target.prompt_ids) for target in prepared}) > 1
    whole = effective_batch(model, prepared)
    alone = pl.concat([effective_batch(model, [target]) for target in prepared])
    small = effective_batch(model, prepared[:1], max_bytes=HELD_BYTES + 1_200_000, state_bytes=1)
    for name in MEASURES:
        assert whole[name].cast(float).to_list() == pytest.approx(alone[name].cast(float).to_list(), abs=1e-4), name
        few = whole[name][: small.height].cast(float).to_list()
        assert small[name].cast(float).to_list() == pytest.approx(few, abs=1e-4), name


def test_states_that_are_held_keep_to_the_memory_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every place in which they are: contributions, skips, and the changes of later layers."""
    made = items("follow", hops=(2,))
    model = opened("looped", made)
    held: list[int] = []
    for place in ("contributions", "skips", "later"):
        module = sys.modules[f"depthprobe.effective.{place}"]

        def spied(*args: Any, own: Any = module.around, **options: Any) -> Any:  # type: ignore[attr-defined]
            held.append(args[3])
            return own(*args, **options)

        monkeypatch.setattr(module, "around", spied)
    effective_depth(model, made, max_bytes=200 << 20)
    assert set(held) == {50 << 20} and len(held) >= 4
    held.clear()
    effective_depth(model, made)
    assert set(held) == {STATE_BYTES}


def test_batches_are_numbered_and_done_ones_left_out() -> None:
    made = items(stories=2, hops=(1, 2, 3))
    model = opened("llama", made)
    prepared = targets(model, made)
    batches = dict(effective_rows(model, prepared, 4))
    assert list(batches) == [0, 1] and n_batches(len(prepared), 4) == 2
    again = dict(effective_rows(model, prepared, 4, done={0}))
    assert list(again) == [1] and again[1].equals(batches[1])
    assert pl.concat(list(batches.values()))["item"].unique(maintain_order=True).to_list() == [i.id for i in made]


def test_a_prompt_of_one_token() -> None:
    made = items(hops=(1,))
    model = opened("llama", made)
    (target,) = targets(model, made)
    rows = effective_batch(model, [replace(target, prompt_ids=target.prompt_ids[:1])])
    assert rows["later_others"].null_count() == 3 and rows["later_same"].null_count() == 1
    assert all(math.isfinite(value) for value in rows["skip_kl"])


def test_the_public_call() -> None:
    made = items(hops=(1, 2))
    result = depthprobe.effective_depth(opened("looped", made), made)
    tables.check("effective", result.frame)
    assert repr(result).startswith("EffectiveDepth(looped: 2 items × 8 layers and 3 loops; the output rests most on ")
    assert "<table" in result._repr_html_() or "dataframe" in result._repr_html_()
    profile = result.profile("kinship")
    assert profile.height == 11 and profile["depth"].is_sorted()
    assert profile["skip_kl"].mean() == pytest.approx(result.frame["skip_kl"].mean(), rel=1e-5)
    code = "import sys, depthprobe; sys.exit('torch' in sys.modules or 'effective_depth' not in dir(depthprobe))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Shown(DepthModel):
    """States are shown and none is taken back."""

    def __init__(self) -> None:
        self.name = "glass"

    def _forward(self, request: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"spared": -1}, "spared is -1, below 0"),
        ({"spared": 500}, r"tokens leave none to skip when 500 are spared \(item "),
        ({"engine": "warp"}, "there is no engine 'warp'"),
    ],
)
def test_bad_settings(given: dict[str, Any], text: str) -> None:
    made = items(hops=(1,))
    model = opened("llama", made)
    with pytest.raises(UserError, match=text) as caught:
        effective_batch(model, targets(model, made), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_bytes": 0}, "max_bytes is 0: give a number of bytes"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"max_bytes": float("nan")}, "max_bytes is nan"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"spared": True}, "spared is True"),
        ({"spared": -1}, "spared is -1: give a whole number of at least 0"),
        ({"skip_too_long": "no"}, "skip_too_long is 'no'"),
        ({"chat": None}, "chat is None"),
        ({"items": None}, "there are no items"),
        ({"items": 3}, "a int is no item"),
        ({"model": "follow-demo"}, "a str has no depth axis"),
    ],
)
def test_odd_values_from_python(given: dict[str, Any], text: str) -> None:
    made = items(hops=(1,))
    call = {"model": opened("llama", made), "items": made} | given
    with pytest.raises(UserError) as caught:
        effective_depth(**call)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_numpy_numbers_are_numbers() -> None:
    made = items(hops=(1,))
    model = opened("llama", made)
    odd = effective_depth(model, made[0], batch_size=np.int64(2), spared=np.int64(1), max_bytes=np.int64(1 << 28))
    assert odd.frame.equals(effective_depth(model, made, batch_size=2, spared=1).frame)


def test_bad_models_and_items() -> None:
    made = items(hops=(1,))
    model = opened("llama", made)
    with pytest.raises(UserError, match="glass shows states but takes none back"):
        effective_batch(Shown(), targets(model, made))
    with pytest.raises(UserError, match="batch size 0 is not positive"):
        list(effective_rows(model, targets(model, made), 0))
    with pytest.raises(UserError, match="there are no items"):
        effective_depth(model, [])
    with torch.no_grad():
        model.model.get_submodule("model.layers.1.mlp.down_proj").weight.fill_(torch.nan)
    with pytest.raises(UserError, match="gives NaN logits") as caught:
        effective_depth(model, made)
    assert made[0].id in str(caught.value)


def test_what_breaks_without_a_part_is_named() -> None:
    """The last layer needs what the first one adds."""
    made = items(hops=(1,))
    model = opened("llama", made)
    first, last = (model.model.get_submodule(f"model.layers.{n}") for n in (0, 2))
    first.register_forward_hook(lambda _m, _args, out: out + 100 * torch.nn.functional.one_hot(torch.tensor(0), 32))
    last.register_forward_hook(lambda _m, args, out: out.masked_fill(args[0][..., :1] < 50, torch.nan))
    with pytest.raises(UserError, match=r"are NaN \(item .* without r1\.l1, depth r1\.l3\)") as caught:
        effective_depth(model, made)
    assert made[0].id in str(caught.value) and "\n" not in str(caught.value)


def test_parts_come_in_order() -> None:
    made = items(hops=(1,))
    model = opened("looped-ouro-coda", made)
    assert isinstance(model, LoopedModel)
    parts = parts_of(model)
    assert [part.depth for part in parts] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [part.site for part in parts].count("loop") == 3
    assert parts[3].entered == Coordinate(0, 1) and parts[6].entered == Coordinate(1, 2, "loop_state")


@pytest.mark.parametrize(("kind", "spared"), [("llama", 1), ("looped", 0)])
def test_the_first_token_is_spared_where_attention_may_rest_on_it(kind: str, spared: int) -> None:
    made = items(hops=(2,))
    model = opened(kind, made)
    result = effective_depth(model, made)
    assert result.spared == spared and ("spared" in repr(result)) == bool(spared)
    assert result.frame.equals(effective_depth(model, made, spared=spared).frame)
    assert not result.frame.equals(effective_depth(model, made, spared=1 - spared).frame)
