"""Cleaning rows: converted to their types, checked, preprocessed; bad ones named and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycloud.data.formats import NAMED_BAD_ROWS, Piece
from raycloud.errors import DataError, MachineError, RaycloudError, TaskError
from raycloud.rows import MissingColumnError, Rows

if TYPE_CHECKING:
    from raycloud.data.index import BadRow
    from raycloud.task import Source

MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None")
"""How a missing value is spelled where text becomes anything else."""

_SHOWN = 40  # characters of a bad value
_FEW = 32  # values that are tried one by one
_INTEGER = r"^[+-]?(\d+|0[xX][0-9a-fA-F]+)$"
_FLOATING = r"(?i)^[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)$"
_BATCH_ROWS = 65536
_BATCH_BYTES = 8 * 2**20  # of rows that hold bytes, such as images, which grow when decoded, ...
_BATCH_BYTES_PLAIN = 32 * 2**20  # ... and of others
_TOLD = 5  # bad rows that an error tells of

Preprocess = Callable[[Rows], "Rows | Mapping[str, Any]"]


@dataclass(slots=True)
class Cleaned:
    """The rows of a slice that are kept, in their order; and the first 20 that are left out."""

    tables: list[pa.Table] = field(default_factory=list)
    bad_rows: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def leave_out(self, rows: int, named: Iterable[BadRow]) -> None:
        """Count bad rows; `named`: the first of them."""
        self.bad_rows += rows
        self.bad += islice(named, NAMED_BAD_ROWS - len(self.bad))


def clean(
    source: Source, preprocess: Preprocess, pieces: Iterable[Piece], *, skip: bool
) -> Cleaned:
    """Convert, check and preprocess the rows of a slice, in their order.

    `preprocess` is called with many rows; where it raises, with fewer, down to one. Bad rows are
    left out with `skip`; otherwise they end in an error, once all are counted.

    Raises:
        DataError: Rows are bad and not to be skipped; or a column is not there, or of types that
            differ from piece to piece.
        TaskError: `preprocess` broke its contract.
        MachineError: `preprocess` ran out of memory, or lost a connection.
    """
    cleaned = Cleaned()
    for batch in _batches(_checked(source, pieces, cleaned)):
        made = list(_preprocessed(preprocess, batch, 0, batch.table.num_rows, cleaned))
        if made:
            cleaned.tables.append(pa.concat_tables(_alike(made, cleaned.tables)))
    if cleaned.bad_rows and not skip:
        raise _refusal(cleaned)
    return cleaned


def _refusal(cleaned: Cleaned) -> DataError:
    first = sorted(cleaned.bad, key=lambda row: (row.file, row.row))[:_TOLD]
    told = [f"{row.file}: row {row.row}: {row.why}" for row in first]
    if more := cleaned.bad_rows - len(first):
        told.append(f"and {more} more")
    rows = f"{cleaned.bad_rows} row{'s' * (cleaned.bad_rows > 1)}"
    return DataError(
        f"{rows} of the data cannot be used: {'; '.join(told)}",
        hint="correct the rows (the first of a file is 0), or leave them out by "
        "data.bad_rows: skip; what columns hold is said by `Source.types`",
    )


class Converted(NamedTuple):
    """Good rows; their numbers before, None where all are left; and why others are bad, rising."""

    table: pa.Table
    kept: np.ndarray[Any, Any] | None
    bad: Mapping[int, str]


def types_of(types: Mapping[str, str] | None) -> dict[str, pa.DataType]:
    """Types by their names; a `DataError` where pyarrow knows no such type."""
    found = {}
    for column, name in (types or {}).items():
        try:
            found[column] = pa.type_for_alias(name)
        except ValueError as error:
            raise DataError(
                f"Source.types: column {column!r}: there is no type {name!r}",
                hint="write a type by pyarrow's name, such as float32, int64, string, bool or "
                "timestamp[s]",
            ) from error
    return found


def convert_columns(
    table: pa.Table, types: Mapping[str, pa.DataType], required: Iterable[str] = ()
) -> Converted:
    """Convert columns; rows with a value that does not, or without a required one, are bad.

    A `DataError` where a column is not there, or nothing of its type can become the other.
    """
    why: dict[int, str] = {}
    for column in (*types, *required):
        if column not in table.column_names:
            raise DataError(
                f"there is no column {column!r}; there are {', '.join(table.column_names)}",
                hint="correct the names in `Source.types` and `Source.required`",
            )
    for column, kind in types.items():
        given = table[column]
        if given.type == kind:
            continue
        values, failed = _converted(column, given, kind)
        for row in failed:
            why.setdefault(row, f"{column!r} = {_shown(given[row])} is no {kind}")
        table = table.set_column(table.column_names.index(column), column, values)
    for column in required:
        is_missing = pc.is_null(table[column], nan_is_null=pa.types.is_floating(table[column].type))
        for row in np.flatnonzero(is_missing.to_numpy()).tolist():
            why.setdefault(row, f"{column!r} is missing")
    if not why:
        return Converted(table, None, {})
    kept = np.delete(np.arange(table.num_rows), list(why))
    return Converted(table.take(kept), kept, dict(sorted(why.items())))


def plain_table(table: pa.Table) -> pa.Table:
    """The table without metadata, and dictionaries, which differ from part to part, spelled out."""
    for at, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(at, column.name, table.column(at).cast(column.type.value_type))
    bare = pa.schema([pa.field(column.name, column.type) for column in table.schema])
    return table if table.schema.equals(bare, check_metadata=True) else table.cast(bare)


def _shown(value: pa.Scalar) -> str:
    plain = value.as_py()
    if isinstance(plain, bytes):
        with suppress(UnicodeDecodeError):
            plain = plain.decode()
    text = repr(plain)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _converted(
    column: str, given: pa.ChunkedArray, kind: pa.DataType
) -> tuple[pa.ChunkedArray, list[int]]:
    """The column as another type, and the numbers of the rows that cannot be."""
    failed: list[int] = []
    chunks: list[pa.Array] = []
    at = 0
    try:
        for chunk in given.chunks:
            chunks += _halved(_readable(chunk, kind, at, failed), kind, at, failed)
            at += len(chunk)
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"column {column!r} of {given.type} cannot become {kind}",
            hint="give another type in `Source.types`, or convert it in `preprocess`",
        ) from error
    return pa.chunked_array(chunks, type=kind), failed


def _readable(array: pa.Array, kind: pa.DataType, at: int, failed: list[int]) -> pa.Array:
    """Bytes as text, and of text that becomes something else what can; the rest is missing."""
    if _is_binary(kind) or not (_is_binary(array.type) or _is_text(array.type)):
        return array
    if _is_binary(array.type):  # the cast checks that it is UTF-8
        array = pa.chunked_array(_halved(array, pa.string(), at, failed)).combine_chunks()
    if _is_text(kind):
        return array
    array = pc.utf8_trim_whitespace(array)
    is_missing = pc.is_in(array, value_set=pa.array(MISSING, array.type))
    array = pc.if_else(is_missing, pa.scalar(None, array.type), array)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        form = _INTEGER if pa.types.is_integer(kind) else _FLOATING
        strange = pc.invert(pc.match_substring_regex(array, form)).fill_null(False)  # noqa: FBT003
        failed += (np.flatnonzero(strange.to_numpy(zero_copy_only=False)) + at).tolist()
        array = pc.if_else(strange, pa.scalar(None, array.type), array)
    return array


def _halved(array: pa.Array, kind: pa.DataType, at: int, failed: list[int]) -> list[pa.Array]:
    """The array converted, in parts. Rows that cannot be are missing, and added to `failed`."""
    # An integer that float32 rounds is what was asked for; a fraction that int64 drops is not.
    safe = not (pa.types.is_integer(array.type) and pa.types.is_floating(kind))
    try:
        return [pc.cast(array, kind, safe=safe)]
    except pa.ArrowInvalid:
        if len(array) > _FEW:
            half = len(array) // 2
            left = _halved(array.slice(0, half), kind, at, failed)
            return left + _halved(array.slice(half), kind, at + half, failed)
    values = []
    for row, value in enumerate(array):
        try:
            values.append(value.cast(kind, safe=safe))
        except pa.ArrowInvalid:
            failed.append(at + row)
            values.append(pa.scalar(None, kind))
    return [pa.array(values, kind)]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _checked(source: Source, pieces: Iterable[Piece], cleaned: Cleaned) -> Iterator[Piece]:
    """The pieces, without rows that do not convert or lack what is required."""
    types = types_of(source.types)
    for piece in pieces:
        cleaned.leave_out(len(piece.bad), (piece.bad_number(*one) for one in piece.bad.items()))
        good = convert_columns(plain_table(piece.table), types, source.required)
        cleaned.leave_out(len(good.bad), (piece.bad_row(*one) for one in good.bad.items()))
        if good.table.num_rows:
            yield piece.only(good.kept, good.table)


class _Batch(NamedTuple):
    """Rows of several pieces, and where each is from."""

    table: pa.Table
    pieces: Sequence[Piece]

    def bad_row(self, row: int, why: str) -> BadRow:
        for piece in self.pieces:
            if row < piece.table.num_rows:
                break
            row -= piece.table.num_rows
        return piece.bad_row(row, why)


def _batches(pieces: Iterable[Piece]) -> Iterator[_Batch]:
    held: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        has_bytes = any("binary" in str(kind) for kind in piece.table.schema.types)
        limit = _BATCH_BYTES if has_bytes else _BATCH_BYTES_PLAIN
        count = piece.table.num_rows
        step = max(1, min(_BATCH_ROWS, limit * count // max(1, piece.table.nbytes)))
        for start in range(0, count, step):
            part = piece if step >= count else piece.part(start, min(start + step, count))
            rows += part.table.num_rows
            size += part.table.nbytes
            if held and (rows > _BATCH_ROWS or size > limit):
                yield _joined(held)
                held, rows, size = [], part.table.num_rows, part.table.nbytes
            held.append(part)
    if held:
        yield _joined(held)


def _joined(pieces: list[Piece]) -> _Batch:
    first = pieces[0]
    names, schema = set(first.table.column_names), first.table.schema
    for piece in pieces:
        if set(piece.table.column_names) != names:
            raise _unlike(first, piece)
    try:
        table = pa.concat_tables([piece.table for piece in pieces], promote_options="default")
    except pa.ArrowException:
        other = next(piece for piece in pieces if not piece.table.schema.equals(schema))
        raise _unlike(first, other) from None
    return _Batch(table, pieces)


def _unlike(one: Piece, other: Piece) -> DataError:
    what = _differing(one.table.schema, other.table.schema)
    return DataError(
        f"{other.file!r} has other columns than {one.file!r}: {what}",
        hint="give types in Source.types, or name what all files have in Source.columns",
    )


def _differing(one: pa.Schema, other: pa.Schema) -> str:
    """What is not the same in two schemas: `'a' was int64 and is string`."""
    was, now = (dict(zip(s.names, map(str, s.types), strict=True)) for s in (one, other))
    told = [
        f"{name!r} was {was.get(name, 'not there')} and is {now.get(name, 'not there')}"
        for name in {**was, **now}
        if was.get(name) != now.get(name)
    ]
    return "; ".join(told) or f"their order was {one.names} and is {other.names}"


def _preprocessed(
    preprocess: Preprocess, batch: _Batch, start: int, stop: int, cleaned: Cleaned
) -> Iterator[pa.Table]:
    """What `preprocess` makes of some rows; where it raises, of each half, down to single rows."""
    try:
        made = preprocess(Rows.from_table(batch.table.slice(start, stop - start)))
    except RaycloudError:
        raise
    except (Exception, SystemExit) as error:
        if fault := _fault(error, single=stop - start == 1):
            raise fault from error
        if stop - start == 1:
            cleaned.leave_out(1, [batch.bad_row(start, f"{type(error).__name__}: {error}")])
            return
        half = (start + stop) // 2
        yield from _preprocessed(preprocess, batch, start, half, cleaned)
        yield from _preprocessed(preprocess, batch, half, stop, cleaned)
        return
    table = _table(made)
    if table.num_rows:
        yield table


def _fault(error: BaseException, *, single: bool) -> RaycloudError | None:
    """What an error of `preprocess` says of the task or the machine; None: a row may be bad."""
    what = f"Task.preprocess raised {type(error).__name__}: {error}"
    match error:
        case MemoryError():
            hint = "give each reader more memory, by fewer of them (`data.cpus`)"
            return MachineError(what, hint=hint) if single else None  # fewer rows may fit
        case ConnectionError() | TimeoutError():  # as good a row meets them
            hint = "what it asks over the network does not answer: try again later"
            return MachineError(what, hint=hint)
        case SystemExit():  # no row's fault: it asks to end
            return TaskError(what, hint="let it raise another error, or return fewer rows")
        case NameError() | ImportError() | NotImplementedError() | SyntaxError():
            return TaskError(what, hint="correct the task")
        case MissingColumnError():
            return TaskError(what, hint="correct the task")
        case _ if "read-only" in str(error):
            return TaskError(what, hint="copy a column before writing into it")
    return None


def _table(made: Any) -> pa.Table:
    """What `preprocess` returned, as a table."""
    if not isinstance(made, Rows | Mapping | pa.Table):
        raise TaskError(
            f"Task.preprocess returned {type(made).__name__}",
            hint="return columns: a dict of arrays or lists of equal length, or `Rows`",
        )
    try:
        rows = Rows(made) if isinstance(made, Mapping) else made
        table = rows.to_table() if isinstance(rows, Rows) else rows
    except ValueError as error:
        raise TaskError(
            f"Task.preprocess returned what cannot be kept: {error}",
            hint="return arrays or lists of equal length, of numbers, strings, bytes or lists; "
            "images or windows of one size as one array",
        ) from error
    return table.replace_schema_metadata(None)


def _alike(tables: list[pa.Table], before: list[pa.Table]) -> list[pa.Table]:
    """The tables, all of one schema with those made before."""
    schema = (before or tables)[0].schema
    for table in tables:
        if not table.schema.equals(schema):
            raise TaskError(
                "Task.preprocess returned other columns than for the rows before: "
                + _differing(schema, table.schema),
                hint="make columns of one type and shape, whatever is in the rows: `astype` where "
                "values may be missing (or give `Source.types`), and one size of images",
            )
    return tables
