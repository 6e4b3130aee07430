"""Cut attention edges against a forward whose softmax is given −inf there, by a patch of the test's own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers as t
from more_models import more_module
from tiny_models import CONTEXT, VOCABULARY, config, depth_model, module
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention

from depthprobe.depth import Cell, Coordinate, Cut, DecoderModel, Edit
from depthprobe.depth.cut_check import check_cuts
from depthprobe.depth.hooked import _CutAttend, _without, edited
from depthprobe.depth.suffix_check import Support, support_of
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.models.attend import DenseAttend
from depthprobe.models.masks import Mask

LENGTH = 11
EAGER = ("mpt", "bloom", "llama", "gpt2", "gemma2", "bigcode")


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY - 2, (LENGTH,), generator=torch.Generator().manual_seed(3))


def noisy(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def opened(kind: str, attention: str = "eager") -> DecoderModel:
    torch.manual_seed(0)
    if kind == "mpt":
        size = {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "expansion_ratio": 2}
        return DecoderModel(noisy(t.MptForCausalLM(t.MptConfig(vocab_size=VOCABULARY, **size))), None, kind)
    if kind == "bigcode":
        made = t.GPTBigCodeConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT)
        made._attn_implementation = attention
        return DecoderModel(noisy(t.GPTBigCodeForCausalLM(made)), None, kind)
    whole = more_module(kind) if kind == "bloom" else module(kind)
    if kind != "bloom":
        whole.set_attn_implementation(attention)
    return DecoderModel(whole, None, kind)


def layers_of(model: TappedModel) -> list[Coordinate]:
    return [point for point in model.axis if point.site == "resid_post"]


def softmax_cut(model: DecoderModel, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits [S, V] of a plain eager forward: the n-th attention softmax does not see what layer n cuts."""
    edges: defaultdict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for cut in cell.cuts:
        edges[cut.coordinate.layer].append((cut.queries, cut.keys))
    own, count = functional.softmax, 0

    def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        assert scores.shape[-2:] == (LENGTH, LENGTH)
        count += 1
        scores = scores.clone()
        for queries, keys in edges[count]:
            for query in queries:
                scores[..., query, list(keys)] = -torch.inf
        return own(scores, *args, **kwargs)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(functional, "softmax", softmax)
        logits = model.model(input_ids=ids()[None]).logits[0]
    assert count == len(layers_of(model))
    return logits


def some_cells(model: TappedModel) -> list[Cell]:
    layers, end = layers_of(model), LENGTH - 1
    return [
        Cell((), tuple(Cut(layer, (end,), tuple(range(end))) for layer in layers)),
        Cell((), (Cut(layers[1], (4, 7, end), (0, 3)),)),
        Cell((), tuple(Cut(layer, tuple(range(4, LENGTH)), (3,)) for layer in layers[:2])),
    ]


