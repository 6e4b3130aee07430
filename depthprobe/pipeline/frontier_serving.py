"""One way of serving the questions of a frontier: driven through the engine, calibrated elsewhere, or made of others.

`served` runs an engine and gives the rows of its answers; `calibrated` finds the threshold with a given mean depth;
`permuted` and `oracle_exits` make the exits that are played back.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.halting import ExitRule
    from depthprobe.models import LoopedForCausalLM
    from depthprobe.runtime import Completion, Request

__all__ = ["Calibrated", "Serving", "calibrated", "oracle_exits", "permuted", "served", "target_of"]

#: rule with a threshold -> the threshold that is never reached before the last loop, and whether a higher one is later
_NEVER: dict[str, tuple[float, bool]] = {
    "q": (1.0, True), "hazard": (1.0, True), "confidence": (1.0, True), "l2": (1e-300, False),
    "second": (1e-300, False), "kl": (1e-300, False), "entropy": (1e-300, False), "entropy-change": (1e-300, False),
}  # fmt: skip
_MEAN = re.compile(r"\s*([a-z0-9-]+)\s*[:=]\s*mean\s*=\s*([^,]*?)\s*((?:,.*)?)")
#: how near a mean depth is near enough, in loops
_NEAR = 0.02


@dataclass(frozen=True, slots=True)
class Serving:
    """All requests under one exit rule.

    Fields:
        completions: in the order of the requests.
        spec: the rule as text.
        criteria: [tokens, U] float64, what the rule compared at each loop that ran, else NaN; only if asked for.
        seconds, peak_kv_bytes, all_rows: of the whole serving, with passes that were recomputed.
        reads: whether the rule asked for a readout after every loop.
    """

    completions: list[Completion]
    spec: str
    criteria: np.ndarray | None
    seconds: float
    peak_kv_bytes: int
    all_rows: int
    read_rows: int
    ragged: bool

    @property
    def mean_exit(self) -> float:
        """Core passes of a token that may leave early: a decoded one, with ragged prefill one of a prompt, too."""
        depths = [depth for one in self.completions for depth in one.exit_depths]
        if self.ragged:
            depths += [depth for one in self.completions for depth in one.prompt_exit_depths]
        return sum(depths) / len(depths)


def served(
    model: LoopedForCausalLM,
    requests: Sequence[Request],
    rule: ExitRule | str,
    options: Mapping[str, Any],
    *,
    told: Callable[[int], None] = lambda done: None,
    criteria: bool = False,
) -> Serving:
    """Serve requests to their end, as many at a time as the engine has slots: who comes waits for nobody.

    Raises:
        UserError: an option that cannot be honoured, or a request that cannot be served.
    """
    from depthprobe.pipeline.trace import summarise
    from depthprobe.runtime import Engine

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "trace" if criteria else None
        with Engine(model, exit=rule, record=record, **options) as engine:
            waiting, names, lines, ended = deque(requests), list[str](), list[dict[str, Any]](), 0
            clients = engine.options.scheduler.n_slots
            while waiting or engine.in_flight:
                while waiting and engine.in_flight < clients:
                    names.append(engine.add(waiting.popleft()))
                events = engine.step()
                lines += [event.record for event in events if criteria]
                if done := sum(event.finish_reason is not None for event in events):
                    ended += done
                    told(ended)
            taken = [engine.take(name) for name in names]
            completions = [one for one in taken if one is not None]
            assert len(completions) == len(requests)
            summary = summarise(engine, completions, [request.about for request in requests])
            about = engine.options.describe(engine.model, engine.runner)
            loops, outer, reads = about["n_loops"], engine.pool.peak_outer, engine.runner.work.rule_outputs
    rows = np.full((len(lines), loops), np.nan)
    for at, line in enumerate(lines):
        found = line["criterion"] or ()
        rows[at, : len(found)] = [np.nan if number is None else number for number in found]
    kinds = ("decode", "prefill", "recomputed", "frozen", "aborted")
    return Serving(
        completions, about["exit"], rows if criteria else None, summary["seconds"],
        summary["peak_core_bytes"] + outer * about["outer_page_bytes"], sum(summary[f"core_rows_{k}"] for k in kinds),
        reads, about["prefill"] == "ragged",
    )  # fmt: skip


# -- thresholds from a mean depth --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A threshold found on other questions than those that it is used on.

    Fields:
        rule: its text.
        target, reached: mean depth asked for, and served with it on the questions of the calibration.
    """

    rule: str
    target: float
    reached: float


