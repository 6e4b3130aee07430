"""How close continuous depth batching comes to what its exits save, and what stands between.

    python benchmarks/cdb.py --json cdb.json
    python benchmarks/cdb.py --quick             # a smaller model and fewer requests
    python benchmarks/cdb.py --tables            # also over widths, contexts and shares of F0

One process, one thread, float32, a random `LoopedForCausalLM` in which products rule. Requests are equally long, so a
static batch has nobody who waits; they end in waves, so their number, 256 or more, is made a multiple of the slots.
Their exits were drawn once (1…4 with .2, .4, .2, .2) and are replayed. Prompts run all loops on either side, their
keys are computed once and copied into everybody's pages, and prefill is no part of any ratio unless the key says
`with_prefill`; what is prefilled *again* after a preemption is computed and counts.

Everybody runs a piece of their work in turn, so that a slow minute of the machine falls on all. Ratios are of sums
of the thread's processor time, `*_wall` of time on the clock; `*_q1` and `*_q3` are quartiles over the turns. The
baseline is the better of `full` (policy full, our runner) and `static` (a plain loop: keys contiguous, fused attention,
the same packed products), both at full depth and 64 rows; `static_all_slots` has as many rows as refill has slots.
Bounds: `flop_bound` = (F0 + U·F_r) / (F0 + d̄·F_r) in products, attention at the mean context among them;
`time_bound`, the same of the seconds that a row of each stage took in `full`. Keys:

fraction_of_bound_w64     speed-up over the baseline / flop_bound, with as many spare slots as rows (`spare_slots`)
fraction_equal_kv_w64     the same with no more pages than `full` held at its peak, all prompts dense;
                          `fraction_equal_kv_ragged_w64`: with prompt tokens that leave early too
overhead_no_exits         seconds with exits that are all U, over `full`, − 1
speedup_over_generate     over transformers' `generate` of the unpacked model, one static batch
python_share_w64          scheduler, pool, page index and the engine itself: all but stages and sampling
kv_resident_over_ideal    most bytes of pages that were taken, reservations included, over those of the exits
scheduler_widest_over_w64 the scheduler's cost a row at width 4,096, over that at 64
record_overhead           seconds with a record over those without, − 1: two engines, tick by tick in turn
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from cdb_load import Load, Shape, make_load, prefill
from cdb_scheduler import scheduler_cost
from cdb_serve import EngineRun, Run, Seconds, StaticRun, in_turn, over, per_row
from cdb_tables import tables

#: parts of a step that are neither a stage nor sampling
PYTHON = ("engine", "scheduler", "pool", "page index")
QUICK = Shape(requests=128, prompts=32, prompt=24, new=12, hidden=384, heads=6, kv_heads=2, intermediate=1024,
              vocabulary=16_384)  # fmt: skip

#: a run is cut into at most so many pieces, of four tokens a row or more
TURNS = 16
#: who is to make the same tokens as whom
ALIKE = {"static": "full", "static_all_slots": "full", "no_exits": "full", "equal_kv": "refill",
         "small_spare": "refill", "no_parking": "refill", "no_refill": "refill"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there, as flat keys")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer requests")
    parser.add_argument("--tables", action="store_true", help="also over widths, contexts and shares of F0")
    parser.add_argument("--requests", type=int, help="how many; default 256, with --quick 128")
    parser.add_argument("--only", help="of those compared, these alone, with commas between; no other part runs")
    parser.add_argument("--max-gib", type=float, default=8.0, help="KV memory of a cell of the tables; default 8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = QUICK if options.quick else Shape()
    if options.requests:
        shape = dataclasses.replace(shape, requests=options.requests)
    load = make_load(shape)
    begun = Seconds.now()
    prefilled = prefill(load)
    prefill_s = (Seconds.now() - begun).cpu / prefilled
    results: dict[str, Any] = {"quick": options.quick} | {f"shape_{k}": v for k, v in vars(shape).items()}
    results |= {"mean_exit": load.mean_exit, "prefill_tokens_per_s": 1 / prefill_s}
    measured, full = compared(load, prefill_s, options.only.split(",") if options.only else None)
    results |= measured
    if not options.only:
        results |= recorded(dataclasses.replace(load, shape=dataclasses.replace(shape, requests=shape.requests // 2)))
        results |= generated(load, results, full)
        results |= scheduler_cost()
        if options.tables:
            results |= tables(shape, options.quick, options.max_gib)
    for key, value in results.items():
        print(f"{key:40} {value:.4g}" if isinstance(value, float) else f"{key:40} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compared(load: Load, prefill_s: float, only: list[str] | None) -> tuple[dict[str, Any], list[list[int]]]:
    """The policies beside the baseline, and the tokens of `full`."""
    s = load.shape
    # at the end of its life a request holds so many pages, the last token's reservation among them; `full` holds
    # as many as it computes, so slots that fit at their end never preempt
    longest = s.prompt + s.new - 1
    pages, answer = s.width * longest * s.loops, s.new * load.mean_exit + s.loops
    spare = int(pages / ((s.prompt - 1) * s.loops + answer)) - s.width
    prompt = sum(map(sum, load.prompt_exits)) / s.requests
    spare_ragged = min(s.width, int(pages / (prompt + answer)) - s.width)
    makers: dict[str, Callable[[], Run]] = {
        "full": lambda: EngineRun("full", load, policy="full", record_gates=False),
        "static": lambda: StaticRun("static", load, s.width),
        "static_all_slots": lambda: StaticRun("static_all_slots", load, 2 * s.width),
        "refill": lambda: EngineRun("refill", load, parts=True),
        "no_exits": lambda: EngineRun("no_exits", load, full=True, parts=True),
        "equal_kv": lambda: EngineRun("equal_kv", load, kv_pages=pages, spare=spare),
        "equal_kv_ragged": lambda: EngineRun("equal_kv_ragged", load, kv_pages=pages, spare=spare_ragged, ragged=True),
        "small_spare": lambda: EngineRun("small_spare", load, spare=s.width // 4),
        "no_parking": lambda: EngineRun("no_parking", load, spare=0, coda_share=0.0),
        "no_refill": lambda: EngineRun("no_refill", load, policy="no-refill"),
        "lockstep": lambda: EngineRun("lockstep", load, policy="lockstep"),
    }
    runs = {name: make() for name, make in makers.items() if only is None or name in only or name == "full"}
    in_turn(list(runs.values()), min(TURNS, s.tokens // (4 * s.width)))
    full = runs["full"]
    assert isinstance(full, EngineRun)
    baseline = min((run for name, run in runs.items() if name in ("full", "static")), key=lambda run: run.total.cpu)
    outer, loop = s.flops()
    d, loops = load.mean_exit, s.loops
    bound = (outer + loops * loop) / (outer + d * loop)
    cost = {stage: per_row(full, stage) for stage in ("prelude", "recurrent", "coda")}
    rest = cost["prelude"] + cost["coda"]
    time_bound = (rest + loops * cost["recurrent"]) / (rest + d * cost["recurrent"])
    found: dict[str, Any] = {"baseline": baseline.name, "spare_slots": s.width, "flop_bound": bound,
                             "f0_share": outer / (outer + loops * loop), "time_bound": time_bound}  # fmt: skip
    for name, run in runs.items():
        found[f"{name}_tokens_per_s"] = run.tokens / run.total.cpu
        prefills = prefill_s * s.requests * (s.prompt - 1)
        found[f"{name}_tokens_per_s_with_prefill"] = run.tokens / (run.total.cpu + prefills)
        if run is not baseline:
            found |= {f"speedup_{name}{ending}": value for ending, value in over(baseline, run).items()}
        if isinstance(run, EngineRun):
            found |= pages_of(run)
            print(leaks(run, full, d), file=sys.stderr)
    w = s.width
    for key, name in (
        (f"bound_w{w}", "refill"), (f"equal_kv_w{w}", "equal_kv"), (f"equal_kv_ragged_w{w}", "equal_kv_ragged"),
    ):  # fmt: skip
        if name in runs:
            key, run = f"fraction_of_{key}" if name == "refill" else f"fraction_{key}", runs[name]
            assert isinstance(run, EngineRun)
            own = (outer + loops * loop) / (outer + run.mean_exit * loop)
            found |= {key + end: value / own for end, value in over(baseline, run).items()}
    if "refill" in runs:
        found[f"fraction_of_time_bound_w{w}"] = found["speedup_refill"] / time_bound
        found |= {f"python_share_w{w}": python_share(runs["refill"])}
        found["kv_resident_over_ideal"] = found["refill_kv_mib"] / found["refill_kv_ideal_mib"]
    if "no_exits" in runs:
        found |= {f"overhead_no_exits{end}": value - 1 for end, value in over(runs["no_exits"], full).items()}
    out = {name: run.out for name, run in runs.items()}
    for name, like in ALIKE.items():
        if name in out and like in out:
            found[f"same_tokens_{name}"] = same(out[name], out[like])
    return found, out["full"]


def same(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Share of requests with the same tokens. Two near equal logits may change places with the rows of a product."""
    pairs = list(zip(tokens, others, strict=False))
    return sum(one == other for one, other in pairs) / len(pairs)


