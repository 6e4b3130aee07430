"""What an engine can be told, checked against the model and turned into the settings of its parts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from depthprobe.errors import UserError
from depthprobe.halting import ExitRule, FixedDepth, FullDepth, QExit, RandomExit, parse_rule
from depthprobe.models.configuration import LoopedConfig
from depthprobe.models.modeling import LoopedForCausalLM
from depthprobe.runtime.layouts import Layout, layout
from depthprobe.runtime.requests import Request
from depthprobe.runtime.settings import Policy, SchedulerConfig, whole

if TYPE_CHECKING:
    from depthprobe.runtime.runner import Runner

#: bytes of keys and values that an engine takes unless told otherwise
KV_BYTES = 1 << 30
#: names that other servers have for keeping the keys of shared prompts
_NO_PREFIX_CACHE = ("prefix_caching", "enable_prefix_caching", "prefix_cache")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine; `EngineOptions.of(model, **options)` makes them.

    Options:
        exit: exit rule, or its text as in `halting.parse_rule`; None: the model's own Q-exit if it has a gate, else
            all loops.
        kv: layout of keys and values: ragged, depth-indexed, last-exited, shared, first-then-shared, state-copied.
            None: ragged, or what the rule needs.
        policy: refill, no-refill, lockstep, full.
        width: most rows of a batch.
        spare: further slots, for rows that wait for the coda; None: as many as `width` under refill, else none.
        coda_share: in refill the coda waits for that share of `width`; None: 1 with spare slots of at least half the
            width, else ½.
        prefill: dense (prompts run all loops) or ragged (prompt tokens leave by the rule).
        prefill_tokens: most prompt tokens of a tick.
        max_len: longest sequence, prompt and generated tokens; None: the model's trained context, or what the pool
            can hold of one request where that is less.
        kv_pages: pages of the pool, one token at one loop over all core layers. Models with prelude or coda layers get
            outer pages beside them, see `_pool`. None: enough for all slots, within `kv_bytes`.
        kv_bytes: bytes of all pages where `kv_pages` is not given, which says it all; None: 1 GiB.
        n_loops: U; None: the model's; at most that.
        by_depth: batch rows of one depth only (for comparison).
        record_gates: whether λ and the criterion of each loop are kept for the record.
        tap: how many tokens the readout after each loop keeps for the record (0: none).
    """

    scheduler: SchedulerConfig
    rule: ExitRule | None
    prompt_rule: ExitRule | None
    exit: ExitRule
    record_gates: bool = True
    tap: int = 0

    @classmethod
    def of(
        cls,
        model: LoopedForCausalLM,
        *,
        exit: ExitRule | str | None = None,
        kv: Layout | str | None = None,
        policy: Policy = "refill",
        width: int = 64,
        spare: int | None = None,
        coda_share: float | None = None,
        prefill: Literal["dense", "ragged"] = "dense",
        prefill_tokens: int = 512,
        max_len: int | None = None,
        kv_pages: int | None = None,
        kv_bytes: int | None = None,
        n_loops: int | None = None,
        by_depth: bool = False,
        record_gates: bool = True,
        tap: int = 0,
        **unknown: Any,
    ) -> EngineOptions:
        """Raises `UserError` where options do not fit the model or each other, or are not known."""
        if unknown:
            name = next(iter(unknown))
            why = "every request computes its own prompt" if name in _NO_PREFIX_CACHE else "see EngineOptions"
            raise UserError(f"the engine has no option {name}", where=name, remedy=f"leave it out: {why}")
        if not isinstance(model, LoopedForCausalLM):
            what = f"the runtime serves looped models, not a {type(model).__name__}"
            raise UserError(what, where="model", remedy="load one with depthprobe.load(…).module, or train one")
        config = model.config
        for name, value, least, most in (
            ("width", width, 1, None), ("spare", spare, 0, None), ("prefill_tokens", prefill_tokens, 1, None),
            ("kv_pages", kv_pages, 1, None), ("kv_bytes", kv_bytes, 1, None), ("n_loops", n_loops, 1, config.n_loops),
            ("max_len", max_len, 1, config.max_position_embeddings), ("tap", tap, 0, config.vocab_size),
        ):  # fmt: skip
            if value is not None or name in ("width", "prefill_tokens", "tap"):
                whole(name, value, least, most)
        if kv_pages is not None and kv_bytes is not None:
            what = "kv_pages and kv_bytes both say how large the pool is"
            raise UserError(what, where="kv_bytes", remedy="leave one out")
        for name, value in (("by_depth", by_depth), ("record_gates", record_gates)):
            if not isinstance(value, bool):
                raise UserError(f"{name} is {value!r}", where=name, remedy="give True or False")
        loops = config.n_loops if n_loops is None else n_loops
        rule = _rule(exit, config, policy, loops)
        rule.check(loops)
        if prefill == "dense" and rule.min_depth_prompt is not None:
            what = "min_prompt is the least depth of prompt tokens, and dense prefill runs them through all loops"
            raise UserError(what, where=f"exit rule {rule.spec()}", remedy="leave it out, or use prefill ragged")
        if kv is not None and not isinstance(kv, (str, Layout)):
            raise UserError(f"kv is {kv!r}", where="kv", remedy="give the name of a layout, such as ragged")
        chosen = layout(kv if kv is not None else ("state-copied" if rule.reprojects else "ragged"))
        if spare is None:
            spare = width if policy == "refill" else 0
        if coda_share is None:
            coda_share = 1.0 if spare * 2 >= width else 0.5
        length = config.max_position_embeddings if max_len is None else max_len
        most, kept = (width + spare) * length, _kept(chosen, rule, policy, loops)
        sizes = page_bytes(config, model.dtype.itemsize)
        core, outer = _pool(most, chosen.reserve(loops), kept, sizes, kv_pages, kv_bytes or KV_BYTES)
        if max_len is None:
            length = min(length, max(1, core // chosen.reserve(loops)))
        settings = SchedulerConfig(
            n_loops=loops, width=width, core_pages=core, outer_pages=outer, spare=spare, policy=policy, kv=chosen,
            prefill_tokens=prefill_tokens, coda_share=coda_share, horizon=rule.horizon, prefill=prefill,
            by_depth=by_depth, max_len=length,
        )  # fmt: skip
        asked = None if policy == "full" or isinstance(rule, FullDepth) else rule
        return cls(settings, asked, asked if prefill == "ragged" else None, rule, record_gates, tap)

    @property
    def horizon(self) -> int:
        """Of the rule."""
        return self.scheduler.horizon

    @property
    def ragged_prefill(self) -> bool:
        """Whether prompt tokens may leave early."""
        return self.scheduler.prefill == "ragged"

    @property
    def replays(self) -> bool:
        """Whether requests bring the depths that they leave at."""
        return self.rule is not None and self.rule.needs_given

    @property
    def needs_prompt_exits(self) -> bool:
        """Whether requests bring the depths that their prompt tokens leave at, since no rule decides them."""
        return self.ragged_prefill and (self.scheduler.policy == "full" or self.replays)

    def checked(self, request: Request, name: str, vocab_size: int, has_tokenizer: bool) -> Request:
        """The request under its name, and with a seed of its own; `UserError` where it cannot be served."""
        if not isinstance(request, Request):
            raise UserError(f"a {type(request).__name__} is no request", where="request", remedy="give a Request(…)")
        request = dataclasses.replace(request, id=name)
        settings, where = self.scheduler, f"request {name}"
        request.check(vocab_size, settings.n_loops, settings.max_len)
        if request.sampling.stop and not has_tokenizer:
            what = "stop strings need a tokenizer"
            raise UserError(what, where=where, remedy="give stop_tokens, or Engine(…, tokenizer=…)")
        if self.replays and request.replay is None:
            raise UserError("the engine replays exits and none are given", where=where, remedy="give replay=…")
        if not self.replays and request.replay is not None:
            what = "exits to replay are given to an engine that decides them"
            raise UserError(what, where=where, remedy="use Engine(…, exit='replay')")
        if request.prompt_replay is not None and not self.ragged_prefill:
            what = "exits of prompt tokens are given and prefill is dense"
            raise UserError(what, where=where, remedy="use Engine(…, prefill='ragged')")
        if self.needs_prompt_exits and request.prompt_replay is None and len(request.prompt) > 1:
            what = "prefill is ragged, and neither a rule nor the request says where prompt tokens leave"
            raise UserError(what, where=where, remedy="give prompt_replay=…, or use Engine(…, prefill='dense')")
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=request.seed))

    def describe(self, model: LoopedForCausalLM, runner: Runner) -> dict[str, Any]:
        """What the record says of the engine."""
        settings, config = self.scheduler, model.config
        core_bytes, outer_bytes = page_bytes(config, model.dtype.itemsize)
        own = {
            field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.name != "kv"
        }
        return own | {
            "exit": self.exit.spec(), "kv": settings.layout.name, "core_page_bytes": core_bytes,
            "outer_page_bytes": outer_bytes, "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(runner.device), "tap": self.tap,
        }  # fmt: skip


