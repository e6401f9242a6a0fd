"""From what was read to what is kept: types, required values, preprocessing, bad rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raycloud.data.convert import sift, types_of
from raycloud.data.index import BadRow
from raycloud.data.pieces import NAMED_BAD_ROWS, Piece
from raycloud.errors import DataError, MachineError, RaycloudError, TaskError
from raycloud.rows import MissingColumnError, Rows

if TYPE_CHECKING:
    from raycloud.task import Source

_BATCH_ROWS = 65536
_BATCH_BYTES = 8 * 2**20  # of rows that hold bytes, such as images, which grow when decoded, ...
_BATCH_BYTES_PLAIN = 32 * 2**20  # ... and of others
_TOLD = 5  # bad rows that an error tells of
_TASKS_FAULT = (NameError, ImportError, NotImplementedError, SyntaxError, MissingColumnError)
_MACHINES_FAULT = (MemoryError, ConnectionError, TimeoutError)  # as good a row meets them

Preprocess = Callable[[Rows], "Rows | Mapping[str, Any]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """Rows to keep.

    Attributes:
        table: The rows; where there are none it may have no columns either.
        bad_rows: How many rows that were read beside these are left out.
        bad: The first of those, at most 20.
    """

    table: pa.Table
    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()


def clean(
    source: Source, preprocess: Preprocess, pieces: Iterable[Piece], *, skip: bool
) -> Iterator[Cleaned]:
    """Convert, check and preprocess the rows of a slice, in their order.

    Args:
        source: Its types and required values.
        preprocess: Called with many rows; where it raises, with fewer, down to one.
        pieces: The rows.
        skip: Whether bad rows are left out; otherwise they end in an error, once all are counted.

    Raises:
        DataError: Rows are bad and not to be skipped; or a column is not there, or of types that
            differ from piece to piece.
        TaskError: `preprocess` broke its contract.
        MachineError: `preprocess` ran out of memory, or lost a connection.
    """
    bad = _Bad()
    run = _Run(preprocess, bad)
    for batch in _batches(_checked(source, pieces, bad)):
        for table in run.kept(batch):
            yield Cleaned(table=table, bad_rows=bad.fresh_rows, bad=bad.take())
    if bad.fresh_rows:
        empty = pa.table({}) if run.schema is None else run.schema.empty_table()
        yield Cleaned(table=empty, bad_rows=bad.fresh_rows, bad=bad.take())
    if bad.rows and not skip:
        raise bad.error()


@dataclass(slots=True)
class _Bad:
    """The bad rows so far."""

    rows: int = 0
    named: list[BadRow] = field(default_factory=list)
    fresh_rows: int = 0
    _fresh: list[BadRow] = field(default_factory=list)

    def add(self, rows: int, named: Iterable[BadRow]) -> None:
        """Count some; `named`: the first of them."""
        self.rows += rows
        self.fresh_rows += rows
        for row in named:
            if len(self._fresh) < NAMED_BAD_ROWS:
                self._fresh.append(row)
            if len(self.named) < NAMED_BAD_ROWS:
                self.named.append(row)

    def take(self) -> tuple[BadRow, ...]:
        """Those since the last time."""
        taken = tuple(self._fresh)
        self.fresh_rows = 0
        self._fresh.clear()
        return taken

    def error(self) -> DataError:
        """What is raised of them."""
        first = sorted(self.named, key=lambda row: (row.file, row.row))[:_TOLD]
        told = "; ".join(f"{row.file}: row {row.row}: {row.why}" for row in first)
        more = f"; and {self.rows - len(first)} more" if self.rows > len(first) else ""
        what = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return DataError(
            f"{what} of the data cannot be used: {told}{more}",
            hint="correct the rows (the first of a file is 0), or leave them out by "
            "data.bad_rows: skip; what columns hold is said by `Source.types`",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Rows of several pieces, and where each is from."""

    table: pa.Table
    pieces: tuple[Piece, ...]

    def place(self, row: int) -> tuple[str, int]:
        """The file of a row, and the row's number there."""
        starts = list(accumulate((piece.table.num_rows for piece in self.pieces), initial=0))
        number = bisect_right(starts, row) - 1
        return self.pieces[number].place(row - starts[number])


def _checked(source: Source, pieces: Iterable[Piece], bad: _Bad) -> Iterator[Piece]:
    """The pieces, without rows that do not convert or lack what is required."""
    types = types_of(source.types)
    required = tuple(source.required)
    for piece in pieces:
        bad.add(piece.bad_rows, piece.unread())
        good = sift(_plain(piece.table), types, required)
        places = [piece.place(row) for row in good.bad[:NAMED_BAD_ROWS]]
        named = zip(places, good.why, strict=False)
        bad.add(len(good.bad), [BadRow(file=file, row=row, why=why) for (file, row), why in named])
        if good.table.num_rows == 0:
            continue
        if good.kept is None:
            yield replace(piece, table=good.table)
        else:
            yield piece.only(good.kept, good.table)


def _plain(table: pa.Table) -> pa.Table:
    """The table without metadata, and dictionaries, which differ from part to part, spelled out."""
    for at, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(at, column.name, table.column(at).cast(column.type.value_type))
    bare = pa.schema([pa.field(column.name, column.type) for column in table.schema])
    return table if table.schema.equals(bare, check_metadata=True) else table.cast(bare)


