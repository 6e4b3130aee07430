"""Cached decoding equals the uncached forward: ragged or not, left-padded, in chunks, through `generate`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from depthprobe.errors import UserError
from depthprobe.halting import FixedDepth, QExit
from depthprobe.models import LoopedCache, LoopedConfig
from depthprobe.models.modeling import CACHE_FIELD
from tests.models.helpers import VOCABULARY, close, configs, pad, random_model, random_rows

SEEDS = st.integers(0, 2**31)


@settings(max_examples=25, deadline=None)
@given(configs(), SEEDS, st.integers(1, 3), st.integers(1, 6), st.sampled_from(["none", "given", "rule"]))
def test_chunks_equal_the_whole(config: LoopedConfig, seed: int, n: int, cut: int, kind: str) -> None:
    model = random_model(config, seed)
    ids, mask = pad(random_rows(seed, n), "left")
    exits = {"none": None, "given": torch.randint(1, config.n_loops + 1, ids.shape), "rule": QExit(0.5)}[kind]
    parts = exits if isinstance(exits, torch.Tensor) else None
    with torch.no_grad():
        whole = model(ids, mask, exits=exits).logits
        cache = LoopedCache()
        pieces = []
        for part in (slice(0, cut), *(slice(i, i + 1) for i in range(cut, ids.shape[1]))):
            out = model(
                ids[:, part],
                mask[:, : part.stop],
                cache=cache,
                exits=exits if parts is None else parts[:, part],
            )
            pieces.append(out.logits)
    real = mask.bool()
    close(torch.cat(pieces, 1)[real], whole[real])
    assert cache.get_seq_length() == ids.shape[1]
    assert len(cache) == config.num_hidden_layers
    assert torch.equal(cache.token_ids, ids.masked_fill(~real, -1))


def test_the_past_mask_is_known_to_the_cache() -> None:
    model = random_model(
        LoopedConfig(vocab_size=VOCABULARY, hidden_size=16, n_core=2, n_previous_tokens=2), 0
    )
    ids, mask = pad(random_rows(0, 3), "left")
    with torch.no_grad():
        whole = model(ids, mask).logits[:, -1]
        first = model(ids[:, :-1], mask[:, :-1], use_cache=True)
        for last in ({}, {"attention_mask": torch.ones(3, 1)}, {"attention_mask": mask}):
            cache = model(ids[:, :-1], mask[:, :-1], use_cache=True)[CACHE_FIELD]
            close(model(ids[:, -1:], cache=cache, **last).logits[:, -1], whole)
    assert isinstance(first[CACHE_FIELD], LoopedCache)


def make(**options: object):
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4,
             "num_key_value_heads": 2, "n_prelude": 1, "n_core": 2, "n_coda": 1, "n_loops": 3,
             "initializer_range": 0.4, "n_previous_tokens": 2, "partial_rotary_factor": 0.5,
             "pad_token_id": 3}  # fmt: skip
    return random_model(LoopedConfig(**{**shape, **options}), 0)


@pytest.mark.parametrize("exits", [None, QExit(0.5), FixedDepth(2)])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_and_without_a_cache(exits: object, beams: int) -> None:
    model = make()
    ids, mask = pad(random_rows(1, 3), "left")
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    if exits is not None:
        options["exits"] = exits
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    if beams == 1:
        for row, real in enumerate(mask.bool()):  # padding changes nothing
            options["attention_mask"] = None
            alone = model.generate(ids[row : row + 1, real], **options)
            assert torch.equal(alone[0, real.sum() :], cached[row, ids.shape[1] :])


def test_generate_goes_on_from_a_cache() -> None:
    model = make()
    ids = torch.tensor(random_rows(2, 1))
    whole = model.generate(ids, max_new_tokens=6, do_sample=False)
    cache = LoopedCache()
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    rest = model.generate(ids, max_new_tokens=6, do_sample=False, **{CACHE_FIELD: cache})
    assert torch.equal(whole, rest)
    chunked = model.generate(
        ids, max_new_tokens=6, do_sample=False, prefill_chunk_size=3, **{CACHE_FIELD: LoopedCache()}
    )
    assert torch.equal(whole, chunked)


def test_the_ids_follow_the_keys() -> None:
    model = make()
    ids = torch.tensor([[1, 2, 4, 5], [6, 7, 8, 9]])
    cache = LoopedCache()
    with torch.no_grad():
        model(ids, cache=cache)
    cache.crop(-1)
    assert torch.equal(cache.token_ids, ids[:, :3])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.token_ids, ids.flip(0)[:, :3])
    cache.batch_repeat_interleave(2)
    assert cache.token_ids.shape == (4, 3)
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert torch.equal(cache.token_ids, ids.flip(0)[:, :3])
    with torch.no_grad():
        close(model(ids.flip(0)[:, 3:], cache=cache).logits, model(ids.flip(0)).logits[:, 3:])
    cache.reset()
    assert cache.token_ids is None and cache.get_seq_length() == 0


def test_a_cache_that_does_not_fit_is_refused() -> None:
    model = make()
    ids = torch.tensor([[1, 2, 4, 5]])
    cache = LoopedCache()
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(UserError, match="3 loops and cannot continue with 2"):
            model(ids, cache=cache, n_loops=2)
        with pytest.raises(UserError, match="holds 1 rows, the input 2"):
            model(ids.repeat(2, 1), cache=cache)
        with pytest.raises(UserError, match="DynamicCache"):
            model(ids, cache=DynamicCache())
        with pytest.raises(UserError, match="past_key_values"):
            model(ids, cache=cache, past_key_values=cache)
        with pytest.raises(UserError, match="previous_ids"):
            model(ids, cache=cache, block_mask=torch.ones(1, 1, 4, 8, dtype=torch.bool))
    assert cache.get_seq_length() == 4
