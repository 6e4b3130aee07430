"""Requests to simulate: their lengths, arrivals and exits, drawn or taken from a trace.

A workload is drawn once and served under many settings, so that policies are compared on the same depths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from depthprobe.errors import UserError
from depthprobe.runtime.presets import Lengths
from depthprobe.runtime.record import read_lines, read_meta


@dataclass(slots=True)
class Work:
    """A request as a simulator sees it.

    Fields:
        exits: exit depth of each generated token; the request ends with the last of them.
        max_new: what it asked for; at least as many.
        prompt_exits: of the prompt but its last token; empty: all loops.
        arrival, aborted: seconds; `aborted` None: it runs to its end.
    """

    prompt_len: int
    exits: Sequence[int]
    max_new: int
    prompt_exits: Sequence[int] = ()
    arrival: float = 0.0
    aborted: float | None = None


def exit_shares(text: str, n_loops: int, least: int = 1) -> list[float]:
    """The distribution of exits over depths 1…U that a text names.

    Args:
        text: a mean depth ("2.47"), shares of depths 1, 2, … ("0/.6/.3/.1"), or a trace folder, whose exits are
            counted.
        least: no row leaves before it. Given a mean, depth − least is binomial over U − least; of shares and
            traces, what lies before moves to it.

    Raises:
        UserError: none of these, or a mean out of reach.
    """
    where = "exits"
    least = min(least, n_loops)
    if "/" in text and not Path(text).is_dir():
        try:
            given = [float(one) for one in text.split("/")]
        except ValueError:
            what = f"{text} is neither shares nor a trace"
            raise UserError(what, where=where, remedy="give e.g. 0/.6/.3/.1") from None
        if len(given) > n_loops or any(not 0 <= one < math.inf for one in given) or not sum(given):
            raise UserError(f"{text} are no shares of {n_loops} depths", where=where, remedy="give e.g. 0/.6/.3/.1")
        counts = given + [0.0] * (n_loops - len(given))
    elif (number := _number(text)) is not None:
        if not least <= number <= n_loops:
            what = f"a mean exit of {text} is not within {least} and {n_loops}"
            raise UserError(what, where=where, remedy="rows leave at the least depth or later, and by the last loop")
        n = n_loops - least
        p = (number - least) / n if n else 0.0
        return [0.0] * (least - 1) + [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    else:
        counts = [0.0] * n_loops
        for row in read_lines(_trace(Path(text), n_loops), "tokens"):
            counts[row["exit"] - 1] += 1
        if not sum(counts):
            raise UserError("the trace holds no token", where=text)
    early = sum(counts[:least])
    total = sum(counts)
    return [0.0] * (least - 1) + [one / total for one in [early, *counts[least:]]]


def draw(lengths: Lengths, n: int, shares: Sequence[float], *, rate: float | None = None, seed: int = 0) -> list[Work]:
    """n requests with lengths and exits of these distributions.

    Lengths are the n quantiles in the middle of equal shares, scaled to the stated mean and shuffled, so that a
    few hundred requests have the means of many.

    Args:
        shares: of depths 1…U.
        rate: requests a second, as a Poisson process; None: all at 0.
    """
    if n < 1:
        raise UserError(f"{n} requests", where="requests", remedy="ask for 1 or more")
    if rate is not None and not 0 < rate < math.inf:
        raise UserError(f"the rate is {rate}, not above 0", where="rate")
    rng, gaps = random.Random(seed), random.Random(~seed)
    prompts = _lengths(lengths.prompt, lengths.prompt_sigma, n, lengths, rng)
    outputs = _lengths(lengths.output, lengths.output_sigma, n, lengths, rng)
    depths = range(1, len(shares) + 1)
    now, out = 0.0, []
    for prompt, output in zip(prompts, outputs, strict=True):
        if rate is not None:
            now += gaps.expovariate(rate)
        output = min(output, max(lengths.least, lengths.longest - prompt))
        out.append(Work(prompt, bytes(rng.choices(depths, shares, k=output)), output, arrival=now))
    return out


def of_trace(folder: Path) -> list[Work]:
    """The requests of a trace in the order in which the engine took them, with all exits as served.

    Raises:
        UserError: no trace, or requests that have not ended (the engine was killed).
    """
    read_meta(folder)
    starts: dict[str, dict] = {}
    ends: dict[str, dict] = {}
    for row in read_lines(folder, "requests"):
        (starts if row["event"] == "start" else ends)[row["request"]] = row
    if missing := [name for name in starts if name not in ends]:
        what = f"{len(missing)} of {len(starts)} requests have not ended, {missing[0]} among them"
        raise UserError(what, where=str(folder), remedy="serve them again, to the end")
    if not starts:
        raise UserError("the trace holds no request", where=str(folder))
    return list(_works(starts, ends))


def _works(starts: dict[str, dict], ends: dict[str, dict]) -> Iterator[Work]:
    for name, start in starts.items():
        end = ends[name]
        yield Work(
            len(start["prompt"]), end["exits"], start["sampling"]["max_new_tokens"], end["prompt_exits"],
            start["arrival"], end["finished"] if end["finish_reason"] == "aborted" else None,
        )  # fmt: skip


def _trace(folder: Path, n_loops: int) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is neither a mean depth, shares nor a trace", where="exits",
                        remedy="give e.g. 2.47, 0/.6/.3/.1 or the --out of `depthprobe trace`")  # fmt: skip
    if (loops := read_meta(folder)["n_loops"]) != n_loops:
        raise UserError(f"exits of {loops} loops are no exits of {n_loops}", where=str(folder))
    return folder


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _lengths(mean: float, sigma: float, n: int, limits: Lengths, rng: random.Random) -> list[int]:
    normal = NormalDist()
    raw = [math.exp(sigma * normal.inv_cdf((i + 0.5) / n)) for i in range(n)]
    top = limits.longest - limits.least

    def clipped(scale: float) -> list[int]:
        return [min(max(round(scale * one), limits.least), top) for one in raw]

    low, high = 0.0, float(top)
    for _ in range(60):  # the scale at which the mean after clipping is the stated one
        scale = (low + high) / 2
        if sum(clipped(scale)) < mean * n:
            low = scale
        else:
            high = scale
    out = clipped(high)
    rng.shuffle(out)
    return out
