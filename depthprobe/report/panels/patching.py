"""What another story's state does at each place: role × depth, and controls beside donors."""

from __future__ import annotations

from typing import Any

import polars as pl

from depthprobe.report import palette
from depthprobe.report.data import Task
from depthprobe.report.figures import Choice, Figure, Grid, agrees, depth_axis, layout, selected
from depthprobe.report.names import (
    DONORS,
    PATCHES,
    ROLES,
    SITES,
    donor_name,
    known_first,
    patch_name,
    role_name,
    site_name,
)
from depthprobe.report.panels.lines import Series, curves, hops_choice, tabled
from depthprobe.report.text import interval, missing, number, percent

__all__ = ["MOST_PATCHED", "controls_beside_donors", "patching_map"]

#: The map holds at most so many cells over all of its options; rarer options are left to the table.
MOST_PATCHED = 8000
#: Up to so many depths a cell is wide enough for its number.
_LABELLED = 14
_ROW = 32
_KEYS = ("hops", "donors", "site", "patch")


def patching_map(task: Task) -> Figure | None:
    """Heat map of the normalised effect, role × depth, for donors that change the answer; None without any.

    Its reader picks the hops, the kind of donor, the site and what is put there.
    """
    rows = _worded(task.patching_by_role.filter(~pl.col("control")))
    if not rows.height:
        return None
    choices = _choices(rows)
    rows, choices, left_out = _within(rows, choices)
    roles = known_first(rows["role"].unique().to_list(), ROLES)
    n_depths, start = len(task.axis.coordinates), selected(choices)
    data: list[dict[str, Any]] = []
    table: list[tuple[tuple[str, ...], dict[str, str]]] = []
    several = [choice for choice in choices if len(choice.options) > 1]
    for when, part in _options(rows, choices):
        data.append(_heat(task, part, roles, n_depths, when) | {"visible": agrees(when, start)})
        words = tuple(dict(choice.options)[when[choice.key]] for choice in several)
        table += [((*words, *cells), when) for cells in _cells(task, part, roles)]
    cells, when, note = tabled(table, choices)
    return Figure(
        id=f"{task.slug}-patching",
        title="Normalised effect of a patch, by role and depth",
        spec={
            "data": data,
            "layout": layout(
                height=_ROW * len(roles) + 70,
                xaxis=_narrow_axis(task),
                yaxis={
                    "title": "", "tickmode": "array", "tickvals": list(range(len(roles))),
                    "ticktext": [_in_two_lines(role_name(role)) for role in roles],
                    "range": [len(roles) - 0.5, -0.5], "showgrid": False,
                    "tickfont": {"size": 11.5, "color": "var(--soft)"},
                },
                left=100,
            ),
        },
        alt=_alt(task, rows, roles, start),
        grid=Grid(
            (*(choice.name for choice in several), "depth", *map(role_name, roles)),
            cells, "patching_by_role", when, " ".join(filter(None, (note, left_out))),
        ),
        sheet=_sheet(rows),
        scale=("−1", "0", "1: the donor's answer"),
        choices=choices,
    )  # fmt: skip