def _batches(pieces: Iterable[Piece]) -> Iterator[_Batch]:
    held: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        limit = _BATCH_BYTES if _has_bytes(piece.table) else _BATCH_BYTES_PLAIN
        count = piece.table.num_rows
        step = max(1, min(_BATCH_ROWS, limit * count // max(1, piece.table.nbytes)))
        for start in range(0, count, step):
            part = piece if step >= count else piece.part(start, min(start + step, count))
            more, bytes_more = part.table.num_rows, part.table.nbytes
            if held and (rows + more > _BATCH_ROWS or size + bytes_more > limit):
                yield _joined(held)
                held, rows, size = [], 0, 0
            held.append(part)
            rows += more
            size += bytes_more
    if held:
        yield _joined(held)


def _joined(pieces: list[Piece]) -> _Batch:
    first = pieces[0]
    for piece in pieces[1:]:
        if set(piece.table.column_names) != set(first.table.column_names):
            raise _unlike(first, piece)
    try:
        table = pa.concat_tables([piece.table for piece in pieces], promote_options="default")
    except pa.ArrowException:
        pairs = ((first, piece) for piece in pieces[1:])
        raise next(
            _unlike(one, other)
            for one, other in pairs
            if not one.table.schema.equals(other.table.schema)
        ) from None
    return _Batch(table=table, pieces=tuple(pieces))


def _unlike(one: Piece, other: Piece) -> DataError:
    what = _differing(one.table.schema, other.table.schema)
    return DataError(
        f"{other.file!r} has other columns than {one.file!r}: {what}",
        hint="give their types in Source.types, or name those that all files have in "
        "Source.columns",
    )


def _has_bytes(table: pa.Table) -> bool:
    return any("binary" in str(kind) for kind in table.schema.types)


def _differing(one: pa.Schema, other: pa.Schema) -> str:
    """What is not the same in two schemas: `'a' is int64 here and string there`."""

    def kind(schema: pa.Schema, name: str) -> str:
        return str(schema.field(name).type) if name in schema.names else "not there"

    names = dict.fromkeys((*one.names, *other.names))
    pairs = [(name, kind(one, name), kind(other, name)) for name in names]
    told = [f"{name!r} was {a} and is {b}" for name, a, b in pairs if a != b]
    return "; ".join(told) or f"their order was {one.names} and is {other.names}"


class _Run:
    """The task's preprocessing, of one batch after another."""

    def __init__(self, preprocess: Preprocess, bad: _Bad) -> None:
        """Nothing is made yet."""
        self.schema: pa.Schema | None = None
        self._preprocess = preprocess
        self._bad = bad

    def kept(self, batch: _Batch) -> Iterator[pa.Table]:
        """What becomes of the batch: one table, or none."""
        tables = list(self._tried(batch, 0, batch.table.num_rows))
        if tables:
            yield pa.concat_tables(tables)

    def _tried(self, batch: _Batch, start: int, stop: int) -> Iterator[pa.Table]:
        rows = Rows.from_table(batch.table.slice(start, stop - start))
        try:
            made = self._preprocess(rows)
        except RaycloudError:
            raise
        except _TASKS_FAULT as error:
            raise _fault(error, "correct the task") from error
        except _MACHINES_FAULT as error:
            if isinstance(error, MemoryError) and stop - start > 1:
                yield from self._halves(batch, start, stop)  # fewer rows may fit
                return
            raise MachineError(
                f"Task.preprocess raised {type(error).__name__}: {error}",
                hint="give each reader more memory, by fewer of them (`data.cpus`)"
                if isinstance(error, MemoryError)
                else "what it asks over the network does not answer: try again later",
            ) from error
        except SystemExit as error:  # no row's fault: it asks to end
            raise _fault(error, "let it raise another error, or return fewer rows") from error
        except Exception as error:
            if "read-only" in str(error):
                raise _fault(error, "copy a column before writing into it") from error
            if stop - start > 1:
                yield from self._halves(batch, start, stop)
                return
            file, row = batch.place(start)
            self._bad.add(1, [BadRow(file=file, row=row, why=f"{type(error).__name__}: {error}")])
            return
        table = self._table(made)
        if table.num_rows:
            yield table

    def _halves(self, batch: _Batch, start: int, stop: int) -> Iterator[pa.Table]:
        half = (start + stop) // 2
        yield from self._tried(batch, start, half)
        yield from self._tried(batch, half, stop)

    def _table(self, made: Any) -> pa.Table:
        """What was returned, as a table like those before it."""
        if not isinstance(made, Rows | Mapping | pa.Table):
            raise TaskError(
                f"Task.preprocess returned {type(made).__name__}",
                hint="return columns: a dict of arrays or lists of equal length, or `Rows`",
            )
        try:
            table = Rows(made) if isinstance(made, Mapping) else made
            table = table.to_table() if isinstance(table, Rows) else table
        except ValueError as error:
            raise TaskError(
                f"Task.preprocess returned what cannot be kept: {error}",
                hint="return arrays or lists of equal length, of numbers, strings, bytes or lists; "
                "images or windows of one size as one array",
            ) from error
        table = table.replace_schema_metadata(None)
        if self.schema is None:
            self.schema = table.schema
        elif not table.schema.equals(self.schema):
            raise TaskError(
                "Task.preprocess returned other columns than for the rows before: "
                + _differing(self.schema, table.schema),
                hint="make columns of one type and shape, whatever is in the rows: `astype` where "
                "values may be missing (or give `Source.types`), and one size of images",
            )
        return table


def _fault(error: BaseException, hint: str) -> TaskError:
    return TaskError(f"Task.preprocess raised {type(error).__name__}: {error}", hint=hint)
