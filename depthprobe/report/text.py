"""Numbers and findings as words. Nothing here knows HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = [
    "count",
    "interval",
    "missing",
    "number",
    "percent",
    "percent_interval",
    "points_interval",
    "signed",
    "span",
]

NARROW = "\u202f"  # between a number and its %
MINUS = "\u2212"


def missing(value: float | None) -> bool:
    """Null in a table or NaN from a mean of nothing."""
    return value is None or math.isnan(value)


def count(n: int, noun: str) -> str:
    """ "1 story", "12 stories"."""
    return f"{n} {noun if n == 1 else noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"


def number(value: float | None, digits: int = 2) -> str:
    """A plain number; an en dash for a missing one. Never "−0.00"."""
    if value is None or math.isnan(value):
        return "–"
    shown = f"{value:.{digits}f}"
    if float(shown) == 0:
        shown = f"{0:.{digits}f}"
    return shown.replace("-", MINUS)


def signed(value: float | None, digits: int = 2) -> str:
    """A change: always with its sign, except a zero."""
    shown = number(value, digits)
    return f"+{shown}" if value is not None and value > 0 and float(f"{value:.{digits}f}") > 0 else shown


def percent(value: float | None) -> str:
    """A share of 1 as whole percent, with one more digit below 1 % (a full vocabulary makes small shares)."""
    if value is None or math.isnan(value):
        return "–"
    shown = 100 * value
    digits = 0 if shown >= 0.95 or shown == 0 else 1 if shown >= 0.05 else 2
    return f"{shown:.{digits}f}{NARROW}%"


def interval(low: float | None, high: float | None, digits: int = 2) -> str:
    """ "0.41 to 0.63", or that there is none."""
    if missing(low) or missing(high):
        return "no interval"
    return f"{number(low, digits)} to {number(high, digits)}"


def percent_interval(low: float | None, high: float | None) -> str:
    """ "86 to 93 %", or that there is none."""
    if missing(low) or missing(high):
        return "no interval"
    first, last = percent(low), percent(high)
    return f"{first.removesuffix(NARROW + '%')} to {last}"


def points_interval(low: float | None, high: float | None) -> str:
    """Bounds of a difference of shares, in points: "−3.1 to 0.4"."""
    if low is None or high is None:
        return interval(None, None)
    return interval(100 * low, 100 * high, 1)


def span(values: Sequence[int]) -> str:
    """Hop counts in words: "k = 3", "k = 1 to 6", "k = 1, 2 and 4"."""
    if not values:
        return "no k"
    if len(values) == 1:
        return f"k = {values[0]}"
    if list(values) == list(range(values[0], values[-1] + 1)) and len(values) > 2:
        return f"k = {values[0]} to {values[-1]}"
    return f"k = {', '.join(map(str, values[:-1]))} and {values[-1]}"
