"""How fast a lens is, and how much memory it takes: against its floor, TransformerLens' logit lens, and nnterp's.

    python benchmarks/lens.py --json lens.json
    python benchmarks/lens.py --quick                # under a minute on an idle core
    python benchmarks/lens.py --model folder-or-name

One process, one thread, one model (SmolLM2-135M in float32; `depthprobe.load("smollm2")` finds it), the same tokens,
top 5 at every depth. Two uses: the answer position (the last token of each row), and all positions. The floor is
what no lens can do without: the trunk's forward, and one matrix product of the head with as many states as are read.
What is compared runs in turn, round by round; a ratio is taken within a round, and its median over rounds is reported
with the quartiles beside it.

Memory is the kernel's own count: the high-water mark of the process's resident memory (VmHWM, reset before the call)
above what was resident before it, weights included. It is measured after all times, with blocks of 1 MiB and more given
back to the kernel when they are freed, which would slow down whoever allocates them often.
Ratios of peers: their seconds over ours, our memory over theirs; of the best peer in each. `_best_peer` keys are about
all positions. A peer that cannot be imported is reported as absent. nnterp wants an nnsight before 0.8, which
depthprobe's own route is not for; both come into a folder of their own:

    pip install --no-deps --target peers nnterp nnsight==0.7.0 python-socketio python-engineio simple-websocket \
        wsproto bidict h11 zstandard cloudpickle toml astor
    PYTHONPATH=peers python benchmarks/lens.py

nnterp's `logit_lens` reads the last token alone and returns all probabilities; at all positions it is given its best
form: its own layer outputs and projection, each layer's top 5 taken at once.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import depthprobe
from depthprobe.depth import DepthModel
from depthprobe.lens import logit_lens

#: Rows of the floor's matrix product that are made at once.
_ROWS = 256
#: Tokens that a lens is to name at each depth.
TOP = 5
PEERS = ("transformer_lens", "nnterp")
Call = Callable[[], object]
#: (tokens, use) → the call that is timed.
Peer = Callable[[Tensor, str], Call]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there, as flat keys")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--model", default="smollm2", help="what to load; default smollm2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = depthprobe.load(options.model, dtype="float32")
    peers = {"transformer_lens": transformer_lens_peer(model), "nnterp": nnterp_peer(model)}
    peers = {name: peer for name, peer in peers.items() if peer is not None}
    results: dict[str, Any] = {"model": options.model, "quick": options.quick, "depths": len(model.axis)}
    for name in PEERS:
        results[f"{name}_installed"] = name in peers
    rounds = 5 if options.quick else 11
    uses = {"answer": (4, 32), "all": (1, 24)} if options.quick else {"answer": (8, 96), "all": (2, 64)}
    prepared: dict[str, dict[str, Call]] = {}
    for use, (rows, length) in uses.items():
        ids = torch.randint(5, model.vocab_size - 5, (rows, length), generator=torch.Generator().manual_seed(7))
        calls = ours_and_floor(model, ids, use) | {name: peer(ids, use) for name, peer in peers.items()}
        prepared[use] = calls
        results |= {f"{use}_{key}": value for key, value in measure(calls, rounds).items()}
        results[f"{use}_rows"], results[f"{use}_tokens"] = rows, length
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    for use, calls in prepared.items():
        results |= {f"{use}_{name}_mib": peak(call) for name, call in calls.items()}
    for use in uses:
        results[f"{use}_over_floor"] = results[f"{use}_ours_over_floor"]
    for use, prefix in {"all": "", "answer": "answer_"}.items() if peers else ():
        results[f"{prefix}speedup_over_best_peer"] = min(results[f"{use}_{name}_over_ours"] for name in peers)
        theirs = [results[f"{use}_{name}_mib"] for name in peers]
        best = min(theirs) if None not in theirs else None
        results[f"{prefix}memory_over_best_peer"] = ratio(results[f"{use}_ours_mib"], best)
    for key, value in results.items():
        print(f"{key:36} {value:.4g}" if isinstance(value, float) else f"{key:36} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def ours_and_floor(model: DepthModel, ids: Tensor, use: str) -> dict[str, Call]:
    head: Any = model.model.get_output_embeddings()  # type: ignore[operator]
    trunk: Any = model.model.get_decoder()  # type: ignore[operator]
    asked = ids.shape[0] * (1 if use == "answer" else ids.shape[1]) * len(model.axis)
    states = torch.randn(_ROWS, head.weight.shape[1])
    logits = torch.empty(_ROWS, head.weight.shape[0])

    @torch.inference_mode()
    def floor() -> None:
        trunk(ids, use_cache=False)
        for start in range(0, asked, _ROWS):
            rows = min(_ROWS, asked - start)
            torch.mm(states[:rows], head.weight.T, out=logits[:rows])

    def ours() -> object:
        return logit_lens(model, ids, "last" if use == "answer" else "all", top_k=TOP)

    return {"floor": floor, "ours": ours}


def transformer_lens_peer(model: DepthModel) -> Peer | None:
    """Over a copy of the model; None where the package is not installed."""
    if importlib.util.find_spec("transformer_lens") is None:
        return None
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.tools.analysis import logit_lens as module

    architecture = type(model.model).__name__
    bridge = build_bridge_from_module(copy.deepcopy(model.model), architecture, hf_config=model.config).eval()
    lens = getattr(module, "logit_lens", module)  # the package may show the function under the module's name

    def prepare(ids: Tensor, use: str) -> Call:
        place = -1 if use == "answer" else None

        @torch.no_grad()
        def call() -> object:
            return lens(bridge, ids, positions=place, top_k=TOP, return_type="log_probs")

        return call

    return prepare


def nnterp_peer(model: DepthModel) -> Peer | None:
    """Over a copy of the model; None where the package cannot be imported."""
    try:
        from nnterp import StandardizedTransformer  # type: ignore[import-not-found]
        from nnterp.interventions import logit_lens as lens  # type: ignore[import-not-found]
    except ImportError as error:
        print(f"nnterp is not compared: {error}", file=sys.stderr)
        return None

    theirs: Any = StandardizedTransformer(copy.deepcopy(model.model), tokenizer=model.tokenizer, device_map=None)
    theirs.tokenizer.padding_side = "left"

    def prepare(ids: Tensor, use: str) -> Call:
        prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        @torch.no_grad()
        def last() -> object:
            return lens(theirs, prompts)

        @torch.no_grad()
        def everywhere() -> object:
            said = []
            with theirs.trace(prompts):
                for layer in range(theirs.num_layers):
                    logits = theirs.project_on_vocab(theirs.layers_output[layer])
                    said.append(logits.log_softmax(-1).topk(TOP).save())
            return said

        return last if use == "answer" else everywhere

    return prepare


def measure(calls: dict[str, Call], rounds: int) -> dict[str, float | None]:
    """Median seconds of each call, and ratios of seconds within rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    found: dict[str, float | None] = {}
    for call in calls.values():
        call()  # what is made once (a float32 head, threads, packed weights) is no part of it
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    for name, values in seconds.items():
        found[f"{name}_s"] = statistics.median(values)
        found[f"{name}_min_s"] = min(values)
    pairs = {"ours_over_floor": ("ours", "floor")} | {f"{name}_over_ours": (name, "ours") for name in PEERS}
    for name, (above, below) in pairs.items():
        if above in seconds and below in seconds:
            ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            found |= {name: middle, f"{name}_q1": low, f"{name}_q3": high}
    return found


def peak(call: Call) -> float | None:
    """MiB of resident memory that a call needs above what was there; None where the kernel does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call()
        return max(0.0, _resident("VmHWM") - before)
    except (OSError, AttributeError):  # another kernel, or another C library
        return None


def _resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise OSError(key)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


if __name__ == "__main__":
    main()
