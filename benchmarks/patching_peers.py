"""Who a patching sweep is measured against: some cells of a story, each run as these would run it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthprobe.depth import Coordinate
from depthprobe.depth.tapped import TappedModel

#: Cells in one nnsight trace.
TRACE = 8


@dataclass(frozen=True)
class Story:
    """A prompt, its donor's, and the two answers' first tokens. changed: the first token that differs."""

    ids: Tensor
    donor: Tensor
    answers: tuple[int, int]
    changed: int


#: (story, patched point, token, value [d]) of some cells → logit differences
Peer = Callable[[Story, Sequence[tuple[Coordinate, int, Tensor]]], list[float]]


def plain_loop(model: TappedModel, lean: dict[str, int]) -> Peer:
    @torch.inference_mode()
    def run(story: Story, cells: Sequence[tuple[Coordinate, int, Tensor]]) -> list[float]:
        out = []
        for point, token, value in cells:
            tap, calls = model.taps[point], 0

            def put(state: Any, tap: Any = tap, token: int = token, value: Tensor = value) -> Tensor | None:
                nonlocal calls
                calls += 1
                if calls != tap.call + 1:
                    return None
                state = state.clone()
                state[:, token] = value
                return state

            def before(_module: Any, args: Any) -> Any:
                state = put(args[0])
                return None if state is None else (state, *args[1:])

            module = model.model.get_submodule(tap.path)
            hook = (
                module.register_forward_pre_hook(before) if tap.before
                else module.register_forward_hook(lambda _module, _args, output: put(output))
            )  # fmt: skip
            with hook:
                logits = model.model(input_ids=story.ids[None], **lean).logits[0, -1]
            out.append(float(logits[story.answers[0]] - logits[story.answers[1]]))
        return out

    return run


def transformer_lens(model: TappedModel) -> Peer:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    name = type(model.model).__name__
    bridge = build_bridge_from_module(copy.deepcopy(model.model), name, hf_config=model.config).eval()

    @torch.inference_mode()
    def run(story: Story, cells: Sequence[tuple[Coordinate, int, Tensor]]) -> list[float]:
        out = []
        for point, token, value in cells:
            where = "blocks.0.hook_in" if point.site == "embed" else f"blocks.{point.layer - 1}.hook_out"

            def put(state: Tensor, hook: Any, token: int = token, value: Tensor = value) -> Tensor:
                del hook
                state = state.clone()
                state[:, token] = value
                return state

            logits = bridge.run_with_hooks(story.ids[None], fwd_hooks=[(where, put)])[0, -1]
            out.append(float(logits[story.answers[0]] - logits[story.answers[1]]))
        return out

    return run


def nnsight(model: TappedModel) -> Peer:
    from nnsight import NNsight

    wrapped: Any = NNsight(copy.deepcopy(model.model))

    @torch.inference_mode()
    def run(story: Story, cells: Sequence[tuple[Coordinate, int, Tensor]]) -> list[float]:
        ids = story.ids.expand(len(cells), -1)
        embedded = [(row, t, value) for row, (p, t, value) in enumerate(cells) if p.site == "embed"]
        layers = [
            [(row, t, value) for row, (p, t, value) in enumerate(cells) if (p.layer, p.site) == (layer, "resid_post")]
            for layer in range(1, model.n_layers + 1)
        ]
        with wrapped.trace(input_ids=ids):
            for row, t, value in embedded:
                wrapped.model.embed_tokens.output[row, t] = value
            for layer, some in enumerate(layers):
                for row, t, value in some:
                    wrapped.model.layers[layer].output[row, t] = value
            logits = wrapped.lm_head.output[:, -1].save()
        return (logits[:, story.answers[0]] - logits[:, story.answers[1]]).tolist()

    return run
