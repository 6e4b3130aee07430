"""What a user can get wrong: each is handled, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from more_models import MORE, more_module
from tiny_models import VOCABULARY, byte_tokenizer, depth_model, module
from torch import Tensor, nn

import depthprobe
from depthprobe.depth import Coordinate, DecoderModel, LoopedModel, wrap
from depthprobe.errors import UserError


def ids(rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(3, VOCABULARY - 2, (rows, length), generator=torch.Generator().manual_seed(1))


def said(call: Any) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "looped", "gpt2"])
def test_a_tokenizer_without_pad_and_bos_opens(tmp_path: Path, kind: str) -> None:
    tokenizer = byte_tokenizer(["Bob is the son of Ann."])
    assert tokenizer.pad_token_id is None and tokenizer.bos_token_id is None
    module(kind, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = depthprobe.load(tmp_path)
    rows = [model.tokenizer(text)["input_ids"] for text in ("Bob is", "Bob is the son of")]
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    capture, alone = model.capture(padded, mask), model.capture(torch.tensor(rows[:1]))
    for depth in model.axis:
        torch.testing.assert_close(capture.states[depth][0], alone.states[depth][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [None, "all", torch.tensor([0, 0])])
def test_an_all_padding_row(positions: Any) -> None:
    mask = torch.tensor([[1] * 6, [0] * 6])
    for kind in ("llama", "looped"):
        text = said(lambda kind=kind: depth_model(kind).capture(ids(), mask, positions))
        assert text == "row 1 holds padding alone: give each row a real token to read"


def test_positions_that_there_are_not() -> None:
    model = depth_model("llama")
    assert said(lambda: model.capture(ids(), positions=torch.tensor([[0, 5], [6, 0]]))) == (
        "position 6 is outside its 6 tokens (row 1): give 0 … 5"
    )
    assert "position -1 is outside" in said(lambda: model.capture(ids(), positions=torch.tensor([0, -1])))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    text = said(lambda: model.capture(ids(), mask, torch.tensor([[0, 1], [2, 1]])))
    assert text.startswith("row 1 is read at padding, token 1")
    assert "positions have shape (3,)" in said(lambda: model.capture(ids(), positions=torch.tensor([1, 1, 1])))
    assert "positions have shape (2, 0)" in said(lambda: model.capture(ids(), positions=torch.ones(2, 0).long()))
    assert "positions is 'last'" in said(lambda: model.capture(ids(), positions="last"))  # type: ignore[arg-type]
    assert "positions is list" in said(lambda: model.capture(ids(), positions=[0, 1]))  # type: ignore[arg-type]
    assert "positions is torch.bool" in said(lambda: model.capture(ids(), positions=torch.tensor([True, False])))
    assert "input_ids have shape (6,)" in said(lambda: model.capture(ids()[0]))


def test_sites_names_and_dtypes_that_there_are_not() -> None:
    model, opt = depth_model("llama"), depth_model("opt")
    assert said(lambda: model.capture(ids(), coordinates=[Coordinate(1, 1, "hook_z")])) == (
        "there is no site 'hook_z' (r1.l1.hook_z): llama has embed, resid_pre, attn_out, mlp_out, resid_post"
    )
    assert said(lambda: opt.capture(ids(), coordinates=[Coordinate(1, 1, "mlp_out")])) == (
        "opt does not show its mlp_out (route native): it has embed, resid_pre, attn_out, resid_post"
    )
    assert "llama has no depth r2.l1" in said(lambda: model.capture(ids(), coordinates=[Coordinate(2, 1)]))
    for names_filter in ("blocks.3.hook_resid_post", ["hook_embed", "blocks.3.hook_resid_post"]):
        text = said(lambda names_filter=names_filter: model.capture(ids(), names_filter=names_filter))
        assert text.startswith("llama has nothing named 'blocks.3.hook_resid_post' (names_filter): it has blocks.")
    assert "nothing named 'blocks.*.hook_z'" in said(lambda: model.capture(ids(), names_filter="blocks.*.hook_z"))
    assert "names_filter picks none" in said(lambda: model.capture(ids(), names_filter=lambda _: False))
    assert "names_filter is empty" in said(lambda: model.capture(ids(), names_filter=[]))
    both = said(lambda: model.capture(ids(), coordinates=model.axis, names_filter="hook_embed"))
    assert both == "coordinates and names_filter are both given: give one of them"
    for dtype in ("int8", "float99", torch.int64):
        text = said(lambda dtype=dtype: model.capture(ids(), dtype=dtype))
        assert text == f"states cannot be stored as '{dtype}': one of float32, bfloat16, float16"


class Int8Head(nn.Module):
    """A head as quantisation libraries make them: packed weights, one scale a row, computing in one dtype."""

    def __init__(self, head: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        scale = head.weight.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("weight", (head.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(dtype))
        self.dtype = dtype

    def forward(self, state: Tensor) -> Tensor:
        if state.dtype != self.dtype:
            raise RuntimeError(f"this head computes in {self.dtype}")
        return nn.functional.linear(state, self.weight.to(self.dtype) * self.scale)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "looped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_quantised_head_is_called_in_its_own_dtype(kind: str, dtype: torch.dtype) -> None:
    plain = module(kind).to(dtype)
    plain.lm_head = Int8Head(plain.lm_head, dtype)
    model = (LoopedModel if kind == "looped" else DecoderModel)(plain, None, kind)
    capture = model.capture(ids(), positions="all")
    model.check_identity(capture)
    assert capture.logits is not None and capture.logits.shape == (2, 6, VOCABULARY) == (2, 6, model.vocab_size)
    depth = model.axis[1]
    read = model.readout(capture.states[depth], depth)
    assert read.dtype == torch.float32 and not bool(read.isnan().any())
    assert plain.lm_head.weight.dtype == torch.int8
    assert len(model.fingerprint()) == 64


@pytest.mark.parametrize("kind", ["llama", "looped"])
def test_a_model_on_two_devices(kind: str) -> None:
    plain = module(kind)
    part = plain.core[1] if kind == "looped" else plain.model.layers[1]
    part.to("meta")
    text = said(lambda: wrap(plain, name=kind))
    assert text.startswith(f"{kind} has weights on the meta device, which hold no values (")
    assert "load it with its weights" in text


def test_remote_code_stays_off(tmp_path: Path) -> None:
    byte_tokenizer(["a"]).save_pretrained(tmp_path)
    module("llama", 320).save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')\n")
    config = (tmp_path / "config.json").read_text()
    assert '"model_type": "llama"' in config
    auto = '{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},'
    (tmp_path / "config.json").write_text(config.replace("{", auto, 1))
    assert depthprobe.load(tmp_path).name == str(tmp_path)  # transformers' own class, not the checkpoint's
    (tmp_path / "config.json").write_text(config.replace("{", auto, 1).replace('"llama"', '"unheard"'))
    assert "depthprobe runs none" in said(lambda: depthprobe.load(tmp_path))
    assert "unknown route 'magic'" in said(lambda: depthprobe.load(tmp_path, route="magic"))


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_where_positions_are_counted_otherwise(kind: str, side: str) -> None:
    """Bart takes no position ids, Bloom none either, Mamba has a state: rows are still those of single prompts."""
    model = DecoderModel(more_module(kind), None, kind)
    mask = torch.ones(2, 6, dtype=torch.long)
    real = slice(2, None) if side == "left" else slice(4)
    mask[0] = 0
    mask[0, real] = 1
    alone, whole = model.capture(ids()[:1, real], positions="all"), model.capture(ids(), mask, "all")
    last, two = model.capture(ids(), mask), torch.tensor([[real.start or 0, 3], [5, 0]])
    several = model.capture(ids(), mask, two)
    assert model.check_identity(whole) < 1e-5 and torch.equal(several.positions, two)  # type: ignore[arg-type]
    for depth in model.axis:
        own = alone.states[depth][0]
        torch.testing.assert_close(whole.states[depth][0, real], own, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last.states[depth][0], own[-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(several.states[depth][0, 0], own[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(several.states[depth][1], whole.states[depth][1, [5, 0]], rtol=1e-4, atol=1e-5)
    assert torch.equal(last.attention_mask, mask)


class Odd(nn.Module):
    """A model that changes its last state in a way of its own before the head."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.inner = module("llama")
        self.config, self.change = self.inner.config, change

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        out = self.inner.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)
        state = self.change(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=self.inner.lm_head(state))  # type: ignore[arg-type]


@torch.no_grad()
def test_what_no_module_does_before_the_head() -> None:
    scaled = DecoderModel(Odd(lambda state: state / 4), None, "scaled")
    assert scaled.check_identity(scaled.capture(ids())) < 1e-5 and scaled.axis[-1] == Coordinate(1, 3)
    shifted = DecoderModel(Odd(lambda state: state.tanh()), None, "shifted")
    assert shifted.axis[-1] == Coordinate(1, 3, "final_state")
    assert shifted.check_identity(shifted.capture(ids())) < 1e-5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m.config, "is_encoder_decoder", True), "x is an encoder-decoder"),
        (lambda m: setattr(m.model, "layers", nn.ModuleList()), "x has no stack of decoder layers"),
        (lambda m: setattr(m.model, "embed_tokens", nn.Identity()), "x does not run on token ids alone"),
    ],
)
def test_models_without_a_decoder_stack(change: Any, text: str) -> None:
    plain = module("llama")
    change(plain)
    assert text in said(lambda: wrap(plain, name="x"))
