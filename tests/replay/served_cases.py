"""Requests served in-process by tiny random models, with a trace on the disk, and the rules to serve them by."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from depthprobe.halting import ExitRule, HazardThreshold, Lookahead, LookaheadHead, QExit, parse_rule
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.runtime.engine import Engine
from depthprobe.runtime.requests import Request, Sampling

VOCABULARY = 17
#: each kind of decision, with and without least depths
RULES = (
    "q:0.5", "q:0.8,min=2,min_prompt=1", "hazard:0.45", "hazard:0.4,min=3", "l2:0.4", "second:0.5", "kl:0.01",
    "entropy:2.5", "entropy-change:0.05", "confidence:0.2", "lookahead:q:0.6", "lookahead:q:0.5,min=3",
    "lookahead:hazard:0.45", "lookahead:l2:0.4", "lookahead:confidence:0.2,min=2",
)  # fmt: skip


def tiny(seed: int = 0, dtype: torch.dtype = torch.float64, **fields: Any) -> LoopedForCausalLM:
    """Random weights, a gate that leans to staying, so that exits are spread."""
    shape = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "n_core": 2, "n_loops": 5}
    torch.manual_seed(seed)
    model = LoopedForCausalLM(LoopedConfig(vocab_size=VOCABULARY, initializer_range=0.25, **(shape | fields))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
        if model.gate is not None:
            model.gate.bias.fill_(-0.5)
    return model.to(dtype)


def rule_of(text: str, model: LoopedForCausalLM) -> ExitRule:
    """The rule; one that looks ahead of a gate gets a head that errs."""
    if not text.startswith(("lookahead:q", "lookahead:hazard")):
        return parse_rule(text)
    head = LookaheadHead.start(model)
    torch.manual_seed(1)
    head.weight.add_(0.3 * torch.randn_like(head.weight))
    inner = parse_rule(text.removeprefix("lookahead:"))
    assert isinstance(inner, (QExit, HazardThreshold))
    return Lookahead(inner, head)


def asked(seed: int, count: int = 6, most: int = 5, **sampling: Any) -> list[Request]:
    """Requests of one to eight prompt tokens; every other one asks an item."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8)))
        about = {"item": f"i{i}", "story": f"s{i // 2}", "cluster": f"c{i // 2}", "task": "follow", "hops": 1 + i % 2}
        found.append(Request(prompt, Sampling(max_new_tokens=rng.randint(1, most), **sampling), f"q{i}", about=about))
    return found


def serve(
    folder: Path, model: LoopedForCausalLM, rule: ExitRule | str, requests: list[Request], **options: Any
) -> Path:
    """Serve them in mixed company and return the trace's folder."""
    with Engine(model, exit=rule, record=folder, **({"width": 3, "max_len": 32} | options)) as engine:
        done = engine.generate(requests)
    assert not any(one.error for one in done), [one.error for one in done]
    return folder


def edit(folder: Path, stream: str, change: Any) -> None:
    """Rewrite the lines of a stream: `change(line)` changes a line in place, or returns False to drop it."""
    (file,) = sorted(folder.glob(f"{stream}-*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [line for line in lines if change(line) is not False]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
