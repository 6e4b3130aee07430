"""`LoopedForCausalLM`: a decoder whose core layers run several times, as a transformers model.

For example:

    config = LoopedConfig(vocab_size=512, n_core=2, n_loops=8)
    model = LoopedForCausalLM(config)
    out = model(tokens, output_loop_states=True)      # out.logits, out.loop_states[r - 1], out.gate_logits
    out = model(tokens, exits=QExit(0.9))             # each token leaves when its gate says so
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthprobe.errors import UserError
from depthprobe.halting import ExitRule
from depthprobe.models.arguments import check_block_mask, check_exit_options, check_ids, check_shape, the_cache
from depthprobe.models.attend import Attend, CachedAttend, DenseAttend, RaggedAttend, Slots
from depthprobe.models.cache import LoopedCache
from depthprobe.models.configuration import LoopedConfig
from depthprobe.models.core import RMSNorm, Rotary, Stack, core_step
from depthprobe.models.loops import dense_loops, exit_rule, exit_uniforms, ragged_loops
from depthprobe.models.masks import build_mask
from depthprobe.models.tokens import Tokens

#: transformers renamed the field in 5.2x; the one that `generate` of the installed version looks for
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass
class LoopedOutput(CausalLMOutputWithPast):
    """Output of `LoopedForCausalLM`; what was not asked for is None. B rows, S tokens, U loops, width d.

    Fields:
        loss: float32 scalar, mean next-token cross-entropy over labels that are not −100.
        logits: `[B, S, V]` (fewer tokens with `logits_to_keep`).
        cache (`past_key_values` in older transformers): the `LoopedCache`.
        loop_states: U tensors `[B, S, d]`, the state after each loop: before the final norm, or, with
            `norm_per_loop`, after it. `readout` norms where needed.
        gate_logits: `[B, S, U]`, λ_d = σ(logit).
        exit_depths: int64 `[B, S]`, 1…U, 0 at padding; with `exits` only.
        executed_core_rows: int64 scalar, passes of a token through the core: Σ exit depths over real tokens,
            or U for each of them without exits.
    """

    loop_states: tuple[Tensor, ...] | None = None
    gate_logits: Tensor | None = None
    exit_depths: Tensor | None = None
    executed_core_rows: Tensor | None = None


class Adapter(nn.Linear):
    """Linear(2d → d) on [state; prelude output]; starts as the identity on the state plus noise."""


class LoopedPreTrainedModel(PreTrainedModel):
    """Initialisation and loading shared by looped models."""

    config_class = LoopedConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        if isinstance(module, Adapter) and not getattr(module.weight, "_is_hf_initialized", False):
            module.weight[:, : module.out_features].diagonal().add_(1.0)


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """Embedding → prelude → core × U → coda → norm → head, with an optional exit gate on every loop state.

    Modules: embed_tokens, mix, prelude.{i}, adapter, core.{i}, coda.{i}, norm, gate, lm_head.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012
    if TYPE_CHECKING:  # at run time transformers would take the annotation, here a string, for the class
        config: LoopedConfig

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.mix = (
            nn.Linear(config.n_previous_tokens * d, d, bias=False) if config.n_previous_tokens else None
        )
        self.prelude = Stack(config, config.n_prelude)
        self.adapter = Adapter(2 * d, d, bias=False) if config.input_injection == "concat" else None
        self.core = Stack(config, config.n_core)
        self.coda = Stack(config, config.n_coda)
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.gate = nn.Linear(d, 1) if config.exit_gate else None
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` then leaves it to `forward` to make a LoopedCache

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    # -- the parts of a loop, for whoever runs them one by one

    def core_step(self, x: Tensor, positions: Rotary, attend: Attend) -> Tensor:
        """One pass of the core layers, `[B, S, d]` → `[B, S, d]`; see `core.core_step`."""
        return core_step(self.core, x, positions, attend)

    def loop_input(self, state: Tensor | None, entry: Tensor) -> Tensor:
        """What the core gets: from the state before (None at the first loop) and the prelude's output."""
        if self.adapter is not None:
            return self.adapter(torch.cat([entry if state is None else state, entry], dim=-1))
        if state is None:
            return entry
        return state + entry if self.config.input_injection == "add" else state

    def loop_output(self, x: Tensor) -> Tensor:
        """The loop state made of the core's output, `[B, S, d]`: normed where the model norms every loop."""
        return self.norm(x) if self.config.norm_per_loop else x

    def normed(self, loop_state: Tensor) -> Tensor:
        """A loop state after the final norm, applied exactly once whether or not loops are normed."""
        return loop_state if self.config.norm_per_loop else self.norm(loop_state)

    def gate_logit(self, loop_state: Tensor) -> Tensor:
        """Logit of λ at a loop state `[..., d]` → `[...]`; the gate looks at the normed state.

        Raises:
            UserError: the model has no gate.
        """
        return self._require_gate()(self.normed(loop_state)).squeeze(-1)

    def readout(self, loop_state: Tensor) -> Tensor:
        """Logits `[..., V]` of a loop state `[..., d]` by norm and head alone, without a coda."""
        return self.lm_head(self.normed(loop_state))

    # -- forward

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        exits: Tensor | ExitRule | None = None,
        exit_seed: int | Tensor | None = None,
        is_prompt: Tensor | None = None,
        n_loops: int | None = None,
        output_loop_states: bool = False,
        output_gate_logits: bool = False,
        block_mask: Tensor | None = None,
        previous_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        return_dict: bool | None = None,
    ) -> LoopedOutput:
        """Run the model. B rows of S new tokens; with a cache of P tokens, T = P + S, else T = S.

        Args:
            input_ids: int64 `[B, S]`.
            attention_mask: `[B, T]` (or `[B, S]`, the new tokens alone), 0 at padding, on either side.
            position_ids: int64 `[B or 1, S]`; by default counted over real tokens.
            labels: int64 `[B, S]`, −100 where not counted; shifted here, so labels = input_ids is right.
            cache: the past, a `LoopedCache` (`past_key_values` is its name in older transformers);
                use_cache makes one. Keys and ids of the new tokens are added to it.
            exits: exit depths, integer `[B, S]` within 1…U, or a rule from `depthprobe.halting` that is
                asked after each loop; None: every token runs all loops. Semantics:
                `depthprobe.models.loops`.
            exit_seed: int for all rows, or int64 `[B]`: what rules that draw exits draw with; a token's exit
                then depends on its seed and position, not on its company.
            is_prompt: bool `[B, S]`, tokens of the prompt, for rules whose least depth differs there.
            n_loops: run another number of loops than the configured one.
            output_loop_states, output_gate_logits: what to return of every loop (the former brings the latter
                if the model has a gate).
            block_mask: bool `[B or 1, 1, S, T]`, who may see whom, for several questions packed behind one
                story; causality and padding are added. Give `position_ids` as each question would have them
                alone: then the previous tokens that are mixed in are also those that it would have alone.
            previous_ids: int64 `[B, S, n_previous_tokens]`, the token before each, then the one before that,
                −1 for none; computed if not given.
            logits_to_keep: the last so many tokens (0: all), or the indices of those wanted.
            skip_logits: leave the head out; for a caller that reads `loop_states` itself.
            return_dict: True or None; there is no tuple to return.

        Raises:
            UserError: arguments that do not fit the model or each other, naming the one.
        """
        if return_dict is not None and not return_dict:
            what = "a looped model returns no tuple, for its output has more fields than others'"
            raise UserError(what, where="return_dict", remedy="leave it out and read fields by name")
        n_loops = self.config.n_loops if n_loops is None else n_loops
        if n_loops < 1:
            raise UserError(f"n_loops is {n_loops}, below 1", where="n_loops")
        check_ids(input_ids, self.config.vocab_size)
        (batch, length), device, back = input_ids.shape, input_ids.device, self.config.n_previous_tokens
        check_shape("position_ids", position_ids, (1, length), (batch, length))
        check_shape("previous_ids", previous_ids, (batch, length, back))
        check_shape("labels", labels, (batch, length))
        held = the_cache(cache, past_key_values, use_cache)
        tokens = Tokens.of(input_ids, attention_mask, held, n_loops)
        keys = tokens.ids.shape[1]
        check_block_mask(block_mask, batch, length, keys)
        rule = None
        if exits is not None:
            seeded, coda = exit_seed is not None, len(self.coda) > 0
            rule = exit_rule(exits, tokens.real(length), n_loops, coda=coda, seeded=seeded)
        check_exit_options(rule, exit_seed, is_prompt, (batch, length))
        if (rule is not None and rule.needs_gate) or output_gate_logits:
            self._require_gate()
        if position_ids is None:
            position_ids = tokens.positions(length)
        if previous_ids is None and back:
            previous_ids = tokens.previous(length, back, position_ids, block_mask)

        mask = build_mask(length, keys, device, tokens.mask, block_mask)
        slots = Slots(self.config.n_prelude, self.config.n_core, self.config.n_coda, n_loops)
        gates = output_gate_logits or (output_loop_states and self.gate is not None)
        positions = Rotary.of(position_ids, self.config, self.embed_tokens.weight.dtype)
        if rule is not None:
            attend: Attend = RaggedAttend(mask, slots, held, own_key=output_loop_states or gates)
        else:
            attend = DenseAttend(mask) if held is None else CachedAttend(mask, slots, held)
        if held is not None:
            held.extend(tokens.ids[:, -length:], n_loops)

        attend.enter("prelude")
        entry = self.prelude(self.embed(input_ids, previous_ids), positions, attend)
        if isinstance(attend, RaggedAttend):
            assert rule is not None
            uniform = None if exit_seed is None else exit_uniforms(exit_seed, position_ids, batch)
            run = ragged_loops(
                self, entry, positions, attend, n_loops, rule, tokens.real(length), output_loop_states, gates,
                uniform, is_prompt,
            )  # fmt: skip
        else:
            run = dense_loops(self, entry, positions, attend, n_loops, output_loop_states, gates)
        state = run.state
        if len(self.coda):
            attend.enter("coda")  # also without logits: a cache needs the coda's keys
            state = self.norm(self.coda(state, positions, attend))
        logits = None if skip_logits else self._logits(state, logits_to_keep)
        output: dict[str, Any] = {CACHE_FIELD: held}
        return LoopedOutput(
            loss=None if labels is None else _loss(logits, labels),
            logits=logits,
            loop_states=tuple(run.states) if output_loop_states else None,
            gate_logits=torch.stack(run.gates, dim=-1) if gates else None,
            exit_depths=run.exit_depths,
            executed_core_rows=tokens.count(length) * n_loops if run.rows is None else run.rows,
            **output,
        )

    def embed(self, input_ids: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """Embeddings `[B, S, d]` of ids `[B, S]`, previous tokens `[B, S, n]` (−1: none) mixed in."""
        x = self.embed_tokens(input_ids)
        if self.mix is None or previous_ids is None:
            return x * self.config.embedding_multiplier
        before = self.embed_tokens(previous_ids.clamp_min(0)) * (previous_ids >= 0).unsqueeze(-1)
        return (x + self.mix(before.flatten(-2))) * self.config.embedding_multiplier

    def _logits(self, state: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, Tensor):
            state = state[:, logits_to_keep]
        elif logits_to_keep > 0:
            state = state[:, -logits_to_keep:]
        # a coda's output is already normed
        return self.lm_head(state) if len(self.coda) else self.readout(state)

    def _require_gate(self) -> nn.Linear:
        if self.gate is None:
            raise UserError("the model has no exit gate", where="config field exit_gate",
                            remedy="use a rule that needs none, such as FixedDepth")  # fmt: skip
        return self.gate


def _loss(logits: Tensor | None, labels: Tensor) -> Tensor:
    if logits is None or logits.shape[1] != labels.shape[1]:
        raise UserError("a loss needs the logits of all tokens", where="labels",
                        remedy="leave logits_to_keep and skip_logits out")  # fmt: skip
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


__all__ = ["LoopedForCausalLM", "LoopedOutput", "LoopedPreTrainedModel", "LoopedCache"]
