"""How fast a patching sweep is: against a plain loop of hooks, TransformerLens, nnsight, and the FLOPs that it needs.

    python benchmarks/patching.py --json patching.json
    python benchmarks/patching.py --quick              # fewer stories and sampled cells
    python benchmarks/patching.py --max-mib 64         # the sweep's memory limit

One process, two threads unless `--threads` says otherwise, float32. SmolLM2-135M (`depthprobe.load("smollm2")`) reads
kinship stories of six hops, whose donors differ in one fact; of many, those are taken whose changed token is spread
evenly over the story. The donor's residual is patched at every depth and every token from the changed one on (earlier
ones cannot matter), and the logit of the answer is compared with that of the donor's answer at the last token.
Everything of a sweep counts: the clean run, the cells, the two rows of the head.

A story is a round. In it our whole sweep is timed, and of each peer a random sample of the same cells, in turn
(`*_cells_timed` of them, of `cells` in all; half before our sweep and half after it); a peer's sweep is its mean
seconds a cell times all cells that can matter, the ones that we fill without running among them. A ratio is taken
within a round. `speedup_over_*` is the ratio of the sums over all rounds, `*_median`, `*_q1` and `*_q3` are over
rounds; so are those of `*_s`, seconds of a sweep. `*_cpu` is the ratio of the sums of processor time, which a loaded
machine disturbs less. No round is begun that would end after `--minutes`; `stories` says how many there were, and of
fewer than were asked for the changed tokens are still spread.

- plain loop: a forward of the transformers model a cell, one hook, no gradients, the logits of the last token alone
  where `--lean`, of all tokens otherwise (what `model(ids)` does, and what the peers do).
- TransformerLens: `run_with_hooks` of its bridge a cell.
- nnsight: eight cells a trace, one row of the batch each.

`over_flop_bound`: seconds of our sweep, over the matrix products that it counted (`Resumed.flops`, those of a cell
that runs) divided by the best rate of a matrix product of the model's shapes that was measured in the same round.
`flops_over_plain`: what the plain loop computes, over that. `mib`: the kernel's high-water mark of resident memory
during a sweep, above what was resident before it, and `limited_mib` that of the same under a limit of
`limited_to_mib`. Keys `looped_*`: the same on a random `LoopedForCausalLM` of 8 M
parameters, one prelude, three core layers in six loops and one coda layer, every (loop, layer) patched.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from patching_peers import TRACE, Peer, Story, nnsight, plain_loop, transformer_lens
from torch import Tensor

import depthprobe
from depthprobe.depth import Cell, Coordinate, Edit, LoopedModel
from depthprobe.depth.tapped import TappedModel
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.tasks.donors import find_donors
from depthprobe.tasks.generate import generate_items

#: MiB of a second, smaller memory limit.
LIMIT = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there, as flat keys")
    parser.add_argument("--quick", action="store_true", help="fewer stories and sampled cells")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--stories", type=int, help="rounds; default 6, with --quick 2")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all; rounds that do not fit are left out")
    parser.add_argument("--max-mib", type=int, default=1024, help="memory limit of our sweep")
    parser.add_argument("--lean", action="store_true", help="the plain loop computes the last token's logits alone")
    options = parser.parse_args()
    begun = time.perf_counter()
    _map_blocks_above(_TIMED)
    torch.set_num_threads(options.threads)
    rounds, sample = options.stories or (2 if options.quick else 6), 4 if options.quick else 10
    results: dict[str, Any] = {"threads": options.threads, "quick": options.quick, "max_mib": options.max_mib}
    model = depthprobe.load("smollm2", dtype="float32")
    assert isinstance(model, TappedModel)
    lean = {"logits_to_keep": 1} if options.lean else {}
    peers: dict[str, Peer] = {"plain_loop": plain_loop(model, lean)}
    if importlib.util.find_spec("transformer_lens"):
        peers["transformerlens"] = transformer_lens(model)
    if importlib.util.find_spec("nnsight"):
        peers["nnsight"] = nnsight(model)
    limit = options.max_mib << 20
    until = begun + options.minutes * 36  # three fifths
    results |= compared(model, stories(model, rounds), peers, sample, limit, until)
    looped = looped_model()
    peers = {"plain_loop": plain_loop(looped, lean)}
    found = compared(looped, random_stories(looped, rounds), peers, sample, limit, begun + options.minutes * 60)
    results |= {f"looped_{key}": value for key, value in found.items()}
    for key, value in results.items():
        print(f"{key:36} {value:.4g}" if isinstance(value, float) else f"{key:36} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


# -- what is read


def stories(model: TappedModel, count: int) -> list[Story]:
    """Kinship stories of six hops whose changed token lies at count evenly spread shares of the story."""
    tokenizer = model.tokenizer
    items = generate_items("kinship", 120, hops=6, seed=1)
    by_id = {item.id: item for item in items}
    found: list[tuple[float, Story]] = []
    for donor in find_donors(items, ("relation",), length_of=lambda w: len(tokenizer(f" {w}")["input_ids"])).donors:
        item = by_id[donor.base_id]
        ids, theirs = (torch.tensor(tokenizer(text)["input_ids"]) for text in (item.text, donor.item.text))
        answers = tuple(tokenizer(i.continuation())["input_ids"][0] for i in (item, donor.item))
        if len(ids) != len(theirs) or answers[0] == answers[1]:
            continue
        changed = int((ids != theirs).nonzero()[0])
        told = len(tokenizer(item.story)["input_ids"])
        found.append((changed / told, Story(ids, theirs, (answers[0], answers[1]), changed)))
    picked = []
    for number in range(count):
        share = (number + 0.5) / count
        near = min(found, key=lambda pair: abs(pair[0] - share))
        found.remove(near)
        picked.append(near[1])
    return picked


def random_stories(model: TappedModel, count: int, length: int = 60) -> list[Story]:
    """Random tokens; the changed one is spread as above, over the first three quarters."""
    noise = torch.Generator().manual_seed(1)
    picked = []
    for number in range(count):
        ids = torch.randint(3, model.vocab_size, (length,), generator=noise)
        donor, changed = ids.clone(), int((number + 0.5) / count * 0.75 * length)
        donor[changed] = (donor[changed] + 1) % model.vocab_size
        picked.append(Story(ids, donor, (5, 6), changed))
    return picked


def looped_model() -> LoopedModel:
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=512, hidden_size=384, intermediate_size=1024, num_attention_heads=6, n_prelude=1, n_core=3,
        n_coda=1, n_loops=6, max_position_embeddings=256,
    )  # fmt: skip
    return LoopedModel(LoopedForCausalLM(config).eval(), None, "looped")


# -- who reads it


def states_of(model: TappedModel, story: Story) -> dict[Coordinate, Tensor]:
    states = model.capture(story.donor[None], positions="all", logits=False).states
    return {point: state[0] for point, state in states.items()}


@torch.inference_mode()
def ours(model: TappedModel, story: Story, states: dict[Coordinate, Tensor], max_bytes: int) -> tuple[Any, Tensor]:
    """The sweep: (what was run, logit differences [depths, tokens])."""
    tokens, last = range(story.changed, len(story.ids)), model.axis[-1]
    cells = [Cell((Edit(point, (t,), states[point][t : t + 1]),)) for point in model.axis for t in tokens]
    done = model.resume(story.ids, cells, engine="suffix", max_bytes=max_bytes)
    tail = model._tail
    ids = torch.tensor(story.answers).expand(len(cells), -1)
    logits = tail.columns(tail.normed(done.states[last]), ids)[:, 0]  # two rows of the head
    return done, (logits[:, 0] - logits[:, 1]).view(len(model.axis), -1)


# -- how long it takes


def compared(
    model: TappedModel, told: Sequence[Story], peers: dict[str, Peer], sample: int, max_bytes: int,
    until: float,
) -> dict[str, Any]:  # fmt: skip
    """Seconds, ratios, FLOPs and memory over all stories that end before a time; the first in any case."""
    chance, found = random.Random(0), dict[str, Any]()
    seconds: dict[str, list[Seconds]] = {name: [] for name in ("ours", "bound", *peers)}
    sizes = {name: 2 * TRACE if name == "nnsight" else sample for name in peers}
    cells_in_all = run_in_all = 0
    worst = flops = plain_flops = 0.0
    warm = states_of(model, told[0])
    model.resume(told[0].ids, [], engine="suffix")  # what is found out once a model is no part of it
    found["mib"] = peak(lambda: ours(model, told[0], warm, max_bytes))
    found |= {"limited_to_mib": LIMIT, "limited_mib": peak(lambda: ours(model, told[0], warm, LIMIT << 20))}
    longest = 0.0
    for story in spread(told):
        entered = time.perf_counter()
        if longest and entered + longest > until:
            break
        states = states_of(model, story)
        tokens = list(range(story.changed, len(story.ids)))
        n_cells = len(model.axis) * len(tokens)
        samples = {
            name: Sample([(chance.randrange(len(model.axis)), chance.choice(tokens)) for _ in range(sizes[name])])
            for name in peers
        }
        for name, peer in peers.items():
            samples[name].half(0, peer, model, story, states)
        begun = Seconds.now()
        done, differences = ours(model, story, states, max_bytes)
        seconds["ours"].append(begun.since())
        seconds["bound"].append(gemm_seconds(model).times(done.flops))
        for name, peer in peers.items():
            samples[name].half(1, peer, model, story, states)
        flops += done.flops
        cells_in_all, run_in_all = cells_in_all + n_cells, run_in_all + done.n_run
        head: Any = model.model.get_output_embeddings()  # type: ignore[operator]
        plain_flops += n_cells * len(story.ids) * (model.flops_per_token(len(story.ids)) + 2.0 * head.weight.numel())
        scale = max(float(differences.abs().max()), 1.0)
        for name, some in samples.items():
            seconds[name].append(some.took.times(n_cells / len(some.cells)))
            for (d, t), value in zip(some.cells, some.values, strict=True):
                worst = max(worst, abs(float(differences[d, t - story.changed]) - value) / scale)
        longest = max(longest, time.perf_counter() - entered)
        print(f"{model.name}: {n_cells} cells, {seconds['ours'][-1].wall:.1f} s", file=sys.stderr, flush=True)
    found |= {"stories": len(seconds["ours"]), "cells": cells_in_all, "cells_run": run_in_all, "largest_error": worst}
    found |= {"tflop": flops / 1e12, "flops_over_plain": plain_flops / flops}
    found |= {f"{name}_cells_timed": sizes[name] * len(seconds["ours"]) for name in peers}
    for name, each in seconds.items():
        found |= {f"{name}_s": sum(value.wall for value in each)} | quartiles(f"{name}_s", [v.wall for v in each])
    pairs = {f"speedup_over_{name}": (name, "ours") for name in peers} | {"over_flop_bound": ("ours", "bound")}
    for key, (above, below) in pairs.items():
        ratios = [a.wall / b.wall for a, b in zip(seconds[above], seconds[below], strict=True)]
        wall, cpu = (
            sum(getattr(a, clock) for a in seconds[above]) / sum(getattr(b, clock) for b in seconds[below])
            for clock in ("wall", "cpu")
        )
        found |= {key: wall, f"{key}_cpu": cpu} | quartiles(key, ratios)
    return found


def quartiles(key: str, values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {f"{key}_median": middle, f"{key}_q1": low, f"{key}_q3": high}


def spread(told: Sequence[Story]) -> list[Story]:
    """An order in which any first few lie spread over all: always the one that is farthest from those before."""
    order, left = [len(told) // 2], set(range(len(told))) - {len(told) // 2}
    while left:
        order.append(max(left, key=lambda n: (min(abs(n - m) for m in order), -n)))
        left.remove(order[-1])
    return [told[n] for n in order]


@dataclass(frozen=True)
class Seconds:
    """On the wall's clock, and of processor time of all threads."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self) -> Seconds:
        now = Seconds.now()
        return Seconds(now.wall - self.wall, now.cpu - self.cpu)

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def times(self, factor: float) -> Seconds:
        return Seconds(self.wall * factor, self.cpu * factor)