def pages_of(run: EngineRun) -> dict[str, Any]:
    """Slots and bytes that a run took at most; ideal: what the exits of the same tokens keep, nothing reserved."""
    engine = run.engine
    core, outer = engine.runner.kv.bytes_per_core_page, engine.runner.kv.bytes_per_outer_page
    most, ideal = (peak * core + run.outer_peak * outer for peak in (run.peak, run.ideal_peak))
    counters = engine.scheduler.counters
    return {f"{run.name}_slots": run.most_slots, f"{run.name}_preemptions": counters["preemptions"],
            f"{run.name}_kv_mib": most / 2**20, f"{run.name}_kv_ideal_mib": ideal / 2**20}  # fmt: skip


def python_share(run: Run) -> float:
    assert isinstance(run, EngineRun) and run.parts is not None
    spent = {name: took.cpu for name, took in run.parts.spent.items()}
    return sum(v for name, v in spent.items() if name in PYTHON) / sum(spent.values())


def leaks(run: EngineRun, full: EngineRun, depth: float) -> str:
    """Where a token's time goes, beside what stages cost a row in `full`: rows of a mean tick, ms a tick, µs a row."""
    lines = [f"{run.name}: {run.total.cpu:.1f} s processor, {run.total.wall:.1f} s clock, {run.most_slots} slots"]
    for stage, ticks in run.ticks.items():
        rows, took = sum(n for n, _ in ticks), sum(one.cpu for _, one in ticks)
        beside = per_row(full, stage)
        lost = f"{per_row(run, stage) / beside:.3f} of full's" if beside and rows else ""
        lines.append(
            f"  {stage:10} {len(ticks):5} ticks {rows / len(ticks):6.1f} rows {1e3 * took / len(ticks):8.2f} ms "
            f"{1e6 * took / max(rows, 1):8.1f} µs a row {lost:18} {took / run.total.cpu:6.1%} of the time"
        )
    for name, took in sorted(run.parts.spent.items(), key=lambda pair: -pair[1].cpu) if run.parts else ():
        calls = run.parts.calls[name]
        lines.append(f"  {name:18} {took.cpu / run.total.cpu:7.2%} {1e3 * took.cpu / calls:8.3f} ms × {calls}")
    return "\n".join(lines)


