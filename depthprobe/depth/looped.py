"""`LoopedForCausalLM` along its depth axis: prelude, every layer of every loop, loop states, coda."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.model import DepthModel, HeadAt, pick
from depthprobe.depth.tail import Tail
from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM


class LoopedModel(DepthModel):
    """A looped model of this package.

    Axis: embed, prelude (0, l), core (r, l) for r = 1…R, coda (R + 1, l). "embed" is the input of the
    prelude: token embeddings with previous tokens mixed in. With a norm after every loop, the normed state is
    a coordinate of its own, (r, n_core, "loop_state"), behind the residual of the loop's last layer, and a
    readout does not norm it again; otherwise the residual of the loop's last layer is the loop state. Either
    ends the loop (`loop_ends`).

    In a model with a coda the readout of a loop is norm and head alone: the *plain* lens, not what the model
    would answer if it stopped there.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        super().__init__(model, tokenizer, name)
        if not isinstance(model, LoopedForCausalLM):
            raise UserError(
                f"{name} is a {type(model).__name__}", remedy="LoopedModel takes a LoopedForCausalLM"
            )
        self._looped = model
        config = model.config
        loops, core, per_loop = config.n_loops, config.n_core, config.norm_per_loop
        axis = [Coordinate(0, 0, "embed"), *(Coordinate(0, layer + 1) for layer in range(config.n_prelude))]
        ends: list[Coordinate] = []
        for loop in range(1, loops + 1):
            axis += [Coordinate(loop, layer + 1) for layer in range(core)]
            if per_loop:
                axis.append(Coordinate(loop, core, "loop_state"))
            ends.append(axis[-1])
        axis += [Coordinate(loops + 1, layer + 1) for layer in range(config.n_coda)]
        self.axis, self.loop_ends = tuple(axis), tuple(ends)
        self.n_loops, self.n_layers = loops, core
        self.gate = model.gate is not None
        self.exit_q = config.exit_q if self.gate else None
        self._tail = Tail([model.norm], model.lm_head)
        self.can_continue = True
        # with previous tokens mixed in, padding would stand where the last of the cached tokens does
        self.bridges_gaps = config.n_previous_tokens == 0

    def _is_normed(self, coordinate: Coordinate) -> bool:
        return coordinate.site == "loop_state"

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
        model = self._looped
        states: dict[Coordinate, Tensor] = {}
        if self.gate:
            wanted = wanted | frozenset(self.loop_ends)

        def keep(first_loop: int, layer: int, site: str = "resid_post") -> Callable[..., None]:
            """A hook that counts its module's runs: run n is loop first_loop + n − 1."""
            runs = 0

            def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
                nonlocal runs
                coordinate = Coordinate(first_loop + runs, layer, site)
                runs += 1
                if coordinate in wanted:
                    states[coordinate] = pick(output, read)

            return hook

        def keep_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
            states[self.axis[0]] = pick(args[0], read)

        arguments = self._arguments(input_ids, attention_mask, token_positions, cache, keep_cache)
        with ExitStack() as stack:
            head = stack.enter_context(HeadAt(model.lm_head, read))
            stack.enter_context(model.prelude.register_forward_pre_hook(keep_input))
            for first_loop, group in ((0, model.prelude), (1, model.core), (self.n_loops + 1, model.coda)):
                for layer, block in enumerate(group):
                    stack.enter_context(block.register_forward_hook(keep(first_loop, layer + 1)))
            if model.config.norm_per_loop:
                # a run of the norm after the last loop, behind the coda, has a coordinate that nobody wants
                stack.enter_context(model.norm.register_forward_hook(keep(1, self.n_layers, "loop_state")))
            output = model(**arguments)
        gate = None
        if self.gate:
            ends = torch.stack([states[end] for end in self.loop_ends], dim=1)  # [B, R, d]
            gate = model.gate_logit(ends).float().sigmoid()
        return states, head.logits(output.logits), gate, getattr(output, self._cache_name(), None)
