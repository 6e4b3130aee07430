"""Clocks and workloads of published measurements, with how each number was derived.

All of it stems from arXiv 2608.09444 (one H100 of 80 GB, bf16, shared KV) unless another source is named; what is an
assumption says so.

**The core.** The paper fits t = δ + γ·rows + α·context to a recurrent step and defines B*(L) = δ/(γ + αL), the rows at
context L that cost as much as the reload. Two values of B* give both slopes:

    γ + αL = δ/B*(L)   ⇒   α = (δ/B*(L₂) − δ/B*(L₁)) / (L₂ − L₁),   γ = δ/B*(L₁) − αL₁

*Ouro-1.4B*: δ = 5.3 ms, B*(128) = 180, B*(8192) in "single digits". 9, the largest of them, gives α = 69.4 ns and
γ = 20.6 µs. A key and value of all 24 layers are 24·2·2048·2 = 196,608 bytes, so that this α streams 2.83 TB/s, 85 % of
the chip's 3.35; 10 or more would ask for more than 95 %, 8 for 75 %. γ does 2·1.23 GFLOP a row at 120 TFLOP/s.
*Huginn-3.5B*: δ = 2.3 ms, B*(128) = 80, "a similar trajectory". No second value is published, so α is taken from bytes:
4·2·5280·2 = 84,480 at the rate found for Ouro are 29.8 ns, hence γ = 24.9 µs and B*(8192) = 8.5.

**Outside the core.** Ouro: 0.4 ms at all operating points, for embedding and head; all of it is charged to the coda,
with no slope. Huginn: 2.8 ms at context 128 to 4.6 ms at 8192, "about 1.2" recurrent steps. From the shapes (layers of
395M weights, an adapter of 56M, a head of 346M) F0/F_r = (4·395 + 346)/(4·395 + 56) = 1.18, so prelude and coda lines
are the core's times their share: 2 layers 0.48, 2 layers and head 0.69 (a reload of 2.7 ms together); their α is that
of 2 of 4 layers. This is within the published range up to 7 rows of 8192 keys. Ouro's F0/F_r is its head over 24
layers, 101M/1233M = 0.08.

**Prefill** has no published figure. A tick runs U loops, so it reloads U times (fixed = U·δ and the outer reloads), and
a pass of a prompt token costs γ, as a decoded row does. Keys read are not charged: prefill is bound by compute. Since
the paper's bound leaves prefill out, results are given with it and for decoding alone.

**Thresholds.** Exit distributions are published as pictures. The paper's largest bounds (1.6 for Ouro at 0.2, 2.4 for
Huginn at 0.5) give mean exits of 2.47 and 5.97; Ouro at 0.5 is 3.05 in arXiv 2610.09013 (other data); no exits are U.
Thresholds between are on straight lines between those. Around its mean the exit depth is drawn as
least + Binomial(U − least, p), which spreads over three of Ouro's depths and some six of Huginn's, as described in
words there.

**Lengths.** Means and 99th percentiles of prompts are published (Alpaca 18 and 75, ShareGPT 270 and 3264 tokens), and
give log-normal distributions with σ = 0.73 and 1.67; outputs have means alone (60, 310): σ = 0.73 and 1.0 are assumed.
At least 4 tokens, together at most 16,384.

**Memory.** 80 GB less weights and 6 GB for the rest: 70 and 66 GiB are taken for pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from depthprobe.errors import UserError
from depthprobe.runtime.roofline import Clock, Line, load_clock


class Range(NamedTuple):
    """A published fraction of the bound, how it is put there, and the mean exit up to which it is told."""

    low: float
    high: float
    said: str
    up_to: float = math.inf


@dataclass(frozen=True, slots=True)
class Published:
    """What the paper reports of a model.

    Fields:
        means: mean exit by gate threshold.
        measured: the thresholds whose mean stems from a published figure, the others lie between.
        fractions: speed-up over full depth as a fraction of the FLOP bound, by policy.
    """

    means: dict[float, float]
    measured: tuple[float, ...]
    fractions: dict[str, Range]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths: means and σ of prompts and outputs, in tokens."""

    prompt: float
    prompt_sigma: float
    output: float
    output_sigma: float
    longest: int = 16384
    least: int = 4


