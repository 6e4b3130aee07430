"""The tuned lens against a training written out with autograd, its file, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, depth_model, module, word_tokenizer

from depthprobe.depth import Capture, Coordinate, DepthModel, wrap
from depthprobe.errors import UserError
from depthprobe.lens import Recipe, TunedLens, logit_lens, train_tuned
from depthprobe.lens.tuned import _checksum, head_digest
from depthprobe.lens.tuned_kl import divergences
from depthprobe.lens.tuned_train import Trainer, captured, kl_slope

KINDS = ["llama", "gpt2", "gemma2", "granite", "opt", "looped", "looped-ouro", "looped-ouro-coda"]
QUICK = Recipe(warm=0, steps=3, rows=4, reads=4)


def rows(number: int, seed: int = 3, longest: int = 12) -> list[tuple[int, ...]]:
    """Random texts in which a token tells something about the next one."""
    draw = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(number):
        length = int(torch.randint(5, longest + 1, (1,), generator=draw))
        steps = torch.randint(1, 4, (length,), generator=draw).cumsum(0)
        texts.append(tuple((3 + steps % (VOCABULARY - 3)).tolist()))
    return texts


def randomised(model: DepthModel, size: float = 0.05) -> TunedLens:
    """A lens that changes what is read."""
    lens, draw = TunedLens.identity(model), torch.Generator().manual_seed(1)
    weight = torch.randn(lens.weight.shape, generator=draw) * size
    return replace(lens, weight=weight, bias=torch.randn(lens.bias.shape, generator=draw) * size)


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_it_is_the_logit_lens(kind: str) -> None:
    model = depth_model(kind)
    plain = logit_lens(model, rows(3), targets=[5])
    tuned = logit_lens(model, rows(3), targets=[5], lens="tuned", tuned=TunedLens.identity(model))
    assert tuned.lens == "tuned" and set(tuned.frame["lens"]) == {"tuned"} and tuned.depths == plain.depths
    for name in ("top_probs", "entropy", "kl_final", "target_logits"):
        torch.testing.assert_close(getattr(tuned, name), getattr(plain, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "looped-ouro", "looped-ouro-coda"])
@torch.no_grad()
def test_a_state_is_translated_and_then_normed_once(kind: str) -> None:
    model = depth_model(kind)
    lens, tail = randomised(model), model.tail32
    result = logit_lens(model, rows(1), targets=[7], lens="tuned", tuned=lens)
    capture = model.capture(torch.tensor(rows(1)), positions="all")
    assert result.target_logits is not None
    for depth, coordinate in enumerate(model.axis):
        state = capture.states[coordinate][0]
        if depth < len(model.axis) - 1:
            state = state + state @ lens.weight[depth].T + lens.bias[depth]
        for norm in () if coordinate.site == "loop_state" else tail.norms:
            state = norm(state)
        expected = tail._transformed(tail.head(state))[:, 7]
        torch.testing.assert_close(result.target_logits[:, depth, 0], expected, rtol=1e-5, atol=1e-5)
    assert result.kl_final[:, -1].max() < 1e-5 < result.kl_final[:, 0].min()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1 << 23, 400])
def test_gradients_are_those_of_autograd(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthprobe.lens.tuned_train._BLOCK", block)
    model = depth_model(kind)
    states = captured(model, rows(4), 5, torch.Generator().manual_seed(0))
    trainer = Trainer(model, states, QUICK)
    with torch.no_grad():
        trainer.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
        trainer.bias.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    losses, weight, bias = trainer.gradients(states)

    total, each = torch.zeros(()), []
    tail, last = model.tail32, model.axis[-1]
    final = tail(states[-1], normed=model.is_normed(last)).log_softmax(-1).detach()
    for place, coordinate in enumerate(model.axis[:-1]):
        moved = (states[place] / trainer.inner[place]) @ trainer.weight[place].T + trainer.bias[place]
        logits = tail(states[place] + trainer.outer[place] * moved, normed=model.is_normed(coordinate))
        kl = (final.exp() * (final - logits.log_softmax(-1))).sum(-1).mean()
        each.append(kl.detach())
        total = total + kl
    expected = torch.autograd.grad(total, (trainer.weight, trainer.bias))
    torch.testing.assert_close(losses, torch.stack(each), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight, expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(bias, expected[1], rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_a_head_that_is_more_than_a_matrix_gives_the_same_gradient() -> None:
    tail = depth_model("gemma2").tail32
    normed, final = torch.randn(2, 3, 32), torch.randn(3, VOCABULARY).log_softmax(-1)
    loss, slope = kl_slope(tail, normed, final)
    other_loss, other = kl_slope(replace(tail, transforms=[torch.nn.Identity()]), normed, final)
    torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "looped", "looped-ouro", "looped-ouro-coda"])
@pytest.mark.parametrize("warm", [0, 16])
def test_training_brings_every_depth_nearer_on_other_texts(kind: str, warm: int) -> None:
    model = depth_model(kind)
    lens = train_tuned(model, rows(200), Recipe(warm=warm, steps=60, rows=16, reads=8, rate=0.02))
    values, owners = divergences(model, lens, rows(60, seed=99), 99, torch.Generator().manual_seed(0))
    logit, tuned = values.mean(axis=1)
    assert len(owners) == values.shape[1] == sum(map(len, rows(60, seed=99)))
    for depth in range(len(model.axis) - 1):
        if logit[depth] > 1e-5:
            assert tuned[depth] < logit[depth], model.axis[depth]
        else:  # the residual before the last loop's norm already says what the model says
            assert kind == "looped-ouro" and depth == len(model.axis) - 2
            assert not lens.weight[depth].any() and not lens.bias[depth].any()
    assert tuned[-1] <= 1e-6


@pytest.mark.parametrize("kind", ["llama", "looped-ouro"])
def test_padding_changes_nothing(kind: str) -> None:
    model, texts = depth_model(kind), rows(5, longest=20)
    lens = randomised(model)
    together, owners = divergences(model, lens, texts, 99, torch.Generator().manual_seed(0))
    for number, text in enumerate(texts):
        alone, _ = divergences(model, lens, [text], 99, torch.Generator().manual_seed(0))
        mine = together[:, [owner == number for owner in owners]]
        assert abs(mine.mean(axis=1) - alone.mean(axis=1)).max() < 1e-5
    result = logit_lens(model, texts, lens="tuned", tuned=lens)
    assert abs(result.kl_final.mean(0).numpy() - together[1].mean(axis=0)).max() < 1e-5


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = []
    for number, seed in enumerate((0, 0, 1)):
        files.append(tmp_path / f"{number}.safetensors")
        train_tuned(depth_model("looped"), rows(20), replace(QUICK, seed=seed), about={"data": "made"}).save(files[-1])
    same, again, other = (file.read_bytes() for file in files)
    assert same == again != other
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name for file in files]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model, path = depth_model("looped-ouro"), tmp_path / "deep" / "a.safetensors"
    lens = train_tuned(model, rows(20), QUICK, about={"data": "made", "license": "none"})
    lens.save(path)
    read = TunedLens.load(path, model)
    assert torch.equal(read.weight, lens.weight) and torch.equal(read.bias, lens.bias)
    assert (read.coordinates, read.head, read.model_name) == (lens.coordinates, lens.head, "looped-ouro")
    assert read.about["data"] == "made" and read.about["steps"] == 3 and read.digest() == lens.digest()
    assert "looped-ouro" in repr(read) and "made" in repr(read)
    by_path = logit_lens(model, rows(2), lens="tuned", tuned=path)
    assert torch.equal(by_path.kl_final, logit_lens(model, rows(2), lens="tuned", tuned=lens).kl_final)


def test_a_lens_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    lens = TunedLens.identity(depth_model("llama"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(lens.save, tmp_path / "file" / "a.safetensors")
    lens.bias[0, 0] = torch.nan
    assert "is not finite" in refusal(lens.save, tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@torch.no_grad()
def test_another_model_is_refused(tmp_path: Path) -> None:
    model, path = depth_model("llama"), tmp_path / "a.safetensors"
    TunedLens.identity(model).save(path)
    said = refusal(TunedLens.load, path, depth_model("llama", seed=1))
    assert "was made for another model, 'llama'" in said and "head" in said and str(path) in said
    assert "depths embed … r1.l2" in refusal(TunedLens.load, path, depth_model("looped"))
    changed = depth_model("llama")
    changed.model.lm_head.weight[3, 4] += 1e-3  # one number of the head
    assert "head" in refusal(logit_lens, changed, [4, 5], lens="tuned", tuned=path)
    normed = depth_model("llama")
    normed.model.model.norm.weight[0] += 1e-3
    assert "head" in refusal(logit_lens, normed, [4, 5], lens="tuned", tuned=TunedLens.load(path))
    inner = depth_model("llama")  # what lies before the head may change
    inner.model.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    TunedLens.load(path, inner)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    model, path = depth_model("llama"), tmp_path / "a.safetensors"
    lens = TunedLens.identity(model)
    lens.save(path)
    tensors = load_file(path)
    header = {"format": "depthprobe-tuned-lens", "version": 2, "model": "llama", "width": 32, "head": lens.head,
              "coordinates": [list(c) for c in lens.coordinates], "about": {}}  # fmt: skip

    def written(tensors: dict[str, torch.Tensor], **changed: Any) -> str:
        other, told = tmp_path / "b.safetensors", header | {"sha256": "0" * 64} | changed
        save_file(tensors, other, metadata={"depthprobe": json.dumps(told)})
        return refusal(TunedLens.load, other, model)

    assert "there is no such tuned lens" in refusal(TunedLens.load, tmp_path / "none.safetensors", model)
    assert "an unknown tensor 'more'" in written({**tensors, "more": torch.zeros(1)})
    assert "has no tensor 'bias'" in written({"weight": tensors["weight"]})
    assert "'weight' of the tuned lens is (2, 32, 32)" in written({**tensors, "weight": tensors["weight"][:2].clone()})
    assert "in float16" in written({**tensors, "bias": tensors["bias"].half()})
    assert "not finite" in written({**tensors, "bias": tensors["bias"] + torch.inf})
    for version in (1, 3):  # the first had no checksum
        said = written(tensors, version=version)
        assert f"version {version}, and this" in said and "train it again with `depthprobe lens train`" in said
    assert "header of the tuned lens is damaged" in written(tensors, coordinates=[[1]])
    other = [[1, 1, "embed"], [1, 2, "embed"], [1, 3, "embed"]]
    assert "its checksum is" in written(tensors, coordinates=other)  # not even the header may be another
    checksum = _checksum(header | {"coordinates": other}, tensors)
    assert "depths" in written(tensors, coordinates=other, sha256=checksum)
    save_file(tensors, tmp_path / "d.safetensors", metadata={"depthprobe": json.dumps(header)})
    assert "header of the tuned lens is damaged" in refusal(TunedLens.load, tmp_path / "d.safetensors")
    save_file(tensors, tmp_path / "c.safetensors")
    assert "is not a tuned lens" in refusal(TunedLens.load, tmp_path / "c.safetensors")
    path.write_bytes(path.read_bytes()[:200])
    assert "cannot be read" in refusal(TunedLens.load, path)


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    """In the smallest bit of a value, too, where the lens stays finite and of its shape."""
    model, path = depth_model("llama"), tmp_path / "a.safetensors"
    randomised(model).save(path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in (start, start + 4 * 500, len(whole) - 4):  # the lowest byte of a float32
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        said = refusal(TunedLens.load, path, model)
        assert "the tuned lens is damaged: its checksum is" in said and str(path) in said and "train it again" in said
    name = whole.index(b"llama")
    path.write_bytes(whole[:name] + b"Llama" + whole[name + 5 :])
    assert "its checksum is" in refusal(TunedLens.load, path)
    path.write_bytes(whole)
    TunedLens.load(path, model)


def test_options_that_say_nothing_are_refused() -> None:
    model = depth_model("looped")
    lens = TunedLens.identity(model)
    assert "lens 'tuned' needs a tuned lens" in refusal(logit_lens, model, [4, 5], lens="tuned")
    assert "lens 'plain' takes no tuned lens" in refusal(logit_lens, model, [4, 5], tuned=lens)
    assert "lens 'coda' takes no tuned lens" in refusal(logit_lens, model, [4, 5], lens="coda", tuned=lens)
    some = logit_lens(model, [4, 5], lens="tuned", tuned=lens, coordinates=model.axis[2:4])
    assert some.depths == (*model.axis[2:4], model.axis[-1])
    assert "a int is no tuned lens" in refusal(logit_lens, model, [4, 5], lens="tuned", tuned=5)
    assert "has no depth r1.l9" in refusal(lens, torch.zeros(32), Coordinate(1, 9))
    assert "32 wide and the state 8" in refusal(lens, torch.zeros(8), model.axis[0])


def test_bad_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = depth_model("llama")
    assert "there are no texts" in refusal(train_tuned, model, [])
    assert "text 1 has no tokens" in refusal(train_tuned, model, [(4, 5), ()])
    assert "the context of llama 256" in refusal(train_tuned, model, [(4,) * 257])
    assert "steps is -1" in refusal(Recipe, steps=-1)
    assert "rows is 0" in refusal(Recipe, rows=0)
    assert "neither least squares nor steps" in refusal(Recipe, warm=0, steps=0)
    assert "the learning rate is nan" in refusal(Recipe, rate=float("nan"))
    monkeypatch.setattr(Trainer, "step", lambda *_: float("nan"))
    assert "the training diverges in step 1" in refusal(train_tuned, model, rows(20), QUICK)


def test_half_precision_models_are_trained_and_read_in_float32() -> None:
    model = wrap(module("llama").to(torch.bfloat16), name="half")
    model.check_identity(model.capture(torch.tensor(rows(1))))  # makes the float32 head, in inference mode
    lens = train_tuned(model, rows(20), QUICK)
    assert lens.weight.dtype == torch.float32 and bool(lens.weight.any())
    result = logit_lens(model, rows(2), lens="tuned", tuned=lens)
    assert float(result.kl_final[:, -1].max()) < 1e-5
    # the same numbers in a wider type are the same head
    assert head_digest(wrap(module("llama").to(torch.bfloat16).float())) == lens.head


@pytest.mark.parametrize("route", ["transformer-lens", "nnsight"])
def test_a_lens_serves_every_route(route: str) -> None:
    pytest.importorskip(route.replace("-", "_"))
    plain = module("llama")
    lens = randomised(wrap(plain, name="llama"))
    expected = logit_lens(wrap(plain, name="llama"), rows(2), lens="tuned", tuned=lens)
    got = logit_lens(wrap(plain, name="llama", route=route), rows(2), lens="tuned", tuned=lens)
    torch.testing.assert_close(got.kl_final, expected.kl_final, rtol=1e-4, atol=1e-5)


def test_a_capture_is_translated_but_for_its_last_depth() -> None:
    model = depth_model("llama", word_tokenizer(["Ann is kind"]))
    capture = model.capture(torch.tensor([[4, 5]]))
    moved = randomised(model).capture(capture, model.axis[-1])
    assert isinstance(moved, Capture) and moved.logits is capture.logits
    assert torch.equal(moved.states[model.axis[-1]], capture.states[model.axis[-1]])
    assert not torch.equal(moved.states[model.axis[1]], capture.states[model.axis[1]])
