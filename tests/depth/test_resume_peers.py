"""A sweep of ours against the same sweep by TransformerLens and by nnsight, on the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, module
from torch import Tensor

from depthprobe.depth import Cell, Coordinate, DecoderModel, Edit, wrap

LENGTH = 9
LAYERS = 3


def prompts() -> tuple[Tensor, Tensor]:
    """A prompt and its donor, which differ from token 3 on in one token."""
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3))
    donor = ids.clone()
    donor[3] = (donor[3] + 5) % VOCABULARY
    return ids, donor


def ours(model: Any, ids: Tensor, donor: Tensor, site: str, engine: str) -> Tensor:
    """Logits [layers, tokens, V] of the last token, `site` patched at every layer and token."""
    points = [Coordinate(1, layer, site) for layer in range(1, LAYERS + 1)]
    states = model.capture(donor[None], positions="all", coordinates=points).states
    cells = [Cell((Edit(p, (t,), states[p][0, [t]]),)) for p in points for t in range(LENGTH)]
    done = model.resume(ids, cells, engine=engine)
    assert done.engine == engine and done.n_filled >= LAYERS * 3
    last = model.axis[-1]
    return model.readout(done.states[last][:, 0], last).view(LAYERS, LENGTH, -1)


@pytest.mark.parametrize(("site", "hook"), [("resid_pre", "resid_pre"), ("mlp_out", "mlp_out")])
def test_transformer_lens(site: str, hook: str) -> None:
    pytest.importorskip("transformer_lens")
    from transformer_lens import patching
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    plain = module("llama")
    bridge = build_bridge_from_module(copy.deepcopy(plain), "LlamaForCausalLM", hf_config=plain.config).eval()
    ids, donor = prompts()
    with torch.no_grad():
        _, cache = bridge.run_with_cache(donor[None])
        seen: list[Tensor] = []

        def metric(logits: Tensor) -> Tensor:
            seen.append(logits[0, -1].clone())
            return logits[0, -1, 7] - logits[0, -1, 8]

        def put(state: Tensor, index: Any, clean: Tensor) -> Tensor:
            _, position = index
            state[:, position] = clean[:, position]
            return state

        theirs = patching.generic_activation_patch(
            bridge, ids[None], cache, metric, put, hook, index_axis_names=("layer", "pos")
        )
    logits = ours(DecoderModel(plain, None, "llama"), ids, donor, site, "suffix")
    torch.testing.assert_close(logits, torch.stack(seen).view(LAYERS, LENGTH, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[..., 7] - logits[..., 8], theirs, rtol=1e-4, atol=1e-4)
    bridged = ours(wrap(bridge), ids, donor, site, "hooks")  # its attention is its own, so rows are run whole
    torch.testing.assert_close(bridged, logits, rtol=1e-4, atol=1e-4)


def test_nnsight() -> None:
    nnsight = pytest.importorskip("nnsight")
    plain = module("gpt2")
    ids, donor = prompts()
    native = DecoderModel(copy.deepcopy(plain), None, "gpt2")
    traced = wrap(nnsight.NNsight(plain), name="gpt2")
    logits = ours(traced, ids, donor, "resid_post", "suffix")
    torch.testing.assert_close(logits, ours(native, ids, donor, "resid_post", "suffix"), rtol=1e-5, atol=1e-5)
    states = native.capture(donor[None], positions="all").states
    model = nnsight.NNsight(plain)
    for layer in range(LAYERS):
        value = states[Coordinate(1, layer + 1)][0, 4]
        with model.trace(input_ids=ids[None]):
            model.transformer.h[layer].output[:, 4] = value
            said = model.lm_head.output[0, -1].save()
        torch.testing.assert_close(logits[layer, 4], said, rtol=1e-4, atol=1e-4)