def target_of(text: str) -> tuple[str, float, str] | None:
    """The name, mean depth and options of a rule written "q:mean=2.5,min=2"; None for one with a threshold.

    Raises:
        UserError: a rule that has no threshold to be set so, or no number.
    """
    found = _MEAN.fullmatch(text.lower())
    if found is None:
        return None
    name, number, options = found.groups()
    if name not in _NEVER:
        raise UserError(f"{name} has no threshold that a mean depth sets", where=text,
                        remedy=f"use one of {', '.join(_NEVER)}")  # fmt: skip
    try:
        return name, float(number), options
    except ValueError:
        raise UserError(f"the mean depth is '{number}', not a number", where=text) from None


def calibrated(
    name: str, options: str, target: float, serve: Callable[..., Serving], *, never: Serving | None = None
) -> Calibrated:
    """The threshold at which rule `name` leaves at a mean depth of `target`.

    It is read off a serving in which nobody leaves early, then served. Where the exits themselves change what the rule
    sees (the keys of others), or tokens of prompts leave, too, it is found by serving one threshold after the other.

    Args:
        options: more of the rule's text, ",min=2".
        serve: rule → serving of the questions of the calibration; takes `criteria=True`.
        never: the serving without early exits, if there is one already.

    Raises:
        UserError: a mean depth that no threshold has.
    """
    from depthprobe.halting import parse_rule

    last, later = _NEVER[name]
    never = serve(f"{name}:{last!r}{options}", criteria=True) if never is None else never
    criteria = never.criteria
    assert criteria is not None
    loops = criteria.shape[1]
    if not 1 <= target <= loops:
        raise UserError(f"a mean depth of {target:g} is not within 1 to {loops}", where=f"exit rule {name}")
    floor = parse_rule(f"{name}:{last!r}{options}").min_depth
    steps = _steps(criteria, later)

    def at(step: int) -> Calibrated:
        rule = f"{name}:{steps[step]:.9g}{options}"
        return Calibrated(rule, target, serve(rule).mean_exit)

    def far(one: Calibrated) -> float:
        return abs(one.reached - target)

    near = _nearest(len(steps), target, later, lambda i: _mean_depth(criteria, steps[i], later, floor))
    found = {near: at(near)}
    if far(found[near]) > _NEAR:  # the exits changed what the rule sees, or there are those of prompts: serve each step

        def reached(step: int) -> float:
            if step not in found:
                found[step] = at(step)
            return found[step].reached

        _nearest(len(steps), target, later, reached)
    return min(found.values(), key=far)


def _steps(criteria: np.ndarray, later: bool) -> np.ndarray:
    """Thresholds in rising order: one between any two numbers on record, and some beyond."""
    numbers = np.unique(criteria[:, :-1][np.isfinite(criteria[:, :-1])])
    if not len(numbers):
        return np.array([1.0 if later else 1e-300])
    between = (numbers[1:] + numbers[:-1]) / 2
    # the record is of decoded tokens, and those of prompts may leave at numbers that lie beyond theirs
    if later:
        low = max(float(numbers[0]), 1e-9)
        return np.unique(np.concatenate([np.geomspace(1e-4 * low, low, 40)[:-1], numbers[:1], between, [1.0]]))
    high = float(numbers[-1]) + 1e-9
    return np.unique(np.concatenate([[1e-300], numbers[:1], between, np.geomspace(1.001 * high, 1e4 * high, 40)]))


