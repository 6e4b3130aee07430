"""Where served tokens left, beside where their readout settles: the causes of the difference, and its distribution."""

from __future__ import annotations

from typing import Any

import polars as pl

from depthprobe.report.data import Task
from depthprobe.report.figures import Choice, Figure, Grid, Key, error_bar, hops_line_axis, layout
from depthprobe.report.text import count, interval, missing, number, percent, signed

__all__ = ["TERM_NAMES", "exit_minus_settling", "served_terms", "served_with"]

#: term -> (its words, colour token)
TERM_NAMES = {
    "gate": ("gate, full keys", "gate"),
    "cache_prompt": ("cache: the prompt's keys", "model"),
    "cache_decode": ("cache: decoded tokens' keys", "role-gender"),
    "lookahead": ("lookahead head", "rival"),
    "delay": ("decided a loop ahead", "other"),
    "cap_floor": ("cap and least depth", "soft"),
    "numerics": ("rounding", "rule"),
}


def served_with(rows: pl.DataFrame) -> Choice:
    """What can be picked where several traces stand in a run: rule, prefill and layout of each."""
    ways = rows.select("rule", "prefill", "layout").unique(maintain_order=True).rows()
    alike = len({layout for _, _, layout in ways}) == 1
    names = [f"{rule}, {prefill} prefill" + ("" if alike else f", {kv}") for rule, prefill, kv in ways]
    return Choice("served", "served with", tuple(("/".join(way), name) for way, name in zip(ways, names, strict=True)))


def served_terms(task: Task) -> Figure | None:
    """Mean terms of exit − settling by hops, stacked above and below zero, and their sum; None without a trace."""
    rows = task.agreement_by_hops.filter(pl.col("hops").is_not_null())
    told = rows.filter(pl.col("term").is_in(list(TERM_NAMES)))
    if not told.height:
        return None
    rows = rows.join(told.select("rule", "prefill", "layout").unique(), on=["rule", "prefill", "layout"], how="semi",
                     maintain_order="left")  # fmt: skip
    choice = served_with(rows)
    hops = sorted(rows["hops"].unique().to_list())
    shown = [term for term in TERM_NAMES if told.filter(pl.col("term") == term)["nonzero"].to_numpy().any()]
    data: list[dict[str, Any]] = []
    grid: list[tuple[str, ...]] = []
    when_rows: list[dict[str, str]] = []
    ends: list[float] = [0.0]
    for at, (way, _) in enumerate(choice.options):
        own = _way(rows, way).sort("hops")
        look = {"meta": {"when": {"served": way}}, "visible": at == 0, "hoverinfo": "text"}
        for term in shown:
            part = own.filter(pl.col("term") == term)
            data.append({
                "type": "bar", "x": part["hops"].to_list(), "y": part["mean"].to_list(), "width": 0.62,
                "marker": {"color": f"var(--{TERM_NAMES[term][1]})"},
                "hovertext": [_hover(TERM_NAMES[term][0], row) for row in part.iter_rows(named=True)], **look,
            })  # fmt: skip
        total = own.filter(pl.col("term") == "total")
        data.append({
            "type": "scatter", "mode": "markers", "x": total["hops"].to_list(), "y": total["mean"].to_list(),
            "marker": {"symbol": "diamond", "size": 10, "color": "var(--ink)",
                       "line": {"width": 1.5, "color": "var(--card)"}},
            "error_y": error_bar(list(total.select("mean", "low", "high").iter_rows()), "ink"),
            "hovertext": [_hover("exit − settling", row) for row in total.iter_rows(named=True)], **look,
        })  # fmt: skip
        for (k,), cell in own.partition_by("hops", as_dict=True, maintain_order=True).items():
            of = {row["term"]: row for row in cell.iter_rows(named=True)}
            signed_means = [of[term]["mean"] for term in shown]
            ends += [sum(m for m in signed_means if m > 0), sum(m for m in signed_means if m < 0)]
            ends += [v for v in (of["total"]["low"], of["total"]["high"]) if not missing(v)]
            grid.append((f"k = {k}", _cell(of["total"]), *(_cell(of[term]) for term in shown)))
            when_rows.append({"served": way})
    reach = max(ends) - min(ends) or 1.0
    yaxis = {"title": "loops", "range": [min(ends) - 0.06 * reach, max(ends) + 0.06 * reach], "zeroline": True,
             "zerolinecolor": "var(--soft)", "nticks": 7}  # fmt: skip
    first = _way(rows, choice.options[0][0]).filter(pl.col("term") == "total").sort("hops")
    sums = ", ".join(f"{signed(row['mean'])} at k = {row['hops']}" for row in first.iter_rows(named=True))
    drawn = layout(height=350, xaxis=hops_line_axis(hops), yaxis=yaxis) | {"barmode": "relative"}
    head = ("hops", "exit − settling", *(TERM_NAMES[term][0] for term in shown))
    sum_key = Key("diamond", "ink", "their sum, with its 95 % interval")
    return Figure(
        id=f"{task.slug}-served-terms",
        title="Exit − settling, and what it is made of",
        spec={"data": data, "layout": drawn},
        alt=f"Stacked bars over hops, one colour for each cause. Exit minus settling in loops: {sums}.",
        grid=Grid(head, tuple(grid), "agreement_by_hops", when=tuple(when_rows)),
        sheet=rows.filter(pl.col("term").is_in([*TERM_NAMES, "total"])),
        keys=(*(Key("square", TERM_NAMES[term][1], TERM_NAMES[term][0]) for term in shown), sum_key),
        choices=(choice,),
    )


