"""Decoder-only models of transformers (Llama, GPT-2, Gemma, Mamba, …), looped ones (Dory, HRM, …) among them.

Nothing is known about an architecture: the layers, how often they run, and what comes after them are found by
running two rows of three tokens and watching (`watch`, `stack`). The readout identity says on every run
whether the end was found right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.stack import find_ending, find_stack, loop_states, part, the_head
from depthprobe.depth.tail import Tail, logit_transform
from depthprobe.depth.tapped import TappedModel
from depthprobe.depth.taps import Tap
from depthprobe.depth.watch import IDS, ROUNDING, Call, Record, check_causal, watch
from depthprobe.errors import UserError


class DecoderModel(TappedModel):
    """A causal language model of transformers.

    Axis of an ordinary one: embed, then (1, l) for l = 1…L. "embed" is what the first layer reads: token (and
    learned position) embeddings after any scale or norm. Of one that runs layers more than once: embed,
    prelude (0, l), (r, l) for r = 1…R, coda (R + 1, l); with "loop_state" behind a loop where a norm follows
    each of them. r counts the calls of the block group in order, so in HRM, where an L stack runs several
    times and then an H stack, each of these calls is an r of its own. A model that reads more than the last
    layer's residual at its end has a last coordinate "final_state", what its final norm gets.

    Other points: "resid_pre" of every layer; "attn_out" and "mlp_out" where a layer has one such module.

    Raises:
        UserError: an encoder, an encoder-decoder, no decoder stack, no output head.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        super().__init__(model, tokenizer, name)
        if getattr(self.config, "is_encoder_decoder", False):
            raise UserError(f"{name} is an encoder-decoder", remedy="depthprobe reads decoder-only models")
        config: Any = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        head = the_head(model, name)
        record = watch(model, name)
        check_causal(record, model, name)
        stack = find_stack(model, record, name)
        ending = find_ending(model, record, stack, head, name)
        self.width, self.n_loops = stack.width, len(stack.loops)
        self.n_layers = max(map(len, stack.loops))
        self._path = stack.first.path.rpartition(".")[0]

        embed = Coordinate(0, 0, "embed")
        taps, axis, ends = {embed: Tap(stack.first.path, before=True)}, [embed], []

        def group(loop: int, calls: tuple[Call, ...]) -> None:
            for layer, call in enumerate(calls, 1):
                depth = Coordinate(loop, layer)
                axis.append(depth)
                taps[depth._replace(site="resid_pre")] = Tap(call.path, call.number, before=True)
                for site in ("attn_out", "mlp_out"):
                    if (inner := part(model, record, call.path, site)) is not None:
                        taps[depth._replace(site=site)] = Tap(inner, call.number)
                taps[depth] = Tap(call.path, call.number)

        group(0, stack.prelude)
        states = loop_states(stack, record)
        for loop, calls in enumerate(stack.loops, 1):
            group(loop, calls)
            if states:
                axis.append(state := Coordinate(loop, len(calls), "loop_state"))
                taps[state] = Tap(states[loop - 1].path, states[loop - 1].number)
            ends.append(axis[-1])
        group(self.n_loops + 1, stack.coda)
        if ending.final is not None:
            axis.append(final := axis[-1]._replace(site="final_state"))
            taps[final] = ending.final
        self._taps, self.axis = taps, tuple(axis)
        self.loop_ends = tuple(ends) if stack.looped else ()
        # a loop state is normed already if the norm that made it is the one before the head
        self._states_are_normed = bool(states) and (states[-1].path,) == ending.paths

        transform = (1.0, None) if ending.transforms else logit_transform(config)
        self._tail = Tail(
            ending.norms, head, *transform, vocab_size=int(record.logits.shape[-1]), transforms=ending.transforms
        ).for_model(self.dtype)
        # A cached prefix leaves padding between prefix and continuation. That is exact where positions are
        # given as numbers; a sliding window or a recurrent state would count the padding.
        kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
        plain = kinds <= {"full_attention"} and not getattr(config, "sliding_window", None) and not stack.looped
        self.can_continue = plain and {"position_ids", "use_cache"} <= self._parameters
        self.bridges_gaps = self.can_continue
        if "position_ids" in self._parameters and not self._agrees(record):
            # RoBERTa and its kin count positions from the padding id on, and a recurrent state counts padding: such
            # a model is given no positions, and rows that are padded on the right
            self._parameters -= {"position_ids"}
            self.can_continue = self.bridges_gaps = False

    def _agrees(self, record: Record) -> bool:
        """Whether the watched rows, given their positions, alone and behind padding, have the logits they had."""
        ids = torch.tensor(IDS)
        padded = torch.cat([torch.zeros(len(ids), 2, dtype=torch.long), ids], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :2] = 0
        alone = self.capture(ids, positions="all", coordinates=()).logits
        behind = self.capture(padded, mask, "all", ()).logits
        assert alone is not None and behind is not None
        theirs = record.logits.float()
        apart = max(float((own.float() - theirs).abs().max()) for own in (alone, behind[:, 2:]))
        return apart <= ROUNDING.get(self.dtype, 1e-3) * max(1.0, float(theirs.abs().max()))

    def _is_normed(self, coordinate: Coordinate) -> bool:
        return coordinate.site == "loop_state" and self._states_are_normed