@dataclass
class Sample:
    """Cells (depth, token) of one story that a peer runs, and what came of it."""

    cells: list[tuple[int, int]]
    took: Seconds = Seconds(0.0, 0.0)
    values: list[float] = field(default_factory=list)

    def half(self, which: int, peer: Peer, model: TappedModel, story: Story, states: dict[Coordinate, Tensor]) -> None:
        """Run and time one half of them."""
        middle = len(self.cells) // 2
        some = self.cells[:middle] if which == 0 else self.cells[middle:]
        cells = [(model.axis[d], t, states[model.axis[d]][t]) for d, t in some]
        peer(story, cells[:1])  # warm
        begun = Seconds.now()
        self.values += peer(story, cells)
        self.took = self.took.plus(begun.since())


def gemm_seconds(model: TappedModel) -> Seconds:
    """Of a FLOP in the fastest matrix product of 1024 rows with a weight of a layer's shape."""
    best = [1.0, 1.0]
    layer = model.model.get_submodule(next(tap.path for point, tap in model.taps.items() if point.site == "resid_post"))
    for weight in (w for w in layer.parameters() if w.dim() == 2):
        rows = torch.randn(1024, weight.shape[1])
        for _ in range(8):
            begun = Seconds.now()
            torch.nn.functional.linear(rows, weight)
            took = begun.since().times(0.5 / 1024 / weight.numel())
            best = [min(best[0], took.wall), min(best[1], took.cpu)]
    return Seconds(*best)


def peak(call: Callable[[], object]) -> float | None:
    """MiB of resident memory that a call needs above what was there; None where the kernel does not tell."""
    gc.collect()
    _map_blocks_above(1 << 20)
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call()
        return max(0.0, _resident("VmHWM") - before)
    except OSError:
        return None
    finally:
        _map_blocks_above(_TIMED)


#: where glibc's own threshold ends up once large blocks were freed
_TIMED = 32 << 20


def _map_blocks_above(size: int) -> None:
    """Blocks above this size are given back to the kernel as they are freed: needed where resident memory is read, and
    a page fault for every page of every tensor where time is (`M_MMAP_THRESHOLD`)."""
    ctypes.CDLL(None).mallopt(-3, size)


def _resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise OSError(key)


if __name__ == "__main__":
    main()