def controls_beside_donors(task: Task) -> tuple[Figure, ...]:
    """Effect and flips over depth, a line for each kind of donor, controls dashed; none in a run without controls."""
    all_rows = _worded(task.patching_by_role)
    controls = all_rows.filter(pl.col("control"))
    if not controls.height:
        return ()
    rows = all_rows.filter(pl.col("patch") == _first_patch(controls))
    # the two ends of the windows at one site: with all places the page would hold every row twice
    found_roles = controls["role"].unique().to_list()
    ends = [role for role in ("changed_word", "last") if role in found_roles]
    roles = ends or known_first(found_roles, ROLES)[:2]
    site = known_first(controls["site"].unique().to_list(), SITES)[0]
    rows = rows.filter(pl.col("role").is_in(roles) & (pl.col("site") == site))
    choices = (
        hops_choice(rows["hops"].unique().to_list()),
        Choice("role", "at", tuple((role, role_name(role)) for role in roles)),
    )
    kinds = {
        control: known_first(rows.filter(pl.col("control") == control)["donor_kind"].unique().to_list(), DONORS)
        for control in (False, True)
    }
    looks = {kind: look for control, names in kinds.items() for kind, look in zip(names, _LOOKS[control], strict=False)}
    found: list[Figure] = []
    for slug, column, title, yaxis in (
        ("controls", "effect", "Normalised effect", {"title": "normalised effect", "range": _reach(rows)}),
        ("control-flips", "flip", "Flips to the donor's answer", {"title": "share of pairs that flip"} | _SHARE),
    ):
        series: list[Series] = []
        parts = rows.partition_by(["donor_kind", "hops", "role"], as_dict=True, maintain_order=True)
        for (kind, hops, role), part in parts.items():
            bounds = ("low", "high") if column == "effect" else (pl.lit(None, pl.Float64), pl.lit(None, pl.Float64))
            own = part.sort("depth").select("depth", y=column, low=bounds[0], high=bounds[1], n="n_items")
            when = {"hops": "all" if hops is None else str(hops), "role": str(role)}
            if own["y"].drop_nulls().len() and kind in looks:
                series.append(Series(donor_name(str(kind)), looks[str(kind)], own, when))
        order = [donor_name(kind) for names in kinds.values() for kind in names]
        series.sort(key=lambda one: order.index(one.name))
        if not series:
            continue
        found.append(
            curves(
                task.axis,
                series,
                id=f"{task.slug}-{slug}",
                title=f"{title}, {site_name(site)}",
                alt=f"Lines over depth, one for each kind of donor, controls dashed: {title.lower()}.",
                source="patching_by_role",
                sheet=_sheet(rows),
                yaxis=yaxis,
                shown=number if column == "effect" else percent,
                choices=choices,
                what="pairs",
            )
        )
    return tuple(found)


_SHARE = {"range": [-0.02, 1.03], "tickformat": ".0%", "nticks": 6}
_LOOKS = {
    False: (("model", "circle", "solid"), ("gate", "square", "solid"), ("role-gender", "diamond", "solid")),
    True: (("rival", "circle-open", "dash"), ("other", "square-open", "dot"), ("role-offchain", "x", "dashdot")),
}


def _worded(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(patch=pl.concat_str("direction", "kind", "span", separator="."))


def _first_patch(rows: pl.DataFrame) -> str:
    return known_first(rows["patch"].unique().to_list(), PATCHES)[0]


def _choices(rows: pl.DataFrame) -> tuple[Choice, ...]:
    donors = known_first(rows["donor_kind"].unique().to_list(), DONORS)
    sites = known_first(rows["site"].unique().to_list(), SITES)
    patches = known_first(rows["patch"].unique().to_list(), PATCHES)
    return (
        hops_choice(rows["hops"].unique().to_list()),
        Choice("donors", "donor", tuple((kind, donor_name(kind)) for kind in donors)),
        Choice("site", "site", tuple((site, site_name(site)) for site in sites)),
        Choice("patch", "put there", tuple((patch, patch_name(patch)) for patch in patches)),
    )


def _within(rows: pl.DataFrame, choices: tuple[Choice, ...]) -> tuple[pl.DataFrame, tuple[Choice, ...], str]:
    """As many options as fit: of the kinds of patch, the sites and the donors the later ones go first."""
    column = {"patch": "patch", "site": "site", "donors": "donor_kind"}
    gone: list[str] = []
    while rows.height > MOST_PATCHED:
        open_ = [choice for choice in reversed(choices) if choice.key in column and len(choice.options) > 1]
        if not open_:
            break
        value, words = open_[0].options[-1]
        rows = rows.filter(pl.col(column[open_[0].key]) != value)
        gone.append(words)
        choices = _choices(rows)
    said = f"Left out to keep the page small: {', '.join(gone)}; the table patching_by_role has it all." if gone else ""
    return rows, choices, said


def _options(rows: pl.DataFrame, choices: tuple[Choice, ...]) -> list[tuple[dict[str, str], pl.DataFrame]]:
    """(options, their rows), in the order of the choices."""
    found: list[tuple[dict[str, str], pl.DataFrame]] = []
    columns = ["hops", "donor_kind", "site", "patch"]
    for key, part in rows.partition_by(columns, as_dict=True, maintain_order=True).items():
        hops, donor, site, patch = key
        values = ("all" if hops is None else str(hops), str(donor), str(site), str(patch))
        found.append((dict(zip(_KEYS, values, strict=True)), part))
    order = {choice.key: [value for value, _ in choice.options] for choice in choices}
    found.sort(key=lambda pair: [order[key].index(pair[0][key]) for key in ("donors", "site", "patch", "hops")])
    return found


def _heat(task: Task, part: pl.DataFrame, roles: list[str], n_depths: int, when: dict[str, str]) -> dict[str, Any]:
    z: list[list[float | None]] = [[None] * n_depths for _ in roles]
    hover = [[""] * n_depths for _ in roles]
    for row in part.iter_rows(named=True):
        at, depth = roles.index(row["role"]), row["depth"]
        z[at][depth] = None if missing(row["effect"]) else round(row["effect"], 4)
        hover[at][depth] = (
            f"{role_name(row['role'])}, {task.axis.long(depth)}<br><b>{number(row['effect'])}</b> "
            f"({interval(row['low'], row['high'])})<br>{percent(row['flip'])} flip; {row['n_items']} pairs"
        )
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": z,
        "x0": 0,
        "dx": 1,
        "y0": 0,
        "dy": 1,
        "zmin": -1,
        "zmax": 1,
        "colorscale": palette.effect_scale(),
        "showscale": False,
        "xgap": 2 if n_depths <= _LABELLED else 0,
        "ygap": 2,
        "hoverongaps": False,
        "hoverinfo": "text",
        "hovertext": hover,
        "meta": {"when": when},
    }
    if n_depths <= _LABELLED:
        trace |= {
            "text": [["" if value is None else number(value) for value in row] for row in z],
            "texttemplate": "%{text}",
            "textfont": {"size": 11.5},
        }
    return trace


