"""Attention over pages: both ways equal plain attention over the keys that were meant, padding reads zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from depthprobe.models import LoopedConfig
from depthprobe.runtime.packed import PackedLinear, can_pack, pack
from depthprobe.runtime.paged import PagedKV
from depthprobe.runtime.rows import RowPages, _bounds
from tests.runtime.helpers import random_model


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), groups=st.integers(1, 4), each=st.integers(1, 4),
    width=st.sampled_from([1, 4, 24]), double=st.booleans(), sparse=st.booleans(), seed=st.integers(0, 9999),
)  # fmt: skip
def test_rows_read_their_pages_alone(
    lengths: list[int], groups: int, each: int, width: int, double: bool, sparse: bool, seed: int
) -> None:
    lengths = sorted(lengths)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    n, pages = len(lengths), 500
    table = torch.randn(pages + 2, 2 * groups * width, generator=generator, dtype=dtype)
    table[pages] = torch.nan  # scratch
    table[pages + 1] = 0.0
    read = np.random.default_rng(seed).integers(0, pages, (n, lengths[-1]))
    for row, length in enumerate(lengths):
        read[row, length:] = pages if row % 2 else -1  # what lies beyond a row is not looked at
    q = torch.randn(n, groups * each, width, generator=generator, dtype=dtype)
    rows = RowPages(
        read, np.array(lengths), pages + 1, pages + 2, groups * each, groups, dtype, torch.device("cpu"), sparse
    )
    out = rows.attend(q, table, torch.empty_like(q))
    for row, length in enumerate(lengths):
        seen = table[torch.from_numpy(read[row, :length])].view(length, 2, groups, width)
        k, v = (seen[:, side].transpose(0, 1).repeat_interleave(each, 0) for side in (0, 1))
        expected = F.scaled_dot_product_attention(q[row][:, None], k, v)[:, 0]
        torch.testing.assert_close(out[row], expected, rtol=1e-10 if double else 2e-5, atol=1e-10 if double else 2e-5)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=200))
def test_groups_cover_the_rows_in_order(lengths: list[int]) -> None:
    lengths = sorted(lengths)
    bounds = _bounds(np.array(lengths), whole=False)
    assert [b for b, _ in bounds] == [0, *[e for _, e in bounds[:-1]]] and bounds[-1][1] == len(lengths)
    assert all(start < stop for start, stop in bounds)


def test_pages_are_counted_and_copied() -> None:
    config = LoopedConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, n_prelude=1, n_core=3, n_coda=2)
    kv = PagedKV(config, 5, 7, torch.float64, torch.device("cpu"))
    assert kv.bytes_per_core_page == 3 * 2 * 2 * 4 * 8 and kv.bytes_per_outer_page == 3 * 2 * 2 * 4 * 8
    assert [len(kv.tables(s)) for s in ("prelude", "core", "coda")] == [1, 3, 2]
    for table in kv.core:
        table[:5] = torch.randn(5, 16, dtype=torch.float64)
    before = [table.clone() for table in kv.core]
    kv.copy(torch.tensor([1, 1]), torch.tensor([0, 4]))
    for table, old in zip(kv.core, before, strict=True):
        assert torch.equal(table[[0, 4]], old[[1, 1]]) and torch.equal(table[[1, 2, 3]], old[[1, 2, 3]])


def test_packed_products_are_the_same_products() -> None:
    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this build of torch packs no weights")
    assert not can_pack(torch.float64, torch.device("cpu"))
    linear = nn.Linear(40, 33)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for rows in (1, 7, 64, 65):
            x = torch.randn(rows, 1, 40)
            torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)
    model = random_model(LoopedConfig(hidden_size=32, intermediate_size=48), 0, torch.float32)
    copy = pack(model)
    assert isinstance(copy.core[0].qkv, PackedLinear) and isinstance(model.core[0].qkv, nn.Linear)
    assert copy.embed_tokens.weight is model.embed_tokens.weight
    with torch.inference_mode():
        ids = torch.arange(9)[None]
        torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
