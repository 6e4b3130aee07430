"""Odd values from Python: `causal_patch` takes them for what they plainly mean, or says one line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from worlds import items, opened, targets, tokenizer, with_donor

import depthprobe
from depthprobe.depth import Coordinate
from depthprobe.errors import UserError
from depthprobe.patching import PatchResult, Plan
from depthprobe.patching.probe import DEFAULT_ROLES
from depthprobe.tasks.items import Item


@cache
def asked() -> Item:
    return with_donor(opened("llama"), "kinship")


def patched(**options: Any) -> PatchResult:
    return depthprobe.causal_patch(options.pop("model", opened("llama")), options.pop("items", asked()), **options)


def refusal(**options: Any) -> str:
    with pytest.raises(UserError) as caught:
        patched(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FEW: dict[str, Any] = {"at": [(1, 1)], "positions": "last", "controls": False}


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ({"at": (1, 1)}, {}),
        ({"at": [1, 1]}, {}),
        ({"at": np.array([1, 1])}, {}),
        ({"at": torch.tensor([[1, 1]])}, {}),
        ({"at": [(np.int64(1), np.int32(1))]}, {}),
        ({"at": Coordinate(1, 1)}, {}),
        ({"at": {(1, 1)}}, {}),
        ({"sites": None}, {}),
        ({"sites": "resid_pre"}, {"sites": ["resid_pre"]}),
        ({"sites": ["resid_pre", "resid_pre"]}, {"sites": ["resid_pre"]}),
        ({"positions": np.int64(-1)}, {"positions": -1}),
        ({"positions": np.array([3, -1])}, {"positions": [3, -1]}),
        ({"positions": torch.tensor(3)}, {"positions": [3]}),
        ({"positions": ["last", "last"]}, {}),
        ({"directions": None, "kinds": None, "span": None, "donors": None, "knockout": None}, {}),
        ({"at": None, "span": "window", "window": np.int64(2)}, {"at": None, "span": "window", "window": 2}),
        ({"knockout": np.int16(1)}, {"knockout": 1}),
        ({"seed": np.int64(0), "controls": np.bool_(False), "max_bytes": float(1 << 30)}, {}),
        ({"donors": ["relation", "relation"]}, {"donors": "relation"}),
        ({"positions": ["last", "last", "last"]}, {"positions": "last"}),
        ({"positions": [-1, np.int64(-1)]}, {"positions": [-1]}),
        ({"items": [asked]}, {}),
        ({"items": (one for one in [asked])}, {}),
    ],
)  # fmt: skip
def test_what_is_plainly_meant(odd: dict[str, Any], plain: dict[str, Any]) -> None:
    if "items" in odd:
        odd = {"items": (one() for one in odd["items"])}
    assert patched(**{**FEW, **odd}).frame.equals(patched(**{**FEW, **plain}).frame)


def test_no_positions_named_are_the_default_roles() -> None:
    assert Plan.of(opened("llama"), positions=None).asked == DEFAULT_ROLES


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"at": []}, "no depth is asked for (at): give (loop, layer) or several, e.g. at=[(1, 1), (1, 2)]"),
        ({"at": [1, 2, 3]}, "is no (loop, layer) (at): give (loop, layer)"),
        ({"at": 3}, "at is 3: give (loop, layer)"),
        ({"at": "11"}, "at is '11': give (loop, layer)"),
        ({"at": [(1, 1.5)]}, "a layer of at is 1.5"),
        ({"at": [(True, 1)]}, "a loop of at is True"),
        ({"at": [(1, 1), 2]}, "2 is no (loop, layer)"),
        ({"at": (1, 9)}, "has no resid_post at loop 1, layer 9 (at)"),
        ({"window": 1.5}, "window is 1.5: give a whole number of at least 1"),
        ({"window": "2", "span": "window"}, "window is '2': give a whole number"),
        ({"window": True}, "window is True: give a whole number"),
        ({"window": None}, "window is None: give a whole number"),
        ({"window": 0, "span": "window"}, "window is 0: give a whole number of at least 1"),
        ({"knockout": 0}, "knockout is 0: give how many layers are cut together, or leave it out"),
        ({"knockout": True}, "knockout is True"),
        ({"knockout": 99}, "a window of 99 does not fit 3 places (knockout)"),
        ({"sites": 5}, "it is 5 (sites): one of resid_pre"),
        ({"sites": [["resid_pre"]]}, "(sites): one of resid_pre"),
        ({"sites": []}, "no sites are asked for: name one (resid_pre"),
        ({"sites": {"resid_pre": 1}}, "sites is a dict"),
        ({"positions": True}, "a position is True: one of changed_word"),
        ({"positions": [np.bool_(True)]}, "a position is "),
        ({"positions": torch.tensor([True])}, "a position is True"),
        ({"positions": 1.0}, "a position is 1.0"),
        ({"positions": [None]}, "a position is None"),
        ({"positions": 10_000}, "position 10000 is outside the prompt of"),
        ({"position": None}, "it is None (position): one of role, each"),
        ({"directions": 1}, "it is 1 (directions): one of donor_to_item"),
        ({"kinds": ["set", None]}, "it is None (kinds): one of set"),
        ({"donors": 0}, "a int is no donor (donors): of relation, "),
        ({"donors": []}, "no donors are asked for: name one (of relation"),
        ({"donors": [["relation"]]}, "a list is no donor (donors)"),
        ({"donors": {"relation": 1}}, "donors is a dict"),
        ({"donors": "uncle"}, "there is no donor of kind 'uncle' (donors)"),
        ({"items": None}, "there are no items: give those of depthprobe.tasks"),
        ({"items": []}, "there are no items: give at least one"),
        ({"items": 7}, "a int is no item"),
        ({"items": "Ann is the mother of Bob."}, "a str is no item"),
        ({"items": [{"id": "x"}]}, "a dict is no item"),
        ({"max_bytes": 0}, "max_bytes is 0: give a number of bytes"),
        ({"max_bytes": -1}, "max_bytes is -1: give a number of bytes"),
        ({"max_bytes": float("nan")}, "max_bytes is nan: give a number of bytes"),
        ({"max_bytes": float("inf")}, "max_bytes is inf: give a number of bytes"),
        ({"max_bytes": "1GiB"}, "max_bytes is '1GiB': give a number of bytes"),
        ({"max_bytes": None}, "max_bytes is None: give a number of bytes"),
        ({"engine": None}, "it is None (engine): one of auto"),
        ({"model": "follow-demo"}, "a str has no depth axis: open it with depthprobe.load"),
        ({"model": None}, "a NoneType has no depth axis"),
        ({"controls": "no"}, "controls is 'no': give True or False"),
        ({"chat": 1}, "chat is 1: give True or False"),
        ({"seed": 0.5}, "seed is 0.5: give a whole number"),
        ({"progress": 3}, "progress is 3: give a function"),
        ({"bos": None}, "there is no 'None' (bos)"),
    ],
)
def test_what_is_not_meant_is_one_line(options: dict[str, Any], text: str) -> None:
    assert text in refusal(**options)


def test_what_stands_there_twice() -> None:
    assert f"two items have the id '{asked().id}': it is the same item: give it once" in refusal(items=[asked()] * 2)
    other = replace(asked(), hops=asked().hops + 1)
    assert "give each its own id" in refusal(items=[asked(), other])
    from depthprobe.tasks.donors import donors_of

    donor = next(donors_of(asked(), "relation"))
    assert "is given twice (donors): give it once" in refusal(donors=[donor, donor])
    assert "a Item is no donor (donors)" in refusal(donors=[asked()])
    assert "partly kinds and partly donors" in refusal(donors=[donor, "relation"])


def test_a_story_beyond_the_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With how long it is and how long it may be; also where the prompt alone would fit and an answer does not."""
    model, long = opened("llama"), items(n=1, hops=(2,), seed=11)[0]
    monkeypatch.setattr(model, "context_length", 40)
    long = replace(long, id="long", text=" ".join([long.text] * 3))
    n = targets(model, [long])[0].n_positions
    said = refusal(items=[asked(), long])
    assert said == f"its {n} tokens exceed the context of llama, 40 tokens (item long): shorten the story"
    bytes_model = opened("llama", "byte")
    item = with_donor(bytes_model, "kinship")
    prompt = len(depthprobe.causal_patch(bytes_model, item, **FEW).donors["tokens"][0])
    monkeypatch.setattr(bytes_model, "context_length", prompt)
    said = refusal(model=bytes_model, items=item, **FEW)
    assert f"exceed the context of llama, {prompt} tokens (item {item.id})" in said
    assert int(said.split(" tokens")[0].removeprefix("its ")) > prompt


def test_a_model_without_attention_is_told_what_to_do_instead() -> None:
    """Before anything is run; without the knock-out it is patched as any other."""
    import transformers as t

    words = tokenizer("word")
    torch.manual_seed(0)
    config = t.MambaConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    model = depthprobe.wrap(t.MambaForCausalLM(config), words, name="mamba")
    with pytest.raises(UserError) as caught:
        depthprobe.causal_patch(model, asked(), knockout=1)
    said = str(caught.value)
    assert "\n" not in said and "no attention is known there in mamba" in said and "(knockout)" in said
    assert "leave it out" in said and "sites='resid_post'" in said and "effective_depth" in said
    assert depthprobe.causal_patch(model, asked(), **FEW).frame.height
