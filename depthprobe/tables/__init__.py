"""The tables that probes write and analysis reads: one schema per name, and a check.

Every probe turns (model, items) into one of these tables, and every figure is drawn from them, so a number in
a report can be followed to rows of a Parquet file. A new column is added to the schemas (`reading`, `causal`, `served`,
`frontier`) first.

    import polars as pl
    from depthprobe import tables
    lens = tables.check("lens", pl.read_parquet("run/tables/lens.parquet"))

Depth is always the *index on the model's depth axis* (0 = the embedding, the last index = the state that the
model's own head reads); `loop` and `layer` say which coordinate that is. Probabilities are in [0, 1],
entropies and divergences in nats, log-probabilities natural.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from depthprobe.errors import UserError
from depthprobe.tables import causal, frontier, reading, served
from depthprobe.tables.reading import FACT

__all__ = ["FACT", "NULLABLE", "SCHEMAS", "check", "conform", "empty"]

#: Every table. Those of `causal` are in a run folder only if their probe was asked for, those of `served` in a trace,
#: those of `frontier` in a folder of `depthprobe frontier`.
SCHEMAS: dict[str, dict[str, pl.DataType]] = {
    **reading.SCHEMAS, **causal.SCHEMAS, **served.SCHEMAS, **frontier.SCHEMAS,
}  # fmt: skip

#: Columns that may be null; a null anywhere else is an error of the writer.
NULLABLE: dict[str, frozenset[str]] = {
    **reading.NULLABLE, **causal.NULLABLE, **served.NULLABLE, **frontier.NULLABLE,
}  # fmt: skip


def empty(name: str) -> pl.DataFrame:
    """A table of that name without rows."""
    return pl.DataFrame(schema=_schema(name))


def conform(
    name: str, rows: pl.DataFrame | Mapping[str, object] | Iterable[Mapping[str, object]]
) -> pl.DataFrame:
    """Columns, lists or row dicts → the checked table, in the order and the types of the schema."""
    schema = _schema(name)
    if isinstance(rows, pl.DataFrame):
        df = rows
    elif isinstance(rows, Mapping):
        df = pl.DataFrame(dict(rows), schema_overrides=schema, strict=False)
    else:
        df = pl.DataFrame(list(rows), schema=schema, strict=False)
    _names(name, df)
    return check(name, df.select([pl.col(column).cast(kind) for column, kind in schema.items()]))


def check(name: str, df: pl.DataFrame) -> pl.DataFrame:
    """The same frame, if its columns, types and nulls are those of the table `name`.

    Raises:
        UserError: an unknown table, a missing or unknown column, another type, or a null where none may be.
    """
    schema = _schema(name)
    _names(name, df)
    for column, kind in schema.items():
        if df.schema[column] != kind:
            raise UserError(
                f"column '{column}' is {df.schema[column]}, expected {kind}",
                where=f"table {name}",
                remedy="write it with the same version of depthprobe, or run `depthprobe analyze` again",
            )
    for column in schema.keys() - NULLABLE[name]:
        nulls = df[column].null_count()
        if nulls:
            raise UserError(
                f"column '{column}' has {nulls} null values and may have none",
                where=f"table {name}",
                remedy="run `depthprobe analyze` again",
            )
    return df


def _schema(name: str) -> dict[str, pl.DataType]:
    if name not in SCHEMAS:
        raise UserError(f"there is no table '{name}'", remedy=f"known tables: {', '.join(SCHEMAS)}")
    return SCHEMAS[name]


def _names(name: str, df: pl.DataFrame) -> None:
    expected, got = set(SCHEMAS[name]), set(df.columns)
    for what, columns in (("lacks", expected - got), ("has unknown", got - expected)):
        if columns:
            raise UserError(
                f"the table {what} column{'s' if len(columns) > 1 else ''} {', '.join(sorted(columns))}",
                where=f"table {name}",
                remedy="write it with the same version of depthprobe, or run `depthprobe analyze` again",
            )
