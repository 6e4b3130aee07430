"""Numbers as words."""

from __future__ import annotations

import math

import pytest

from depthprobe.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.956, "96\u202f%"),
        (1.0, "100\u202f%"),
        (0.0, "0\u202f%"),
        (0.004, "0.4\u202f%"),
        (0.0002, "0.02\u202f%"),
        (None, "–"),
    ],
)
def test_percent(value: float | None, shown: str) -> None:
    assert text.percent(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "+0.50"), (-0.5, "−0.50"), (0.001, "0.00"), (-0.001, "0.00"), (math.nan, "–"), (None, "–")],
)
def test_signed(value: float | None, shown: str) -> None:
    assert text.signed(value) == shown


def test_intervals() -> None:
    assert text.interval(-0.1, 0.25) == "−0.10 to 0.25"
    assert text.percent_interval(0.86, 0.93) == "86 to 93\u202f%"
    assert text.points_interval(-0.031, 0.004) == "−3.1 to 0.4"
    for missing in (
        text.interval(None, 1.0),
        text.percent_interval(None, None),
        text.points_interval(None, 0.1),
    ):
        assert missing == "no interval"


@pytest.mark.parametrize(
    ("hops", "shown"),
    [
        ((3,), "k = 3"),
        ((1, 2), "k = 1 and 2"),
        ((1, 2, 3), "k = 1 to 3"),
        ((1, 2, 4), "k = 1, 2 and 4"),
        ((), "no k"),
    ],
)
def test_span(hops: tuple[int, ...], shown: str) -> None:
    assert text.span(hops) == shown


def test_count() -> None:
    assert [text.count(n, "story") for n in (1, 2)] == ["1 story", "2 stories"]
    assert [text.count(n, "question") for n in (0, 1)] == ["0 questions", "1 question"]
