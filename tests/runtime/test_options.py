"""Options and requests: how large a pool becomes, and every wrong value as one line that names it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from depthprobe.errors import UserError
from depthprobe.halting import parse_rule
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.runtime import Engine, Request, Sampling
from depthprobe.runtime.jobs import Job
from depthprobe.runtime.layouts import layout
from depthprobe.runtime.options import EngineOptions, page_bytes
from depthprobe.runtime.pages import PagePool
from depthprobe.runtime.scheduler import Scheduler
from tests.runtime.helpers import VOCABULARY, random_model

CONFIG = LoopedConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_attention_heads=2, n_core=2, n_loops=4,
    n_prelude=1, n_coda=1, initializer_range=0.25, max_position_embeddings=32,
)  # fmt: skip
LOOPS = 4


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, 0)


def made(config: LoopedConfig, **options):
    with torch.device("meta"):
        return EngineOptions.of(LoopedForCausalLM(config), **options)


# -- the pool


@pytest.mark.parametrize(("exit", "kept"), [("fixed:1", 1), ("fixed:2", 2), ("full", 4), ("q:0.5", 2.5),
                                            ("random:.5/.5/0/0", 1.5), ("q:0.5,min=3", 3.5)])  # fmt: skip
def test_both_kinds_of_pages_run_out_together_at_the_expected_exit(exit, kept) -> None:
    """Whether the pool is given in pages or bytes, and however many slots there are."""
    settings = made(CONFIG, exit=exit, kv_pages=240).scheduler
    assert (settings.core_pages, settings.outer_pages) == (240, math.ceil(240 / kept))
    core, outer = page_bytes(CONFIG, 4)
    budget = 300 * core
    settings = made(CONFIG, exit=exit, kv_bytes=budget).scheduler
    assert settings.core_pages * core + settings.outer_pages * outer <= budget
    assert abs(settings.core_pages - settings.outer_pages * kept) <= kept + 1


def test_outer_pages_are_no_more_than_all_slots_use_and_heed_the_bytes() -> None:
    settings = made(CONFIG, width=2, spare=0, max_len=5, kv_pages=10_000).scheduler
    assert (settings.core_pages, settings.outer_pages) == (10_000, 10)
    settings = made(CONFIG, width=2, spare=0, max_len=5).scheduler
    assert (settings.core_pages, settings.outer_pages) == (40, 10)  # enough for all, within the bytes
    long = LoopedConfig(**{**CONFIG.to_dict(), "max_position_embeddings": 131_072})
    settings = made(long, kv_pages=1000).scheduler
    assert settings.outer_pages == 400  # once 128 slots of 131,072 tokens


def test_tokens_that_leave_early_fill_the_whole_pool(model) -> None:
    """8 · 14 tokens that left at 1 and 8 in flight fit into 144 core pages: outer pages may not end at a quarter."""
    core, outer = page_bytes(CONFIG, 8)
    engine = Engine(model, exit="fixed:1", width=8, spare=0, kv_bytes=144 * (core + outer))
    assert engine.pool.n_core == 144
    engine.generate([[i % 3] for i in range(8)], Sampling(max_new_tokens=15, ignore_eos=True))
    assert engine.scheduler.counters["preemptions"] == 0
    assert engine.pool.peak_core >= 8 * 15 and engine.pool.peak_outer == 8 * 15


def test_the_default_length_is_what_the_pool_can_hold_of_one_request() -> None:
    long = LoopedConfig(**{**CONFIG.to_dict(), "max_position_embeddings": 131_072, "n_loops": 32})
    settings = made(long, kv_pages=3200).scheduler
    assert settings.max_len == 100
    assert made(CONFIG, kv_pages=3200).scheduler.max_len == 32  # the model's own, where that is less
    assert made(long, kv_pages=3200, max_len=131_072).scheduler.max_len == 131_072


def test_tables_grow_with_the_sequences_that_there_are() -> None:
    pool = PagePool(4 * 700, 700, 3, 131_072, 4, layout("ragged"))
    assert pool.core.nbytes < 1 << 20
    pool.start_span(1, 0, 200)
    pool.leave([1] * 200, range(200), [2] * 200)
    before = pool.core[1, :, :200].copy(), pool.outer[1, :200].copy(), pool.exits[1, :200].copy()
    pool.start_span(1, 200, 500)
    after = pool.core[1, :, :200], pool.outer[1, :200], pool.exits[1, :200]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert pool.core.shape[2] == pool.outer.shape[1] == pool.exits.shape[1] == 512
    pool.check_integrity()
    pool.release(1)
    pool.check_integrity()
    assert (pool.free_core, pool.free_outer) == (2800, 700)
    short = PagePool(80, 20, 1, 20, 4, layout("ragged"))
    with pytest.raises(RuntimeError, match="position 20"):
        short.start([0], [20])


def test_a_request_longer_than_the_first_tables_is_served(model) -> None:
    wide = random_model(LoopedConfig(**{**CONFIG.to_dict(), "max_position_embeddings": 600}), 0)
    engine = Engine(wide, exit="full", width=2, kv_pages=4 * 700)
    prompt = [i % VOCABULARY for i in range(254)]
    done = engine.generate([prompt], Sampling(max_new_tokens=6, ignore_eos=True))[0]
    expected = wide.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 254:]
    assert done.tokens == expected.tolist()


def test_the_last_place_is_used() -> None:
    """prompt + max_new − 1 places: the request and the scheduler agree."""
    options = made(CONFIG, width=2, max_len=12)
    ends = {}
    for new in (8, 9):
        try:
            options.checked(Request((1,) * 5, Sampling(max_new_tokens=new)), "r0", VOCABULARY, False)
            Scheduler(options.scheduler).add(Job(0, 5, new))
            ends[new] = "served"
        except UserError as error:
            ends[new] = str(error)
    assert ends[8] == "served" and "need 13 places" in ends[9]
    with pytest.raises(UserError, match="more than the 12"):
        Scheduler(options.scheduler).add(Job(0, 5, 9))


# -- refusals


WRONG = [
    *[({name: value}, name) for name in ("width", "prefill_tokens", "kv_pages", "kv_bytes", "n_loops", "max_len")
      for value in (0, -1, 1.5, "3", True, [2])],
    *[({name: value}, name) for name in ("spare", "tap") for value in (-1, 0.5, "3", True)],
    *[({name: None}, name) for name in ("width", "prefill_tokens", "tap")],
    *[({"coda_share": value}, "coda_share") for value in (-0.1, 1.1, "half", True, float("nan"))],
    *[({"exit": value}, "exit") for value in (0.5, 1, ["q:0.5"], True)],
    *[({name: value}, name) for name in ("kv", "policy", "prefill") for value in (3, "", ["ragged"], {})],
    *[({name: value}, name) for name in ("by_depth", "record_gates") for value in (1, "no", None)],
    ({"kv_pages": 100, "kv_bytes": 1 << 20}, "leave one out"),
    ({"n_loops": 5}, "4, which the model has"), ({"max_len": 33}, "32, which the model has"),
    ({"tap": VOCABULARY + 1}, "17, which the model has"),
    ({"exit": "q:0.5,min_prompt=2"}, "dense prefill"), ({"exit": "lookahead:l2:0.1,min_prompt=2"}, "dense prefill"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda one: str(one))
def test_every_wrong_option_is_one_line_that_names_it(options, words) -> None:
    with pytest.raises(UserError, match=words) as error:
        made(CONFIG, **options)
    assert "\n" not in str(error.value) and "core_pages" not in str(error.value)


def test_least_depths_of_prompts_hold_where_prompts_leave_early() -> None:
    options = made(CONFIG, exit="q:0.5,min_prompt=2", prefill="ragged")
    assert options.prompt_rule is not None and options.prompt_rule.least_depth(prompt=True) == 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [(Request(5), "prompt is 5"), (Request("abc"), "prompt is 'abc'"), (Request((1,), 5), "sampling is 5"),
     (Request((1,), id=5), "id is 5"), (Request((1,), replay=5), "replay is 5"), (Request((1,), about=5), "about"),
     (Request((1,), prompt_replay=5), "prompt_replay is 5")],
    ids=lambda one: "",
)  # fmt: skip
def test_a_request_of_wrong_kinds_is_one_line(model, request_, words) -> None:
    with pytest.raises(UserError, match=words):
        Engine(model).add(request_)
    with pytest.raises(UserError, match="request"):
        made(CONFIG).checked([1, 2], "r0", VOCABULARY, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_tokens", 5), ("stop_tokens", None), ("stop_tokens", "12"), ("stop", 5), ("stop", None), ("seed", 0.5),
     ("ignore_eos", 1), ("temperature", "hot"), ("top_p", None)],
)  # fmt: skip
def test_sampling_of_wrong_kinds_names_the_field(field, value) -> None:
    with pytest.raises(UserError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize("options", [{"policy": "full"}, {"exit": "replay"}])
def test_ragged_prefill_needs_someone_who_says_where_prompts_leave(model, options) -> None:
    engine = Engine(model, prefill="ragged", width=2, **options)
    replay = (2, 2) if "exit" in options else None
    with pytest.raises(UserError, match="prompt_replay"):
        engine.add(Request((1, 2, 3), Sampling(max_new_tokens=2), replay=replay))
    engine.add(Request((1,), Sampling(max_new_tokens=2), replay=replay))  # no prompt to leave early
    engine.add(Request((1, 2, 3), Sampling(max_new_tokens=2), id="b", replay=replay, prompt_replay=(1, 3)))
    engine.run()
    done = engine.take("b")
    assert done is not None and done.prompt_exit_depths == [1, 3]


# -- seeds


def test_requests_without_a_seed_draw_each_their_own(model) -> None:
    """By id: the same in every batch and order, and different between requests."""
    options = {"exit": "random:.25/.25/.25/.25", "max_len": 32}
    sampling = Sampling(max_new_tokens=16, ignore_eos=True)
    done = Engine(model, width=4, **options).generate([[1]] * 4, sampling)
    assert len({tuple(one.exit_depths) for one in done}) == 4
    alone = Engine(model, width=1, **options).generate([Request((1,), sampling, id=one.id) for one in done[::-1]])
    assert [one.exit_depths for one in alone[::-1]] == [one.exit_depths for one in done]
    fixed = Engine(model, width=4, **options).generate([[1]] * 3, dataclasses.replace(sampling, seed=3))
    assert len({tuple(one.exit_depths) for one in fixed}) == 1


def test_rules_are_taken_as_objects_too(model) -> None:
    assert EngineOptions.of(model, exit=parse_rule("fixed:2")).exit.spec() == "fixed:2"
