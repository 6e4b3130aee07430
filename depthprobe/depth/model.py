"""`DepthModel`: a causal language model opened along its depth axis.

    model = depthprobe.load("follow-demo")
    capture = model.capture(input_ids, attention_mask)     # states at every depth, last token of each row
    logits = model.readout(capture.states[model.axis[3]], model.axis[3])
    model.check_identity(capture)                          # the last readout is the model's own output

The base class holds what every kind of model shares: padding, positions from the mask, the readout identity
and the fingerprint. A subclass says what its axis is and how its states are caught.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.tail import Tail
from depthprobe.errors import UserError

#: Largest |readout − model's logits| allowed, as a share of the largest |logit|. Both sides run in the
#: model's dtype, on the same states, so only the order of summation differs.
IDENTITY_TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
#: The float32 readout of half-precision states against logits rounded to that precision.
FLOAT32_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
#: Tensors up to this many elements enter the fingerprint whole, larger ones with this many samples.
_SAMPLED = 1 << 16


@dataclass(frozen=True, slots=True)
class Capture:
    """What one forward left behind, B rows.

    Attributes:
        states: coordinate → [B, d] in the model's dtype, at each row's position.
        logits: [B, V] in the model's dtype, the model's own output at the same position.
        gate_lambda: [B, R] float32, conditional stop probability after each loop; None without a gate.
        attention_mask: [B, P + S], past and present tokens; what a continuation passes on, lengthened.
        cache: the model's key-value cache if it was asked for.
    """

    states: Mapping[Coordinate, Tensor]
    logits: Tensor
    gate_lambda: Tensor | None
    attention_mask: Tensor
    cache: Any = None


class DepthModel(ABC):
    """A causal language model with a depth axis.

    Attributes:
        name: as the user called it.
        model: the transformers model, in eval mode.
        tokenizer: its tokenizer, or None (then it takes token ids only).
        axis: the readable depths in the order of execution; the first is the embedding, the last is what the
            model's own head reads.
        loop_ends: the coordinates at which a loop ends, in order: where a gate could exit. Empty for a model
            without loops.
        n_loops: R; 1 for an ordinary transformer.
        n_layers: layers in one loop.
        gate: whether the model has an exit gate.
        exit_q: the model's own threshold for Q-exit; None without a gate.
        context_length: most tokens the model was made for; None if it sets no limit.
        can_continue: whether `capture` may be given the cache of an earlier call. Rows of a continuation are
            best padded on the right, so that they follow their past without a gap.
        bridges_gaps: whether padding may lie between the cached tokens and those that continue them.
    """

    axis: tuple[Coordinate, ...]
    loop_ends: tuple[Coordinate, ...] = ()
    n_loops: int = 1
    n_layers: int
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
        self._parameters = _parameters(model)
        self._tail: Tail
        self._tail32: Tail | None = None

    # -- what it is

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the head; may be more than the tokenizer has tokens."""
        return self._tail.vocab_size

    def __repr__(self) -> str:
        loops = f"{self.n_loops} loops × " if self.loop_ends else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.name!r}, {loops}{self.n_layers} layers, {dtype}, {self.device})"

    def fingerprint(self) -> str:
        """SHA-256 (hex) of configuration, weights and tokenizer. Small tensors whole, large ones sampled."""
        digest = hashlib.sha256()
        config = self.config.to_dict()
        for volatile in ("_name_or_path", "transformers_version"):
            config.pop(volatile, None)
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for key, value in sorted(self.model.state_dict().items()):
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            flat = value.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLED)
            if flat.numel():
                digest.update(flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes())
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            digest.update(backend.to_str().encode())
        return digest.hexdigest()

    # -- what it does

    @torch.inference_mode()
    def capture(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        coordinates: Sequence[Coordinate] | None = None,
        *,
        cache: Any = None,
        keep_cache: bool = False,
    ) -> Capture:
        """Run the model and keep the states of one token a row.

        Args:
            input_ids: int64 [B, S]; padding left or right, its ids do not matter.
            attention_mask: [B, P + S], 1 for real tokens, past (P, with `cache`) and present; default: all
                real. Positions are counted from it, so a padded row gives the states of the row alone.
            positions: int64 [B], indices into S; default: the last real token of each row.
            coordinates: the depths to keep; default: the whole axis.
            cache: key-value cache of the P tokens before these; it is changed in place. Needs `can_continue`.
            keep_cache: return the cache of P + S tokens.

        Raises:
            UserError: a position out of range, a row of padding alone, a coordinate that is not on the axis.
        """
        device = self.device
        input_ids = input_ids.to(device)
        rows, length = input_ids.shape
        if attention_mask is None:
            past = 0 if cache is None else int(cache.get_seq_length())
            attention_mask = torch.ones(rows, past + length, dtype=torch.long, device=device)
        attention_mask = attention_mask.to(device, torch.long)
        if attention_mask.shape[0] != rows or attention_mask.shape[1] < length:
            raise UserError(
                f"attention_mask has shape {tuple(attention_mask.shape)}", where=f"{rows} × {length} tokens"
            )
        positions = _read_positions(attention_mask[:, -length:], positions)
        wanted = self.axis if coordinates is None else tuple(coordinates)
        for coordinate in wanted:
            if coordinate not in self.axis:
                known = f"{self.axis[0]} … {self.axis[-1]}"
                raise UserError(
                    f"{self.name} has no depth {coordinate} ({coordinate.site})", remedy=f"it has {known}"
                )
        if (cache is not None or keep_cache) and not self.can_continue:
            raise UserError(f"{self.name} cannot continue from a cache", remedy="pass whole sequences")
        token_positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]
        states, logits, gate, cache = self._forward(
            input_ids, attention_mask, token_positions, positions, frozenset(wanted), cache, keep_cache
        )
        return Capture(
            {c: states[c] for c in wanted}, logits, gate, attention_mask, cache if keep_cache else None
        )

    @abstractmethod
    def _forward(
        self,
        input_ids: Tensor,  # [B, S]
        attention_mask: Tensor,  # [B, P + S]
        token_positions: Tensor,  # [B, S], position of each token in its own row
        read: Tensor,  # [B], index of the token whose states are kept
        wanted: frozenset[Coordinate],
        cache: Any,
        keep_cache: bool,
    ) -> tuple[dict[Coordinate, Tensor], Tensor, Tensor | None, Any]:
        """States [B, d] at the wanted coordinates, logits [B, V], λ [B, R] or None, cache."""

    @torch.inference_mode()
    def readout(self, state: Tensor, coordinate: Coordinate) -> Tensor:
        """Logits of a state as if the model ended there: its own final norm (once), head and logit transform.

        Args:
            state: [..., d], any floating dtype.
            coordinate: where it was caught; a loop state that a norm has already left is not normed again.

        Returns:
            float32 [..., V], computed in float32.
        """
        if self._tail32 is None:
            self._tail32 = self._tail if self.dtype == torch.float32 else self._tail.float32()
        return self._tail32(state.float(), normed=self._is_normed(coordinate))

    def _is_normed(self, coordinate: Coordinate) -> bool:
        """Whether the final norm has already been applied to the state at this coordinate."""
        del coordinate
        return False

    @torch.inference_mode()
    def check_identity(self, capture: Capture) -> float:
        """Compare the readout of the last depth with the model's own logits.

        Both in the model's dtype within `IDENTITY_TOLERANCE`, and the float32 readout within
        `FLOAT32_TOLERANCE`, each relative to the row's largest |logit| (at least 1). Rows with a NaN are left
        to the caller.

        Returns:
            The largest relative difference in the model's dtype.

        Raises:
            UserError: the readout does not reproduce the model, so no lens of it can be trusted.
        """
        last = self.axis[-1]
        own = capture.logits.float()
        state = capture.states[last]
        good = ~own.isnan().any(-1)
        if not bool(good.any()):
            return 0.0
        scale = own[good].abs().amax(-1, keepdim=True).clamp(min=1.0)
        found: list[float] = []
        for tolerances, logits in (
            (IDENTITY_TOLERANCE, self._tail(state, normed=self._is_normed(last)).float()),
            (FLOAT32_TOLERANCE, self.readout(state, last)),
        ):
            found.append(difference := float(((logits[good] - own[good]).abs() / scale).max()))
            allowed = tolerances.get(self.dtype, 1e-4)
            if not difference <= allowed:
                dtype = str(self.dtype).removeprefix("torch.")
                raise UserError(
                    f"the readout of the last layer differs from the model's own logits by {difference:.1e} "
                    f"of the largest logit; at most {allowed:.0e} is allowed in {dtype}",
                    where=self.name,
                    remedy="this architecture ends in a way that depthprobe does not know; please report it",
                )
        return found[0]

    # -- for subclasses

    def _arguments(
        self, input_ids: Tensor, attention_mask: Tensor, token_positions: Tensor, cache: Any, keep_cache: bool
    ) -> dict[str, Any]:
        """Keyword arguments of the model's forward, as far as it has them."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "position_ids" in self._parameters:
            arguments["position_ids"] = token_positions
        if "use_cache" in self._parameters:
            arguments["use_cache"] = keep_cache or cache is not None
        if cache is not None:
            arguments[self._cache_name()] = cache
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


def pick(hidden: Tensor, read: Tensor) -> Tensor:
    """[B, S, d] at one token a row, [B] → [B, d], a copy that does not hold the whole."""
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), read.to(hidden.device)].clone()


class HeadAt:
    """Context in which a head computes the logits of one token a row and not of the whole sequence.

    `logits_to_keep` of transformers takes the same columns for every row, and padded rows end in different
    ones.
    """

    def __init__(self, head: nn.Module, read: Tensor) -> None:
        self._head, self._read, self._fired = head, read, False

    def __enter__(self) -> HeadAt:
        self._handle = self._head.register_forward_pre_hook(self._cut)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _cut(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if args and args[0].dim() == 3:
            self._fired = True
            return (pick(args[0], self._read)[:, None], *args[1:])
        return None

    def logits(self, logits: Tensor) -> Tensor:
        """[B, V] from what the model returned."""
        return logits[:, 0] if self._fired else pick(logits, self._read)


def _read_positions(mask: Tensor, positions: Tensor | None) -> Tensor:
    """Checked token index of each row; the default is the last real token. mask: [B, S]."""
    rows, length = mask.shape
    last = length - 1 - mask.flip(-1).argmax(-1)
    positions = last if positions is None else positions.to(mask.device, torch.long)
    if positions.shape != (rows,):
        raise UserError(
            f"positions have shape {tuple(positions.shape)}", remedy=f"one for each of {rows} rows"
        )
    inside = (positions >= 0) & (positions < length)
    if not bool(inside.all()):
        row = int((~inside).nonzero()[0])
        raise UserError(f"position {int(positions[row])} is outside its {length} tokens", where=f"row {row}")
    real = mask[torch.arange(rows, device=mask.device), positions] > 0
    if not bool(real.all()):
        row = int((~real).nonzero()[0])
        what = (
            "holds padding alone"
            if not bool(mask[row].any())
            else f"is read at padding, token {int(positions[row])}"
        )
        raise UserError(f"row {row} {what}", remedy="give each row a real token to read")
    return positions


def _parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(cast("Any", model.forward)).parameters)


def _context_length(config: Any) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
