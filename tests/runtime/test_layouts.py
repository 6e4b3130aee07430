"""Layouts by example, and what must hold of any."""

from __future__ import annotations

import pytest

from depthprobe.errors import UserError
from depthprobe.runtime.layouts import LAYOUTS, layout

# name: pages in flight, kept after leaving at 1, 2, 3, 4, pages written by loops 1, 2, 3, 4; U = 4
TABLE = {
    "ragged": (4, (1, 2, 3, 4), (0, 1, 2, 3)),
    "depth-indexed": (4, (4, 4, 4, 4), (0, 1, 2, 3)),
    "last-exited": (4, (4, 4, 4, 4), (0, 1, 2, 3)),
    "shared": (1, (1, 1, 1, 1), (0, 0, 0, 0)),
    "first-then-shared": (2, (1, 2, 2, 2), (0, 1, 1, 1)),
    "state-copied": (4, (2, 3, 4, 4), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_of_four_loops(name: str) -> None:
    reserve, held, index = TABLE[name]
    one = layout(name)
    assert one.reserve(4) == reserve
    assert tuple(one.held(e, 4) for e in range(1, 5)) == held
    assert tuple(one.index(d, 4) for d in range(1, 5)) == index


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("u", range(1, 7))
def test_what_holds_of_any_layout(name: str, u: int) -> None:
    one = layout(name)
    assert {one.index(d, u) for d in range(1, u + 1)} == set(range(one.reserve(u)))
    for e in range(1, u + 1):
        assert 1 <= one.held(e, u) <= one.reserve(u)
        assert one.index(e, u) < one.held(e, u), "the exit's page is kept"
        alias = one.alias(e, u)
        assert alias is None or alias == one.held(e, u) - 1
    assert one.held(u, u) == one.reserve(u), "nothing is given back at full depth"


def test_which_layouts_can_be_replayed() -> None:
    assert [name for name, one in LAYOUTS.items() if not one.parallel] == ["shared", "first-then-shared"]


def test_early_exits_of_a_depth_indexed_cache_are_refused() -> None:
    layout("depth-indexed").allows(early=False)
    layout("ragged").allows(early=True)
    with pytest.raises(UserError, match=r"depth-indexed has no early exits.*\(kv\): use policy full"):
        layout("depth-indexed").allows(early=True)


def test_unknown_layouts_are_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match=r"no KV layout is named 'paged'.*ragged, depth-indexed"):
        layout("paged")
    assert layout(LAYOUTS["ragged"]) is LAYOUTS["ragged"]
