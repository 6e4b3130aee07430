"""`dry_run`: what a run would take, from its cells and a short calibration; nothing is written.

    print(depthprobe.pipeline.dry_run("follow-demo", probes="lens,patching"))
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthprobe.pipeline.config import AnalyzeConfig
from depthprobe.pipeline.prepare import allowed_bytes, begun, opened
from depthprobe.pipeline.probes import PROBES

__all__ = ["DryRun", "ProbeCost", "dry_run"]


@dataclass(frozen=True, slots=True)
class ProbeCost:
    """What one probe takes.

    Attributes:
        probe: its name.
        items: questions that it asks.
        cells: changed forwards that are asked for; of the lens, questions.
        flops: of the matrix products that the engine will make.
        bytes: held at once beyond the model.
        seconds: expected, from a part that was run and timed.
    """

    probe: str
    items: int
    cells: int
    flops: float
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run takes; printed it is a table."""

    model: str
    probes: tuple[ProbeCost, ...]

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.probes)

    def __str__(self) -> str:
        from depthprobe.depth.capture import human_bytes

        lines = [f"{'probe':<10} {'questions':>9} {'cells':>9} {'FLOPs':>9} {'memory':>10} {'time':>9}"]
        for cost in self.probes:
            lines.append(
                f"{cost.probe:<10} {cost.items:>9} {cost.cells:>9} {cost.flops:>9.2g} {human_bytes(cost.bytes):>10} "
                f"{_span(cost.seconds):>9}"
            )
        lines.append(f"{self.model}: {_span(self.seconds)} in all, estimated; nothing was written")
        return "\n".join(lines)


def dry_run(
    model: str | None = None,
    *,
    out: str | Path | None = None,
    max_memory: str | int | None = None,
    remark: Callable[[str], None] | None = None,
    **options: Any,
) -> DryRun:
    """Prepare a run, time one part of each probe, and say what all of them would take.

    Args:
        out: the run folder, which is checked as `analyze` checks it.
        model, max_memory, remark, options: as `analyze` takes them.

    Raises:
        UserError: what `analyze` raises before it computes.
    """
    from depthprobe.lens import lens_batch

    say = remark or (lambda line: None)
    config = AnalyzeConfig.of({"model": model, **options})
    limit = allowed_bytes(config, max_memory)
    if out is not None and begun(folder := Path(out).expanduser(), config, resume=False):
        say(f"this run is finished already: {folder}")
    ready = opened(config, split_given=options.get("split") is not None, say=say, told=lambda *_: None)
    loaded, targets = ready.model, ready.prepared.targets
    batch = targets[: config.batch_size]
    tokens = sum(len(target.prompt_ids) for target in targets)
    each = getattr(loaded, "flops_per_token", lambda length: 0.0)(tokens // len(targets))
    began = time.perf_counter()
    lens_batch(loaded, batch, ready.tuned, ready.coda)
    seconds = (time.perf_counter() - began) * len(targets) / len(batch)
    held = loaded.capture_bytes(len(batch), max(len(target.prompt_ids) for target in batch))
    # behind the coda: again with 1 … R − 1 loops, coda and prelude taken for as much as a whole model
    passes = loaded.n_loops if ready.coda else 1
    costs = [ProbeCost("lens", len(targets), len(targets), passes * tokens * each, held, seconds)]
    for name in config.probes[1:]:
        work = PROBES[name].prepare(loaded, ready.prepared, config, limit, say)
        parts = [work.cost(number) for number in range(work.n_parts)]
        middle = sorted(range(work.n_parts), key=lambda number: parts[number].flops)[work.n_parts // 2]
        began = time.perf_counter()
        next(iter(work.rows(set(range(work.n_parts)) - {middle})))
        took = time.perf_counter() - began
        total = sum(part.flops for part in parts)
        costs.append(
            ProbeCost(
                name, work.n_parts, sum(part.cells for part in parts), total, max(part.bytes for part in parts),
                took * total / parts[middle].flops,
            )
        )  # fmt: skip
    return DryRun(config.model, tuple(costs))


def _span(seconds: float) -> str:
    """75 → "1 min 15 s"; below ten minutes to the second."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"
