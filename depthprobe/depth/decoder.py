"""Ordinary decoder stacks of transformers (Llama, GPT-2, GPT-NeoX, Gemma, …), read with layer hooks.

Nothing is known about an architecture but its configuration: the stack is the list of layers whose length the
configuration states, and the final norm is whatever runs after the last of them. Both are found by running
two tokens and watching, and the readout identity says on every run whether they were found right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.model import DepthModel, HeadAt, pick
from depthprobe.depth.tail import Tail, logit_transform
from depthprobe.errors import UserError


class DecoderModel(DepthModel):
    """A causal language model of transformers with one stack of layers, each run once.

    Axis: embed, then (1, l) for l = 1…L. "embed" is what the first layer reads: token (and learned position)
    embeddings after any scale or norm.

    Raises:
        UserError: an encoder-decoder, no decoder stack, layers that run more than once, no output head.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        super().__init__(model, tokenizer, name)
        if getattr(self.config, "is_encoder_decoder", False):
            raise UserError(f"{name} is an encoder-decoder", remedy="depthprobe reads decoder-only models")
        self._path, self._layers = find_stack(model, name)
        head = model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise UserError(f"{name} has no language-model head", remedy="give a causal language model")
        norms = _watch(model, self._path, self._layers, name)
        self._tail = Tail(norms, head, *logit_transform(self.config))
        self.n_layers = len(self._layers)
        self.axis = (Coordinate(0, 0, "embed"), *(Coordinate(1, i + 1) for i in range(self.n_layers)))
        # A cached prefix leaves padding between prefix and continuation. That is exact where positions are
        # given as numbers; a sliding window would count the padding.
        sliding = any("sliding" in str(kind) for kind in getattr(self.config, "layer_types", None) or ())
        sliding = sliding or bool(getattr(self.config, "sliding_window", None))
        self.can_continue = not sliding and {"position_ids", "use_cache"} <= self._parameters
        self.bridges_gaps = self.can_continue

    def _forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_positions: Tensor,
        read: Tensor,
        wanted: frozenset[Coordinate],
        cache: Any,
        keep_cache: bool,
    ) -> tuple[dict[Coordinate, Tensor], Tensor, Tensor | None, Any]:
        states: dict[Coordinate, Tensor] = {}

        def keep(coordinate: Coordinate) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                states[coordinate] = pick(_hidden(output), read)

            return hook

        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[self.axis[0]] = pick(args[0] if args else kwargs["hidden_states"], read)

        arguments = self._arguments(input_ids, attention_mask, token_positions, cache, keep_cache)
        with ExitStack() as stack:
            head = stack.enter_context(HeadAt(self._tail.head, read))
            if self.axis[0] in wanted:
                stack.enter_context(self._layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
            for coordinate, layer in zip(self.axis[1:], self._layers, strict=True):
                if coordinate in wanted:
                    stack.enter_context(layer.register_forward_hook(keep(coordinate)))
            output = self.model(**arguments)
        return states, head.logits(output.logits), None, getattr(output, self._cache_name(), None)


def find_stack(model: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """(path, layers) of the stack: the one outermost ModuleList with as many layers as the config says.

    Raises:
        UserError: there is none, or more than one.
    """
    expected = getattr(model.config, "num_hidden_layers", None)
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == expected and not inside:
            found.append((path, module))
    if len(found) != 1:
        kind = getattr(model.config, "model_type", type(model).__name__)
        what = "no stack of decoder layers" if not found else f"{len(found)} stacks of layers"
        raise UserError(
            f"{name} has {what}", where=f"architecture {kind}", remedy="give a decoder-only model"
        )
    return found[0]


def _watch(model: nn.Module, path: str, layers: nn.ModuleList, name: str) -> list[nn.Module]:
    """The modules beside the layers that run after the last of them; checks that each layer runs once."""
    backbone = model.get_submodule(path.rpartition(".")[0])
    order: list[nn.Module] = []

    def note(module: nn.Module, _args: Any, _output: Any) -> None:
        order.append(module)

    beside = [child for child in backbone.children() if child is not layers]
    with ExitStack() as stack, torch.inference_mode():
        for module in (*layers, *beside):
            stack.enter_context(module.register_forward_hook(note))
        device = next(model.parameters()).device
        model(input_ids=torch.ones(1, 2, dtype=torch.long, device=device))
    runs = [order.count(layer) for layer in layers]
    if any(count != 1 for count in runs):
        what = "runs its layers more than once" if max(runs) > 1 else "does not run all its layers"
        raise UserError(f"{name} {what} in a forward", remedy="this kind of looped model is not supported")
    head = model.get_output_embeddings()  # type: ignore[operator]
    after = order[max(order.index(layer) for layer in layers) + 1 :]
    return [module for module in after if module is not head]


def _hidden(output: Any) -> Tensor:
    """The residual of a layer's output; older layers return it in a tuple."""
    return output if isinstance(output, Tensor) else output[0]
