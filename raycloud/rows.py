"""A batch of rows, as columns: what a task preprocesses and collates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Column = Any
"""An array of shape (rows, ...); of strings, bytes or lists an array of objects."""

_EXACT = 2**53  # integers up to here are exact as float64


class MissingColumnError(KeyError):
    """A column was asked for that the rows do not have."""

    def __str__(self) -> str:
        """The sentence, which a `KeyError` would put in quotes."""
        return str(self.args[0])


class Rows(Sequence[dict[str, Any]]):
    """Rows, each a dict, held as columns.

    What came from an Arrow table is converted where it is first looked at, without a copy where
    Arrow's memory serves, and is read-only. Of missing values, those of an integer column make it
    float64 with NaN (objects with None where an integer is too large for that), those of other
    columns are NaN, NaT or None.

    >>> rows = Rows({"x": np.arange(3), "name": ["a", "b", "c"]})
    >>> len(rows), rows["x"].sum(), rows[1]["name"]
    (3, np.int64(3), 'b')
    """

    __slots__ = ("_arrays", "_given", "_length")

    _given: dict[str, np.ndarray[Any, Any] | pa.Array]
    _arrays: dict[str, np.ndarray[Any, Any]]  # what was given, as far as it is looked at

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """Take columns by name; arrays are kept as they are, without a copy.

        A list of numbers becomes an array of them, a list of arrays of two or more dimensions one
        array of them all; strings, bytes, lists and 1-D arrays stay objects.

        Raises:
            ValueError: Columns of different lengths, or one that is no column.
        """
        self._given = {}
        self._arrays = {}
        self._length = -1
        for name, given in columns.items():
            column = given if type(given) is np.ndarray else _to_column(name, given)
            self._given[name] = column
            if type(column) is np.ndarray:
                if column.ndim == 0:
                    raise ValueError(f"column {name!r} is a single value, not one for each row")
                self._arrays[name] = column
            if self._length not in {-1, len(column)}:
                raise ValueError(
                    f"columns differ in length: {name!r} has {len(column)} values, those before it "
                    f"have {self._length}"
                )
            self._length = len(column)
        self._length = max(self._length, 0)

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """The rows of an Arrow table, which they share memory with."""
        return cls(dict(zip(table.column_names, table.columns, strict=True)))

    def to_table(self) -> pa.Table:
        """The rows as an Arrow table, without a copy where Arrow can hold an array as it is.

        Columns of more than one dimension become `fixed_shape_tensor`. Those that came from Arrow
        are what they were.

        Raises:
            ValueError: A column that Arrow cannot hold; named.
        """
        import pyarrow as pa  # noqa: PLC0415 - most rows never become a table

        return pa.table(
            {
                name: _to_arrow(name, column) if type(column) is np.ndarray else column
                for name, column in self._given.items()
            }
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._given)

    def __len__(self) -> int:
        """Number of rows."""
        return self._length

    @overload
    def __getitem__(self, index: str, /) -> Column: ...
    @overload
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...
    def __getitem__(self, index: str | int | slice, /) -> Column | dict[str, Any] | Self:
        """A column by its name, a row by its number, or some of the rows by a slice."""
        if isinstance(index, str):
            return self._column(index)
        if isinstance(index, slice):
            if index.step not in {None, 1}:
                return self.take(np.arange(self._length)[index])
            return type(self)({name: column[index] for name, column in self._given.items()})
        if not -self._length <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return {name: self._column(name)[index] for name in self._given}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict."""
        names = self.columns
        for values in zip(*(self._column(name) for name in names), strict=True):
            yield dict(zip(names, values, strict=True))

    def take(self, indices: np.ndarray[Any, Any]) -> Self:
        """The rows of these numbers, in this order, copied."""
        # Also of a mask, of negative numbers, and of an empty list, which would be of floats.
        numbers = np.arange(self._length)[np.asarray(indices, dtype=None if len(indices) else int)]
        return type(self)(
            {
                name: column.take(numbers, axis=0)
                if type(column) is np.ndarray
                else column.take(numbers)
                for name, column in self._given.items()
            }
        )

    def __repr__(self) -> str:
        """How many rows, and what each column holds."""
        what = ", ".join(f"{name}: {_kind(column)}" for name, column in self._given.items())
        return f"Rows({self._length} rows; {what})"

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        array = self._arrays.get(name)
        if array is not None:
            return array
        if name not in self._given:
            there = ", ".join(map(repr, self._given)) or "none"
            raise MissingColumnError(f"no column {name!r}; there are {there}")
        array = _from_arrow(self._given[name])
        array.flags.writeable = False
        self._arrays[name] = array
        return array


