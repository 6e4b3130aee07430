"""One key-value head behind a fused projection: the suffix engine against a forward with a hook of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from tiny_models import CONTEXT, VOCABULARY
from torch import Tensor

from depthprobe.depth import Cell, DecoderModel, Edit, suffix_attend
from depthprobe.depth.suffix_check import support_of
from depthprobe.errors import UserError

_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
KINDS = ("bigcode", "phi3", "gemma", "gpt2-one-head")


def opened(kind: str, dtype: torch.dtype = torch.float32) -> DecoderModel:
    llama = {**_IDS, **_SIZE, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
    torch.manual_seed(0)
    match kind:
        case "bigcode":
            made: Any = t.GPTBigCodeForCausalLM(
                t.GPTBigCodeConfig(**_IDS, n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT)
            )
        case "phi3":
            made = t.Phi3ForCausalLM(t.Phi3Config(**llama))
        case "gemma":
            made = t.GemmaForCausalLM(t.GemmaConfig(**llama, head_dim=8))
        case _:
            made = t.GPT2LMHeadModel(t.GPT2Config(**_IDS, n_embd=32, n_layer=3, n_head=1, n_positions=CONTEXT))
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return DecoderModel(made.eval().to(dtype), None, kind)


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY - 2, (11,), generator=torch.Generator().manual_seed(3))


def hooked_logits(model: DecoderModel, cell: Cell) -> Tensor:
    """[S, V] of a plain forward in which the output of a layer, or of the embedding, is overwritten."""
    (edit,) = cell.edits
    tap = model.taps[edit.coordinate]
    assert edit.value is not None
    value = edit.value

    def put(state: Any) -> Any:
        if isinstance(state, tuple):
            return (put(state[0]), *state[1:])
        state = state.clone()
        state[:, list(edit.positions)] = value
        return state

    module = model.model.get_submodule(tap.path)
    if tap.before:
        handle = module.register_forward_pre_hook(lambda _m, args: (put(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(lambda _m, _args, out: put(out))
    with handle, torch.inference_mode():
        return model.model(input_ids=ids()[None]).logits[0]


@pytest.mark.parametrize("read", [(10,), (4, 10), (0, 3, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_narrowed_last_block_with_one_head(kind: str, read: tuple[int, ...]) -> None:
    model = opened(kind)
    noise = torch.Generator().manual_seed(1)
    cells = [
        Cell((Edit(point, (token,), torch.randn(1, 32, generator=noise)),))
        for point in model.axis[:3]
        for token in (3, 3, 5, 10)
        if token <= max(read)
    ]
    done = model.resume(ids(), cells, read)
    assert done.engine == "suffix" and done.n_run == len(cells)
    last = model.axis[-1]
    for cell, state in zip(cells, done.states[last], strict=True):
        expected = hooked_logits(model, cell)[list(read)]
        torch.testing.assert_close(model.readout(state, last), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str) -> None:
    model = opened(kind, torch.bfloat16)
    cell = Cell((Edit(model.axis[1], (3,), torch.ones(1, 32, dtype=torch.bfloat16)),))
    slow, fast = (model.resume(ids(), [cell], engine=engine) for engine in ("hooks", "suffix"))
    state, other = (done.states[model.axis[-1]].float() for done in (slow, fast))
    assert float((state - other).abs().max() / state.abs().max()) < 6e-2


def test_what_fails_in_a_narrowed_block_alone_is_found_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" falls back on hooks where the engine trips only over tokens that are not read."""
    model, own = opened("phi3"), suffix_attend._span

    def trips(q: Tensor, k: Tensor, v: Tensor, span: suffix_attend.Span, *rest: Any) -> Tensor:
        if span.asking is not None:
            raise RuntimeError("view size is not compatible")
        return own(q, k, v, span, *rest)

    monkeypatch.setattr(suffix_attend, "_span", trips)
    assert "view size is not compatible" in str(support_of(model))
    cell = Cell((Edit(model.axis[1], (3,), torch.ones(1, 32)),))
    assert model.resume(ids(), [cell]).engine == "hooks"
    with pytest.raises(UserError, match="do not run on a part of a row"):
        model.resume(ids(), [cell], engine="suffix")
