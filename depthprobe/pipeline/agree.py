"""A trace held against the lens: record → replay → agreement, and its tables.

    from depthprobe.pipeline import agree
    found = agree("traces/demo", run="runs/demo")
    found.tables["agreement_by_hops"]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.analysis.agreement import Epsilon
    from depthprobe.halting import ExitRule
    from depthprobe.models import LoopedForCausalLM

__all__ = ["Agreement", "add_to_run", "agree"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What came of a trace.

    Attributes:
        tables: served_requests, served_tokens, served_ticks, replayed, agreement, agreement_by_hops.
        about: the trace's `trace.json`.
        epsilon: what counted as rounding.
        left_out: requests that could not be replayed, by reason.
        ties: greedy tokens that differ from the replay where two logits are equal up to rounding.
        gap: the largest difference of a number on record from the replay's.
        compared: items whose settling was compared with the lens; None without a run.
        seconds: that the forwards took.
    """

    tables: dict[str, pl.DataFrame]
    about: dict[str, Any]
    epsilon: Epsilon
    left_out: dict[str, int]
    ties: int
    gap: float
    compared: int | None
    seconds: float


def agree(
    trace: str | Path,
    run: str | Path | None = None,
    *,
    model: str | LoopedForCausalLM | None = None,
    lookahead: str | None = None,
    rule: ExitRule | None = None,
    device: str = "cpu",
    epsilon: Epsilon | None = None,
    batch_tokens: int = 4096,
    seed: int = 0,
    resamples: int = 2000,
    remark: Callable[[str], None] | None = None,
) -> Agreement:
    """Replay a trace and say, token by token, why it left where it did. Nothing is written.

    Args:
        trace: folder of `depthprobe trace`, or of `Engine(…, record=…)`; also of a process that was killed.
        run: folder of `depthprobe analyze` with the same items: gives their clusters, and the lens' settling, with
            which the replay's is compared.
        model: the model that served, if it is not where the trace says.
        lookahead: file or folder of the head that served; None: as the trace says, else the one beside the model.
        rule: the exit rule that served, if the trace's text does not say it all (a lookahead head in memory).
        epsilon: what counts as rounding; None: `epsilon_of` the trace's dtype.
        batch_tokens: most tokens of a forward.
        seed, resamples: of the intervals.
        remark: is called with a line for what was skipped.

    Raises:
        UserError: a trace, run or model that is not there or that do not belong together; a layout without a forward
            over all positions; a sampled rule; a token whose exit, answer or gate values are not the replay's.
    """
    from depthprobe.analysis.agreement import (
        ExitFacts,
        agreement_by_hops_table,
        agreement_table,
        epsilon_of,
        refuse_sampled,
    )
    from depthprobe.analysis.served_checks import check_numbers, check_tokens
    from depthprobe.replay import check_replayable, read_served, replay
    from depthprobe.runs.trace_tables import trace_tables
    from depthprobe.runtime.record import read_meta

    say = remark or (lambda _: None)
    folder = Path(trace).expanduser()
    about = read_meta(folder)
    check_replayable(about["kv"])
    looped = _model(about, model, device, folder)
    rule = _rule(about, model, lookahead) if rule is None else rule
    facts = ExitFacts(rule.spec(), int(about["n_loops"]), rule.horizon, rule.needs_lookahead, rule.min_depth,
                      rule.sampled, rule.planned, about["kv"], about["prefill"])  # fmt: skip
    refuse_sampled(facts)
    epsilon = epsilon_of(about["dtype"]) if epsilon is None else epsilon

    found = trace_tables(folder)
    served = read_served(folder, about)
    for why, count in served.left_out.items():
        say(f"{count} request{'s' if count > 1 else ''} left out: {why}")
    if not served.requests:
        raise UserError("no request of the trace can be replayed", where=str(folder), remedy="serve some requests")
    items = None if run is None else _items(Path(run).expanduser(), about, say)
    if items is not None:
        found["served_requests"] = _with_items(found["served_requests"], items)
    begin = time.perf_counter()
    found["replayed"] = replay(
        looped, served.requests, rule, kv=about["kv"], n_loops=facts.n_loops,
        ragged_prefill=about["prefill"] == "ragged", batch_tokens=batch_tokens,
    )  # fmt: skip
    seconds = time.perf_counter() - begin

    requests = found["served_requests"]
    # exits first: a wrong one changes what later tokens say, and it is to be named itself
    found["agreement"] = agreement_table(found["replayed"], requests, facts, epsilon)
    ties = check_tokens(found["replayed"], requests, epsilon)
    gap = check_numbers(found["replayed"], found["served_tokens"], epsilon)
    compared = None
    if run is not None and items is not None:
        if len(looped.coda):
            say("the replay reads through the coda, the lens before it: its settling is not compared")
            compared = 0
        else:
            compared = _against_lens(Path(run).expanduser(), items, found, epsilon, say)
    found["agreement_by_hops"] = agreement_by_hops_table(found["agreement"], seed=seed, resamples=resamples)
    return Agreement(found, about, epsilon, served.left_out, ties, gap, compared, seconds)


