"""JSON lines: fast where all is well, and line by line where it is not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from raycloud.data.clean import types_of
from raycloud.data.formats import Piece, Slice, codec_of, columns_to_read
from raycloud.data.formats_text import Lines, is_utf8, lines_of
from raycloud.data.location import open_input
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.data.retry import Pause
    from raycloud.task import Source

_HEAD_BYTES = 2**20
_SNIFFED_BYTES = 64
_SPACE = b"\xef\xbb\xbf \t\r\n"
_BETWEEN = re.compile(r"[\s,]*")
_DEEPEST = 10_000  # pyarrow still has stack for so many levels
_FLAT = (pa.int64(), pa.float64(), pa.bool_(), pa.string())
_UNFIT = (pa.ArrowException, OverflowError, TypeError)  # what a value raises that is none of a type

Types = Mapping[str, pa.DataType]
Parsed = tuple[pa.Table, np.ndarray[Any, Any] | None, dict[int, str]]
"""Rows, the numbers of their lines (None: one after another), and why other lines are bad."""


def json_types(
    source: Source, inputs: Sequence[Input], pause: Pause
) -> tuple[tuple[str, str], ...]:
    """Types of the columns that hold single values, as declared or as found at the data's head."""
    declared = types_of(source.types)
    found: dict[str, pa.DataType] = {}
    for file in inputs:
        cut = codec_of(file.path) is None and is_utf8(source)
        piece = Slice(
            inputs=(file,), format="jsonl", stop=min(_HEAD_BYTES, file.bytes) if cut else 0
        )
        head = next(lines_of(source, piece, pause), None)
        if head is None:
            continue
        if _begins_array(head.data):
            head = replace(head, data=_elements(head.data, file.path, whole=False))
        table, _, _ = _parsed(head, declared)
        for field in table.schema:
            if pa.types.is_null(field.type):
                found[field.name] = pa.string()
            elif field.name in declared or field.type in _FLAT:
                found[field.name] = field.type
        if table.num_rows:
            break
    kinds = {**found, **declared}
    if source.columns is not None:
        kinds = {name: kind for name, kind in kinds.items() if name in source.columns}
    return tuple((name, str(kind)) for name, kind in kinds.items())


