"""The settings of a frontier in the order in which they are served, and how each comes to its rule or its exits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.pipeline.config import AnalyzeConfig
from depthprobe.pipeline.frontier_serving import (
    Calibrated,
    Exits,
    Serving,
    calibrated,
    oracle_exits,
    permuted,
    served,
    target_of,
    with_exits,
)

if TYPE_CHECKING:
    from depthprobe.models import LoopedForCausalLM
    from depthprobe.runs import RunFolder
    from depthprobe.runtime import Request

__all__ = ["PARTS", "Setting", "Work"]

#: tables of which each setting is a part
PARTS = ("frontier_answers", "frontier_served")


@dataclass(frozen=True, slots=True)
class Setting:
    """A way of serving the questions of one task, in the order in which they are served."""

    kv: str
    task: str
    kind: str
    name: str
    beside: str | None = None
    seed: int = 0


@dataclass
class Work:
    """Model, questions and settings, and what has been served."""

    looped: LoopedForCausalLM
    requests: dict[str, list[Request]]  # by task
    other: dict[str, list[Request]]  # those of the calibration; empty with a file
    plan: list[Setting]
    exits: dict[str, Any]  # setting -> rule; None: calibrated
    serving: dict[str, Any]
    about: dict[str, Any]
    digest: str
    _calibrated: dict[tuple[str, str, str], Calibrated] = field(default_factory=dict)
    _oracles: dict[str, tuple[list[Exits], list[Exits]]] = field(default_factory=dict)
    _aside: dict[tuple[str, str, str], Serving] = field(default_factory=dict)

    @classmethod
    def opened(
        cls, config: AnalyzeConfig, given: Mapping[str, Any], exit: list[str], kv: list[str], permutations: int,
        calibrate: int, lookahead: str | None, serving: dict[str, Any], remark: Callable[[str], None],
        say: Callable[[str, int, int], None],
    ) -> Work:  # fmt: skip
        from depthprobe.halting import parse_rule
        from depthprobe.pipeline.analyze import _about
        from depthprobe.pipeline.trace import _looped, _requests, _rule
        from depthprobe.runtime import Sampling
        from depthprobe.runtime.options import EngineOptions

        split_given = given.get("split") is not None
        opened, requests = _requests(config, split_given, None, None, Sampling(), remark, say)
        looped = _looped(opened)
        rules: dict[str, Any] = {}
        for text in exit:
            target = target_of(text)
            if target is not None and not 1 <= target[1] <= looped.config.n_loops:
                what = f"a mean depth of {target[1]:g} is not within 1 to {looped.config.n_loops}"
                raise UserError(what, where=f"exit {text}")
            rule = None if target else _rule(text, lookahead, config.model, looped)[0]
            rules[text] = parse_rule(rule) if isinstance(rule, str) else rule
        for layout in kv:  # what cannot be served is told before anything is
            for rule in (*rules.values(), "replay"):
                EngineOptions.of(looped, exit=rule or "q:1.0", kv=layout, **serving)
        other: dict[str, list[Request]] = {}
        if config.data is None:
            split = {"heldout": "train", "train": "heldout"}.get(config.split, "any")
            aside = AnalyzeConfig.of({**given, "split": split, "seed": config.seed + 1, "n": calibrate})
            other = _by_task(_requests(aside, True, None, None, Sampling(), remark, say)[1])
        else:
            remark("a file has no other split to set a threshold on: there is no confidence exit beside the rules")
        by_task = _by_task(requests)
        # a confidence exit has no other one beside it
        compared = [text for text in exit if other and not text.strip().lower().startswith("confidence")]
        plan = [
            setting for layout in kv for task in by_task
            for setting in _plan(layout, task, exit, looped.config.n_loops, compared, permutations)
        ]  # fmt: skip
        total = hashlib.sha256()
        for request in (*requests, *(one for own in other.values() for one in own)):
            total.update(json.dumps([request.prompt, request.about], sort_keys=True).encode())
        return cls(looped, by_task, other, plan, rules, serving, _about(opened, config),
                   total.hexdigest())  # fmt: skip

    def serve(self, run: RunFolder, say: Callable[[str, int, int], None]) -> None:
        """The settings that are not there yet, one part each."""
        numbers = set.intersection(*(run.parts(name) for name in PARTS))
        sizes = [len(self.requests[setting.task]) for setting in self.plan]
        done = sum(size for number, size in enumerate(sizes) if number in numbers)
        say("served", done, sum(sizes))
        for number, setting in enumerate(self.plan):
            if number in numbers:
                continue
            before = done
            found = self._one(run, setting, lambda n, before=before: say("served", before + n, sum(sizes)))
            for name, table in zip(PARTS, found, strict=True):
                run.write_part(name, number, table)
            done += sizes[number]

    def _one(self, run: RunFolder, setting: Setting, told: Callable[[int], None]) -> tuple[pl.DataFrame, pl.DataFrame]:
        requests, found = self.requests[setting.task], None
        rule: Any = "replay"
        if setting.kind == "fixed":
            rule = setting.name
        elif setting.kind == "rule":
            rule = self.exits[setting.name]
            if rule is None:
                found = self._threshold(setting)
                rule = found.rule
        elif setting.kind == "confidence":
            found = self._threshold(setting)
            rule = found.rule
        elif setting.kind == "permuted":
            assert setting.beside is not None
            own = self._answers(run, setting, setting.beside)
            of_prompts = (None if x is None else tuple(x) for x in own["prompt_exits"].to_list())
            exits = list(zip(map(tuple, own["exits"].to_list()), of_prompts, strict=True))
            most = [request.sampling.max_new_tokens for request in requests]
            requests = with_exits(requests, permuted(exits, most, setting.seed))
        else:
            settling, earliest = self._oracle(run, setting)
            requests = with_exits(requests, settling if setting.kind == "settling" else earliest)
        serving = served(self.looped, requests, rule, self.serving | {"kv": setting.kv}, told=told)
        return self._rows(setting, requests, serving, found)

    def _rows(
        self, setting: Setting, requests: Sequence[Request], serving: Serving, found: Calibrated | None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        ragged, loops = self.serving["prefill"] == "ragged", self.looped.config.n_loops
        same = {"setting": setting.name, "kind": setting.kind, "kv": setting.kv, "rule": serving.spec,
                "beside": setting.beside, "seed": setting.seed}  # fmt: skip
        rows = []
        for request, one in zip(requests, serving.completions, strict=True):
            about, ids = request.about, request.about["answer_ids"]
            assert one.finished is not None
            rows.append({
                **same, **{key: about[key] for key in ("item", "story", "cluster", "task", "hops")},
                "correct": one.tokens[: len(ids)] == list(ids), "tokens": len(one.tokens),
                "mean_exit": sum(one.exit_depths) / len(one.tokens), "decode_rows": sum(one.exit_depths),
                "prompt_rows": sum(one.prompt_exit_depths),
                "latency": (one.finished - one.arrival) / len(one.tokens), "predicted": one.tokens,
                "exits": one.exit_depths, "prompt_exits": one.prompt_exit_depths if ragged else None,
            })  # fmt: skip
        whole = {
            **same, "task": setting.task, "n_loops": loops, "questions": len(rows),
            "tokens": sum(row["tokens"] for row in rows), "decode_rows": sum(row["decode_rows"] for row in rows),
            "all_rows": serving.all_rows, "read_rows": serving.read_rows, "seconds": serving.seconds,
            "peak_kv_bytes": serving.peak_kv_bytes,
            "target": None if found is None else found.target, "calibrated": None if found is None else found.reached,
            "n_calibration": None if found is None else len(self.other[setting.task]),
        }  # fmt: skip
        return tables.conform("frontier_answers", rows), tables.conform("frontier_served", [whole])

    # -- what a setting is made of

    def _threshold(self, setting: Setting) -> Calibrated:
        """Of a rule that is given by its mean depth, or of the confidence exit beside a rule."""
        key = (setting.kv, setting.task, setting.name)
        if key in self._calibrated:
            return self._calibrated[key]

        def serve(rule: Any, criteria: bool = False) -> Serving:
            return self._set_aside(setting, rule, criteria)

        if setting.kind == "rule":
            asked = target_of(setting.name)
            assert asked is not None
            name, target, options = asked
        else:
            assert setting.beside is not None
            rule, name, options = self.exits[setting.beside], "confidence", ""
            if rule is None:
                rule = self._threshold(Setting(setting.kv, setting.task, "rule", setting.beside)).rule
            target = serve(rule).mean_exit
        self._calibrated[key] = calibrated(name, options, target, serve)
        return self._calibrated[key]

    def _set_aside(self, setting: Setting, rule: Any, criteria: bool) -> Serving:
        """The questions of the calibration, served once for each rule and layout."""

        key = (setting.kv, setting.task, f"{rule if isinstance(rule, str) else rule.spec()}{' criteria' * criteria}")
        if key not in self._aside:
            options = self.serving | {"kv": setting.kv}
            self._aside[key] = served(self.looped, self.other[setting.task], rule, options, criteria=criteria)
        return self._aside[key]

    def _oracle(self, run: RunFolder, setting: Setting) -> tuple[list[Exits], list[Exits]]:

        if setting.task not in self._oracles:
            requests, loops = self.requests[setting.task], self.looped.config.n_loops
            full = f"fixed:{loops}"
            if any((one.kv, one.task) == ("ragged", setting.task) for one in self.plan):
                tokens = self._answers(run, Setting("ragged", setting.task, "", ""), full)["predicted"].to_list()
            else:
                options = self.serving | {"kv": "ragged"}
                tokens = [one.tokens for one in served(self.looped, requests, full, options).completions]
            ragged = self.serving["prefill"] == "ragged"
            self._oracles[setting.task] = oracle_exits(self.looped, requests, tokens, loops, ragged)
        return self._oracles[setting.task]

    def _answers(self, run: RunFolder, near: Setting, name: str) -> pl.DataFrame:
        """The answers of a setting that was served before, in the order of the requests."""
        number = next(
            at for at, one in enumerate(self.plan) if (one.kv, one.task, one.name) == (near.kv, near.task, name)
        )
        file = run.path / "tables" / "frontier_answers" / f"part-{number:05d}.parquet"
        return tables.check("frontier_answers", pl.read_parquet(file))


def _by_task(requests: Sequence[Request]) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(request.about["task"], []).append(request)
    return found


def _plan(
    kv: str, task: str, exit: Sequence[str], n_loops: int, compared: Sequence[str], permutations: int
) -> Iterator[Setting]:
    """In an order in which nothing is needed before it was served."""
    for depth in range(1, n_loops + 1):
        yield Setting(kv, task, "fixed", f"fixed:{depth}")
    for text in exit:
        yield Setting(kv, task, "rule", text)
        if text in compared:
            yield Setting(kv, task, "confidence", f"confidence as {text}", text)
        for seed in range(1, permutations + 1):
            yield Setting(kv, task, "permuted", f"permuted {text}", text, seed)
    yield Setting(kv, task, "settling", "settling oracle")
    yield Setting(kv, task, "earliest", "earliest-equal oracle")