def add_to_run(run: str | Path, found: Agreement) -> None:
    """Put the agreement into a run folder, for its report. Rows of traces that were served otherwise stay.

    Raises:
        UserError: no run there, or a table that cannot be read or written.
    """
    from depthprobe.report.data import read_table
    from depthprobe.runs.trace_tables import write_tables

    folder, way = Path(run).expanduser(), ["rule", "layout", "prefill"]
    joined = {}
    for name in ("agreement", "agreement_by_hops"):
        new = found.tables[name]
        others = read_table(folder, name, required=False).join(new.select(way).unique(), on=way, how="anti")
        joined[name] = pl.concat([others, new])
    write_tables(folder, joined)


def _model(about: dict[str, Any], given: str | LoopedForCausalLM | None, device: str, trace: Path) -> LoopedForCausalLM:
    from depthprobe.depth import load
    from depthprobe.models import LoopedForCausalLM

    if isinstance(given, LoopedForCausalLM):
        return given
    name = about.get("model") if given is None else given
    if not name:
        raise UserError("the trace does not say which model served", where=str(trace), remedy="name it with --model")
    kind = about["dtype"]
    opened = load(name, device=device, dtype="auto" if kind == "float64" else kind)
    if not isinstance(opened.model, LoopedForCausalLM):
        raise UserError(f"{name} is no looped model of this package", where="model", remedy="name the one that served")
    if kind == "float64":
        opened.model.double()
    recorded = about.get("model_fingerprint")
    if recorded and recorded != opened.fingerprint():
        what = f"{name} is not the model that served: its weights, configuration or tokenizer differ"
        raise UserError(what, where=str(trace), remedy="name the one that served with --model")
    return opened.model


def _rule(about: dict[str, Any], model: object, lookahead: str | None) -> ExitRule:
    from depthprobe.depth.load import find_folder
    from depthprobe.halting import LookaheadHead, parse_rule

    text = about["exit"]
    if lookahead is not None and not text.startswith("lookahead"):
        raise UserError("a lookahead head is given and the rule does not look ahead", where=text, remedy="leave it out")
    if lookahead is None:
        try:
            return parse_rule(text)  # also one that is only late needs no head
        except UserError:
            if not text.startswith("lookahead"):
                raise
    place = lookahead or about.get("lookahead")
    if not place:
        name = model if isinstance(model, str) else about.get("model")
        if not name:
            raise UserError("the trace does not say which lookahead head served", where=text, remedy="give rule=…")
        place = find_folder(name)
    return parse_rule(text, LookaheadHead.load(place))


def _items(run: Path, about: dict[str, Any], say: Callable[[str], None]) -> pl.DataFrame:
    from depthprobe.report.data import read_table
    from depthprobe.runs import read_manifest

    manifest = read_manifest(run)
    theirs, ours = manifest.get("model", {}).get("fingerprint"), about.get("model_fingerprint")
    if theirs and ours and theirs != ours:
        what = "the run and the trace are of different models"
        raise UserError(what, where=str(run), remedy="analyze and serve the same model, in the same dtype")
    if not ours:
        say("the trace has no fingerprint of its model: only the settling shows whether the run is of the same one")
    return read_table(run, "items", required=True)


def _with_items(requests: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """What the run knows of the items, where it has them."""
    keys = ("story", "cluster", "task", "hops")
    known = items.select("item", *(pl.col(key).alias(f"{key}_of_run") for key in keys))
    joined = requests.join(known, on="item", how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce(f"{key}_of_run", key).alias(key) for key in keys).select(requests.columns)


def _against_lens(
    run: Path, items: pl.DataFrame, found: dict[str, pl.DataFrame], epsilon: Epsilon, say: Callable[[str], None]
) -> int:
    from depthprobe.analysis.served_checks import check_against_lens
    from depthprobe.report.data import read_table
    from depthprobe.runs import read_manifest

    lens = read_manifest(run).get("config", {}).get("lens", "plain")
    if lens != "plain":
        say(f"the run's lens is {lens}: its settling is not compared")
        return 0
    settling = read_table(run, "settling", required=True)
    compared = check_against_lens(
        found["agreement"], found["replayed"], found["served_requests"], settling, items, epsilon
    )
    if not compared:
        say("no prompt of the trace is one of the run's with a settling loop: the lens' settling is not compared")
    return compared
