"""`DepthModel`: a causal language model opened along its depth axis.

    model = depthprobe.load("follow-demo")
    capture = model.capture(input_ids, attention_mask)     # states at every depth, last token of each row
    logits = model.readout(capture.states[model.axis[3]], model.axis[3])
    model.check_identity(capture)                          # the last readout is the model's own output
    model.capture(input_ids, positions="all", names_filter="*hook_resid_post", dtype="float16", logits=False)

The base class holds what every kind of model shares: padding, positions from the mask, what is asked for and
what it weighs, the readout and its identity. A subclass says what its axis is and how its states are caught.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthprobe.depth import identity
from depthprobe.depth.arguments import flag, whole
from depthprobe.depth.capture import Capture
from depthprobe.depth.coordinates import SITES, Coordinate, NamesFilter, point_name
from depthprobe.depth.fingerprint import fingerprint
from depthprobe.depth.reading import (
    Positions,
    embedded_tokens,
    known_tokens,
    read_positions,
    token_tensor,
    without_left_padding,
)
from depthprobe.depth.request import (
    Caught,
    Request,
    check_stored,
    one_device,
    past_tokens,
    storage_dtype,
    wanted_points,
)
from depthprobe.depth.show import Kept, capture_line, model_html, model_line
from depthprobe.depth.tail import Tail
from depthprobe.errors import UserError


class DepthModel(ABC):
    """A causal language model with a depth axis.

    Attributes:
        name: as the user called it.
        model: the transformers model, in eval mode.
        tokenizer: its tokenizer, or None (then it takes token ids only).
        route: how its states are caught: "native", "transformer-lens" or "nnsight".
        axis: the readable depths in the order of execution; the first is the embedding, the last is what the
            model's own head reads.
        points: everything that `capture` can keep, in the order of execution: the axis and, where the
            architecture shows them, what goes into a layer and what its parts return.
        loop_ends: the coordinates at which a loop ends, in order: where a gate could exit. Empty for a model
            without loops.
        n_loops: R; 1 for an ordinary transformer.
        n_layers: layers in one loop.
        width: d, of every state.
        gate: whether the model has an exit gate.
        exit_q: the model's own threshold for Q-exit; None without a gate.
        context_length: most tokens the model was made for; None if it sets no limit.
        can_continue: whether `capture` may be given the cache of an earlier call. Rows of a continuation are
            best padded on the right, so that they follow their past without a gap.
        bridges_gaps: whether padding may lie between the cached tokens and those that continue them.

    Raises:
        UserError: weights on the meta device, or on more than one.
    """

    route: str = "native"
    axis: tuple[Coordinate, ...]
    loop_ends: tuple[Coordinate, ...] = ()
    n_loops: int = 1
    n_layers: int
    width: int
    gate: bool = False
    exit_q: float | None = None
    can_continue: bool = False
    bridges_gaps: bool = False

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.config: Any = model.config
        self.context_length: int | None = _context_length(self.config)
        one_device(model, name)
        self._parameters = _parameters(model)
        self._embedded = embedded_tokens(model)
        self._tail: Tail
        self._tail32: Tail | None = None
        self._points: tuple[Coordinate, ...] | None = None

    # -- what it is

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point weight."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def vocab_size(self) -> int:
        """Columns of the logits; may be more than the tokenizer has tokens."""
        return self._tail.vocab_size

    @property
    def points(self) -> tuple[Coordinate, ...]:
        return self.axis if self._points is None else self._points

    @property
    def sites(self) -> tuple[str, ...]:
        """Those of `coordinates.SITES` that this model offers."""
        offered = {point.site for point in self.points}
        return tuple(site for site in SITES if site in offered)

    @property
    def names(self) -> dict[Coordinate, str]:
        """Point → the name that `names_filter` and `Capture.cache_dict` use."""
        return {point: point_name(point, self.n_loops, bool(self.loop_ends)) for point in self.points}

    def __repr__(self) -> str:
        return model_line(self)

    def _repr_html_(self) -> str:
        return model_html(self)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of configuration, weights and tokenizer. Small tensors whole, large ones sampled."""
        return fingerprint(self.model, self.config, self.tokenizer)

    # -- what it does

    @torch.no_grad()
    def capture(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        positions: Positions = None,
        coordinates: Sequence[Coordinate] | None = None,
        *,
        names_filter: NamesFilter | None = None,
        dtype: torch.dtype | str | None = None,
        logits: bool = True,
        cache: Any = None,
        keep_cache: bool = False,
        verbose: bool = False,
    ) -> Capture:
        """Run the model once and keep the states that are asked for, and nothing else.

        Args:
            input_ids: int64 [B, S]; padding left or right, its ids do not matter.
            attention_mask: [B, past + S], 1 for real tokens, past and present; default without `cache`: all
                real. Positions are counted from it, so a padded row gives the states of the row alone.
            positions: indices into S, int64 [B] or [B, P]; "all"; default: the last real token of each row.
                States are then [B, d], [B, P, d] or [B, S, d], and logits and gate likewise.
            coordinates: the depths to keep, from `points`; default: the whole axis.
            names_filter: instead of coordinates: a name of `names`, one with `*`, several, or a function.
            dtype: storage dtype of the states, e.g. "float16"; default: the model's.
            logits: False leaves the head out, which for a large vocabulary is most of the work.
            cache: key-value cache of the tokens before these; it is changed in place. Needs `can_continue`.
            keep_cache: return the cache of past + S tokens.
            verbose: print `describe_capture` first.

        Raises:
            UserError: a position out of range, a row of padding alone, a coordinate, name or dtype that there
                is not, coordinates and names_filter at once.
        """
        device = self.device
        input_ids = token_tensor(input_ids, "input_ids").to(device)
        rows, length = input_ids.shape
        past = past_tokens(cache)
        logits, keep_cache = flag(logits, "logits"), flag(keep_cache, "keep_cache")
        if attention_mask is None:
            if past:
                # of padding in the past a cache knows nothing
                remedy = "give one over past and present tokens, such as the earlier Capture.attention_mask and ones"
                raise UserError("a forward that continues a cache has no attention_mask", remedy=remedy)
            attention_mask = torch.ones(rows, length, dtype=torch.long, device=device)
        attention_mask = token_tensor(attention_mask, "attention_mask").to(device)
        if attention_mask.shape != (rows, past + length):
            of = f"{rows} × {length} tokens" + (f" behind {past}" if past else "")
            what = f"attention_mask has shape {tuple(attention_mask.shape)}"
            raise UserError(what, where=of, remedy=f"give {rows} × {past + length}")
        input_ids = known_tokens(input_ids, attention_mask[:, -length:], self._embedded, self.name)
        longest = int(attention_mask.sum(-1).max())
        if self.context_length is not None and longest > self.context_length:
            what = f"a row has {longest} tokens, the context of {self.name} {self.context_length}"
            raise UserError(what, remedy="shorten it")
        read = read_positions(attention_mask[:, -length:], positions)
        kept_mask, asked = attention_mask, read
        if cache is None and "position_ids" not in self._parameters:
            # such a model counts positions from the left edge, padding or not
            input_ids, attention_mask, read = without_left_padding(input_ids, attention_mask, read)
        wanted = self._wanted(coordinates, names_filter)
        stored = storage_dtype(dtype, self.dtype)
        if (cache is not None or keep_cache) and not self.can_continue:
            raise UserError(f"{self.name} cannot continue from a cache", remedy="pass whole sequences")
        if verbose:
            print(self.describe_capture(rows, length, positions, coordinates=wanted, dtype=stored, logits=logits))
        token_positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]
        caught = self._forward(
            Request(
                input_ids, attention_mask, token_positions, read, frozenset(wanted), stored, logits, cache,
                keep_cache,
            )
        )  # fmt: skip
        if stored != self.dtype:
            check_stored(caught.states, stored, self.name)
        names = self.names
        return Capture(
            states={c: caught.states[c] for c in wanted},
            logits=caught.logits,
            gate_lambda=caught.gate_lambda,
            attention_mask=kept_mask,
            cache=caught.cache if keep_cache else None,
            positions=asked.index,
            names={c: names[c] for c in wanted},
            model_name=self.name,
        )

    def capture_bytes(
        self,
        rows: int,
        length: int,
        positions: Positions | int = None,
        coordinates: Sequence[Coordinate] | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        names_filter: NamesFilter | None = None,
        logits: bool = True,
    ) -> int:
        """Bytes of the states, logits and gate that such a call of `capture` would leave (`Capture.nbytes`).

        Args:
            rows, length: B and S.
            positions: as in `capture`, or P, the tokens read in each row.
            coordinates, dtype, names_filter, logits: as in `capture`.
        """
        if isinstance(positions, str) and positions != "all":
            raise UserError(f"positions is '{positions}'", remedy='give "all", token indices, or how many')
        rows, length = whole(rows, "rows", 1), whole(length, "length", 1)
        if isinstance(positions, Tensor) and positions.dim():
            each = positions.shape[1] if positions.dim() == 2 else 1
        else:
            each = 1 if positions is None else length if positions == "all" else whole(positions, "positions", 1)
        states = len(self._wanted(coordinates, names_filter)) * self.width * storage_dtype(dtype, self.dtype).itemsize
        head = self.vocab_size * self.dtype.itemsize if logits else 0
        gate = self.n_loops * torch.float32.itemsize if self.gate else 0
        return rows * each * (states + head + gate)

    def describe_capture(
        self, rows: int, length: int, positions: Positions | int = None, **kept: Unpack[Kept]
    ) -> str:
        """One line about what such a call would keep and what that weighs; arguments of `capture_bytes`."""
        wanted = self._wanted(kept.get("coordinates"), kept.get("names_filter"))
        return capture_line(self, rows, length, len(wanted), self.capture_bytes(rows, length, positions, **kept), kept)

    def _wanted(
        self, coordinates: Sequence[Coordinate] | None, names_filter: NamesFilter | None
    ) -> tuple[Coordinate, ...]:
        return wanted_points(self.names, self.axis, coordinates, names_filter, self.name, self.route)

    @abstractmethod
    def _forward(self, request: Request) -> Caught:
        """Run the model as asked."""

    @torch.no_grad()
    def readout(self, state: Tensor, coordinate: Coordinate) -> Tensor:
        """Logits of a state as if the model ended there: its own final norm (once), head and logit transform.

        Args:
            state: [..., d], any floating dtype.
            coordinate: a depth of the axis, where it was caught; a loop state that a norm has already left is not
                normed again.

        Returns:
            float32 [..., V], computed in float32 (a quantised head computes as it always does).

        Raises:
            UserError: another width; a coordinate that is no state of the residual stream.
        """
        if state.shape[-1:] != (self.width,):
            raise UserError(f"a state has shape {tuple(state.shape)}", remedy=f"give [..., {self.width}]")
        if coordinate not in self.axis and coordinate.site != "resid_pre":
            known = f"{self.axis[0]} … {self.axis[-1]}"
            raise UserError(f"{coordinate} is no depth of {self.name} to read", remedy=f"it has {known}")
        return self.tail32(state.float(), normed=self._is_normed(coordinate)).float()

    @property
    def tail32(self) -> Tail:
        """Norm, head and logit transform in float32, made when first asked for."""
        if self._tail32 is None:
            with torch.inference_mode(False):  # weights that were copied in that mode would pass no gradient on
                self._tail32 = self._tail if self.dtype == torch.float32 else self._tail.float32()
        return self._tail32

    @torch.no_grad()
    def normed(self, state: Tensor, coordinate: Coordinate) -> Tensor:
        """A state [..., d] as `tail32.tiles` takes it: float32, after the final norm, once."""
        return state.float() if self._is_normed(coordinate) else self.tail32.normed(state.float())

    def _is_normed(self, coordinate: Coordinate) -> bool:
        """Whether the final norm has already been applied to the state at this coordinate."""
        del coordinate
        return False

    def is_normed(self, coordinate: Coordinate) -> bool:
        """Whether the final norm has already been applied to the state at this coordinate, so that it is not again."""
        return self._is_normed(coordinate)

    @torch.no_grad()
    def check_identity(self, capture: Capture) -> float:
        """Compare the readout of the last depth with the model's own logits, at every position captured.

        Both in the model's dtype within `identity.IDENTITY_TOLERANCE`, and the float32 readout within
        `identity.FLOAT32_TOLERANCE`, each relative to the row's largest |logit| (at least 1). Rows with a NaN
        are left to the caller.

        Returns:
            The largest relative difference in the model's dtype.

        Raises:
            UserError: the readout does not reproduce the model, so no lens of it can be trusted; the capture
                holds no logits or not the last depth.
        """
        last = self.axis[-1]
        if capture.logits is None or last not in capture.states:
            what = "logits" if capture.logits is None else f"{last}, the last depth"
            raise UserError(
                f"the capture holds no {what}, which the identity check compares", where=self.name,
                remedy="capture with logits=True and the whole axis",
            )  # fmt: skip
        return identity.check(
            self.name,
            capture.states[last],
            capture.logits,
            self.dtype,
            lambda state: self._tail(state.to(self.dtype), normed=self._is_normed(last)),
            lambda state: self.readout(state, last),
        )

    # -- for subclasses

    def _arguments(self, request: Request) -> dict[str, Any]:
        """Keyword arguments of the model's forward, as far as it has them."""
        arguments: dict[str, Any] = {
            "input_ids": request.input_ids,
            "attention_mask": request.attention_mask,
        }
        if "position_ids" in self._parameters:
            arguments["position_ids"] = request.token_positions
        if "use_cache" in self._parameters:
            arguments["use_cache"] = request.keep_cache or request.cache is not None
        if request.cache is not None:
            arguments[self._cache_name()] = request.cache
        return arguments

    def _cache_name(self) -> str:
        """transformers renamed the argument, and the field of its outputs, in the course of version 5."""
        field = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
        return field if field in self._parameters else "past_key_values"


def continue_cache(cache: Any, rows: Tensor) -> Any:
    """A copy of a cache whose batch is `rows` (int64 [B']) of the old one; the old one stays usable."""
    cache = copy.deepcopy(cache)
    cache.batch_select_indices(rows)
    return cache


def _parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(cast("Any", model.forward)).parameters)


def _context_length(config: Any) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