def exit_minus_settling(task: Task) -> Figure | None:
    """How the tokens are spread over exit − settling, by hops; None without a trace."""
    if not task.agreement.height:
        return None
    rows = task.agreement.with_columns(total=pl.col("exit") - pl.col("s_full"))
    choice = served_with(rows)
    hops = sorted(rows["hops"].drop_nulls().unique().to_list())
    pick = Choice("hops", "hops k", (("all", "all"), *((str(k), str(k)) for k in hops)))
    spread = range(int(rows["total"].to_numpy().min()), int(rows["total"].to_numpy().max()) + 1)
    colours = ["var(--other)" if x < 0 else "var(--gate)" if x else "var(--model)" for x in spread]
    data: list[dict[str, Any]] = []
    grid: list[tuple[str, ...]] = []
    when_rows: list[dict[str, str]] = []
    sheets: list[pl.DataFrame] = []
    for way, _ in choice.options:
        for value, _ in pick.options:
            own = _way(rows, way)
            own = own if value == "all" else own.filter(pl.col("hops") == int(value))
            if not own.height:
                continue
            tokens = [own.filter(pl.col("total") == x).height for x in spread]
            shares = [n / own.height for n in tokens]
            when = {"served": way, "hops": value}
            data.append({
                "type": "bar", "x": list(spread), "y": shares, "width": 0.8, "meta": {"when": when},
                "visible": not data, "hoverinfo": "text",
                "marker": {"color": colours},
                "hovertext": [f"{_loops(x)}<br><b>{percent(share)}</b> ({count(n, 'token')})"
                              for x, share, n in zip(spread, shares, tokens, strict=True)],
            })  # fmt: skip
            for x, share, n in zip(spread, shares, tokens, strict=True):
                grid.append((_loops(x), percent(share), str(n)))
                when_rows.append(when)
            own_rows = {"exit_minus_settling": list(spread), "share": shares, "tokens": tokens}
            sheets.append(pl.DataFrame({"served": way, "hops": value, **own_rows}))
    top = max(y for trace in data for y in trace["y"])
    xaxis = {"title": "exit − settling, loops", "dtick": 1, "showgrid": False}
    xaxis["range"] = [spread[0] - 0.7, spread[-1] + 0.7]
    yaxis = {"title": "share of tokens", "range": [0, min(1.03, 1.08 * top)], "tickformat": ".0%", "nticks": 6}
    at_all = sheets[0]
    said = "; ".join(f"{_loops(x)}: {percent(y)}" for x, y in at_all.select("exit_minus_settling", "share").iter_rows())
    return Figure(
        id=f"{task.slug}-served-spread",
        title="How far from settling tokens leave",
        spec={"data": data, "layout": layout(height=350, xaxis=xaxis, yaxis=yaxis)},
        alt=f"Bars over exit minus settling, all hops: {said}.",
        grid=Grid(("exit − settling", "share of tokens", "tokens"), tuple(grid), "agreement", when=tuple(when_rows)),
        sheet=pl.concat(sheets),
        keys=(
            Key("square", "other", "leaves before it settles"),
            Key("square", "model", "at once"),
            Key("square", "gate", "later"),
        ),
        choices=(choice, pick),
    )


def _way(rows: pl.DataFrame, way: str) -> pl.DataFrame:
    key = pl.concat_str("rule", "prefill", "layout", separator="/")
    return rows.filter(key == way)


def _loops(x: int) -> str:
    return "at settling" if x == 0 else f"{count(abs(x), 'loop')} {'later' if x > 0 else 'earlier'}"


def _cell(row: dict[str, Any]) -> str:
    return f"{signed(row['mean'])} ({interval(row['low'], row['high'])})"


def _hover(name: str, row: dict[str, Any]) -> str:
    return (
        f"k = {row['hops']}: {name}<br><b>{signed(row['mean'])}</b> loops ({interval(row['low'], row['high'])})<br>"
        f"not 0 at {percent(row['nonzero'])} of {number(float(row['n_tokens']), 0)} tokens"
    )
