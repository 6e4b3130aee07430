"""Tiles of the vocabulary against whole rows of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCABULARY, depth_model, module

from depthprobe.depth import wrap
from depthprobe.errors import UserError
from depthprobe.lens import vocabulary
from depthprobe.lens.vocabulary import read


def states(model: Any, rows: int = 3, length: int = 5) -> tuple[list[Any], Any]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(2))
    capture = model.capture(ids, positions="all")
    return [(c, capture.states[c].flatten(0, 1)) for c in model.axis], capture.logits.flatten(0, 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere", "opt", "looped-ouro-coda"])
@pytest.mark.parametrize(("tile", "rows"), [(1 << 20, 1024), (64, 1), (700, 9)])
def test_tiles_give_what_whole_rows_give(kind: str, tile: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_TILE", tile)
    monkeypatch.setattr(vocabulary, "_ROWS", rows)
    model = depth_model(kind)
    depths, own = states(model)
    n = len(own)
    targets = torch.randint(0, VOCABULARY, (n, 2), generator=torch.Generator().manual_seed(4))
    said = read(model, depths, top_k=4, targets=targets, own=own)
    logits = torch.stack([model.readout(state, c) for c, state in depths], dim=1).double()  # [N, D, V]
    logprobs = logits.log_softmax(-1)
    final = logprobs[:, -1:]
    kl = (final.exp() * (final - logprobs)).sum(-1)
    wanted = logits.gather(-1, targets[:, None].expand(-1, logits.shape[1], -1))
    for got, value in (
        (said.log_normaliser, logits.logsumexp(-1)),
        (said.entropy, -(logprobs.exp() * logprobs).sum(-1)),
        (said.kl_final, kl),
        (said.top_logprobs, logprobs.topk(4).values),
        (said.target_logit, wanted),
    ):
        assert got is not None
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-5)
    assert said.target_rank is not None and said.identity is not None
    assert torch.equal(said.target_rank, (logits[..., None] > wanted[..., None, :]).sum(-2))
    torch.testing.assert_close(logprobs.gather(-1, said.top_ids), logprobs.topk(4).values, rtol=1e-5, atol=1e-5)
    assert float(said.identity.max()) < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 99))
def test_the_best_of_many_tiles(rows: int, widths: list[int], k: int, seed: int) -> None:
    logits = torch.randn(rows, sum(widths), generator=torch.Generator().manual_seed(seed))
    k, start = min(k, logits.shape[1]), 0
    best, ids = torch.full((rows, k), -torch.inf), torch.zeros(rows, k, dtype=torch.long)
    for width in widths:
        tile = logits[:, start : start + width].contiguous()
        groups = tile.view(rows, -1, 8 if width % 8 == 0 else width)
        highest = groups.amax(-1)
        vocabulary._compete(best, ids, groups, highest, highest.amax(-1), start)
        start += width
    assert torch.equal(best, logits.topk(k).values) and torch.equal(logits.gather(-1, ids), best)


def test_without_entropy_nothing_is_made_of_it() -> None:
    model = depth_model("llama")
    depths, _ = states(model)
    said = read(model, depths, full=False)
    assert said.entropy is None and said.kl_final is None and said.target_rank is None and said.identity is None


def test_a_readout_that_is_not_the_models_is_refused() -> None:
    model = depth_model("llama")
    depths, own = states(model)
    with pytest.raises(UserError, match="differs from the model's own logits"):
        read(model, depths, own=own + torch.linspace(0, 1, VOCABULARY))


def test_logits_that_tie_have_one_rank() -> None:
    """A thousand unused tokens of one row in the head differ in the last bits, by where in a product they lie."""
    model = depth_model("llama")
    head = torch.nn.Linear(32, 1000, bias=False)
    head.weight.data[:] = torch.randn(32, generator=torch.Generator().manual_seed(0))
    model.model.lm_head = head
    model = wrap(model.model, name="tied")
    state = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    said = read(model, [(model.axis[-1], state)], targets=torch.arange(0, 1000, 7).expand(5, -1))
    assert said.target_rank is not None and int(said.target_rank.max()) == 0


def test_damage_is_named_by_place() -> None:
    model = depth_model("llama")
    depths, _ = states(model)
    depths[2] = (depths[2][0], depths[2][1].clone())
    depths[2][1][7, 3] = torch.nan
    with pytest.raises(UserError, match=r"states of llama are NaN .place 7, depth r1\.l2.") as caught:
        read(model, depths, name="place {}".format)
    assert "\n" not in str(caught.value)


def test_large_half_precision_states_are_read_in_float32() -> None:
    """Squares of such states, and their logits, are beyond 65504; the states are not."""
    model = wrap(module("llama").to(torch.float16), name="half")
    depths, _ = states(model)
    depths = [(c, (state.float() / state.float().abs().amax() * 6e4).to(torch.float16)) for c, state in depths]
    said = read(model, depths)
    assert bool(said.log_normaliser.isfinite().all())
    depths[1][1][4, 0] = torch.inf
    with pytest.raises(UserError, match=r"overflow float16 .its largest number is 65504. .row 4, depth r1\.l1."):
        read(model, depths)