def read_json(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """Each line a row, or each element of an array; what does not convert is bad."""
    types = types_of(dict(piece.types))
    for file in piece.inputs:
        parts = lines_of(source, replace(piece, inputs=(file,)), pause)
        if (first := next(parts, None)) is None:
            continue
        parts = chain([first], parts)
        if not piece.start and _begins_array(first.data):
            data = _elements(b"".join(lines.data for lines in parts), file.path, whole=True)
            parts = iter([Lines(data=data, file=file.path)])
        for lines in parts:
            table, numbers, bad = _parsed(lines, types)
            table = table.select(columns_to_read(source, table.column_names, file.path))
            yield lines.piece(table, numbers, bad)


def is_array(source: Source, file: Input, pause: Pause) -> bool:
    """Whether a file is one JSON array, which is not cut."""
    with open_input(source, file, pause) as opened:
        return _begins_array(opened.read(_SNIFFED_BYTES))


def _begins_array(data: bytes) -> bool:
    return data.lstrip(_SPACE)[:1] == b"["


def _elements(data: bytes, file: str, *, whole: bool) -> bytes:
    """The elements of an array, a line each; of one that is not `whole`, as far as it goes."""
    text = data.decode(errors="strict" if whole else "ignore").lstrip("\ufeff \t\r\n")
    decoder, found, at = json.JSONDecoder(), list[str](), 1
    try:
        while True:
            between = _BETWEEN.match(text, at)
            at = at if between is None else between.end()
            if text[at : at + 1] in {"]", ""}:
                break
            element, at = decoder.raw_decode(text, at)
            found.append(json.dumps(element))
    except (ValueError, RecursionError) as error:
        if whole:
            raise DataError(
                f"{file!r} begins as a JSON array, and is none: {error}",
                hint="write the file again, or an object a line",
            ) from error
    return "".join(f"{line}\n" for line in found).encode()


def _parsed(lines: Lines, types: Types) -> Parsed:
    table = None if _may_go_deep(lines.data) else _all_at_once(lines, types)
    if table is not None:
        if table.num_rows == lines.data.count(b"\n") + (not lines.data.endswith(b"\n")):
            return table, None, {}
        filled = [row for row, line in enumerate(lines.split()) if line.strip()]
        if table.num_rows == len(filled):  # else several on one line
            return table, np.array(filled), {}
    return _one_by_one(lines, types)


def _may_go_deep(data: bytes) -> bool:
    """Whether a line could nest so deep that pyarrow's parser would run out of stack."""
    if data.count(b"[") + data.count(b"{") <= _DEEPEST:
        return False
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    edges = np.concatenate(([-1], ends, [len(data)]))
    for line in np.flatnonzero(np.diff(edges) > _DEEPEST):
        start, stop = int(edges[line]) + 1, int(edges[line + 1])
        if data.count(b"[", start, stop) + data.count(b"{", start, stop) > _DEEPEST:
            return True
    return False


def _all_at_once(lines: Lines, types: Types) -> pa.Table | None:
    """What pyarrow makes of the lines; None where that would not do."""
    try:
        table = pj.read_json(
            BytesIO(lines.data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(lines.data) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(list(types.items())), newlines_in_values=False
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    # Text that looked like a date to pyarrow is text.
    dates = any(f.name not in types and "timestamp" in str(f.type) for f in table.schema)
    return None if dates else table


def _one_by_one(lines: Lines, types: Types) -> Parsed:
    rows: dict[int, dict[str, Any]] = {}
    bad: dict[int, str] = {}
    for number, line in enumerate(lines.split()):
        if not line.strip():
            continue
        try:
            rows[number] = json.loads(line)
            if not isinstance(rows[number], dict):
                bad[number] = f"is no JSON object, but {type(rows.pop(number)).__name__}"
        except RecursionError:
            bad[number] = "goes too deep"
        except ValueError as error:
            bad[number] = f"is no JSON: {error}"
    columns = {}
    for name in dict.fromkeys((*types, *chain.from_iterable(rows.values()))):
        values = {number: row.get(name) for number, row in rows.items()}
        kind = types[name] if name in types else _usual_type(name, values, lines.file)
        columns[name] = _typed(name, values, kind, bad)
    table = pa.table(columns)
    numbers = np.array(list(rows), dtype=np.int64)
    good = np.flatnonzero([number not in bad for number in rows])
    if len(good) < len(rows):
        table, numbers = table.take(good), numbers[good]
    return table, numbers, dict(sorted(bad.items()))


def _usual_type(name: str, values: dict[int, Any], file: str) -> pa.DataType:
    """The type that all of the values have, or most."""
    try:
        return pa.array(list(values.values())).type
    except (pa.ArrowException, OverflowError) as error:
        kinds = Counter(type(value) for value in values.values() if value is not None)
        numbers = kinds[int] + kinds[float]
        if kinds[str] >= max(numbers, kinds[bool], 1):
            return pa.string()
        if kinds[bool] > numbers:
            return pa.bool_()
        if numbers:
            return pa.float64() if kinds[float] else pa.int64()
        raise DataError(
            f"column {name!r} of {file!r} holds values of several types: {error}",
            hint="leave it out by Source.columns, or write it the same in every row",
        ) from error


def _typed(name: str, values: dict[int, Any], kind: pa.DataType, bad: dict[int, str]) -> pa.Array:
    try:
        return pa.array(list(values.values()), kind)
    except _UNFIT:
        pass
    made = []
    for number, value in values.items():
        try:
            made.append(_scalar(value, kind))
        except _UNFIT:
            made.append(pa.scalar(None, kind))
            bad.setdefault(number, f"{name!r} = {value!r:.40} is no {kind}")
    return pa.array(made, kind)


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(value, kind)
    except _UNFIT:
        return pa.scalar(value).cast(kind)
