"""Three routes, one set of states: module hooks, TransformerLens' hook points, nnsight's traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from more_models import more_module
from tiny_models import VOCABULARY, depth_model, module
from torch import Tensor

from depthprobe.depth import Coordinate, DecoderModel, DepthModel, LoopedModel, wrap
from depthprobe.errors import UserError

transformer_lens = pytest.importorskip("transformer_lens")
nnsight = pytest.importorskip("nnsight")

#: What each is there for: learned positions; parallel attention with partial rotary (two); soft-capped logits and
#: sandwich norms; embedding scale; logit and residual multipliers; logit scale and one norm; QK-norm; norms
#: behind the branches alone; LayerNorm with bias; a tied head; a projection behind the stack.
ARCHITECTURES = (
    "gpt2", "neox", "phi", "gemma2", "gemma", "granite", "cohere", "qwen3", "olmo2", "stablelm", "llama-tied",
    "llama", "opt",
)  # fmt: skip


def made(kind: str) -> Any:
    return more_module(kind) if kind in ("olmo2", "stablelm", "bart", "codegen") else module(kind)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 5:] = 0
    return ids, mask


def agree(one: DepthModel, other: DepthModel, positions: Any, tolerance: float = 1e-4) -> None:
    assert one.axis == other.axis and one.loop_ends == other.loop_ends
    ids, mask = batch()
    a = one.capture(ids, mask, positions, one.points)
    b = other.capture(ids, mask, positions, other.points)
    assert a.logits is not None and b.logits is not None
    real = mask.bool() if isinstance(positions, str) else torch.ones(3, dtype=torch.bool)
    for point in set(one.points) & set(other.points):
        assert float((a.states[point] - b.states[point])[real].abs().max()) <= tolerance, point
    for depth in one.axis:
        read = one.readout(a.states[depth], depth), other.readout(b.states[depth], depth)
        assert float((read[0] - read[1])[real].abs().max()) <= tolerance, depth
    assert float((a.logits - b.logits)[real].abs().max()) <= tolerance
    assert one.check_identity(a) < 1e-5 and other.check_identity(b) < 1e-5
    if one.gate:
        assert a.gate_lambda is not None and b.gate_lambda is not None
        torch.testing.assert_close(a.gate_lambda, b.gate_lambda)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_three_routes_agree(kind: str) -> None:
    plain = made(kind)
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    native = wrap(plain, name=kind)
    bridge, traced = wrap(plain, name=kind, route="transformer-lens"), wrap(plain, name=kind, route="nnsight")
    assert [model.route for model in (native, bridge, traced)] == ["native", "transformer-lens", "nnsight"]
    assert set(native.points) <= set(traced.points) and {"resid_pre", "resid_post"} <= set(bridge.sites)
    for positions in (None, "all"):
        agree(native, traced, positions)
        agree(native, bridge, positions)
    # the bridge rewires the model that it is given, which was a copy
    assert not [path for path, part in plain.named_modules() if "transformer_lens" in type(part).__module__]
    assert before.keys() == plain.state_dict().keys()


@pytest.mark.parametrize("kind", ["looped", "looped-ouro-coda"])
@torch.no_grad()
def test_loops_are_told_apart_in_a_trace(kind: str) -> None:
    native = depth_model(kind)
    traced = wrap(native, route="nnsight")
    assert traced.points == native.points and traced.route == "nnsight"
    for positions in (None, "all", torch.tensor([[6, 5], [4, 0], [6, 1]])):
        agree(native, traced, positions)


@torch.no_grad()
def test_objects_of_the_libraries_are_taken_as_they_are() -> None:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    native = depth_model("llama")
    bridge = build_bridge_from_module(module("llama"), "LlamaForCausalLM", hf_config=native.config)
    taken = wrap(bridge)
    assert taken.route == "transformer-lens" and "transformer-lens" in repr(taken)
    agree(native, taken, None)
    traced = wrap(nnsight.NNsight(module("llama")), name="mine")
    assert traced.route == "nnsight" and traced.name == "mine"
    agree(native, traced, None)
    assert isinstance(wrap(module("looped")), LoopedModel) and isinstance(wrap(module("llama")), DecoderModel)
    again = wrap(traced, route="native")
    assert again.route == "native" and again.name == "mine"


@pytest.mark.parametrize("route", ["transformer-lens", "nnsight"])
@torch.no_grad()
def test_options_are_kept_to_by_every_route(route: str) -> None:
    plain, (ids, mask) = module("llama"), batch()
    native, model = wrap(plain), wrap(plain, route=route)
    chosen = [Coordinate(1, 2), Coordinate(1, 3, "mlp_out")]
    a = native.capture(ids, mask, "all", chosen, dtype="float16", logits=False)
    b = model.capture(ids, mask, "all", chosen, dtype="float16", logits=False)
    assert b.logits is None and list(b.states) == chosen
    for point in chosen:
        real = mask.bool()  # at padding there is nothing to agree on
        torch.testing.assert_close(a.states[point][real], b.states[point][real], rtol=2e-3, atol=2e-3)
        assert b.states[point].untyped_storage().nbytes() == 3 * 7 * 32 * 2
    if not model.can_continue:
        with pytest.raises(UserError, match="cannot continue from a cache"):
            model.capture(ids[:, :4], keep_cache=True)
        return
    cached = model.capture(ids[:, :4], keep_cache=True)
    rest = model.capture(ids[:, 4:], torch.ones_like(ids), cache=cached.cache)
    torch.testing.assert_close(rest.logits, native.capture(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
@torch.no_grad()
def test_a_bridge_in_half_precision_reads_in_float32(kind: str) -> None:
    plain = module(kind).to(torch.bfloat16)
    native, bridge = wrap(plain), wrap(plain, route="transformer-lens")
    ids, mask = batch()
    capture = bridge.capture(ids, mask)
    bridge.check_identity(capture)
    depth = bridge.axis[1]
    read = bridge.readout(capture.states[depth], depth)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, native.readout(capture.states[depth], depth), rtol=1e-4, atol=1e-4)


def refusal(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        wrap(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_routes_that_do_not_fit() -> None:
    llama = module("llama")
    assert "unknown route 'hooks': one of native, transformer-lens, nnsight" in refusal(llama, route="hooks")
    wrapped = nnsight.NNsight(llama)
    assert "read by route 'nnsight', not 'transformer-lens'" in refusal(wrapped, route="transformer-lens")
    assert "a Linear has no depth axis" in refusal(torch.nn.Linear(2, 2))
    assert "a str has no depth axis" in refusal("llama")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("looped", "TransformerLens has no adapter for looped (architecture looped): take route='native'"),
        ("ctrl", "TransformerLens has no adapter for ctrl (architecture ctrl): take route='native'"),
        ("codegen", "TransformerLens' adapter CodeGenForCausalLM cannot open codegen: "),
    ],
)
def test_architectures_that_the_bridge_cannot_open(kind: str, said: str) -> None:
    plain = more_module(kind) if kind != "looped" else module(kind)
    assert wrap(plain).route == "native" and wrap(plain, route="nnsight").route == "nnsight"
    assert said in refusal(plain, name=kind, route="transformer-lens")


@pytest.mark.parametrize(("route", "package"), [("transformer-lens", "transformer_lens"), ("nnsight", "nnsight")])
def test_a_missing_library_is_named(route: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    said = refusal(module("llama"), route=route)
    assert "is not installed" in said and "depthprobe[interp]" in said
