"""The suffix engine against the hooks engine, which runs whole rows: random cells on every architecture."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from more_models import more_module
from tiny_models import CONTEXT, DECODERS, LOOPED, VOCABULARY, module
from torch import Tensor

from depthprobe.depth import Cell, Coordinate, Cut, DecoderModel, Edit, LoopedModel, suffix_memory
from depthprobe.depth.hooked import edited
from depthprobe.depth.suffix_check import Support, support_of
from depthprobe.depth.suffix_memory import TooLittleMemoryError
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError

#: Those of more_models whose attention goes through transformers' interface, or that are looped.
MORE = ("olmo2", "stablelm", "gptj", "bart", "dory", "dory-last-loop", "hrm")
REFUSED = {"falcon": "interface", "bloom": "interface", "mamba": "interface", "inkling": "more than its last layer"}
SLIDING = ("mistral-sliding", "gemma2-sliding", "gptoss")


@cache
def opened(kind: str, dtype: torch.dtype = torch.float32) -> TappedModel:
    if kind.startswith("looped"):
        return LoopedModel(module(kind).to(dtype), None, kind)
    if kind in SLIDING:
        return DecoderModel(sliding(kind).to(dtype), None, kind)
    return DecoderModel((module(kind) if kind in DECODERS else more_module(kind)).to(dtype), None, kind)


def sliding(kind: str) -> Any:
    """Windows of four tokens; gpt-oss also has sinks and experts."""
    import transformers as t

    torch.manual_seed(0)
    size = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
        "sliding_window": 4, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "mistral-sliding":
        made: Any = t.MistralForCausalLM(t.MistralConfig(**size))
    elif kind == "gptoss":
        made = t.GptOssForCausalLM(t.GptOssConfig(**size, num_local_experts=4, num_experts_per_tok=2))
    else:
        made = t.Gemma2ForCausalLM(t.Gemma2Config(**size, query_pre_attn_scalar=8))
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return made.eval()


def prompt(length: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY - 2, (length,), generator=torch.Generator().manual_seed(seed))


@st.composite
def sweeps(draw: st.DrawFn, model: TappedModel, cuts: bool) -> dict[str, Any]:
    """A prompt, cells of every kind, tokens and coordinates to read."""
    length = draw(st.integers(1, 11))
    seed = draw(st.integers(0, 1000))
    noise = torch.Generator().manual_seed(seed)
    tokens = st.lists(st.integers(0, length - 1), min_size=1, max_size=3, unique=True).map(sorted).map(tuple)
    layers = [point for point in model.axis if point.site == "resid_post"]
    cells = []
    for _ in range(draw(st.integers(1, 6))):
        edits = []
        for _ in range(draw(st.integers(0, 3))):
            point, at = draw(st.sampled_from(model.points)), draw(tokens)
            skip = point.site == "resid_post" and draw(st.booleans())
            value = None if skip else torch.randn(len(at), model.width, generator=noise).to(model.dtype)
            edits.append(Edit(point, at, value))
        cut = []
        if cuts and draw(st.booleans()):
            queries = draw(tokens)
            keys = tuple(p for p in draw(tokens) if p not in queries)
            window = draw(st.integers(0, len(layers) - 1))
            cut = [Cut(layer, queries, keys) for layer in layers[window : window + 2]] if keys else []
        cells.append(Cell(tuple(edits), tuple(cut)))
    coordinates = draw(st.lists(st.sampled_from(model.points), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        coordinates.append(model.axis[-1])
    return {
        "ids": prompt(length, seed), "cells": cells, "read": draw(tokens),
        "coordinates": list(dict.fromkeys(coordinates)),
        "max_bytes": draw(st.sampled_from([1 << 30, 1])),
    }  # fmt: skip


def compared(model: TappedModel, sweep: dict[str, Any], tolerance: float) -> None:
    call = {key: sweep[key] for key in ("read", "coordinates")}
    slow = model.resume(sweep["ids"], sweep["cells"], **call, engine="hooks")
    try:
        fast = model.resume(sweep["ids"], sweep["cells"], **call, engine="suffix", max_bytes=sweep["max_bytes"])
    except TooLittleMemoryError as error:  # the least that it names is enough
        assert sweep["max_bytes"] == 1
        fast = model.resume(sweep["ids"], sweep["cells"], **call, engine="suffix", max_bytes=error.least)
    assert (slow.engine, fast.engine) == ("hooks", "suffix")
    assert (fast.n_run, fast.n_filled) == (slow.n_run, slow.n_filled)
    if sweep["max_bytes"] > 1:  # else each cell brings an unpatched row of its own
        assert fast.token_layers <= slow.token_layers
    # and both against all cells run, also those that were filled
    rows, read = len(sweep["cells"]), torch.tensor(sweep["read"])
    with torch.inference_mode(), edited(model.model, model.taps, sweep["cells"], len(sweep["ids"]), model.name):
        whole = model.capture(
            sweep["ids"].expand(rows, -1), positions=read.expand(rows, -1), coordinates=sweep["coordinates"],
            logits=False,
        )  # fmt: skip
    for point, state in whole.states.items():
        atol = tolerance * max(1.0, float(state.abs().max()))
        torch.testing.assert_close(slow.states[point], state, rtol=tolerance, atol=atol, msg=f"hooks {point}")
        torch.testing.assert_close(fast.states[point], state, rtol=tolerance, atol=atol, msg=f"suffix {point}")


@pytest.mark.parametrize("kind", [*DECODERS, *LOOPED, *MORE, *SLIDING])
def test_any_cells_equal_whole_rows_with_hooks(kind: str) -> None:
    # nGPT norms vectors that are near zero in a tiny model, which float32 does not survive
    model = opened(kind, torch.float64 if kind.startswith("dory") else torch.float32)
    masked = "attn_out" in model.sites or kind.startswith("looped")

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(sweeps(model, masked))
    def check(sweep: dict[str, Any]) -> None:
        compared(model, sweep, 1e-5)

    check()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "looped", "looped-ouro-coda"])
def test_half_precision(kind: str) -> None:
    model = opened(kind, torch.bfloat16)
    assert isinstance(support_of(model), Support)
    ids, last = prompt(9, 1), model.axis[-1]
    noise = torch.Generator().manual_seed(2)
    cells = [
        Cell((Edit(point, (token,), torch.randn(1, model.width, generator=noise).bfloat16()),))
        for point in model.axis[1:]
        for token in (2, 5)
    ]
    slow = model.resume(ids, cells, engine="hooks").states[last].float()
    fast = model.resume(ids, cells, engine="suffix")
    assert fast.drift <= 3e-2
    assert float((fast.states[last].float() - slow).abs().max() / slow.abs().max()) < 6e-2


@pytest.mark.parametrize(("kind", "text"), REFUSED.items())
def test_what_it_does_not_run_goes_by_hooks_or_says_why(kind: str, text: str) -> None:
    model = opened(kind)
    point = model.axis[1]
    cell = Cell((Edit(point, (1,), torch.ones(1, model.width)),))
    assert model.resume(prompt(5, 0), [cell]).engine == "hooks"
    assert model.plan_resume(prompt(5, 0), [cell]).engine == "hooks"
    with pytest.raises(UserError, match=text) as caught:
        model.resume(prompt(5, 0), [cell], engine="suffix")
    assert "engine='hooks'" in str(caught.value) and "\n" not in str(caught.value)


def hooks_of(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", ["llama", "looped"])
def test_nothing_is_left_behind_by_an_exception(kind: str) -> None:
    model = opened(kind)
    support_of(model)
    hooks, own = hooks_of(model.model), getattr(model.config, "_attn_implementation", None)
    calls = 0

    def fails(_module: Any, _args: Any, _output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first is the clean run
            raise RuntimeError("in the middle")

    layer = model.model.get_submodule(model.taps[Coordinate(1, 2)].path)
    handle = layer.register_forward_hook(fails)
    cell = Cell((Edit(model.axis[0], (1,), torch.ones(1, model.width)),))
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            model.resume(prompt(6, 0), [cell], engine="suffix")
    finally:
        handle.remove()
    assert hooks_of(model.model) == hooks and getattr(model.config, "_attn_implementation", None) == own
    assert model.resume(prompt(6, 0), [cell], engine="suffix").n_run == 1


@pytest.mark.parametrize("kind", ["llama", "gpt2", "looped-ouro-coda"])
def test_the_plan_is_what_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(suffix_memory, "HELD_BYTES", 0)
    model = opened(kind)
    ids = prompt(11, 5)
    cells = [Cell((Edit(p, (t,), torch.ones(1, model.width)),)) for p in model.axis for t in (0, 3, 9, 10)]
    with pytest.raises(TooLittleMemoryError) as caught:
        model.plan_resume(ids, cells, max_bytes=1)
    limit = caught.value.least + 1000
    plan = model.plan_resume(ids, cells, max_bytes=limit)
    with FlopCounterMode(display=False) as clean:
        model.capture(ids[None], positions="all", logits=False)
    with FlopCounterMode(display=False) as counter:
        done = model.resume(ids, cells, max_bytes=limit)
    assert plan.engine == done.engine == "suffix" and plan.n_batches > 1
    assert (plan.n_run, plan.n_filled) == (done.n_run, done.n_filled)
    assert (plan.token_layers, plan.flops) == (done.token_layers, done.flops)
    counted = counter.get_total_flops() - clean.get_total_flops()
    assert done.flops == pytest.approx(counted, rel=0.02)
    one = model.plan_resume(ids, cells)
    assert one.n_batches == 1 and one.flops < plan.flops and one.nbytes > plan.nbytes


def test_a_loop_state_of_nested_loops_is_edited_for_good() -> None:
    """HRM adds the states that its two stacks left to what the next one reads, also after an edit."""
    model = opened("hrm")
    ids, other = prompt(7, 1), prompt(7, 2)
    points = [point for point in model.points if point.site == "loop_state"]
    theirs = model.capture(other[None], positions="all", coordinates=points).states
    cells = [Cell((Edit(point, (4,), theirs[point][0, [4]]),)) for point in points]
    last = model.axis[-1]
    fast, slow = (model.resume(ids, cells, engine=engine).states[last] for engine in ("suffix", "hooks"))
    assert len(points) > 3
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