def _nearest(n: int, target: float, later: bool, depth: Callable[[int], float]) -> int:
    """The step whose mean depth is nearest, if depth goes one way with the threshold."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        if (depth(middle) < target) == later:
            low = middle + 1
        else:
            high = middle
    return min((max(low - 1, 0), low), key=lambda step: abs(depth(step) - target))


def _mean_depth(criteria: np.ndarray, threshold: float, later: bool, floor: int) -> float:
    with np.errstate(invalid="ignore"):
        met = criteria >= threshold if later else criteria < threshold
    met[:, : floor - 1] = False
    met[:, -1] = True
    return float(met.argmax(1).mean()) + 1


# -- exits to be played back -------------------------------------------------------------------------------------------

#: exits of the generated tokens, and of prompt[:-1] (None: dense prefill)
Exits = tuple[tuple[int, ...], tuple[int, ...] | None]


def permuted(exits: Sequence[Exits], most: Sequence[int], seed: int) -> list[Exits]:
    """The same exits, shuffled over all tokens; those of prompts among themselves.

    Args:
        exits: of each request.
        most: tokens that each may generate: more than it did if it ended early, and then drawn from all.
    """
    rng = np.random.default_rng((seed, 7))

    def shuffled(parts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        pool = rng.permutation(np.array([depth for part in parts for depth in part], dtype=np.int64)).tolist()
        at, found = 0, []
        for part in parts:
            found.append(tuple(pool[at : at + len(part)]))
            at += len(part)
        return found

    decoded = shuffled([own for own, _ in exits])
    every = [depth for own in decoded for depth in own]
    full = [own + tuple(rng.choice(every, n - len(own)).tolist()) for own, n in zip(decoded, most, strict=True)]
    prompts = [own for _, own in exits]
    given = [own for own in prompts if own is not None]
    return list(zip(full, shuffled(given) if given else prompts, strict=True))


def oracle_exits(
    model: LoopedForCausalLM, requests: Sequence[Request], tokens: Sequence[Sequence[int]], n_loops: int, ragged: bool
) -> tuple[list[Exits], list[Exits]]:
    """Exits of the settling oracle and of the earliest-equal oracle, by readouts under full keys.

    Args:
        tokens: what each request generates at full depth.
        ragged: whether the tokens of prompts have exits, too, by the same readouts.

    Returns:
        the smallest loop from which on top-1 stays that of loop U; the first loop at which it is that.
    """
    from depthprobe.analysis.settling import first_true, stays_true
    from depthprobe.halting import FullDepth
    from depthprobe.replay import ServedRequest, replay

    def whole(n: int) -> tuple[int, ...]:
        return (n_loops,) * n

    asked = []
    for request, made in zip(requests, tokens, strict=True):
        prompt, rest = request.prompt, tuple(made)
        if ragged:  # every position is read as if it had been decoded
            prompt, rest = prompt[:1], prompt[1:] + rest
        asked.append(ServedRequest(request.id, prompt, rest, whole(len(rest)), whole(len(prompt) - 1)))
    table = replay(model, asked, FullDepth(), n_loops=n_loops, ragged_prefill=False)
    equal = table.filter(table["kv"] == "full")["equals_final"].to_numpy().astype(bool).reshape(-1, n_loops)
    found = []
    for depths in (stays_true(equal) + 1, first_true(equal) + 1):
        at, exits = 0, list[Exits]()
        for request, one in zip(requests, asked, strict=True):
            own = tuple(int(depth) for depth in depths[at : at + len(one.tokens)])
            at += len(one.tokens)
            before = len(request.prompt) - 1 if ragged else 0
            decoded = own[before:]
            more = whole(request.sampling.max_new_tokens - len(decoded))
            exits.append((decoded + more, own[:before] if ragged else None))
        found.append(exits)
    return found[0], found[1]


def with_exits(requests: Sequence[Request], exits: Sequence[Exits]) -> list[Request]:
    """Requests that play these exits back."""
    return [
        dataclasses.replace(request, replay=decoded, prompt_replay=prompt)
        for request, (decoded, prompt) in zip(requests, exits, strict=True)
    ]
