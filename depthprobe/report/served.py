"""The block about what was really served: exits of a trace, held against the settling of the same tokens."""

from __future__ import annotations

from depthprobe.analysis.agreement import check_sum
from depthprobe.report import panels
from depthprobe.report.blocks import Block
from depthprobe.report.data import Task
from depthprobe.report.figures import Grid
from depthprobe.report.panels.served import served_with
from depthprobe.report.text import count, interval, missing, number, percent

__all__ = ["served_blocks"]

_SHOWN = (("s_full", "settles, full keys"), ("s_served", "settles, keys as served"), ("exit", "left"))


def served_blocks(task: Task) -> tuple[Block, ...]:
    """None for a run that no trace was held against.

    Raises:
        UserError: terms that do not add up, naming request and token.
    """
    if not task.agreement_by_hops.height:
        return ()
    check_sum(task.agreement)
    figures = tuple(f for f in (panels.served_terms(task), panels.exit_minus_settling(task)) if f is not None)
    planned = task.agreement["gate"].null_count()
    return (
        Block(
            "Served depth: where did tokens really leave, and why there?",
            "Tokens that a runtime served with early exits, replayed. A token settles at the loop from which on its "
            "first word stays that of the last loop, all keys at full depth. The exit differs from that for causes "
            "that add up exactly, token by token: the gate's own choice under full keys; keys of other tokens that "
            "left early; the head that decides a loop ahead; the delay of deciding ahead; cap and least depth.",
            figures,
            table=_table(task),
            table_title="Means in loops, with 95 % intervals",
            after=(f"The exits of {count(planned, 'token')} were planned or played back: no rule decided them, so they "
                   "have no causes. " if planned else "")
            + "“Changed”: the token served is not the one that full depth would give at that place.",
        ),
    )  # fmt: skip


def _table(task: Task) -> Grid:
    rows = task.agreement_by_hops
    names = dict(served_with(rows).options)
    lines: list[tuple[str, ...]] = []
    for way, own in rows.partition_by(["rule", "prefill", "layout"], as_dict=True, maintain_order=True).items():
        for (k,), cell in own.partition_by("hops", as_dict=True, maintain_order=True).items():
            of = {row["term"]: row for row in cell.iter_rows(named=True)}
            changed = of["changed"]["mean"]
            means = (_mean(of[name]["mean"], of[name]["low"], of[name]["high"]) for name, _ in _SHOWN)
            first = (names["/".join(map(str, way))], "all" if k is None else f"k = {k}")
            lines.append((*first, *means, percent(changed), str(of["exit"]["n_tokens"])))
    head = ("served with", "hops", *(words for _, words in _SHOWN), "changed", "tokens")
    return Grid(head, tuple(lines), "agreement_by_hops")


def _mean(mean: float, low: float | None, high: float | None) -> str:
    return number(mean) if missing(low) else f"{number(mean)} ({interval(low, high)})"
