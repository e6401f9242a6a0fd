"""Tables: Parquet and Arrow files, cut at row groups and record batches; and CSV.

CSV is read as bytes, then converted, so that a value that is none of its column's is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from raycloud.data.clean import convert_columns, types_of
from raycloud.data.formats import Piece, Slice, columns_to_read, suffix_of
from raycloud.data.formats_text import check_encoding, text_of
from raycloud.data.location import open_input
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.data.retry import Pause
    from raycloud.task import Source

_PART_BYTES = 5 * 2**20  # that are asked for at once, about; as fsspec's buffers are
_BATCH_BYTES = 8 * 2**20  # of decoded rows at once
_BATCH_ROWS = 65536
_MAGIC = b"ARROW1"
_CSV_BYTES = 8 * 2**20  # of CSV at once
_HEAD_BYTES = 2**20
_LINE_BYTES = 2**16
_FOUND = (pa.int64(), pa.float64(), pa.bool_())
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')
_AS_THEY_ARE = csv.ConvertOptions(check_utf8=False)


def holds_bytes(source: Source, file: Input, format_: str, pause: Pause) -> bool:
    """Whether rows hold bytes, such as images, which grow when they are decoded."""
    is_parquet = format_ == "parquet"
    ahead = not is_parquet or file.bytes <= _PART_BYTES
    with open_input(source, file, pause, ahead=ahead) as opened:
        schema = pq.read_schema(opened) if is_parquet else _arrow_reader(opened).schema
        names = columns_to_read(source, schema.names, file.path)
        return any(_has_bytes(schema.field(name).type) for name in names)


def parquet_parts(source: Source, file: Input, pause: Pause) -> list[int]:
    """Encoded bytes of the columns to read of each row group."""
    with open_input(source, file, pause, ahead=file.bytes <= _PART_BYTES) as opened:
        parquet = pq.ParquetFile(opened)
        names = set(columns_to_read(source, parquet.schema_arrow.names, file.path))
        groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
        return [
            sum(
                column.total_compressed_size
                for column in map(group.column, range(group.num_columns))
                if column.path_in_schema.partition(".")[0] in names
            )
            for group in groups
        ]


def arrow_parts(source: Source, file: Input, pause: Pause) -> list[int]:
    """About how many bytes each record batch has; of a stream, which has no index, one part."""
    with open_input(source, file, pause) as opened:
        count = getattr(_arrow_reader(opened), "num_record_batches", 1)
        return [file.bytes // max(count, 1)] * count


def read_parquet(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows of some row groups, or of whole files."""
    for file in piece.inputs:
        with open_input(source, file, pause, ahead=file.bytes <= _PART_BYTES) as opened:
            parquet = pq.ParquetFile(opened, pre_buffer=True)
            metadata = parquet.metadata
            names = columns_to_read(source, parquet.schema_arrow.names, file.path)
            row = sum(metadata.row_group(g).num_rows for g in range(piece.start))
            stop = piece.stop or metadata.num_row_groups
            for groups, size in _read_at_once(metadata, piece.start, stop):
                for batch in parquet.iter_batches(
                    batch_size=size,
                    row_groups=groups,
                    columns=names,
                    use_threads=False,
                ):
                    table = pa.Table.from_batches([batch]).select(names)
                    numbers = np.arange(row, row + batch.num_rows)
                    yield Piece(table=table, file=file.path, numbers=numbers)
                    row += batch.num_rows


