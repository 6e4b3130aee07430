"""The pool: what is read through its tables is what the layout promises, and no page is lost or shared."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthprobe.runtime.layouts import LAYOUTS, Layout, layout
from depthprobe.runtime.pages import PagePool

NAMES = st.sampled_from(list(LAYOUTS))


def seen_at(one: Layout, d: int, ran: int, left: bool) -> int:
    """The loop whose values a query at depth d reads of a token that ran `ran` loops; −1 − e: the final state of a
    token that left at e, projected anew. Straight from the definitions; d ≤ ran where the token is in flight."""
    if one.name == "shared":
        return ran
    if one.name == "first-then-shared":
        return 1 if d == 1 else ran
    if one.name == "state-copied" and left and d > ran:
        return -1 - ran
    return min(d, ran)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_queries_read_what_the_layout_says(name: str, u: int, outer: bool, rng: random.Random) -> None:
    """Values are written through the tables as the runner would, and read back by every depth."""
    n_slots, longest, one = 4, 6, layout(name)
    n_core = n_slots * longest * one.reserve(u)
    pool = PagePool(n_core, n_slots * longest if outer else 0, n_slots, longest, u, one, seed=rng.randrange(99))
    value: dict[int, tuple[int, int, int]] = {}  # page: slot, position, loop
    tokens: dict[tuple[int, int], tuple[int, bool]] = {}  # loops run, whether it left
    length = [0] * n_slots
    for _ in range(rng.randrange(4, 14)):
        free = [s for s in range(n_slots) if length[s] < longest and tokens.get((s, length[s] - 1), (0, True))[1]]
        if free and rng.random() < 0.7:
            slots = rng.sample(free, rng.randrange(1, len(free) + 1))
            pool.start(slots, [length[s] for s in slots])
            for s in slots:
                tokens[s, length[s]] = (0, False)
                length[s] += 1
        going = [key for key, (_, left) in tokens.items() if not left]
        rows = []
        for key in going:  # mixed depths: each runs some loops further
            for _ in range(rng.randrange(u + 1)):
                d = tokens[key][0] + 1
                if d <= u:
                    assert pool.writable([key[0]], [d], [key[1]])[0]
                    value[int(pool.core[key[0], d - 1, key[1]])] = (*key, d)
                    tokens[key] = (d, False)
            d = tokens[key][0]
            if d and (d == u or (one.early and rng.random() < 0.5)):
                rows.append((*key, d))
        if rows:
            plan = pool.leave(*zip(*rows, strict=True))
            assert (plan is not None) == one.copies
            if plan is not None:
                for source, target in zip(plan.source.tolist(), plan.target.tolist(), strict=True):
                    value[target] = value[source]
            for s, p, e in rows:
                tokens[s, p] = (e, True)
                free_loops = pool.writable([s] * u, range(1, u + 1), [p] * u)
                if name == "state-copied" and e < u:
                    value[int(pool.core[s, e, p])] = (s, p, -1 - e)
                    assert free_loops.tolist() == [d <= e + 1 for d in range(1, u + 1)]
                elif one.alias(e, u) is not None:
                    assert free_loops.tolist() == [d <= e for d in range(1, u + 1)]
        if rng.random() < 0.2:
            s = rng.randrange(n_slots)
            pool.release(s)
            tokens = {key: token for key, token in tokens.items() if key[0] != s}
            length[s] = 0
        pool.check_integrity()
        for s in range(n_slots):
            mine = [token for key, token in tokens.items() if key[0] == s]
            held = sum(one.held(ran, u) if left else one.reserve(u) for ran, left in mine)
            assert pool.pages_held(s) == held and pool.length[s] == len(mine)
        assert pool.free_core == n_core - sum(map(pool.pages_held, range(n_slots)))
        assert not outer or pool.free_outer == n_slots * longest - len(tokens)
        for (s, p), (ran, left) in tokens.items():
            for d in range(1, (u if left else ran) + 1):
                assert value[int(pool.core[s, d - 1, p])] == (s, p, seen_at(one, d, ran, left))
    for s in range(n_slots):
        pool.release(s)
    assert pool.free_core == n_core and (pool.core == -1).all() and (pool.outer == -1).all()


def test_a_span_leaves_at_many_depths_at_once() -> None:
    pool = PagePool(40, 10, 2, 8, 4, layout("ragged"))
    pool.start_span(1, 0, 5)
    assert (pool.free_core, pool.free_outer, pool.peak_core, pool.peak_outer) == (20, 5, 20, 5)
    assert pool.leave([1] * 5, range(5), [1, 4, 2, 3, 1]) is None
    assert pool.pages_held(1) == 11 and pool.free_core == 29
    assert pool.exits[1].tolist() == [1, 4, 2, 3, 1, 0, 0, 0]
    assert [len(set(pool.core[1, :, p].tolist())) for p in range(5)] == [1, 4, 2, 3, 1]
    pool.release(1)
    pool.start_span(0, 0, 2)
    assert pool.peak_core == 20 and pool.free_core == 32


def test_pages_come_in_order_or_shuffled_and_the_last_given_back_first() -> None:
    pool = PagePool(8, 0, 2, 2, 2, layout("ragged"))
    pool.start([0], [0])
    pool.start([0], [1])
    assert pool.core[0].T.tolist() == [[0, 1], [2, 3]]
    pool.leave([0], [0], [1])
    pool.start([1], [0])
    assert pool.core[1, :, 0].tolist() == [4, 1] or pool.core[1, :, 0].tolist() == [1, 4]
    shuffled = PagePool(64, 0, 2, 16, 2, layout("ragged"), seed=1)
    shuffled.start_span(0, 0, 16)
    assert np.diff(shuffled.core[0].T.ravel()).max() > 2


def test_copies_of_the_last_exited() -> None:
    pool = PagePool(8, 0, 2, 1, 4, layout("last-exited"))
    pool.start([0, 1], [0, 0])
    before = pool.core.copy()
    plan = pool.leave([0, 1], [0, 0], [2, 3])
    assert plan is not None
    assert plan.source.tolist() == [before[0, 1, 0], before[0, 1, 0], before[1, 2, 0]]
    assert plan.target.tolist() == [before[0, 2, 0], before[0, 3, 0], before[1, 3, 0]]
    assert (pool.core == before).all() and pool.free_core == 0


def test_bugs_are_not_served() -> None:
    pool = PagePool(4, 0, 2, 2, 4, layout("depth-indexed"))
    pool.start([0], [0])
    with pytest.raises(RuntimeError, match="4 pages are taken, 0 are free"):
        pool.start([1], [0])
    with pytest.raises(ValueError, match="no early exits"):
        pool.leave([0], [0], [3])
    pool.leave([0], [0], [4])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool.core.__setitem__((0, 0, 0), pool.core[0, 0, 1]), "core pages of two tokens"),
        (lambda pool: pool.core.__setitem__((0, 1, 0), -1), "some loops only"),
        (lambda pool: pool.core.__setitem__((0, 1, 0), pool.core[0, 1, 1]), "loops of token 0 of slot 0 read"),
        (lambda pool: pool.core.__setitem__((1, slice(None), 0), 1), "behind the end"),
        (lambda pool: pool.exits.__setitem__((0, 2), 1), "without pages has an exit"),
        (lambda pool: pool.outer.__setitem__((0, 0), -1), "outer and core"),
    ],
)
def test_integrity_names_what_is_wrong(spoil, message: str) -> None:
    pool = PagePool(8, 4, 2, 4, 2, layout("ragged"))
    pool.start_span(0, 0, 2)
    pool.leave([0, 0], [0, 1], [1, 1])
    pool.check_integrity()
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