def slopes(delta: float, first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """(γ, α) from δ and two points (L, B*(L)); see the top of the module."""
    (near, b_near), (far, b_far) = first, second
    alpha = (delta / b_far - delta / b_near) / (far - near)
    return delta / b_near - alpha * near, alpha


def _ouro() -> Clock:
    delta, loops = 5.3e-3, 4
    gamma, alpha = slopes(delta, (128, 180), (8192, 9))
    coda = Line(0.4e-3)
    return Clock(
        "h100-ouro-1.4b", loops, Line(delta, gamma, alpha), Line(), coda,
        Line(loops * delta + coda.fixed, gamma), f0=101 / 1233, core_page_bytes=24 * 2 * 2048 * 2,
        kv_bytes=70 << 30, least_coda=1, least_depth=2, about={"source": "arXiv 2608.09444, fits"},
    )  # fmt: skip


def _huginn() -> Clock:
    delta, loops = 2.3e-3, 16
    core_bytes = 4 * 2 * 5280 * 2
    rate = 24 * 2 * 2048 * 2 / slopes(5.3e-3, (128, 180), (8192, 9))[1]
    alpha = core_bytes / rate
    gamma = delta / 80 - 128 * alpha
    layer, adapter, head = 395.3, 55.8, 346.0
    core = 4 * layer + adapter
    before, after = 2 * layer / core, (2 * layer + head) / core
    prelude = Line(before * delta, before * gamma, alpha / 2)
    coda = Line(after * delta, after * gamma, alpha / 2)
    outer = prelude + coda
    return Clock(
        "h100-huginn", loops, Line(delta, gamma, alpha), prelude, coda,
        Line(loops * delta + outer.fixed, gamma + outer.per_row / loops), f0=before + after,
        core_page_bytes=core_bytes, outer_page_bytes=core_bytes, kv_bytes=66 << 30, least_coda=32, least_depth=3,
        about={"source": "arXiv 2608.09444, fits"},
    )  # fmt: skip


PRESETS: dict[str, Clock] = {one.name: one for one in (_ouro(), _huginn())}

WORKLOADS: dict[str, Lengths] = {
    "alpaca": Lengths(18, 0.73, 60, 0.73),
    "sharegpt": Lengths(270, 1.67, 310, 1.0),
}


def _between(points: dict[float, float], wanted: tuple[float, ...]) -> dict[float, float]:
    """The points, and wanted arguments on the straight lines between them."""
    known = sorted(points)
    out = dict(points)
    for x in wanted:
        low = max(one for one in known if one <= x)
        high = min(one for one in known if one >= x)
        share = 0.0 if high == low else (x - low) / (high - low)
        out[x] = round(points[low] + share * (points[high] - points[low]), 2)
    return dict(sorted(out.items()))


PUBLISHED: dict[str, Published] = {
    "h100-ouro-1.4b": Published(
        _between({0.2: 2.47, 0.5: 3.05, 1.0: 4.0}, (0.4, 0.7)), (0.2, 0.5, 1.0),
        {
            "refill": Range(0.94, 0.99, "94–99 % of the bound; without exits within 2 % of full"),
            "no-refill": Range(0.75, 0.88, "about 1.2× below B*, 1.4× at large batches, of 1.6×", 2.6),
        },
    ),
    "h100-huginn": Published(
        _between({0.0: 16.0, 0.5: 5.97}, (0.12, 0.26, 0.35)), (0.0, 0.5),
        {"refill": Range(0.73, 0.92, "73–92 % of the bound, up to 1.9×")},
    ),
}  # fmt: skip


def clock_of(name: str) -> Clock:
    """A preset, or the clock in a JSON file.

    Raises:
        UserError: neither.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).exists():
        raise UserError(f"no clock is named {name}", where="clock",
                        remedy=f"use one of {', '.join(PRESETS)}, or a file of `depthprobe simulate fit`")  # fmt: skip
    return load_clock(Path(name))


def mean_at(clock: Clock, threshold: float) -> float:
    """The mean exit at a published threshold of a preset.

    Raises:
        UserError: nothing is published for it.
    """
    published = PUBLISHED.get(clock.name)
    if published is None or threshold not in published.means:
        known = "none" if published is None else ", ".join(f"{one:g}" for one in published.means)
        raise UserError(f"no exits are known for clock {clock.name} at threshold {threshold:g}", where="threshold",
                        remedy=f"use one of {known}, or give --exits")  # fmt: skip
    return published.means[threshold]
