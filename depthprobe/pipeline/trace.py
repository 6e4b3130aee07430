"""Serving questions or prompts through the engine, with the trace of every exit: `depthprobe trace`.

result = trace("follow-demo", exit="q:0.5", n=50, out="runs/served")
print(result.summary["mean_exit"], result.summary["accuracy"])
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthprobe.errors import UserError
from depthprobe.pipeline.config import AnalyzeConfig

if TYPE_CHECKING:
    from depthprobe.depth import DepthModel
    from depthprobe.runtime import Completion, Engine, Request, Sampling

__all__ = ["Served", "trace"]

#: options of `AnalyzeConfig` that say which questions are asked, and of which model
QUESTIONS = (
    "model", "task", "data", "hops", "n", "split", "form", "template", "order", "distractors", "device", "dtype",
    "revision", "seed", "bos", "chat", "skip_too_long",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """What was served.

    Fields:
        folder: the trace.
        completions: in the order of the requests.
        summary: as `summarise` gives it, and as `summary.json` in the folder has it.
    """

    folder: Path
    completions: list[Completion]
    summary: dict[str, Any]


def trace(
    model: str = "follow-demo",
    *,
    out: Path | str,
    prompts: Path | str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    ignore_eos: bool = False,
    rate: float | None = None,
    lookahead: str | None = None,
    exit: str | None = None,
    engine: Mapping[str, Any] | None = None,
    remark: Callable[[str], None] = lambda line: None,
    progress: Callable[[str, int, int], None] | None = None,
    **questions: Any,
) -> Served:
    """Serve the questions of a task, or the prompts of a file, and write the trace.

    Args:
        model: a looped model, as `depthprobe.load` takes it.
        out: folder of the trace; must not exist, or be empty.
        prompts: a text file with a prompt a line, or JSON lines {"prompt": text or ids, "max_new_tokens": …}; None:
            generated questions.
        max_new_tokens: tokens of each request; None: of questions as many as the answer has, of prompts 16.
        temperature, top_p, stop, stop_tokens, ignore_eos: as in `runtime.Sampling`.
        rate: requests a second, arriving as a Poisson process (seeded); None: all at once.
        lookahead: file or folder with a lookahead head; None: the one beside the model.
        exit: exit rule as text, see `halting.parse_rule`.
        engine: further options of `runtime.EngineOptions`.
        questions: options of `analyze` that say which questions: task, data, hops, n, split, seed, …

    Raises:
        UserError: anything that cannot be served or written, in one line; also where no request could be served, after
            the trace is written.
    """
    config = AnalyzeConfig.of({"model": model, **{k: v for k, v in questions.items() if v is not None}})
    for name in questions:
        if name not in QUESTIONS:
            raise UserError(f"trace has no option {name}", where=name)
    if prompts is not None and (given := [k for k, v in questions.items() if v is not None and k not in _OF_A_MODEL]):
        what = f"--{given[0].replace('_', '-')} says which questions are asked, and prompts come from a file"
        raise UserError(what, where=str(prompts), remedy="leave one out")
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"the rate is {rate}, not above 0", where="rate")
    from depthprobe.runtime import Engine, Sampling
    from depthprobe.runtime.options import EngineOptions

    # what is wrong for all requests is said at once, before a model is loaded
    each = Sampling(
        16 if max_new_tokens is None else max_new_tokens, temperature, top_p, stop_tokens=tuple(stop_tokens),
        stop=tuple(stop), ignore_eos=ignore_eos,
    )  # fmt: skip
    say = progress or (lambda stage, done, total: None)
    split_given = questions.get("split") is not None
    opened, requests = _requests(config, split_given, prompts, max_new_tokens, each, remark, say)
    served = _looped(opened)
    rule, head = _rule(exit, lookahead, model, served)
    about = {
        "model": config.model, "model_fingerprint": opened.fingerprint(), "rate": rate, "seed": config.seed,
        "task": None if prompts is not None else list(config.task),
        "prompts": None if prompts is None else str(prompts), "lookahead": head,
    }  # fmt: skip
    tokenizer, options = opened.tokenizer, dict(engine or {})
    checked = EngineOptions.of(served, exit=rule, **options)
    if checked.replays:
        what = "replayed exits come with requests, and questions and prompts have none"
        raise UserError(what, where="exit rule replay", remedy="serve with runtime.Engine(…, exit='replay')")
    if checked.needs_prompt_exits:
        what = "policy full lets no prompt token leave, which ragged prefill is for"
        raise UserError(what, where="prefill", remedy="use prefill dense")
    if each.stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer", where="stop", remedy="give stop tokens, by their ids")
    with Engine(served, exit=rule, tokenizer=tokenizer, record=Path(out), about=about, **options) as running:
        completions = list(_serve(running, requests, rate, config.seed, say))
        summary = summarise(running, completions, [request.about for request in requests])
    _write(Path(out) / "summary.json", summary)
    if not summary["served"]:
        why = next((one.error for one in completions if one.error is not None), "there are none")
        raise UserError(f"none of {len(completions)} requests could be served: {why}", where=str(out))
    return Served(Path(out), completions, summary)


_OF_A_MODEL = ("model", "device", "dtype", "revision", "seed", "bos")


def _requests(
    config: AnalyzeConfig,
    split_given: bool,
    prompts: Path | str | None,
    max_new: int | None,
    each: Sampling,
    remark: Callable[[str], None],
    say: Callable[[str, int, int], None],
) -> tuple[DepthModel, list[Request]]:
    from depthprobe.runtime import Request

    def sampling(tokens: int, index: int) -> Sampling:
        return replace(each, max_new_tokens=tokens, seed=config.seed + index)

    if prompts is not None:
        from depthprobe.depth import load

        rows = list(_read_prompts(Path(prompts), each.max_new_tokens))
        model = load(config.model, revision=config.revision, device=config.device, dtype=config.dtype)
        out = []
        for index, (prompt, tokens) in enumerate(rows):
            ids = _ids(model.tokenizer, prompt, config.bos)
            out.append(Request(tuple(ids), sampling(tokens, index), id=f"p{index}"))
        return model, out
    from depthprobe.pipeline.prepare import opened
    from depthprobe.tasks.intervals import cluster_of

    ready = opened(config, split_given=split_given, say=remark, told=say)
    return ready.model, [
        Request(
            target.prompt_ids, sampling(max_new or len(target.answer_ids), index), id=target.item.id,
            about={
                "item": target.item.id, "story": target.item.story_id, "cluster": cluster_of(target.item),
                "hops": target.item.hops, "task": target.item.task, "answer_ids": list(target.answer_ids),
            },
        )
        for index, target in enumerate(ready.prepared.targets)
    ]  # fmt: skip


def _read_prompts(file: Path, max_new: int) -> Iterator[tuple[str | list[int], int]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"the prompts cannot be read: {why}", where=str(file)) from None
    found = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found += 1
        if file.suffix != ".jsonl":
            yield line, max_new
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"not JSON: {error}", where=where) from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(i) is int for i in prompt)):
            raise UserError("there is no prompt, text or token ids", where=where, remedy='give {"prompt": "…"}')
        unknown = sorted(set(row) - {"prompt", "max_new_tokens"})
        if unknown:
            raise UserError(f"unknown field {unknown[0]}", where=where, remedy="known: prompt, max_new_tokens")
        tokens = row.get("max_new_tokens", max_new)
        if type(tokens) is not int or tokens < 1:
            raise UserError(f"max_new_tokens is {tokens!r}, not a whole number of 1 or more", where=where)
        yield prompt, tokens
    if not found:
        raise UserError("there are no prompts", where=str(file), remedy="give one a line")


def _ids(tokenizer: Any, prompt: str | list[int], bos: str) -> Sequence[int]:
    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise UserError("the model has no tokenizer", where="prompts", remedy='give token ids: {"prompt": [1, 2]}')
    from depthprobe.lens.targets import encode

    return encode(tokenizer, [prompt], special=bos != "never")[0]


def _looped(model: DepthModel) -> Any:
    from depthprobe.models import LoopedForCausalLM

    inner = model.model
    if not isinstance(inner, LoopedForCausalLM):
        what = f"the runtime serves looped models, not a {type(inner).__name__}"
        raise UserError(what, where="model", remedy="take follow-demo, kinship-demo or another looped model")
    return inner


def _rule(exit: str | None, lookahead: str | None, model: str, served: Any) -> tuple[Any, str | None]:
    """The rule, and where its lookahead head comes from."""
    from depthprobe.halting import LookaheadHead, parse_rule

    looks_ahead = exit is not None and exit.strip().lower().startswith("lookahead")
    try:
        rule = None if exit is None else parse_rule(exit)
    except UserError as error:
        if not looks_ahead or "lookahead head" not in error.what:
            raise
        from depthprobe.models import embedded_models, embedded_path

        place = lookahead or (str(embedded_path(model)) if model in embedded_models() else model)
        assert exit is not None
        return parse_rule(exit, LookaheadHead.load(place, served)), str(place)
    if lookahead is not None:
        why = "needs none: it only decides a loop late" if looks_ahead else "does not look ahead"
        what = f"a lookahead head is given and the rule {why}"
        raise UserError(what, where="lookahead", remedy="leave it out, or ask for --exit lookahead:0.5")
    return rule, None


def _serve(
    engine: Engine, requests: Sequence[Request], rate: float | None, seed: int, say: Callable[[str, int, int], None]
) -> Iterator[Completion]:
    """Completions in the order of the requests; those refused have `error`."""
    import numpy as np

    from depthprobe.runtime import Completion

    gaps = np.zeros(len(requests)) if rate is None else np.random.default_rng(seed).exponential(1 / rate, len(requests))
    start = engine.now()
    arrivals = start + np.cumsum(gaps)
    refused: dict[int, Completion] = {}
    names: list[str | None] = [None] * len(requests)
    sent = finished = 0
    while sent < len(requests) or engine.in_flight:
        now = engine.now()
        while sent < len(requests) and arrivals[sent] <= now:
            request = requests[sent]
            try:
                names[sent] = engine.add(request, arrival=float(arrivals[sent]))
            except UserError as error:
                refused[sent] = Completion(request.id, request.prompt, finish_reason="refused", error=str(error))
            sent += 1
        if engine.in_flight:
            finished += sum(event.finish_reason is not None for event in engine.step())
            say("served", finished + len(refused), len(requests))
        elif sent < len(requests):
            time.sleep(max(0.0, min(0.05, float(arrivals[sent]) - engine.now())))
    for index, name in enumerate(names):
        done = refused.get(index) if name is None else engine.take(name)
        assert done is not None
        yield done


def summarise(engine: Engine, completions: Sequence[Completion], about: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Depth, work, time and memory of what was served, together.

    Keys: requests, served, refused, tokens, mean_exit, core_rows_… as the scheduler counts them, rule_outputs (rows
    whose output an exit rule asked for: each a head, and a coda where there is one), decode_share (executed core
    passes of decoded tokens as a share of U each), all_share (prefill and recomputed passes included, of U for every
    token), seconds, tokens_per_s, normalised_latency_s (median and 90 % of latency / generated tokens, from arrival),
    first_token_s, peak_core_pages, peak_core_bytes (of those), peak_outer_pages, peak_kv_bytes (most of either kind, of
    core, prelude and coda layers), accuracy (share of whole answers that are right among the questions that were
    served, n_answers of n_questions; null of none).
    """
    import numpy as np

    served = [one for one in completions if one.error is None and one.tokens]
    loops = engine.options.scheduler.n_loops
    counters = engine.scheduler.counters
    exits = np.array([depth for one in served for depth in one.exit_depths])
    prompt_tokens = sum(len(one.prompt) - 1 for one in served)
    normalised = [(one.finished - one.arrival) / len(one.tokens) for one in served if one.finished is not None]
    first = [one.first_token - one.arrival for one in served if one.first_token is not None]
    seconds = max((one.finished or 0.0 for one in served), default=0.0) - min(
        (one.arrival for one in served), default=0.0
    )
    kinds = ("decode", "prefill", "recomputed", "frozen", "aborted")
    work = {f"core_rows_{kind}": counters[f"core_rows_{kind}"] for kind in kinds}
    described = engine.options.describe(engine.model, engine.runner)
    core_bytes = engine.pool.peak_core * described["core_page_bytes"]
    out: dict[str, Any] = {
        "requests": len(completions), "served": len(served),
        "refused": sum(one.error is not None for one in completions),
        "tokens": len(exits), "n_loops": loops, "mean_exit": _mean(exits), **work,
        "rule_outputs": engine.runner.work.rule_outputs,
        "decode_share": _ratio(work["core_rows_decode"], loops * len(exits)),
        "all_share": _ratio(sum(work.values()), loops * (len(exits) + prompt_tokens)),
        "seconds": seconds, "tokens_per_s": _ratio(len(exits), seconds),
        "normalised_latency_s": _quantiles(normalised), "first_token_s": _quantiles(first),
        "peak_core_pages": engine.pool.peak_core,
        "peak_core_bytes": core_bytes, "peak_outer_pages": engine.pool.peak_outer,
        "peak_kv_bytes": core_bytes + engine.pool.peak_outer * described["outer_page_bytes"],
        "exit": described["exit"], "kv": described["kv"], "policy": described["policy"],
    }  # fmt: skip
    asked = [(one, row) for one, row in zip(completions, about, strict=True) if row.get("answer_ids")]
    if asked:
        # a question that was refused has no answer, neither right nor wrong
        answered = [(one, row) for one, row in asked if one.error is None and one.tokens]
        out["n_questions"], out["n_answers"] = len(asked), len(answered)
        out["accuracy"] = _mean([_right(one, row) for one, row in answered])
        by_hops: dict[int, list[tuple[bool, float | None]]] = {row["hops"]: [] for _, row in asked}
        for one, row in answered:
            by_hops[row["hops"]].append((_right(one, row), _mean(one.exit_depths)))
        out["by_hops"] = [
            {"hops": hops, "n": len(rows), "accuracy": _mean([right for right, _ in rows]),
             "mean_exit": _mean([depth for _, depth in rows if depth is not None])}
            for hops, rows in sorted(by_hops.items())
        ]  # fmt: skip
    return out


def _right(one: Completion, row: Mapping[str, Any]) -> bool:
    ids = list(row["answer_ids"])
    return one.tokens[: len(ids)] == ids


def _mean(values: Any) -> float | None:
    return float(sum(values) / len(values)) if len(values) else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    import numpy as np

    if not values:
        return None
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {"p10": float(low), "p50": float(middle), "p90": float(high)}


def _write(file: Path, summary: Mapping[str, Any]) -> None:
    from depthprobe.files import atomic_write

    atomic_write(file, (json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
