"""Policies against full depth and against the bound, on the same requests, beside what was published.

rows = compare(clock, draw(…), policies=["refill"], widths=[64], kvs=["shared", "ragged"])
print(rows[0]["fraction"], rows[0]["says"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from depthprobe.runtime.bound import flop_bound, time_bound, token_seconds
from depthprobe.runtime.presets import PUBLISHED, Range
from depthprobe.runtime.roofline import Clock
from depthprobe.runtime.settings import Policy, SchedulerConfig
from depthprobe.runtime.simulate import Simulated, Simulator, settings
from depthprobe.runtime.workload import Work


def compare(
    clock: Clock,
    works: Sequence[Work],
    *,
    policies: Sequence[Policy],
    widths: Sequence[int],
    kvs: Sequence[str],
    threshold: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """A row for each layout, width and policy. Full depth is run for each layout and width, as what they are held to.

    Args:
        threshold: what the exits of works stand for, for the rows.
        options: of `simulate.settings`.

    Raises:
        UserError: settings that no scheduler takes.

    Returns:
        rows with policy, width, kv, threshold, and

        * tokens, mean_exit, tokens_per_s, seconds, latency_s (normalised: end-to-end seconds / tokens, mean and
          quantiles), first_token_s;
        * speedup over full depth before the tail (see `Simulated.steady`), flop_bound and fraction = speedup /
          flop_bound; decode_fraction: the same of decoding alone, which is what the bound speaks of;
        * time_bound and time_fraction: decoding against the same bound in seconds;
        * fill: rows of a recurrent tick / width, before the tail; shares of the time by stage, idle_share;
        * peak_pages, peak_bytes, most_in_flight, preemptions, refused;
        * published (low, high), says: a sentence where it departs.
    """
    order: list[Policy] = ["full", *(one for one in policies if one != "full")]
    configs = [  # all before the first is run, so that what cannot be is refused at once
        settings(clock, works, width=width, policy=policy, kv=kv, **options)
        for kv in kvs
        for width in widths
        for policy in order
    ]
    rows: list[dict[str, Any]] = []
    full = Simulated(1)
    for config in configs:
        out = Simulator(config, clock, works).run()
        kv, policy = config.layout.name, config.policy
        if policy == "full":
            full = out
        if policy in policies:
            row = {"policy": policy, "width": config.width, "kv": kv, "threshold": threshold}
            rows.append(row | measures(out, full, clock, config, policy))
        say(f"{policy}, width {config.width}, {kv}")
    return rows


def measures(out: Simulated, full: Simulated, clock: Clock, config: SchedulerConfig, policy: str) -> dict[str, Any]:
    """What `compare` says of one run."""
    rate, decode_rate = out.rates
    base, decode_base = full.rates
    flops = flop_bound(clock, out.mean_exit) if out.tokens else None
    seconds = time_bound(clock, config.width, out.mean_context, out.mean_exit)
    speedup = rate / base if base else 0.0
    decode_speedup = decode_rate / decode_base if decode_base else 0.0
    total = out.seconds or 1.0
    row: dict[str, Any] = {
        "tokens": out.tokens, "mean_exit": out.mean_exit, "tokens_per_s": rate, "seconds": out.seconds,
        "latency_s": quantiles(out.latencies), "first_token_s": quantiles(out.first), "speedup": speedup,
        "flop_bound": flops, "fraction": None if flops is None else speedup / flops,
        "decode_fraction": None if flops is None else decode_speedup / flops,
        "time_bound": seconds, "time_fraction": decode_speedup / seconds, "fill": out.fill,
        "shares": {stage: value / total for stage, value in out.stage_seconds.items()},
        "idle_share": out.idle_share, "host_share": out.host / total, "mean_context": out.mean_context,
        "peak_pages": out.peak_core, "kv_pages": config.core_pages,
        "peak_bytes": out.peak_core * clock.core_page_bytes + out.peak_outer * clock.outer_page_bytes,
        "most_in_flight": out.most_in_flight, "preemptions": out.counters["preemptions"],
        "recomputed_share": out.counters["core_rows_recomputed"] / max(1, out.counters["core_rows_decode"]),
        "refused": len(out.refused), "least_coda": config.least_coda(config.width),
    }  # fmt: skip
    published = published_range(clock, policy, out.mean_exit)
    row["published"] = None if published is None else [published.low, published.high]
    row["says"] = None if published is None or policy == "full" else _says(row, published, out, full, clock, config)
    return row


def published_range(clock: Clock, policy: str, mean_exit: float) -> Range | None:
    """The published fraction of the bound; without early exits that of refill is "within 2 % of full"."""
    known = PUBLISHED.get(clock.name)
    if known is None:
        return None
    if policy == "refill" and mean_exit > clock.n_loops - 1e-9:
        return Range(0.98, 1.02, "within 2 % of full")
    found = known.fractions.get(policy)
    return None if found is None or mean_exit > found.up_to else found


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 90 % of values; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {"mean": sum(ordered) / len(ordered), "p50": at(0.5), "p90": at(0.9)}


def _says(
    row: dict[str, Any], published: Range, out: Simulated, full: Simulated, clock: Clock, config: SchedulerConfig
) -> str:
    """Whether the fraction lies within the published range, and where its time goes if not."""
    fraction, decoding = row["fraction"], row["decode_fraction"]
    reach = f"published {published.low:.2f}–{published.high:.2f}"
    if published.low - 0.005 <= fraction <= published.high + 0.005:
        return f"within the {reach}"
    if fraction > published.high:
        if full.fill < 0.95 * out.fill or full.most_in_flight < out.most_in_flight:
            return f"above the {reach}: full depth is short of pages, {full.most_in_flight} requests in flight at most"
        return f"above the {reach}: nothing but the clock's stages takes time"
    if published.low - 0.005 <= decoding:
        return (
            f"below the {reach}, decoding alone {decoding:.2f}: prefill is {row['shares']['prefill']:.0%} of the time"
        )
    # seconds of a token beyond those in full batches; of the core before the tail
    tokens = max(1, out.tokens)
    outside = (out.stage_seconds["prelude"] + out.stage_seconds["coda"]) / tokens
    outside -= token_seconds(clock, config.width, out.mean_context, 0.0)
    core = clock.recurrent.fixed * out.mean_exit * (1 / max(out.fill, 1e-9) - 1) / config.width
    idle = out.host / tokens
    why = max(
        (core, f"recurrent batches are {row['fill']:.0%} full"),
        (outside, f"prelude and coda run in {out.tokens / max(1, out.stage_ticks['coda']):.0f} rows on average"),
        (idle, f"the device waits for the host {row['host_share']:.0%} of the time"),
    )[1]
    return f"below the {reach}, decoding alone {decoding:.2f}: {why}"
