"""The schemas' check: what it lets through and the one line for what it does not."""

from __future__ import annotations

import polars as pl
import pytest

from depthprobe import tables
from depthprobe.errors import UserError

ROW = {"task": "follow", "loop": 1, "accuracy": 0.5, "low": None, "high": 0.75}


@pytest.mark.parametrize("name", list(tables.SCHEMAS))
def test_every_table_can_be_empty(name: str) -> None:
    empty = tables.empty(name)
    assert tables.check(name, empty) is empty and tables.conform(name, []).equals(empty)
    assert tables.NULLABLE[name] <= set(empty.columns)


def test_conform_orders_and_casts() -> None:
    table = tables.conform("fixed_exits", [dict(reversed(ROW.items()))])
    assert table.columns == list(tables.SCHEMAS["fixed_exits"]) and table.schema["loop"] == pl.Int32
    assert tables.conform("fixed_exits", table.reverse()).equals(table)
    assert tables.conform("fixed_exits", {name: [value] for name, value in ROW.items()}).equals(table)


def test_what_does_not_fit_is_named() -> None:
    table = tables.conform("fixed_exits", [ROW])
    for broken, said in (
        (table.drop("loop"), "the table lacks column loop (table fixed_exits)"),
        (table.with_columns(a=1, b=2), "the table has unknown columns a, b (table fixed_exits)"),
        (table.cast({"loop": pl.Int64}), "column 'loop' is Int64, expected Int32"),
        (table.with_columns(task=pl.lit(None, pl.String)), "column 'task' has 1 null values"),
    ):
        with pytest.raises(UserError) as caught:
            tables.check("fixed_exits", broken)
        assert said in str(caught.value)
    with pytest.raises(UserError, match="there is no table 'lenses'"):
        tables.check("lenses", table)
