"""Run folders without a model: a lens table drawn from a simple story of depth, analysed as a real one.

python -m tests.report.synthetic OUT        # writes OUT/looped and OUT/layers, each with its report
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from depthprobe import analysis, tables

Axis = list[tuple[int, int, str, bool]]

_NAMES = ("Ann", "Bob", "Carl", "Dana", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon")
_RELATIONS = ("son", "wife", "brother", "daughter", "mother", "husband", "sister", "father")


def looped_axis(
    n_loops: int = 8, layers: int = 1, prelude: int = 0, coda: int = 0, loop_state: bool = False
) -> Axis:
    """(loop, layer, site, is_loop_end) in the order of execution."""
    axis: Axis = [(0, 0, "embed", False)]
    axis += [(0, layer, "resid_post", False) for layer in range(1, prelude + 1)]
    for loop in range(1, n_loops + 1):
        axis += [
            (loop, layer, "resid_post", layer == layers and not loop_state) for layer in range(1, layers + 1)
        ]
        if loop_state:
            axis.append((loop, layers, "loop_state", True))
    return axis + [(n_loops + 1, layer, "resid_post", False) for layer in range(1, coda + 1)]


def layers_axis(n_layers: int = 30) -> Axis:
    return [
        (0, 0, "embed", False),
        *((1, layer, "resid_post", layer == n_layers) for layer in range(1, n_layers + 1)),
    ]


def write_run(
    folder: Path,
    axis: Axis,
    *,
    model: str = "family-demo",
    tasks: Sequence[str] = ("kinship", "follow"),
    hops: Sequence[int] = (1, 2, 3, 4, 5, 6),
    n_stories: int = 40,
    gate: bool = True,
    shortcuts: bool = True,
    seed: int = 0,
    with_tokens: int = 0,
) -> Path:
    """A finished run folder, without report.html; the first `with_tokens` items have rows in `tokens`."""
    rng = np.random.default_rng(seed)
    exit_q = 0.9 if gate else None
    items = pl.concat([_items(task, hops, n_stories) for task in tasks])
    lens = pl.concat([_lens(items.filter(pl.col("task") == task), task, axis, gate, rng) for task in tasks])
    found = analysis.analyse(lens, exit_q=exit_q, resamples=300)
    found |= {"items": items, "lens": lens}
    if shortcuts:
        found["shortcuts"] = _shortcuts(tasks, hops, n_stories)
    if with_tokens:
        found["tokens"] = _tokens(items.head(with_tokens), lens, rng)
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, df in found.items():
        tables.check(name, df).write_parquet(folder / "tables" / f"{name}.parquet")
    (folder / "manifest.json").write_text(
        json.dumps(_manifest(model, axis, tasks, hops, n_stories, exit_q, seed))
    )
    return folder


def _items(task: str, hops: Sequence[int], n_stories: int) -> pl.DataFrame:
    rows: list[dict[str, Any]] = []
    for s in range(n_stories):
        text, facts = "", []
        for i in range(max(hops)):
            relation = _RELATIONS[(s + i) % len(_RELATIONS)]
            subject, other = _NAMES[(i + 1) % len(_NAMES)], _NAMES[i % len(_NAMES)]
            line = f"{subject} is the {relation} of {other}."
            facts.append(
                {"subject": subject, "relation": relation, "object": other, "role": "chain", "hop": i + 1}
                | {"start": len(text), "end": len(text) + len(line)}
            )
            text += line + " "
        for k in hops:
            question = f"{_NAMES[k % len(_NAMES)]} is Ann's" if task == "kinship" else f"Ann's {'son ' * k}is"
            chain = [{**f, "hop": f["hop"] if f["hop"] <= k else None} for f in facts]
            for f in chain:
                f["role"] = "chain" if f["hop"] is not None else "offchain"
            rows.append(
                {
                    "item": f"{task}-{s}-k{k}", "story": f"{task}-{s}",
                    "cluster": f"{task}-{s % 17 if task == 'kinship' else s}", "task": task, "hops": k,
                    "split": "heldout",
                    "form": "statement", "template": "subject-first", "order": "forward",
                    "distractors": "none",
                    "question": question, "answer": "nephew", "plausible": ["nephew", "son"],
                    "candidates": list(_RELATIONS), "chance": 1 / len(_RELATIONS),
                    "chain_relations": [f["relation"] for f in facts[:k]],
                    "text": text + question, "facts": chain, "n_tokens": 40, "bos": False, "text_start": 0,
                    "prompt_ids": [1, 2], "answer_ids": [3], "n_collisions": 0, "first_token_only": True,
                    "seed": s,
                }
            )  # fmt: skip
    return tables.conform("items", rows)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _lens(items: pl.DataFrame, task: str, axis: Axis, gate: bool, rng: np.random.Generator) -> pl.DataFrame:
    """Plausible early, right later, and later still with more hops; a looped model does so sharply."""
    n, d = items.height, len(axis)
    k = items["hops"].to_numpy().astype(float)[:, None]
    n_loops = len({loop for loop, *_, end in axis if end})
    looped = n_loops > 1
    if looped:
        place = np.array(
            [0.0 if site == "embed" else min(max(loop, 0), n_loops) for loop, _, site, _ in axis]
        )
        place += np.linspace(0, 0.02, d)
        step = (0.55 if task == "kinship" else 0.25) * (k - 1) + 1.2 + rng.normal(0, 0.45, (n, 1))
        solved = rng.random((n, 1)) < (0.99 - 0.025 * k if task == "kinship" else 1.02 - 0.09 * k)
        soft, sharp = 0.8, 3.0
    else:
        place = np.arange(d, dtype=float)
        step = 22 + 0.18 * (k - 1) + rng.normal(0, 2.2, (n, 1))
        solved = rng.random((n, 1)) < np.maximum(0.75 - 0.14 * k, 0.12)
        soft, sharp = 5.0, 0.7
    plausible = 0.02 + 0.93 * _sigmoid(sharp * (place - step + soft)) * (0.55 if not looped else 1.0)
    right = np.where(solved, 0.95, 0.12) * _sigmoid(sharp * (place - step)) * plausible + 0.3 * plausible / 4
    correct = right > 0.5 * plausible
    likely = plausible > 0.3 * plausible[:, -1:]
    state = correct * 1 + likely * 2 + (place > step + rng.normal(0, 0.3 * soft, (n, 1))) * 4
    equal = state == state[:, -1:]
    ends = np.array([end for *_, end in axis])
    lam = np.where(ends, _sigmoid(2.0 * (place - step) - 0.8), np.nan)
    survive = np.cumprod(np.where(ends, 1 - lam, 1.0), axis=1)
    last = np.flatnonzero(ends)[-1]
    cdf = np.where(ends, 1 - survive, np.nan)
    cdf[:, last] = 1.0
    full = np.full((n, d), np.nan)

    def flat(a: np.ndarray) -> np.ndarray:
        return np.broadcast_to(a, (n, d)).reshape(-1)

    keys = {c: np.repeat(items[c].to_numpy(), d) for c in ("item", "story", "cluster", "task", "hops")}
    columns: dict[str, Any] = {
        **keys,
        "depth": flat(np.arange(d)),
        "loop": flat(np.array([a[0] for a in axis])),
        "layer": flat(np.array([a[1] for a in axis])),
        "site": [a[2] for a in axis] * n,
        "lens": ["plain"] * (n * d),
        "target_logit": flat(np.log(right)),
        "target_logprob": flat(np.log(right)),
        "target_prob": flat(right),
        "target_rank": flat(np.where(correct, 0, 3)),
        "p_plausible": flat(np.maximum(plausible, right)),
        "p_candidates": flat(np.minimum(plausible + 0.02, 1.0)),
        "candidate_prob": flat(right / (plausible + 0.02)),
        "candidate_correct": flat(correct),
        "candidate_plausible": flat(likely),
        "answer_logprob": pl.Series(flat(full)).fill_nan(None),
        "top1_id": flat(state),
        "top1": ["nephew"] * (n * d),
        "equals_final": flat(equal),
        "entropy": flat(1 - plausible),
        "kl_final": flat(1 - plausible),
        "top5": [["nephew", "son"]] * (n * d),
        "top5_probs": [[0.5, 0.2]] * (n * d),
        "is_loop_end": flat(ends),
        "gate_lambda": pl.Series(flat(lam if gate else full)).fill_nan(None),
        "gate_cdf": pl.Series(flat(cdf if gate else full)).fill_nan(None),
    }
    return tables.conform("lens", columns)


def words_of(text: str) -> list[str]:
    """A story's tokens, as a word tokenizer would have them."""
    return re.findall(r"'s|\w+|[^\w\s]", text)


