"""How close continuous depth batching comes to what its exits save, and what stands between.

    python benchmarks/cdb.py --json cdb.json
    python benchmarks/cdb.py --quick             # a smaller model and fewer requests
    python benchmarks/cdb.py --tables            # also over widths, contexts and shares of F0

One process, one thread, float32, a random `LoopedForCausalLM` in which products rule. Requests are equally long, so a
static batch has nobody who waits; their exits were drawn once (1…4 with .2, .4, .2, .2) and are replayed. Prompts run
all loops on either side, their keys are computed once and copied into everybody's pages, and prefill is no part of
any ratio unless the key says `with_prefill`; what is prefilled *again* after a preemption is computed and counts.

Everybody runs a share of their work in turn, so that a slow minute of the machine falls on all. Ratios are of sums of
the thread's processor time, `*_wall` on the clock; `*_q1` and `*_q3` are quartiles over the turns. The baseline is the
better of `full` (policy full, our runner) and `static` (a plain loop: keys contiguous, fused attention, the same packed
products), both at full depth and 64 rows. Bounds: `flop_bound` = (F0 + U·F_r) / (F0 + d̄·F_r) in products,
attention at the mean context among them; `time_bound`, the same of the stages' seconds a row in `full`.

fraction_of_bound_w64     speed-up over the baseline / flop_bound, with as many spare slots as rows (`spare_slots`)
fraction_equal_kv_w64     the same with no more pages than `full` held at its peak, all prompts dense;
                          `fraction_equal_kv_ragged_w64`: with prompt tokens that leave early too
overhead_no_exits         seconds with exits that are all U, over `full`, − 1
speedup_over_generate     over transformers' `generate` of the unpacked model, one static batch
python_share_w64          scheduler, pool, page index and the engine itself: all but stages and sampling
kv_resident_over_ideal    most bytes of pages that were taken, reservations included, over those of the exits
record_overhead           seconds with a record over those without, − 1: two engines, tick by tick in turn
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from cdb_load import Load, Shape, make_load, prefill
from cdb_serve import CLOCKS, EngineRun, Run, Seconds, StaticRun, in_turn, over

QUICK = Shape(requests=128, prompts=32, prompt=24, new=12, hidden=384, heads=6, kv_heads=2, intermediate=1024,
              vocabulary=16_384)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there, as flat keys")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer requests")
    parser.add_argument("--tables", action="store_true", help="also over widths, contexts and shares of F0")
    parser.add_argument("--requests", type=int, help="how many; default 256, with --quick 128")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = QUICK if options.quick else Shape()
    if options.requests:
        shape = Shape(**{**vars(shape), "requests": options.requests})
    load = make_load(shape)
    begun = Seconds.now()
    prefilled = prefill(load)
    took = Seconds.now() - begun
    results: dict[str, Any] = {"quick": options.quick} | {f"shape_{k}": v for k, v in vars(shape).items()}
    results |= {"mean_exit": load.mean_exit, "prefill_tokens_per_s": prefilled / took.cpu}
    results |= compared(load, took.cpu / prefilled)
    results |= recorded(load)
    results |= generated(load, results["refill_tokens_per_s"])
    for key, value in results.items():
        print(f"{key:36} {value:.4g}" if isinstance(value, float) else f"{key:36} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compared(load: Load, prefill_s: float) -> dict[str, Any]:
    """The policies beside the baseline."""
    s = load.shape
    pages = s.width * (s.prompt + s.new - 1) * s.loops
    runs: dict[str, Run] = {
        "full": EngineRun("full", load, policy="full", record_gates=False),
        "static": StaticRun("static", load, s.width),
        "static_all_slots": StaticRun("static_all_slots", load, 2 * s.width),
        "refill": EngineRun("refill", load, parts=True),
        "no_exits": EngineRun("no_exits", load, full=True),
        "equal_kv": EngineRun("equal_kv", load, kv_pages=pages),
        "equal_kv_ragged": EngineRun("equal_kv_ragged", load, kv_pages=pages, ragged=True),
        "small_spare": EngineRun("small_spare", load, spare=s.width // 4),
        "no_parking": EngineRun("no_parking", load, spare=0, coda_share=0.0),
        "no_refill": EngineRun("no_refill", load, policy="no-refill"),
        "lockstep": EngineRun("lockstep", load, policy="lockstep"),
    }
    in_turn(list(runs.values()), s.tokens, 8, lambda n: print(f"turn {n} of 8", file=sys.stderr, flush=True))
    baseline = min((runs["full"], runs["static"]), key=lambda run: run.total.cpu)
    found: dict[str, Any] = {"baseline": baseline.name, "spare_slots": s.width}
    outer, loop = s.flops()
    d, U = load.mean_exit, s.loops
    bound = (outer + U * loop) / (outer + d * loop)
    full = runs["full"]
    assert isinstance(full, EngineRun)
    cost = {stage: per_row(full, stage) for stage in ("prelude", "recurrent", "coda")}
    rest = cost["prelude"] + cost["coda"]
    time_bound = (rest + U * cost["recurrent"]) / (rest + d * cost["recurrent"])
    found |= {"flop_bound": bound, "time_bound": time_bound, "f0_share": outer / (outer + U * loop)}
    for name, run in runs.items():
        found[f"{name}_tokens_per_s"] = run.tokens / run.total.cpu
        if run is not baseline:
            found |= {f"speedup_{name}{'' if k == 'cpu' else '_' + k}": v for k, v in over(baseline, run).items()}
        if isinstance(run, EngineRun):
            found |= {f"{name}_slots": run.most_slots, f"{name}_preemptions": run.engine.scheduler.counters["preemptions"]}
    for key, name in (("bound", "refill"), ("equal_kv", "equal_kv"), ("equal_kv_ragged", "equal_kv_ragged")):
        found[f"fraction_of_bound_w{s.width}" if key == "bound" else f"fraction_{key}_w{s.width}"] = (
            found[f"speedup_{name}"] / bound
        )
    return found


def per_row(run: EngineRun, stage: str) -> float:
    """Processor seconds a row."""
    ticks = run.ticks[stage]
    return sum(took.cpu for _, took in ticks) / max(1, sum(rows for rows, _ in ticks))


def recorded(load: Load) -> dict[str, Any]:
    return {}


def generated(load: Load, ours: float) -> dict[str, Any]:
    return {}


if __name__ == "__main__":
    main()