def _cells(task: Task, part: pl.DataFrame, roles: list[str]) -> list[tuple[str, ...]]:
    of = {(row["role"], row["depth"]): row for row in part.iter_rows(named=True)}

    def shown(role: str, depth: int) -> str:
        row = of.get((role, depth))
        if row is None or missing(row["effect"]):
            return "–"
        return f"{number(row['effect'])} ({interval(row['low'], row['high'])})"

    depths = sorted({depth for _, depth in of})
    return [(task.axis.long(depth), *(shown(role, depth) for role in roles)) for depth in depths]


def _narrow_axis(task: Task) -> dict[str, Any]:
    """The depth axis beside long labels: on a phone there is no room for the depths within loops."""
    axis = depth_axis(task.axis)
    if task.axis.steps_per_loop > 1 and task.axis.looped:
        kept = [i for i, depth in enumerate(axis["tickvals"]) if int(depth) in task.axis.between_loops]
        axis |= {name: [axis[name][i] for i in kept] for name in ("tickvals", "ticktext")}
    return axis


def _in_two_lines(words: str) -> str:
    """A long label, broken at the space nearest its middle."""
    if len(words) <= 14:
        return words
    at = min((i for i, c in enumerate(words) if c == " "), key=lambda i: abs(i - len(words) / 2), default=0)
    return f"{words[:at]}<br>{words[at + 1:]}" if at else words


def _sheet(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.drop("patch")


def _reach(rows: pl.DataFrame) -> list[float]:
    """A range for effects: 0 … 1 and what lies outside, up to two units."""
    values = [v for c in ("effect", "low", "high") for v in rows[c].drop_nulls().drop_nans()]
    return [max(min([*values, 0.0]), -1.0) - 0.06, min(max([*values, 1.0]), 2.0) + 0.06]


def _alt(task: Task, rows: pl.DataFrame, roles: list[str], start: dict[str, str]) -> str:
    first = next((part for when, part in _options(rows, _choices(rows)) if agrees(when, start)), rows.clear())
    said: list[str] = []
    for role in roles:
        own = first.filter((pl.col("role") == role) & pl.col("effect").is_not_null()).sort("depth")
        if own.height:
            ends = own["effect"][0], own["effect"][-1]
            named = task.axis.long(own["depth"][0]), task.axis.long(own["depth"][-1])
            said.append(f"{role_name(role)} {number(ends[0])} at {named[0]}, {number(ends[1])} at {named[1]}")
    return "Heat map: normalised effect, rows by role, columns by depth. " + ("; ".join(said) or "No effects") + "."