def _tokens(items: pl.DataFrame, lens: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    """At the embedding and where a loop or the stack ends: made-up words, but those of `lens` at the last position."""
    read = lens.filter(pl.col("is_loop_end") | (pl.col("depth") == 0))
    rows: list[dict[str, Any]] = []
    for item in items.iter_rows(named=True):
        words = words_of(item["text"])
        for position, token in enumerate(words):
            for at in read.filter(pl.col("item") == item["item"]).sort("depth").iter_rows(named=True):
                top5 = [_NAMES[i] for i in rng.permutation(len(_NAMES))[:5]]
                probs = np.sort(rng.dirichlet(np.full(8, 0.4)))[::-1][:5].tolist()
                if position == len(words) - 1:
                    top5, probs = [*at["top5"], "Ann", "Bob", ", \"x\""], [*at["top5_probs"], 0.1, 0.01, 0.001]
                rows.append(
                    {"item": item["item"], "position": position, "token": token, "token_id": position}
                    | {name: at[name] for name in ("depth", "loop", "layer", "site", "gate_lambda", "gate_cdf")}
                    | {"top1": top5[0], "top1_prob": probs[0], "top5": top5, "top5_probs": probs}
                )
    return tables.conform("tokens", rows)


def _shortcuts(tasks: Sequence[str], hops: Sequence[int], n: int) -> pl.DataFrame:
    levels = {
        "kinship": {
            "majority": (0.2, 0.0), "last_fact": (0.95, -0.16), "first_last": (1.0, -0.06),
            "multiset_last": (1.0, -0.02), "bag_of_words": (0.6, -0.06),
        },
        "follow": {
            "random_person": (0.1, 0.0), "right_gender": (0.2, 0.0), "last_mentioned": (0.3, -0.02),
            "last_two_words": (1.0, -0.07), "bag_of_words": (0.4, -0.05),
        },
    }  # fmt: skip
    rows = []
    for task in tasks:
        for name, (base, fall) in levels.get(task, levels["follow"]).items():
            for k in hops:
                p = min(max(base + fall * (k - 1), 0.02), 1.0)
                half = 1.96 * (p * (1 - p) / n) ** 0.5
                low, high = max(p - half, 0.0), min(p + half, 1.0)
                rows.append(
                    {
                        "task": task,
                        "hops": k,
                        "shortcut": name,
                        "accuracy": p,
                        "low": low,
                        "high": high,
                        "n": n,
                    }
                )
    return tables.conform("shortcuts", rows)


def _manifest(
    model: str, axis: Axis, tasks: Sequence[str], hops: Sequence[int], n: int, exit_q: float | None, seed: int
) -> dict[str, Any]:
    loops = len({loop for loop, *_, end in axis if end})
    return {
        "schema_version": 1,
        "command": f"depthprobe analyze {model} --hops {min(hops)}-{max(hops)} --n {n} --seed {seed}",
        "config": {"model": model, "task": list(tasks), "hops": list(hops), "n": n, "seed": seed},
        "model": {
            "name": model, "revision": None, "fingerprint": "9f1c" * 16, "dtype": "float32", "device": "cpu",
            "n_loops": loops, "exit_q": exit_q,
        },
        "versions": {"depthprobe": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "transformers": "5.24.0"},
        "git": "0123abc",
        "seed": seed,
        "counts": {"items": n * len(hops) * len(tasks), "stories": n * len(tasks)},
        "started": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:04:47+00:00",
    }  # fmt: skip


def main(out: Path) -> None:
    from depthprobe.report import write_report

    for path in (
        write_run(out / "looped", looped_axis(), with_tokens=24),
        write_run(out / "layers", layers_axis(), model="SmolLM2-135M-Instruct", gate=False),
        write_run(out / "deep", looped_axis(4, layers=4, prelude=1, coda=1), model="random/looped-4x4"),
        write_run(
            out / "small", looped_axis(3), model="<b>tiny</b>", tasks=("data",), hops=(2,), n_stories=1,
            gate=False, shortcuts=False,
        ),
    ):  # fmt: skip
        print(write_report(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
