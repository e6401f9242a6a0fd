"""CSV: read as bytes, then converted, so that a value that is none of its column's is named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from raycloud.data.convert import sift, types_of
from raycloud.data.formats import suffix_of
from raycloud.data.index import BadRow, Input
from raycloud.data.pieces import NAMED_BAD_ROWS, Piece, Slice
from raycloud.data.reading import check_encoding, chosen, reading, text_of
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.patience import Pause
    from raycloud.task import Source

_BLOCK_BYTES = 8 * 2**20
_HEAD_BYTES = 2**20
_LINE_BYTES = 2**16
_FOUND = (pa.int64(), pa.float64(), pa.bool_())
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """A file's text, from its beginning; what separates values; and the names of the columns."""

    stream: pa.NativeFile
    delimiter: str
    header: list[str]


@dataclass(slots=True)
class _Refused:
    """Rows with another number of values than there are columns; pyarrow's number of the first."""

    first: int
    why: dict[int, str] = field(default_factory=dict)
    named: int = 0  # those that a piece has told of

    def __call__(self, row: csv.InvalidRow) -> str:
        self.why[row.number - self.first] = (
            f"has {row.actual_columns} values, not {row.expected_columns}"
        )
        return "skip"


def csv_types(source: Source, inputs: Sequence[Input], pause: Pause) -> tuple[tuple[str, str], ...]:
    """Types of the columns to read, as declared, or as found at the head of the data."""
    found: dict[str, pa.DataType] = {}
    for file in inputs:
        with _opened(source, file, pause) as text:
            reader = csv.open_csv(
                text.stream,
                read_options=_naming(source, _HEAD_BYTES),
                parse_options=_parsing(text.delimiter, _refused(source)),
                convert_options=csv.ConvertOptions(check_utf8=False),
            )
            names = chosen(source, text.header, file.path)
            kinds = {name: reader.schema.field(name).type for name in names}
            found = {n: kind if kind in _FOUND else pa.string() for n, kind in kinds.items()}
            if next(iter(reader), pa.table({})).num_rows:
                break
    declared = {n: kind for n, kind in types_of(source.types).items() if n in found}
    return tuple((name, str(kind)) for name, kind in (found | declared).items())


def read_csv(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows of whole files; one of another length, or that does not convert, is bad."""
    for file in piece.inputs:
        with _opened(source, file, pause) as text:
            names = _expected(source, text.header, piece, file)
            refused = _refused(source)
            reader = csv.open_csv(
                text.stream,
                read_options=_naming(source, _BLOCK_BYTES),
                parse_options=_parsing(text.delimiter, refused),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.binary()),
                    include_columns=names,
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            yield from _pieces(reader, types_of(dict(piece.types)), file.path, refused)


def _pieces(
    reader: Any, types: dict[str, pa.DataType], file: str, refused: _Refused
) -> Iterator[Piece]:
    row = 0
    last = pa.Table.from_batches([], reader.schema)
    for batch in reader:
        numbers, row = _numbers(row, batch.num_rows, refused.why)
        yield _piece(pa.Table.from_batches([batch]), numbers, types, file, refused)
    if len(refused.why) > refused.named:
        yield _piece(last, np.arange(0), types, file, refused)


def _piece(
    table: pa.Table,
    numbers: np.ndarray[Any, Any],
    types: dict[str, pa.DataType],
    file: str,
    refused: _Refused,
) -> Piece:
    good = sift(table, types)
    short = list(refused.why.items())[refused.named :]
    refused.named += len(short)
    unfit = zip(numbers[list(good.bad)].tolist(), good.why, strict=True)
    bad = sorted([*short, *unfit])
    return Piece(
        table=good.table,
        file=file,
        numbers=numbers if good.kept is None else numbers[good.kept],
        bad=tuple(BadRow(file=file, row=number, why=why) for number, why in bad[:NAMED_BAD_ROWS]),
        bad_rows=len(bad),
    )


def _numbers(row: int, count: int, bad: dict[int, str]) -> tuple[np.ndarray[Any, Any], int]:
    """The numbers of the next `count` good rows, and of the row after them."""
    numbers = np.arange(row, row + count)
    for number in sorted(number for number in bad if number >= row):
        if count == 0 or number > numbers[-1]:
            break
        numbers[numbers >= number] += 1
    return numbers, int(numbers[-1]) + 1 if count else row


@contextmanager
def _opened(source: Source, file: Input, pause: Pause) -> Iterator[_Text]:
    if file.bytes == 0:
        raise DataError(
            f"{file.path!r} is empty: not even a header",
            hint="write the file again, or leave it out by `Source.select`",
        )
    with reading(source, file, pause) as opened:
        text = text_of(source, file, opened)  # would close the file where it is let go of
        head = text.read(_LINE_BYTES)
        check_encoding(source, file, head)
        opened.seek(0)
        delimiter = source.delimiter or _delimiter(file.path, head)
        yield _Text(
            stream=text_of(source, file, opened),
            delimiter=delimiter,
            header=_header(source, head, delimiter, file),
        )


def _header(source: Source, head: bytes, delimiter: str, file: Input) -> list[str]:
    if source.names is not None:
        return list(source.names)
    reader = csv.open_csv(
        BytesIO(head),
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=_parsing(delimiter, _refused(source)),
        convert_options=csv.ConvertOptions(check_utf8=False),
    )
    names: list[str] = reader.schema.names
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise DataError(
            f"{file.path!r} has several columns named {', '.join(map(repr, sorted(twice)))}",
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


def _naming(source: Source, block_bytes: int) -> csv.ReadOptions:
    names = None if source.names is None else list(source.names)
    return csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names)


def _refused(source: Source) -> _Refused:
    return _Refused(first=2 if source.names is None else 1)


def _parsing(delimiter: str, refused: _Refused) -> csv.ParseOptions:
    return csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refused
    )
