"""Slices: how inputs are cut, the same way whoever cuts; and reading one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from raycloud.data.formats import NAMED_BAD_ROWS, Piece, Slice, codec_of, folders_of, format_of
from raycloud.data.formats_json import is_array, json_types, read_json
from raycloud.data.formats_tables import (
    arrow_parts,
    csv_types,
    holds_bytes,
    parquet_parts,
    read_arrow,
    read_csv,
    read_parquet,
)
from raycloud.data.formats_text import is_utf8, line_ranges, read_lines, read_whole
from raycloud.data.location import AT_ONCE, is_local
from raycloud.data.retry import Pause, wait

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.task import Source

__all__ = ["IMAGES_BYTES", "NAMED_BAD_ROWS", "SLICE_BYTES", "Piece", "Slice", "cut", "read"]

SLICE_BYTES = 32 * 2**20  # about how much of the inputs a slice has
IMAGES_BYTES = 4 * 2**20  # where rows hold bytes, such as images, which grow when decoded

_WITH_FOLDERS = frozenset({"parquet", "arrow", "csv", "jsonl"})
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")
_READERS = {
    "text": read_lines,
    "csv": read_csv,
    "jsonl": read_json,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "images": read_whole,
}


def cut(source: Source, inputs: Sequence[Input], *, pause: Pause = wait) -> tuple[Slice, ...]:
    """The inputs as slices, in their order: the same ones whoever cuts.

    Small files lie together in a slice; large ones that can be cut are. What follows an input has
    no part in how it is cut, except that a last slice of small files may have room for more.

    Raises:
        DataError: An input that has to be looked into is damaged, or gone.
    """
    if not inputs:
        return ()
    kind = format_of(source.format, (file.path for file in inputs))
    target = SLICE_BYTES
    types: tuple[tuple[str, str], ...] = ()
    if kind == "csv":
        types = csv_types(source, inputs, pause)
    elif kind == "jsonl":
        types = json_types(source, inputs, pause)
    elif kind == "images" or (
        kind in {"parquet", "arrow"} and holds_bytes(source, inputs[0], kind, pause)
    ):
        target = IMAGES_BYTES
    whole = Slice(inputs=(), format=kind, types=types, folders=_folders(source, kind, inputs))
    large = [file for file in inputs if file.bytes > target]
    at_once = 1 if all(is_local(file.path) for file in large) else AT_ONCE
    with ThreadPoolExecutor(at_once, thread_name_prefix="raycloud-cut") as pool:
        found = pool.map(lambda file: _ranges(source, kind, file, target, pause), large)
        ranges = dict(zip((file.path for file in large), found, strict=True))
    return tuple(
        replace(whole, inputs=tuple(inputs[first:last]), start=start, stop=stop)
        for first, last in _runs([file.bytes for file in inputs], target)
        for start, stop in ranges.get(inputs[first].path, [(0, 0)])
    )


def read(source: Source, piece: Slice, *, pause: Pause = wait) -> Iterator[Piece]:
    """The rows of a slice, in the order of the files.

    Columns that the names of directories hold are added, where the file does not have them.

    Raises:
        DataError: A file is damaged, gone, has changed, or lacks a column.
    """
    whole = piece.format == "text" and source.unit == "file"
    reader = read_whole if whole else _READERS[piece.format]
    for one in reader(source, piece, pause):
        if not piece.folders:
            yield one
            continue
        table, said = one.table, folders_of(one.file)
        for name, kind in piece.folders:
            if name not in table.column_names:
                value = pa.scalar(said[name]).cast(kind)
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        if source.columns is not None:
            table = table.select(list(source.columns))
        yield replace(one, table=table)


def _folders(source: Source, kind: str, inputs: Sequence[Input]) -> tuple[tuple[str, str], ...]:
    """The columns that directories of all inputs name, and that are asked for; and their types."""
    if kind not in _WITH_FOLDERS:
        return ()
    said = [folders_of(file.path) for file in inputs]
    found = []
    for name in said[0]:
        asked = source.columns is None or name in source.columns
        if asked and all(name in one for one in said):
            values = [one[name] for one in said]
            whole = all(value is None or _WHOLE.fullmatch(value) for value in values)
            declared = (source.types or {}).get(name)
            found.append((name, declared or ("int64" if whole else "string")))
    return tuple(found)


def _ranges(
    source: Source, kind: str, file: Input, target: int, pause: Pause
) -> list[tuple[int, int]]:
    """How a large file is cut; (0, 0) is the whole of it."""
    if kind == "parquet":
        return _runs(parquet_parts(source, file, pause), target)
    if kind == "arrow":
        return _runs(arrow_parts(source, file, pause), target)
    is_array_ = kind == "jsonl" and is_array(source, file, pause)
    is_lined = kind == "jsonl" or (kind == "text" and source.unit == "line")
    if is_lined and not is_array_ and codec_of(file.path) is None and is_utf8(source):
        return line_ranges(file.bytes, target)
    return [(0, 0)]


def _runs(parts: Sequence[int], target: int) -> list[tuple[int, int]]:
    """Neighbouring parts that are small enough together; large ones alone.

    >>> _runs([3, 3, 3, 9, 1], 6)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    edges = [0]
    size = 0
    for number, part in enumerate(parts):
        if number > edges[-1] and size + part > target:
            edges.append(number)
            size = 0
        size += part
    edges.append(len(parts))
    return list(pairwise(edges)) if parts else [(0, 0)]