def page_bytes(config: LoopedConfig, itemsize: int) -> tuple[int, int]:
    """Bytes of a core page and of an outer page: keys and values of one token over the layers of each."""
    layer = 2 * config.kv_heads * config.head_size * itemsize
    return config.n_core * layer, (config.n_prelude + config.n_coda) * layer


def _kept(kind: Layout, rule: ExitRule, policy: str, loops: int) -> float:
    """Core pages that a decoded token is expected to keep.

    Where it leaves is known of fixed and random depths, and of policy full. Of other rules it is taken to be half-way
    between their least depth and U.
    """
    if policy == "full" or isinstance(rule, FullDepth):
        return kind.held(loops, loops)
    if isinstance(rule, RandomExit):
        chances = enumerate(rule.probabilities, 1)
        return sum(p * kind.held(max(e, rule.min_depth), loops) for e, p in chances)
    if isinstance(rule, FixedDepth):
        return kind.held(rule.depth, loops)
    least = min(rule.least_depth(), loops)
    return (kind.held(least, loops) + kind.held(loops, loops)) / 2


def _pool(
    most: int, reserve: int, kept: float, sizes: tuple[int, int], pages: int | None, budget: int
) -> tuple[int, int]:
    """Core and outer pages of the pool, so that both kinds run out together where tokens leave as expected.

    A token has one outer page whatever its depth, so there are as many as tokens that keep `kept` core pages each fit.
    If tokens stay longer, as those of dense prompts do, some are never used; they are the cheaper kind to have left.

    Args:
        most: tokens of all slots at their longest; no more outer pages than that.
        reserve: core pages of a token in flight.
        kept: those it is expected to keep when it has left.
        sizes: bytes of a core page and of an outer page, the latter 0 without prelude and coda layers.
        pages: core pages asked for; None: as many as `budget` bytes leave, and not more than ever used.
    """
    core_bytes, outer_bytes = sizes
    if pages is not None:
        return pages, min(most, math.ceil(pages / kept)) if outer_bytes else 0
    if most * (reserve * core_bytes + outer_bytes) <= budget:
        return most * reserve, most if outer_bytes else 0
    outer = max(1, min(most, int(budget // (kept * core_bytes + outer_bytes)))) if outer_bytes else 0
    left = (budget - outer * outer_bytes) // core_bytes
    return max(reserve, min(most * reserve, left)), outer


def end_tokens(model: LoopedForCausalLM) -> frozenset[int]:
    """Ids that end a text, by the model's generation settings or its configuration."""
    settings = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def _rule(exit: ExitRule | str | None, config: LoopedConfig, policy: str, n_loops: int) -> ExitRule:
    rule = parse_rule(exit) if isinstance(exit, str) else exit
    if rule is not None and not isinstance(rule, ExitRule):
        raise UserError(f"exit is {exit!r}, no exit rule", where="exit", remedy="give a rule, or its text like q:0.5")
    if rule is None:
        gated = config.exit_gate and policy != "full"
        return QExit(config.exit_q) if gated else FullDepth()
    if (
        policy == "full"
        and not isinstance(rule, FullDepth)
        and not (isinstance(rule, FixedDepth) and rule.depth == n_loops)
    ):
        what = "policy full runs every loop and asks no exit rule"
        raise UserError(what, where=f"exit rule {rule.name}", remedy="leave the rule out, or use policy refill")
    return rule
