"""`LoopedForCausalLM` along its depth axis: prelude, every layer of every loop, loop states, coda."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.tail import Tail
from depthprobe.depth.tapped import TappedModel
from depthprobe.depth.taps import Tap
from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM


class LoopedModel(TappedModel):
    """A looped model of this package.

    Axis: embed, prelude (0, l), core (r, l) for r = 1…R, coda (R + 1, l). "embed" is the input of the
    prelude: token embeddings with previous tokens mixed in. With a norm after every loop, the normed state is
    a coordinate of its own, (r, n_core, "loop_state"), behind the residual of the loop's last layer, and a
    readout does not norm it again; otherwise the residual of the loop's last layer is the loop state. Either
    ends the loop (`loop_ends`). Other points: "resid_pre" of every layer (of a loop's first, what the
    injection has made); "attn_out" and "mlp_out" are the output and the down projections.

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
        self.n_loops, self.n_layers, self.width = config.n_loops, config.n_core, config.hidden_size
        embed = Coordinate(0, 0, "embed")
        taps = {embed: Tap("prelude", before=True)}
        axis, ends = [embed], []

        def group(path: str, loop: int, layers: int, call: int = 0) -> None:
            for layer in range(layers):
                block, depth = f"{path}.{layer}", Coordinate(loop, layer + 1)
                axis.append(depth)
                taps[depth._replace(site="resid_pre")] = Tap(block, call, before=True)
                taps[depth._replace(site="attn_out")] = Tap(f"{block}.out", call)
                taps[depth._replace(site="mlp_out")] = Tap(f"{block}.mlp_down", call)
                taps[depth] = Tap(block, call)

        group("prelude", 0, config.n_prelude)
        for loop in range(1, self.n_loops + 1):
            group("core", loop, config.n_core, loop - 1)
            if config.norm_per_loop:
                axis.append(state := Coordinate(loop, config.n_core, "loop_state"))
                taps[state] = Tap("norm", loop - 1)
            ends.append(axis[-1])
        group("coda", self.n_loops + 1, config.n_coda)
        self._taps, self.axis, self.loop_ends = taps, tuple(axis), tuple(ends)
        self.gate = model.gate is not None
        self.exit_q = config.exit_q if self.gate else None
        self._tail = Tail([model.norm], model.lm_head, vocab_size=config.vocab_size).for_model(self.dtype)
        self.can_continue = True
        # with previous tokens mixed in, padding would stand where the last of the cached tokens does
        self.bridges_gaps = config.n_previous_tokens == 0

    def _is_normed(self, coordinate: Coordinate) -> bool:
        return coordinate.site == "loop_state"

    def _gate(self, state: Tensor) -> Tensor:
        return self._looped.gate_logit(state).float().sigmoid()
