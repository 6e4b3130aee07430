"""Tables of interventions beside a synthetic run: information that moves later with more hops, as a clean model would.

python -m tests.report.synthetic_causal OUT        # writes OUT/looped and OUT/layers, each with its report
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from synthetic import words_of

from depthprobe import analysis, tables

_KEYS = ("item", "story", "cluster", "task", "hops")
_ROLES = ("changed_word", "changed_fact", "other_facts", "question_names", "last")
#: kind, control, how much of the effect it has
_DONORS = {
    "kinship": (("relation", False, 1.0), ("same_answer", True, 0.08)),
    "follow": (("relation", False, 0.8), ("name", False, 1.0), ("distractor_name", True, 0.05)),
}
EFFECTS = ("donors", "patching", "patching_by_role", "windows", "window_slopes")
CUTS = ("knockout", "knockout_by_depth", "knockout_slopes")
SKIPS = ("effective", "effective_by_hops", "effective_depths", "effective_slopes")


def add_causal(
    folder: Path,
    *,
    names: Iterable[str] = (*EFFECTS, *CUTS, *SKIPS),
    sites: Sequence[str] = ("resid_post", "attn_out"),
    seed: int = 0,
    n_positioned: int = 12,
    nothing: bool = False,
) -> Path:
    """Write tables into a run folder of `synthetic.write_run`.

    Args:
        n_positioned: items whose patches are also told token by token.
        nothing: every effect is null (answer and donor's answer alike).
    """
    rng = np.random.default_rng(seed)
    items = pl.read_parquet(folder / "tables" / "items.parquet")
    lens = pl.read_parquet(folder / "tables" / "lens.parquet")
    axis = lens.select("depth", "loop", "layer", "site", "is_loop_end").unique().sort("depth")
    patching = _patching(items, axis, sites, rng, n_positioned)
    if nothing:
        patching = patching.with_columns(effect=pl.lit(None, pl.Float32))
    windows = _windows(patching, axis)
    knockout = _knockout(items, axis, rng)
    effective = _effective(items, axis, rng)
    told = analysis.analyse_effective(effective, resamples=200)
    found = {
        "donors": _donors(items.head(n_positioned)),
        "patching": patching,
        "patching_by_role": _by_role(patching),
        "windows": windows,
        "window_slopes": _window_slopes(windows),
        "knockout": knockout,
        "knockout_by_depth": _by_depth(knockout),
        "knockout_slopes": analysis.knockout_slopes_table(knockout, resamples=200),
        "effective": effective,
        **told,
    }
    for name in names:
        tables.check(name, found[name]).write_parquet(folder / "tables" / f"{name}.parquet")
    return folder


def _sigmoid(x: np.ndarray | float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, dtype=float)))


def _curves(k: int, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """role -> effect over the depths: the changed word decides early, the last token late, later with more hops."""
    at, width = np.arange(n), n / 14
    leave = n * (0.25 + 0.06 * k) + rng.normal(0, n / 22)
    arrive = leave + n * 0.08
    noise = lambda: rng.normal(0, 0.025, n)  # noqa: E731
    last = _sigmoid((at - arrive) / width)
    last[0], last[-1] = 0.0, 1.0
    word = 1 - _sigmoid((at - leave) / width)
    word[0] = 1.0
    between = np.clip(1 - word - last, 0, 1)
    return {
        "changed_word": word + noise() * (at > 0),
        "changed_fact": 0.6 * between + noise(),
        "other_facts": 0.25 * between - 0.12 * _sigmoid(at - n / 2) + noise(),
        "question_names": 0.35 * between + noise(),
        "last": last + noise() * (at < n - 1),
    }


def _patching(
    items: pl.DataFrame, axis: pl.DataFrame, sites: Sequence[str], rng: np.random.Generator, n_positioned: int
) -> pl.DataFrame:
    """Columns are gathered a curve at a time: thousands of small frames would take minutes."""
    n = axis.height
    heads: list[dict[str, Any]] = []
    effects: list[np.ndarray] = []

    def add(
        item: dict[str, Any], kind: str, control: bool, site: str, role: str, at: int | None, e: np.ndarray
    ) -> None:
        head = {name: item[name] for name in _KEYS} | {"donor_kind": kind, "control": control, "site": site}
        heads.append(head | {"role": role, "position": at, "hop": None if "distractor" in kind else 1})
        effects.append(e)

    for number, item in enumerate(items.iter_rows(named=True)):
        for kind, control, share in _DONORS.get(item["task"], _DONORS["follow"]):
            own = _curves(item["hops"], n, rng)
            for site in sites:
                for role in _ROLES:
                    size = share * (1.0 if site == "resid_post" else 0.4)
                    add(item, kind, control, site, role, None, size * own[role])
            if number < n_positioned and not control:
                for at in range(4, 24):
                    role = "changed_word" if at == 4 else "last" if at == 23 else "other_facts"
                    fade = 1.0 if role != "other_facts" else 0.5 if at % 5 == 0 else 0.1
                    effect = share * fade * own[role if role != "other_facts" else "changed_fact"]
                    add(item, kind, control, "resid_post", role, at, effect)
    schema = tables.SCHEMAS["patching"]
    head = pl.DataFrame(heads, schema_overrides={name: schema[name] for name in heads[0]}, infer_schema_length=None)
    head = head.with_columns(curve=pl.int_range(pl.len()))
    whole = head.join(axis.select("depth", "loop", "layer"), how="cross").sort("curve", "depth")
    effect = pl.Series("effect", np.concatenate(effects))
    patched = 4.0 - 8.0 * effect
    p = pl.Series(_sigmoid(patched.to_numpy()))
    return tables.conform(
        "patching",
        whole.drop("curve").with_columns(
            effect, direction=pl.lit("donor_to_item"), kind=pl.lit("set"), span=pl.lit("one"), window=pl.lit(1),
            n_positions=pl.lit(1), both_right=pl.lit(True), ld_clean=pl.lit(4.0), ld_donor=pl.lit(-4.0),
            ld_patched=patched, p_answer=p, p_donor=1 - p, flip=patched < 0,
        ),
    )  # fmt: skip


def _donors(items: pl.DataFrame) -> pl.DataFrame:
    rows = [
        {name: item[name] for name in _KEYS}
        | {"donor_kind": kind, "control": control, "donor": f"{item['item']}-{kind}", "hop": 1}
        | {"before": "son", "after": "nephew", "answer": item["answer"], "donor_answer": "uncle"}
        | {"text": item["text"], "tokens": (words := words_of(item["text"])), "roles": [""] * len(words)}
        | {"item_right": True, "donor_right": True}
        for item in items.iter_rows(named=True)
        for kind, control, _ in _DONORS.get(item["task"], _DONORS["follow"])
    ]
    return tables.conform("donors", rows)


def _means(df: pl.DataFrame, keys: list[str], column: str, name: str = "mean") -> pl.DataFrame:
    """Mean and a normal interval: a bootstrap of each cell would take long, and is tested elsewhere."""
    half = 2 * pl.col(column).cast(pl.Float64).std() / pl.len().sqrt()
    mean = pl.col(column).cast(pl.Float64).mean()
    extra = [pl.len().alias("n"), pl.col("cluster").n_unique().alias("n_clusters")]
    bounds = [(mean - half).alias("low"), (mean + half).alias("high")]
    return df.group_by(keys, maintain_order=True).agg(mean.alias(name), *bounds, *extra)


def _with_all(df: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([df, df.with_columns(hops=pl.lit(None, pl.Int32))])


def _by_role(patching: pl.DataFrame) -> pl.DataFrame:
    keys = ["task", "hops", "donor_kind", "control", "direction", "kind", "span", "site", "role", "depth"]
    whole = _with_all(patching.filter(pl.col("position").is_null() & pl.col("effect").is_not_null()))
    flips = whole.group_by(keys).agg(pl.col("flip").mean())
    found = _means(whole, keys, "effect", "effect").join(flips, on=keys, nulls_equal=True)
    return tables.conform("patching_by_role", found.rename({"n": "n_items"}))


def _windows(patching: pl.DataFrame, axis: pl.DataFrame) -> pl.DataFrame:
    last, rows = axis.height - 1, []
    own = patching.filter(
        pl.col("position").is_null() & pl.col("effect").is_not_null() & (pl.col("donor_kind") == "relation"),
        pl.col("role").is_in(["changed_word", "last"]),
    )
    keys = [*_KEYS, "role", "site"]
    for *key, effects in own.sort("depth").group_by(keys, maintain_order=True).agg("effect").iter_rows():
        effect = np.array(effects)
        source = key[-2] == "changed_word"
        over = effect < 0.5 if source else effect > 0.5
        at = int(np.argmax(over)) if over.any() else None
        crossed = None if not at else float(at - 1 + (0.5 - effect[at - 1]) / (effect[at] - effect[at - 1]))
        area = float(np.clip(effect, 0, 1).mean())
        rows.append(
            dict(zip(_KEYS, key, strict=False))
            | {"end": "source" if source else "destination", "site": key[-1], "depth_crossed": crossed}
            | {"relative": None if crossed is None else crossed / last, "loop_crossed": crossed}
            | {"area": area, "censored": crossed is None}
            | {"monotone": bool(len(rows) % 5), "effect_first": effects[0], "effect_last": effects[-1]}
        )
    return tables.conform("windows", rows)


def _window_slopes(windows: pl.DataFrame) -> pl.DataFrame:
    rows: list[dict[str, Any]] = []
    for (task, end), part in windows.filter(site="resid_post").partition_by(["task", "end"], as_dict=True).items():
        for column, name in (("depth_crossed", "crossed"), ("area", "area"), ("relative", "crossed_relative")):
            row = {"task": task, "quantity": f"{end}_{name}"} | analysis.slope_of(part, column, resamples=200)
            row |= {"share_censored": part["censored"].mean(), "share_nonmonotone": 1 - part["monotone"].mean()}
            rows.append(row | {"n_pairs": part.height})
    return tables.conform("window_slopes", rows)


def _knockout(items: pl.DataFrame, axis: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    layers = axis.filter(pl.col("site") == "resid_post").to_dicts()
    rows: list[dict[str, Any]] = []
    for item in items.iter_rows(named=True):
        centre = axis.height * (0.3 + 0.05 * item["hops"]) + rng.normal(0, axis.height / 30)
        for role, size in (("changed_word", 2.5), ("changed_fact", 1.4), ("other_facts", 0.7), ("question_names", 1.9)):
            shift = -axis.height / 6 if role == "question_names" else 0
            for at in layers:
                drop = size * np.exp(-(((at["depth"] - centre - shift) / (axis.height / 9)) ** 2)) + rng.normal(0, 0.02)
                rows.append(
                    {name: item[name] for name in _KEYS}
                    | {"role": role, "loop": at["loop"], "layer": at["layer"], "depth": at["depth"], "window": 1}
                    | {"ld_clean": 4.0, "ld_cut": 4.0 - drop, "logprob_clean": -0.1, "logprob_cut": -0.1 - drop}
                    | {"p_answer": float(np.exp(-0.1 - drop)), "correct": drop < 1.2, "flip": drop >= 1.2}
                )
    return tables.conform("knockout", rows)


def _by_depth(knockout: pl.DataFrame) -> pl.DataFrame:
    keys = ["task", "hops", "role", "depth", "window"]
    whole = _with_all(knockout.with_columns(drop=pl.col("logprob_clean") - pl.col("logprob_cut")))
    right = whole.group_by(keys).agg(accuracy=pl.col("correct").mean())
    found = _means(whole, keys, "drop", "drop").join(right, on=keys, nulls_equal=True)
    return tables.conform("knockout_by_depth", found.drop("n_clusters"))


def _effective(items: pl.DataFrame, axis: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    n, rows = axis.height, []
    parts = [one | {"site": "resid_post"} for one in axis.filter(pl.col("site") == "resid_post").to_dicts()]
    parts = sorted(parts, key=lambda one: one["depth"])
    if axis["is_loop_end"].sum() > 1:
        parts += [one | {"site": "loop"} for one in axis.filter("is_loop_end").to_dicts()]
    for item in items.iter_rows(named=True):
        for at in parts:
            share = at["depth"] / n
            bump = float(np.exp(-(((share - 0.35 - 0.04 * item["hops"]) / 0.2) ** 2)))
            noise = float(rng.normal(0, 0.02))
            last = at["depth"] == n - 1
            rows.append(
                {name: item[name] for name in _KEYS}
                | {name: at[name] for name in ("depth", "loop", "layer", "site")}
                | {"contribution": 1.4 * (1 - share) + 0.5 * bump + noise, "cosine": 0.4 * share - 0.2 + noise}
                | {"contribution_all": 1.2 * (1 - share) + noise, "cosine_all": 0.3 * share - 0.1 + noise}
                | {"skip_kl": 3 * bump + abs(noise), "skip_top5": max(1 - bump, 0.0), "skip_logprob": -3 * bump}
                | {"skip_correct": bump < 0.7, "later_same": None if last else 0.8 * bump + 0.1}
                | {"later_others": None if last else 0.5 * bump * (1 - share), "lens_kl": 6 * (1 - share)}
                | {"lens_top5": share}
            )
    return tables.conform("effective", rows)


def main(out: Path) -> None:
    from synthetic import layers_axis, looped_axis, write_run

    from depthprobe.report import write_report

    one = {"tasks": ("follow",)}
    runs = (
        write_run(out / "looped", looped_axis(), with_tokens=24, n_stories=60),
        write_run(out / "layers", layers_axis(), model="SmolLM2-135M-Instruct", gate=False, with_tokens=12, **one),
        write_run(out / "deep", looped_axis(4, layers=4, prelude=1, coda=1), model="looped-4x4", n_stories=12, **one),
    )
    for run in runs:
        path = write_report(add_causal(run))
        print(path, f"{path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
