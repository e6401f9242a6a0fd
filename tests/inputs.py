"""From a `Source` to its rows in a few words, for tests of reading and cleaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from raycloud.data.clean import Cleaned, Preprocess, clean
from raycloud.data.index import Input
from raycloud.data.location import locate
from raycloud.data.slices import Piece, Slice, cut, read
from raycloud.rows import Rows
from raycloud.task import Source


def inputs_of(source: Source) -> list[Input]:
    """The files of a source, without digests."""
    return [Input(path=f.path, bytes=f.bytes, digest="") for f in locate(source)]


def slices_of(source: Source) -> tuple[Slice, ...]:
    """The slices of a source."""
    return cut(source, inputs_of(source))


def pieces_of(source: Source) -> list[Piece]:
    """All pieces of all slices."""
    return [piece for part in slices_of(source) for piece in read(source, part)]


def cleaned_of(
    source: Source, preprocess: Preprocess = lambda rows: rows, *, skip: bool = False
) -> list[Cleaned]:
    """What is left of all slices."""
    return [clean(source, preprocess, read(source, part), skip=skip) for part in slices_of(source)]


def rows_of(cleaned: Sequence[Cleaned]) -> list[dict[str, Any]]:
    """The rows, one after another."""
    tables = [table for one in cleaned for table in one.tables]
    return [row for table in tables for row in Rows.from_table(table).to_table().to_pylist()]


def bad_of(cleaned: Sequence[Cleaned]) -> list[tuple[str, int, str]]:
    """The bad rows that are named: the file's name, the row, and why."""
    return [(b.file.rpartition("/")[2], b.row, b.why) for one in cleaned for b in one.bad]


def column(pieces: Sequence[Piece], name: str) -> list[Any]:
    """A column of all pieces."""
    return [value for piece in pieces for value in piece.table[name].to_pylist()]


def places(pieces: Sequence[Piece]) -> list[tuple[str, int]]:
    """Where each row of all pieces is from: the file's name, and the row."""
    found = [piece.bad_row(i, "") for piece in pieces for i in range(piece.table.num_rows)]
    return [(one.file.rpartition("/")[2], one.row) for one in found]


def table_of(rows: int, first: int = 0) -> pa.Table:
    """Rows of a number and its name."""
    numbers = range(first, first + rows)
    return pa.table({"x": pa.array(numbers, pa.int32()), "name": [f"n{i}" for i in numbers]})
