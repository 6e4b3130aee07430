"""Tables for `cdb.py --tables`: refill beside `full` over widths and contexts, and over the share of F0.

Each cell serves three requests a row, refill with as many spare slots as rows, in the middle of the run: without the
start, when all rows are at one loop, and the end, when rows run out. Pages hold random keys, not prefilled ones.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from cdb_load import Shape, make_load
from cdb_serve import EngineRun, Seconds, random_keys

WIDTHS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128), (32, 128, 512, 2048)
QUICK_WIDTHS, QUICK_CONTEXTS = (4, 32), (16, 128)
#: layers of the prelude, and as many of the coda
OUTER = (0, 1, 2)
#: decode tokens of a request; requests a row, and at least; turns
NEW, EACH, LEAST, TURNS = 6, 3, 12, 4


def tables(shape: Shape, quick: bool, max_gib: float) -> dict[str, Any]:
    """Flat keys; the tables themselves are printed."""
    found: dict[str, Any] = {}
    widths, contexts = (QUICK_WIDTHS, QUICK_CONTEXTS) if quick else (WIDTHS, CONTEXTS)
    lines = ["speed-up over full, and its share of the FLOP bound (– : more KV than --max-gib)",
             "width".rjust(6) + "".join(f"{f'context {c}':>20}" for c in contexts)]  # fmt: skip
    for width in widths:
        line = f"{width:6}"
        for context in contexts:
            cell = compare(dataclasses.replace(shape, width=width, prompt=context), max_gib)
            line += f"{'–':>20}" if cell is None else f"{cell['speedup']:11.3f} ({cell['fraction']:.3f})"
            for key, value in (cell or {"fraction": None}).items():
                found[f"table_{key}_w{width}_c{context}"] = value
        lines.append(line)
        print(line, file=sys.stderr, flush=True)
    lines += ["", "prelude/coda  share of F0     bound  speed-up  fraction"]
    for outer in OUTER:
        cell = compare(dataclasses.replace(shape, outer=outer), max_gib)
        if cell is None:
            continue
        found |= {f"outer{outer}_{key}": value for key, value in cell.items()}
        lines.append(f"{outer:7}/{outer}{cell['f0_share']:16.3f}{cell['bound']:10.3f}{cell['speedup']:10.3f}"
                     f"{cell['fraction']:10.3f}")  # fmt: skip
    print("\n".join(lines))
    return found


def compare(shape: Shape, max_gib: float) -> dict[str, float] | None:
    """One cell; None where its keys take too much memory."""
    s = dataclasses.replace(shape, new=NEW, requests=max(LEAST, EACH * shape.width), prompts=1)
    kept = 3 * s.width * (s.prompt + s.new - 1)  # tokens: of the slots of refill, and of `full`
    layer = 8 * s.kv_heads * (s.hidden // s.heads)
    if kept * layer * (s.layers * s.loops + 2 * s.outer) > max_gib * 2**30:
        return None
    load = make_load(s)
    begin, end = s.tokens // 6, s.tokens * 5 // 6
    pages = s.width * (s.prompt + s.new) * s.loops
    runs = [
        EngineRun("full", load, policy="full", record_gates=False, kv_pages=pages),
        EngineRun("refill", load, kv_pages=2 * pages),
    ]
    for run in runs:
        random_keys(run.engine)
        run.advance(begin)
    cores, tokens, took = runs[1].engine.runner.work.core, [run.tokens for run in runs], [Seconds(), Seconds()]
    for number in range(1, TURNS + 1):
        for i, run in enumerate(runs):
            run.advance(begin + (end - begin) * number // TURNS)
            took[i] += run.rounds[-1]
    made = [run.tokens - before for run, before in zip(runs, tokens, strict=True)]
    rates = [one / spent.cpu for one, spent in zip(made, took, strict=True)]
    depth = (runs[1].engine.runner.work.core - cores) / made[1]
    outer, loop = s.flops()
    bound = (outer + s.loops * loop) / (outer + depth * loop)
    speedup = rates[1] / rates[0]
    return {"speedup": speedup, "fraction": speedup / bound, "bound": bound, "full_tokens_per_s": rates[0],
            "f0_share": outer / (outer + s.loops * loop)}  # fmt: skip
