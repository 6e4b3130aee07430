"""How fast items are made, and made and checked by the solver: on one core, for both tasks at their defaults.

    python benchmarks/tasks.py --json tasks.json
    python benchmarks/tasks.py --quick

Rates count items (rungs of ladders) over processor seconds of this one thread, so that other programs on the
machine do not show; the rates by the clock on the wall stand beside them. The composition table and the pool
of families are made before the clock starts, once for a process. `verified_items_per_s` is over both tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from depthprobe.tasks.donors import find_donors
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.shortcuts import default_shortcuts
from depthprobe.tasks.solver import verify

TASKS = ("kinship", "follow")
SEED = 20


class Clock:
    """Processor and wall seconds of a block."""

    def __enter__(self) -> Clock:
        self.cpu, self.wall = -time.process_time(), -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu += time.process_time()
        self.wall += time.perf_counter()


def measure(stories: int) -> dict[str, float | int | str]:
    """Flat results; rates in items per second."""
    out: dict[str, float | int | str] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "stories_per_task": stories,
    }
    total_items, total = 0, {"made": 0.0, "verified": 0.0, "made_wall": 0.0, "verified_wall": 0.0}
    for task in TASKS:
        generator = Generator(task, seed=SEED)
        generator.story(0)  # families and composition table are there now
        with Clock() as made:
            items = list(generator.items(stories, first=1))
        with Clock() as checked:
            wrong = verify(items)
        if wrong:
            raise SystemExit(f"error: {len(wrong)} {task} items do not have exactly their one answer")
        out[f"{task}_items_per_s"] = len(items) / made.cpu
        out[f"{task}_verified_items_per_s"] = len(items) / (made.cpu + checked.cpu)
        out[f"{task}_solver_items_per_s"] = len(items) / checked.cpu
        total_items += len(items)
        for name, seconds in (
            ("made", made.cpu),
            ("verified", made.cpu + checked.cpu),
            ("made_wall", made.wall),
            ("verified_wall", made.wall + checked.wall),
        ):
            total[name] += seconds
        some = items[:120]
        with Clock() as clock:
            found = find_donors(some, ["relation"] if task == "kinship" else ["name"])
        out[f"{task}_donors_per_s"] = len(found.donors) / clock.cpu
        with Clock() as clock:
            default_shortcuts(items[:600])
        out[f"{task}_default_shortcuts_s"] = clock.cpu
    out["items"] = total_items
    out["items_per_s"] = total_items / total["made"]
    out["verified_items_per_s"] = total_items / total["verified"]
    out["items_per_s_wall"] = total_items / total["made_wall"]
    out["verified_items_per_s_wall"] = total_items / total["verified_wall"]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as one flat JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer stories: some seconds")
    arguments = parser.parse_args()
    results = measure(200 if arguments.quick else 1500)
    for name, value in results.items():
        print(f"{name:32s} {value:12.1f}" if isinstance(value, float) else f"{name:32s} {value!s:>12s}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