def _read_at_once(metadata: Any, start: int, stop: int) -> Iterator[tuple[list[int], int]]:
    """Row groups to ask for together, so that many small ones are one part; and rows at once."""
    groups, rows, size = list[int](), 0, 0
    for group in range(start, stop):
        part = metadata.row_group(group)
        groups.append(group)
        rows, size = rows + part.num_rows, size + part.total_byte_size
        if size >= _PART_BYTES or group == stop - 1:
            yield groups, min(_BATCH_ROWS, max(1, _BATCH_BYTES * rows // max(1, size)))
            groups, rows, size = [], 0, 0


def read_arrow(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows of some record batches, or of whole files or streams."""
    for file in piece.inputs:

        def before(file: Input = file) -> int:
            with open_input(source, file, pause) as opened:
                reader = pa.ipc.open_file(opened)
                return sum(reader.get_batch(number).num_rows for number in range(piece.start))

        with open_input(source, file, pause) as opened:
            reader = _arrow_reader(opened)
            names = columns_to_read(source, reader.schema.names, file.path)
            row = 0
            batches = reader
            if isinstance(reader, pa.ipc.RecordBatchFileReader):
                stop = piece.stop or reader.num_record_batches
                batches = map(reader.get_batch, range(piece.start, stop))
            for batch in batches:
                batch.validate(full=True)  # else texts may lie where the file has ended
                yield Piece(
                    table=pa.Table.from_batches([batch]).select(names),
                    file=file.path,
                    numbers=np.arange(row, row + batch.num_rows),
                    before=before if piece.start else int,
                )
                row += batch.num_rows


def _arrow_reader(opened: pa.NativeFile) -> Any:
    """A reader of a file or of a stream, whichever it is."""
    head = opened.read(len(_MAGIC))
    opened.seek(0)
    return pa.ipc.open_file(opened) if head == _MAGIC else pa.ipc.open_stream(opened)


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


# CSV.


@dataclass(slots=True)
class _Text:
    """A file's text, from its beginning, and what pyarrow must know of it.

    `short` says, by its number, why a row is refused: it has another number of values than names.
    """

    source: Source
    stream: Any
    delimiter: str
    header: list[str] = field(default_factory=list)
    short: dict[int, str] = field(default_factory=dict)

    def open(self, convert: csv.ConvertOptions, block_bytes: int = _HEAD_BYTES) -> Any:
        """A reader of record batches."""
        names = None if self.source.names is None else list(self.source.names)
        return csv.open_csv(
            self.stream,
            read_options=csv.ReadOptions(
                use_threads=False, block_size=block_bytes, column_names=names
            ),
            parse_options=csv.ParseOptions(
                delimiter=self.delimiter,
                newlines_in_values=True,
                invalid_row_handler=self._refuse,
            ),
            convert_options=convert,
        )

    def _refuse(self, row: csv.InvalidRow) -> str:
        first = 1 if self.source.names is not None else 2  # pyarrow's number of the first row
        self.short[row.number - first] = (
            f"has {row.actual_columns} values, not {row.expected_columns}"
        )
        return "skip"


def csv_types(source: Source, inputs: Sequence[Input], pause: Pause) -> tuple[tuple[str, str], ...]:
    """Types of the columns to read, as declared, or as found at the head of the data."""
    found: dict[str, pa.DataType] = {}
    for file in inputs:
        with _opened(source, file, pause) as text:
            reader = text.open(_AS_THEY_ARE)
            names = columns_to_read(source, text.header, file.path)
            kinds = {name: reader.schema.field(name).type for name in names}
            found = {n: kind if kind in _FOUND else pa.string() for n, kind in kinds.items()}
            if next(iter(reader), pa.table({})).num_rows:
                break
    declared = {n: kind for n, kind in types_of(source.types).items() if n in found}
    return tuple((name, str(kind)) for name, kind in (found | declared).items())


def read_csv(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows of whole files; one of another length, or that does not convert, is bad."""
    types = types_of(dict(piece.types))
    for file in piece.inputs:
        with _opened(source, file, pause) as text:
            names = _expected(source, text.header, piece, file)
            convert = csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.binary()),
                include_columns=names,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            )
            reader = text.open(convert, _CSV_BYTES)
            row = told = 0
            # Short rows at the end are known once pyarrow has given the last batch.
            for batch in chain(reader, [pa.RecordBatch.from_pylist([], reader.schema)]):
                numbers = np.arange(row, row + batch.num_rows + len(text.short))
                numbers = numbers[~np.isin(numbers, list(text.short))][: batch.num_rows]
                row = int(numbers[-1]) + 1 if len(numbers) else row
                short = dict(islice(text.short.items(), told, None))
                if not (batch.num_rows or short):
                    continue
                told += len(short)
                good = convert_columns(pa.Table.from_batches([batch]), types)
                bad = short | {int(numbers[row]): why for row, why in good.bad.items()}
                yield Piece(
                    table=good.table,
                    file=file.path,
                    numbers=numbers if good.kept is None else numbers[good.kept],
                    bad=dict(sorted(bad.items())),
                )


@contextmanager
def _opened(source: Source, file: Input, pause: Pause) -> Iterator[_Text]:
    if file.bytes == 0:
        raise DataError(
            f"{file.path!r} is empty: not even a header",
            hint="write the file again, or leave it out by `Source.select`",
        )
    with open_input(source, file, pause) as opened:
        text = text_of(source, file, opened)  # would close the file where it is let go of
        head = text.read(_LINE_BYTES)
        check_encoding(source, file, head)
        delimiter = source.delimiter or _delimiter(file.path, head)
        names = source.names
        header = _header(source, head, delimiter, file) if names is None else list(names)
        opened.seek(0)
        yield _Text(source, text_of(source, file, opened), delimiter, header)


def _header(source: Source, head: bytes, delimiter: str, file: Input) -> list[str]:
    names: list[str] = _Text(source, BytesIO(head), delimiter).open(_AS_THEY_ARE).schema.names
    if twice := sorted({repr(name) for name in names if names.count(name) > 1}):
        raise DataError(
            f"{file.path!r} has several columns named {', '.join(twice)}",
            hint="give each column its own name in the file's header",
        )
    if source.columns is None and all(map(_is_number, names)):
        raise DataError(
            f"{file.path!r} begins with numbers alone, where the names of its columns should be: "
            f"{delimiter.join(names)!r:.80}",
            hint="if it has no header, give Source.names; if these are names, Source.columns",
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _delimiter(path: str, head: bytes) -> str:
    if suffix_of(path) == "tsv":
        return "\t"
    line = _QUOTED.sub(b"", head).partition(b"\n")[0]
    return next((mark for mark in ",;\t|" if mark.encode() in line), ",")


def _expected(source: Source, header: list[str], piece: Slice, file: Input) -> list[str]:
    names = [name for name, _ in piece.types]
    missing = [name for name in names if name not in header]
    other = [] if source.columns is not None else [name for name in header if name not in names]
    if missing or other:
        what = f"lacks {missing}" if missing else f"has {other} besides"
        raise DataError(
            f"{file.path!r} has other columns than the first file: it {what}",
            hint="name the columns that all files have in Source.columns",
        )
    return names