@pytest.mark.parametrize("engine", ["auto", "hooks"])
@pytest.mark.parametrize("kind", EAGER)
def test_cuts_are_those_of_the_softmax(kind: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = opened(kind), (3, 6, LENGTH - 1)
    cells, last = some_cells(model), model.axis[-1]
    resumed = model.resume(ids(), cells, read, engine=engine)
    assert resumed.n_run == len(cells)
    for cell, state in zip(cells, resumed.states[last], strict=True):
        expected = softmax_cut(model, cell, monkeypatch)[list(read)]
        torch.testing.assert_close(model.readout(state, last), expected, rtol=1e-4, atol=1e-4)
        assert float((state - resumed.clean[last]).abs().max()) > 1e-3  # each of them does something


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("engine", ["suffix", "hooks"])
def test_flex_attention(kind: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is a function; the reference is the same weights with eager attention."""

    def flex(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **asked: Any) -> Any:
        # the kernel itself is compiled for half a minute: what it computes, by hand, from its kind of mask
        assert type(mask).__name__ == "BlockMask"
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * asked["scaling"]
        if asked.get("softcap"):
            scores = torch.tanh(scores / asked["softcap"]) * asked["softcap"]
        row, length = torch.zeros((), dtype=torch.long), scores.shape[-1]
        query = torch.arange(length)
        seen = torch.stack([mask.mask_mod(row, row, at.expand(length), query) for at in query])
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2), None

    monkeypatch.setitem(t.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", flex)
    own = flex_attention.create_block_mask
    uncompiled: Any = lambda *a, **k: own(*a, **{**k, "_compile": False})  # noqa: E731
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", uncompiled)
    plain, model = opened(kind), opened(kind, "flex_attention")
    assert isinstance(support_of(model), Support)
    cells, last = some_cells(model), model.axis[-1]
    cells.append(Cell((Edit(model.axis[1], (2,), torch.ones(1, 32)),), cells[1].cuts))
    state = model.resume(ids(), cells, engine=engine).states[last]
    for cell, own_state in zip(cells[:3], state, strict=False):
        expected = softmax_cut(plain, cell, monkeypatch)[[-1]]
        torch.testing.assert_close(model.readout(own_state, last), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, plain.resume(ids(), cells, engine="hooks").states[last], rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("kind", ["llama", "neox", "gemma2", "opt", "looped", "looped-ouro-coda"])
def test_attention_that_obeys_is_tried_once_a_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = depth_model(kind)
    assert isinstance(model, TappedModel)
    cells = [Cell((), (Cut(layer, (5,), (2,)),)) for layer in layers_of(model)]
    check_cuts(model, cells)
    monkeypatch.setattr(type(model), "capture", lambda *_a, **_k: pytest.fail("tried again"))
    check_cuts(model, cells)


@pytest.mark.parametrize("kind", ["ignored", "added"])
def test_a_mask_without_effect_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthprobe.depth import hooked

    model = opened("llama")
    wrong = {"ignored": lambda mask, *_: mask, "added": lambda mask, edges, *_: mask.masked_fill(edges, 1.0)}
    monkeypatch.setattr(hooked, "_without", wrong[kind])
    with pytest.raises(UserError, match="does not hide what its mask hides"):
        model.resume(ids(), some_cells(model), engine="hooks")


def test_everything_that_is_made_is_made_where_the_layer_is() -> None:
    """No GPU is at hand: a tensor without storage shows where a mask, or a value, would have been put."""
    edges = torch.zeros(1, 1, 5, 5, dtype=torch.bool, device="meta")
    additive = torch.zeros(1, 1, 5, 5, device="meta")
    assert _without(None, edges, torch.float32, "m").device.type == "meta"
    assert _without(additive, edges, torch.float32, "m").device.type == "meta"
    mask = _CutAttend(DenseAttend(Mask(None, causal=True)), edges)._mask
    assert mask.visible is not None and mask.visible.device.type == "meta"


@pytest.mark.parametrize("kind", ["llama", "looped-ouro-coda"])
def test_values_and_cuts_on_the_cpu_reach_a_model_elsewhere(kind: str) -> None:
    model = depth_model(kind)
    assert isinstance(model, TappedModel)
    whole, layer = model.model.to("meta"), layers_of(model)[1]
    cells = [Cell((Edit(layer, (2,), torch.ones(1, 32)),), (Cut(layer, (4,), (1,)),)), None]
    with torch.inference_mode(), edited(whole, model.taps, cells, 6, kind):
        logits = whole(input_ids=torch.zeros(2, 6, dtype=torch.long, device="meta")).logits
    assert logits.device.type == "meta" and logits.shape == (2, 6, VOCABULARY)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_flops_by_hooks_are_those_of_the_weights_that_a_token_meets(kind: str) -> None:
    if kind == "mixtral":  # experts are stacked in one tensor of three dimensions
        keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        size = {key: getattr(config("llama"), key) for key in (*keys, "num_key_value_heads")}
        torch.manual_seed(0)
        made = t.MixtralForCausalLM(t.MixtralConfig(**size, num_local_experts=4, num_experts_per_tok=2))
        model = DecoderModel(noisy(made), None, kind)
    else:
        model = opened(kind)
    cell = Cell((Edit(model.axis[1], (3,), torch.ones(1, 32)),))
    slow = model.resume(ids(), [cell], engine="hooks")
    projections, network = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48
    weights = projections + (network if kind == "llama" else 32 * 4 + 2 * network)
    attention = 2 * 32 * (LENGTH + 1) / 2  # scores and values, of half the keys on average
    assert slow.flops == 2 * LENGTH * 3 * 2 * (weights + attention)  # two rows, three layers
    assert slow.flops == model.plan_resume(ids(), [cell], engine="hooks").flops
    suffix = model.plan_resume(ids(), [Cell((Edit(model.axis[1], (0,), torch.ones(1, 32)),))], range(LENGTH))
    assert suffix.engine == "suffix"  # which weighs what runs: two layers of two whole rows
    assert suffix.flops * 3 / 2 == pytest.approx(slow.flops, rel=0.1)


@pytest.mark.parametrize(
    ("prompt", "cell", "text"),
    [
        (torch.tensor([3.5, 4.0]), Cell(), "input_ids are float32"),
        (torch.zeros(0, dtype=torch.long), Cell(), r"input_ids have shape \(0,\)"),
        (torch.zeros(1, 3, dtype=torch.long), Cell(), r"input_ids have shape \(1, 3\)"),
        (ids(), Cell((Edit(Coordinate(1, 1), (1,), torch.full((1, 32), torch.nan)),)), r"not finite .*\(cell 0\)"),
        (ids(), Cell((Edit(Coordinate(1, 1), (1,), torch.full((1, 32), -torch.inf)),)), "not finite in float32"),
        (
            ids(),
            Cell((Edit(Coordinate(1, 1), (1,), torch.full((1, 32), 1e300, dtype=torch.float64)),)),
            "not finite in float32",
        ),
    ],
)
def test_bad_prompts_and_values(prompt: Any, cell: Cell, text: str) -> None:
    model = opened("llama")
    for call in (model.resume, model.plan_resume):
        with pytest.raises(UserError, match=text) as caught:
            call(prompt, [cell])
        assert "\n" not in str(caught.value)