def _kind(column: np.ndarray[Any, Any] | pa.Array) -> str:
    if isinstance(column, np.ndarray):
        return f"{column.dtype}{list(column.shape[1:]) if column.ndim > 1 else ''}"
    return str(column.type)


def _to_column(name: str, given: Any) -> np.ndarray[Any, Any] | pa.Array:
    if hasattr(given, "combine_chunks"):  # Arrow's
        given = given.chunk(0) if given.num_chunks == 1 else given.combine_chunks()
    if hasattr(given, "null_count"):
        return given
    if hasattr(given, "__array__"):  # an array of another library
        array = np.asarray(given)
    elif isinstance(given, list | tuple):
        first = next((value for value in given if value is not None), None)
        if isinstance(first, str | bytes | list | tuple | Mapping):
            return np.fromiter(given, dtype=object, count=len(given))
        if getattr(first, "ndim", 0) == 1:  # of any lengths: equal ones are a coincidence
            return np.fromiter(given, dtype=object, count=len(given))
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise ValueError(f"column {name!r} holds arrays of different shapes") from error
    else:
        raise ValueError(f"column {name!r} is {type(given).__name__}, not a list or an array")
    # numpy's own strings have a fixed width, which would be another for each batch
    return array.astype(object) if array.dtype.kind in "US" else array


def _to_arrow(name: str, array: np.ndarray[Any, Any]) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415 - most rows never become a table

    shape = array.shape[1:]
    if 0 in shape:  # Arrow divides by it, which ends the process
        raise ValueError(f"column {name!r} of {list(array.shape)} has no values in a row")
    try:
        if array.ndim == 1:
            return pa.array(array.tolist() if array.dtype.kind == "O" else array)
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        kind = pa.fixed_shape_tensor(flat.type, shape)
        storage = pa.FixedSizeListArray.from_arrays(flat, type=kind.storage_type)
        return pa.ExtensionArray.from_storage(kind, storage)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"column {name!r} of {array.dtype} {list(array.shape)} cannot be held: {error}"
        ) from error


def _from_arrow(column: pa.Array) -> np.ndarray[Any, Any]:
    import pyarrow as pa  # noqa: PLC0415 - what came from Arrow has imported it

    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return np.asarray(column.to_numpy_ndarray())
        return _blocks(column.storage, tuple(kind.shape))
    if isinstance(kind, pa.BaseExtensionType):
        return _from_arrow(column.storage)
    if pa.types.is_dictionary(kind):
        return _from_arrow(column.dictionary_decode())
    if pa.types.is_fixed_size_list(kind):
        return _blocks(column, (kind.list_size,))
    if pa.types.is_integer(kind) and column.null_count:
        exact = column.to_numpy(zero_copy_only=False)
        if np.nanmax(np.abs(exact), initial=0.0) >= _EXACT:
            return np.fromiter(column.to_pylist(), dtype=object, count=len(column))
    array: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
    return array


def _blocks(column: pa.Array, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Equally long lists as one array of (rows, *shape); as objects where one is missing."""
    flat = _from_arrow(column.flatten())  # without the missing ones
    shape = (*shape, *flat.shape[1:])
    if not column.null_count:
        return flat.reshape(len(column), *shape)
    there = iter(flat.reshape(-1, *shape))
    valid = column.is_valid().to_pylist()
    return np.fromiter((next(there) if v else None for v in valid), object, len(column))
