"""Columns of the types they shall have, and the rows that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycloud.errors import DataError

MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None")
"""How a missing value is spelled where text becomes anything else."""

_SHOWN = 40  # characters of a bad value
_FEW = 32  # values that are tried one by one
_INTEGER = r"^[+-]?(\d+|0[xX][0-9a-fA-F]+)$"
_FLOATING = r"(?i)^[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)$"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sifted:
    """What is left of some rows.

    Attributes:
        table: The good rows.
        kept: Their numbers before; None: all are left.
        bad: Numbers of the bad rows, rising.
        why: Of each bad row.
    """

    table: pa.Table
    kept: np.ndarray[Any, Any] | None
    bad: tuple[int, ...]
    why: tuple[str, ...]


def types_of(types: Mapping[str, str] | None) -> dict[str, pa.DataType]:
    """Types by their names.

    Raises:
        DataError: pyarrow knows no such type.
    """
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


def sift(
    table: pa.Table, types: Mapping[str, pa.DataType], required: tuple[str, ...] = ()
) -> Sifted:
    """Convert columns; rows with a value that does not, or without a required one, are bad.

    Raises:
        DataError: A column is not there, or nothing of its type can become the other.
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
        at = table.column_names.index(column)
        table = table.set_column(at, column, values)
    for column in required:
        missing = _missing(table[column])
        for row in np.flatnonzero(missing).tolist():
            why.setdefault(row, f"{column!r} is missing")
    if not why:
        return Sifted(table=table, kept=None, bad=(), why=())
    bad = tuple(sorted(why))
    kept = np.delete(np.arange(table.num_rows), bad)
    return Sifted(table=table.take(kept), kept=kept, bad=bad, why=tuple(why[row] for row in bad))


def _missing(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    nan = pa.types.is_floating(column.type)
    missing = pc.is_null(column, nan_is_null=nan)
    return np.asarray(missing.to_numpy())


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
    failed: list[int] = []
    chunks: list[pa.Array] = []
    at = 0
    for chunk in given.chunks:
        try:
            chunks += _halved(_readable(chunk, kind, at, failed), kind, at, failed)
        except pa.ArrowNotImplementedError as error:
            raise DataError(
                f"column {column!r} of {given.type} cannot become {kind}",
                hint="give another type in `Source.types`, or convert it in `preprocess`",
            ) from error
        at += len(chunk)
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
    form = _INTEGER if pa.types.is_integer(kind) else _FLOATING
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
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
