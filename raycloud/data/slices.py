"""Cutting inputs into slices, and reading one: which reader takes which format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from raycloud.data.formats import codec_of, format_of
from raycloud.data.formats_columnar import (
    arrow_parts,
    holds_bytes,
    parquet_parts,
    read_arrow,
    read_parquet,
)
from raycloud.data.formats_csv import csv_types, read_csv
from raycloud.data.formats_json import is_array, json_types, read_json
from raycloud.data.formats_lines import line_ranges, read_lines
from raycloud.data.formats_whole import read_images, read_texts
from raycloud.data.location import is_local
from raycloud.data.patience import Pause, wait
from raycloud.data.pieces import NAMED_BAD_ROWS, Piece, Slice
from raycloud.data.reading import folders_of, is_utf8
from raycloud.errors import InternalError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.task import Source

__all__ = ["IMAGES_BYTES", "NAMED_BAD_ROWS", "SLICE_BYTES", "Piece", "Slice", "cut", "read"]

SLICE_BYTES = 32 * 2**20
"""About how much of the inputs a slice has."""

IMAGES_BYTES = 4 * 2**20
"""The same where rows hold bytes, such as images, which grow when they are decoded."""

_WITH_FOLDERS = frozenset({"parquet", "arrow", "csv", "jsonl"})
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")
_AT_ONCE = 16  # files of another machine that are looked into at the same time

_Ranges = Callable[["Input"], list[tuple[int, int]]]


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
    folders = _folders(source, kind, inputs)
    large = [file for file in inputs if file.bytes > target]
    at_once = 1 if all(is_local(file.path) for file in large) else _AT_ONCE
    with ThreadPoolExecutor(at_once, thread_name_prefix="raycloud-cut") as pool:
        found = pool.map(lambda file: _ranges(source, kind, file, target, pause), large)
        ranges = dict(zip((file.path for file in large), found, strict=True))
    slices: list[Slice] = []
    for files in _grouped(inputs, target):
        for start, stop in ranges.get(files[0].path, [(0, 0)]):
            where = {"start": start, "stop": stop}
            slices.append(Slice(inputs=files, format=kind, types=types, folders=folders, **where))
    return tuple(slices)


def read(source: Source, piece: Slice, *, pause: Pause = wait) -> Iterator[Piece]:
    """The rows of a slice, in the order of the files.

    Raises:
        DataError: A file is damaged, gone, has changed, or lacks a column.
    """
    if not piece.folders:
        return _read(source, piece, pause)
    return _with_folders(source, piece, pause)


def _with_folders(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows with what the names of their directories say, where the file does not say it."""
    for one in _read(source, piece, pause):
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
    names = [name for name in said[0] if all(name in one for one in said)]
    if source.columns is not None:
        names = [name for name in names if name in source.columns]
    declared = dict(source.types or {})
    return tuple((name, declared.get(name) or _kind(one[name] for one in said)) for name in names)


def _kind(values: Iterable[str | None]) -> str:
    return (
        "int64" if all(value is None or _WHOLE.fullmatch(value) for value in values) else "string"
    )


def _read(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    match piece.format:
        case "text" if source.unit == "line":
            return read_lines(source, piece, pause)
        case "text":
            return read_texts(source, piece, pause)
        case "csv":
            return read_csv(source, piece, pause)
        case "jsonl":
            return read_json(source, piece, pause)
        case "parquet":
            return read_parquet(source, piece, pause)
        case "arrow":
            return read_arrow(source, piece, pause)
        case "images":
            return read_images(source, piece, pause)
        case _:
            pass
    raise InternalError(f"a slice of format {piece.format!r}, which is not read from files")


def _grouped(inputs: Sequence[Input], target: int) -> Iterator[tuple[Input, ...]]:
    """Neighbours that are small enough together; large ones alone."""
    group: list[Input] = []
    size = 0
    for file in inputs:
        if group and size + file.bytes > target:
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.bytes
    if group:
        yield tuple(group)


def _ranges(
    source: Source, kind: str, file: Input, target: int, pause: Pause
) -> list[tuple[int, int]]:
    """How a large file is cut; (0, 0) is the whole of it."""
    if kind == "parquet":
        return _runs(parquet_parts(source, file, pause), target)
    if kind == "arrow":
        return _runs(arrow_parts(source, file, pause), target)
    is_lined = kind == "jsonl" or (kind == "text" and source.unit == "line")
    if kind == "jsonl" and is_array(source, file, pause):
        return [(0, 0)]
    if is_lined and codec_of(file.path) is None and is_utf8(source):
        return line_ranges(file.bytes, target)
    return [(0, 0)]


def _runs(parts: Sequence[int], target: int) -> list[tuple[int, int]]:
    """Neighbouring parts that are small enough together.

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
