"""Rows of the table `knockout` against forwards in which the attention of some layers is masked, or made, by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import opened, subject, with_donor

import depthprobe
from depthprobe.depth import LoopedModel
from depthprobe.depth.tapped import TappedModel
from depthprobe.patching.probe import CUT_ROLES, pair_roles

#: kind → where its layers are, and the name of the attention in one.
LAYERS = {"llama": ("model.layers", "self_attn"), "gpt2": ("transformer.h", "attn")}


def seen(length: int, queries: Sequence[int], keys: Collection[int]) -> Tensor:
    """bool [S, S]: causal, without the edges from queries to keys."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for query in queries:
        mask[query, list(keys)] = False
    return mask


def attention(mask: Tensor) -> Callable[..., Tensor]:
    """Softmax attention written out; q [B, H, S, h], k and v [B, K, S, h] → [B, S, H · h]."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        del layer
        groups = q.shape[1] // k.shape[1]
        heads = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // groups].mT / q.shape[-1] ** 0.5
            heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, head // groups])
        return torch.cat(heads, dim=-1)

    return attend


@contextmanager
def cut(model: TappedModel, kind: str, places: Collection[tuple[int, int]], mask: Tensor) -> Iterator[None]:
    """The layers at (loop, layer) attend as the mask says; the others as they always do."""
    hooks = []
    if isinstance(model, LoopedModel):
        stages = {"prelude": 0, "core": 1, "coda": model.n_loops + 1}
        for stage, first in stages.items():
            for number, block in enumerate(model.model.get_submodule(stage).children(), 1):
                calls = [0]

                def by_hand(_: Any, args: Any, first: int = first, number: int = number, calls: Any = calls) -> Any:
                    calls[0] += 1
                    here = (first + calls[0] - 1, number) in places
                    return (*args[:2], attention(mask), *args[3:]) if here else None

                hooks.append(block.register_forward_pre_hook(by_hand))
    else:
        path, name = LAYERS[kind]
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]

        def masked(_: Any, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "attention_mask": added}

        for _, layer in places:
            module = model.model.get_submodule(f"{path}.{layer - 1}.{name}")
            hooks.append(module.register_forward_pre_hook(masked, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: TappedModel) -> list[tuple[int, int]]:
    """(loop, layer) in the order of execution."""
    return [(c.loop, c.layer) for c in model.axis if c.site == "resid_post"]


@pytest.mark.parametrize(
    ("kind", "words", "window"),
    [("llama", "word", 1), ("llama", "byte", 2), ("gpt2", "word", 2), ("gpt2", "byte", 1), ("looped", "word", 2),
     ("looped-ouro-coda", "byte", 1)],
)  # fmt: skip
@torch.inference_mode()
def test_rows_are_those_of_a_mask_made_by_hand(kind: str, words: str, window: int) -> None:
    model = opened(kind, words)
    item = with_donor(model, "follow")
    result = depthprobe.causal_patch(model, item, knockout=window, at=[(0, 0)], controls=False)
    assert result.knockout is not None
    one = subject(model, item, controls=False)
    target, prompt = one.target, one.target.prompt_ids
    roles, _ = pair_roles(model, one, one.pairs[0])
    along = layers_of(model)
    assert result.knockout.height == len(CUT_ROLES) * (len(along) - window + 1)

    def logprob(word: str, role: str, start: int) -> float:
        """Of the whole answer; what is cut for the prompt's last token is cut for the answer's tokens."""
        path = target.paths[target.words.index(word)]
        ids = (*prompt, *path[:-1])
        mask = seen(len(ids), range(len(prompt) - 1, len(ids)), roles[role])
        with cut(model, kind, along[start : start + window] if start >= 0 else (), mask):
            logits = model.model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 :]
        rows = logits.double().log_softmax(-1)
        return sum(float(row[token]) for row, token in zip(rows, path, strict=True))

    def right(role: str, start: int) -> bool:
        return item.answer == max(item.candidates, key=lambda word: logprob(word, role, start))

    before = right("changed_word", -1)
    against = one.pairs[0].against
    clean = [logprob(word, "changed_word", -1) for word in (item.answer, against)]
    moved = 0.0
    rows = result.knockout.to_dicts()
    for number, row in enumerate(rows):
        start = along.index((row["loop"], row["layer"]))
        answer, other = (logprob(word, row["role"], start) for word in (item.answer, against))
        assert row["window"] == window and model.axis[row["depth"]][:2] == along[start]
        assert row["logprob_clean"] == pytest.approx(clean[0], rel=1e-4)
        assert row["ld_clean"] == pytest.approx(clean[0] - clean[1], rel=1e-4, abs=1e-4)
        assert row["logprob_cut"] == pytest.approx(answer, rel=1e-4)
        assert row["ld_cut"] == pytest.approx(answer - other, rel=1e-4, abs=1e-4)
        assert row["p_answer"] == pytest.approx(torch.tensor(answer).exp().item(), rel=1e-3)
        moved = max(moved, abs(answer - clean[0]))
        if words == "word" and number % 3 == 0:  # a candidate is a token: the best one is known from a forward each
            after = right(row["role"], start)
            assert row["correct"] == after and row["flip"] == (before and not after)
    assert moved > 1e-3