def recorded(load: Load) -> dict[str, Any]:
    """Two engines that make the same ticks, in turn, who goes first by turns; an interval over blocks of ticks."""
    with tempfile.TemporaryDirectory() as folder:
        plain, traced = EngineRun("plain", load), EngineRun("traced", load, record=Path(folder) / "trace")
        pairs: list[tuple[Seconds, Seconds]] = []
        while plain.engine.in_flight:
            first = len(pairs) % 2
            took = [run.step() for run in ((plain, traced) if first else (traced, plain))]
            pairs.append((took[1 - first], took[first]))
        assert not traced.engine.in_flight
        traced.engine.close()
        size = sum(file.stat().st_size for file in (Path(folder) / "trace").iterdir())
    blocks = [pairs[start : start + 10] for start in range(0, len(pairs), 10)]
    chance = random.Random(0)

    def overhead(some: list[list[tuple[Seconds, Seconds]]], clock: str) -> float:
        without, with_ = (sum(getattr(pair[i], clock) for block in some for pair in block) for i in (0, 1))
        return with_ / without - 1

    found: dict[str, Any] = {"record_bytes_per_token": size / plain.goal}
    for clock, ending in (("cpu", ""), ("wall", "_wall")):
        drawn = sorted(overhead(chance.choices(blocks, k=len(blocks)), clock) for _ in range(2000))
        found |= {f"record_overhead{ending}": overhead(blocks, clock),
                  f"record_overhead{ending}_low": drawn[50], f"record_overhead{ending}_high": drawn[1949]}  # fmt: skip
    return found


def generated(load: Load, results: dict[str, Any], full: list[list[int]]) -> dict[str, Any]:
    """transformers' `generate`: one static batch, full depth; its own prefill is that of an answer of one token."""
    s = load.shape
    ids = torch.tensor([load.prompts[number % s.prompts] for number in range(s.width)])
    took: list[float] = []
    made = ids
    for rows, new in ((2, 2), (s.width, 1), (s.width, s.new)):  # the first warms up
        mask, begun = torch.ones_like(ids[:rows]), Seconds.now()
        with torch.inference_mode():
            made = load.model.generate(ids[:rows], attention_mask=mask, max_new_tokens=new, do_sample=False)
        took.append((Seconds.now() - begun).cpu)
    _, once, whole = took
    # the first token comes with the prefill, whose last row is a decode row on our side
    tokens = s.width * (s.new - 1)
    rate, rate_with = tokens / (whole - once), s.width * s.new / whole
    return {
        "generate_tokens_per_s": rate, "generate_tokens_per_s_with_prefill": rate_with,
        "speedup_over_generate": results["refill_tokens_per_s"] / rate,
        "speedup_over_generate_with_prefill": results["refill_tokens_per_s_with_prefill"] / rate_with,
        "full_over_generate": results["full_tokens_per_s"] / rate,
        "same_tokens_generate": same(made[:, s.prompt :].tolist(), full),
    }  # fmt: skip


if __name__ == "__main__":
    main()
