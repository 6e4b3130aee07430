"""`LoopedConfig`: the shape of a looped language model, prelude – core × loops – coda."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from depthprobe.errors import UserError


class LoopedConfig(PreTrainedConfig):
    """Configuration of `LoopedForCausalLM`. An impossible one raises `UserError` naming the field.

    Fields:
        vocab_size, hidden_size (d), intermediate_size (width of the SwiGLU): sizes.
        num_attention_heads, num_key_value_heads (None: as many as query heads), head_dim (None: d / heads).
        n_prelude, n_core, n_coda: layers before, in and after the loop; the core has at least one.
        n_loops: U, how often the core runs.
        attention_bias: a bias on queries, keys and values, with which a head can look a fixed distance back.
        embedding_multiplier: scale of the embeddings (mixed-in ones too) on entry, as in Granite; the head
            is not scaled. √d lets a tied embedding of norm 1 serve both ends.
        rope_theta, partial_rotary_factor: base of the rotary embedding and the share of each head it turns, 0
            to 1.
        n_previous_tokens: 0, 1 or 2; with 2, x_s = e_s + W[e_{s−1}; e_{s−2}] before the prelude, zero where
            there is no such token. Token ids alone are needed for it, so it costs no cache.
        norm: "pre", x + f(n1 x), or "sandwich", x + n2(f(n1 x)) (Ouro, arXiv 2510.25741).
        norm_per_loop: the final norm after EVERY loop, its output feeding the next (Ouro).
        input_injection: what loop r ≥ 2 gets besides its own state s from the prelude output e: "none", s
            alone; "add", s + e (the first loop gets e); "concat", A[s; e] at every loop, s₀ = e (Huginn's
            adapter, 2502.05171).
        exit_gate: a Linear(d, 1) on the normed loop state, λ = σ(·).
        exit_q: the quantile its exits are read at.
        max_position_embeddings: the trained context; nothing is sized by it.
        tie_word_embeddings, rms_norm_eps, initializer_range, pad/bos/eos_token_id: as usual.
    """

    model_type: ClassVar[str] = "looped"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    n_prelude: int = 0
    n_core: int = 1
    n_coda: int = 0
    n_loops: int = 4
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    n_previous_tokens: int = 0
    norm: str = "pre"
    norm_per_loop: bool = False
    input_injection: str = "none"
    exit_gate: bool = True
    exit_q: float = 0.5
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        divisible = _is_int(self.hidden_size) and _is_int(self.num_attention_heads)
        if self.head_dim is None and divisible and self.num_attention_heads > 0:
            _require(self.hidden_size % self.num_attention_heads == 0, "num_attention_heads",
                     f"{self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}",
                     "set head_dim, or another number of heads")  # fmt: skip
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        self._check()

    @property
    def num_hidden_layers(self) -> int:
        """Executed layers, and so the number of key/value slots of a token: prelude + core × loops + coda."""
        return self.n_prelude + self.n_core * self.n_loops + self.n_coda

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, resolved."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Width of a head, resolved."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of each head the rotary embedding turns."""
        return round(self.head_size * self.partial_rotary_factor)

    def _check(self) -> None:
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "n_core", "n_loops", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, field)
            _require(_is_int(value) and value >= 1, field, f"{field} is {value!r}, not a whole number of 1 or more")
        for field in ("n_prelude", "n_coda"):
            value = getattr(self, field)
            _require(_is_int(value) and value >= 0, field, f"{field} is {value!r}, not a whole number of 0 or more")
        heads, groups = self.num_attention_heads, self.kv_heads
        what = f"{groups} key/value heads do not divide {heads} query heads"
        _require(heads % groups == 0, "num_key_value_heads", what)
        factor = self.partial_rotary_factor
        _require(0.0 <= factor <= 1.0, "partial_rotary_factor", f"partial_rotary_factor is {factor}, not in [0, 1]")
        _require(self.rotary_dim % 2 == 0, "partial_rotary_factor",
                 f"{factor} of a head of {self.head_size} is {self.rotary_dim} dimensions, which is odd",
                 "rotary embedding turns pairs")  # fmt: skip
        _require(self.n_previous_tokens in (0, 1, 2), "n_previous_tokens",
                 f"n_previous_tokens is {self.n_previous_tokens!r}, not 0, 1 or 2")  # fmt: skip
        _require(self.norm in ("pre", "sandwich"), "norm", f"norm is {self.norm!r}, not 'pre' or 'sandwich'")
        _require(self.input_injection in ("none", "add", "concat"), "input_injection",
                 f"input_injection is {self.input_injection!r}, not 'none', 'add' or 'concat'")  # fmt: skip
        _require(0.0 < self.exit_q <= 1.0, "exit_q", f"exit_q is {self.exit_q}, not in (0, 1]")
        _require(self.embedding_multiplier > 0.0, "embedding_multiplier",
                 f"embedding_multiplier is {self.embedding_multiplier}, not above 0")  # fmt: skip
        _require(self.rope_theta > 0.0, "rope_theta", f"rope_theta is {self.rope_theta}, not above 0")
        for field in ("rms_norm_eps", "initializer_range"):
            _require(getattr(self, field) >= 0.0, field, f"{field} is {getattr(self, field)}, below 0")
        pad = self.pad_token_id
        _require(pad is None or 0 <= pad < self.vocab_size, "pad_token_id",
                 f"pad_token_id is {pad}, outside a vocabulary of {self.vocab_size}")  # fmt: skip


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, field: str, what: str, remedy: str | None = None) -> None:
    if not condition:
        raise UserError(what, where=f"config field {field}", remedy=remedy)
