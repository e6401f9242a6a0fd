"""What reading gives and takes: slices of the inputs, and pieces of a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud.data.index import BadRow, Input

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

NAMED_BAD_ROWS = 20
"""How many bad rows are named, at most; all are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A piece of the inputs that is read at once, and becomes one block.

    Attributes:
        inputs: The files, in order: several small ones, or one.
        format: How they are read.
        start: Of one file, where the slice begins: a row group or a record batch, or a byte of
            lined text (the slice holds the lines that begin in it).
        stop: Where it ends, not included; 0: the whole of each file.
        types: Columns of CSV and JSON lines with their types, by pyarrow's names, where they are
            declared or were found at the head of the data; the others go by each slice.
        folders: Columns that the directories' names hold, with their types.
    """

    inputs: tuple[Input, ...]
    format: str
    start: int = 0
    stop: int = 0
    types: tuple[tuple[str, str], ...] = ()
    folders: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some of the rows of a slice, in the order of the file.

    Attributes:
        table: The rows.
        file: Where they are from.
        first_row: The number of the first there.
        numbers: Of each row, how many rows after the first it was; None: one after another.
        rows_before: Counts the rows of the file before the slice, which nobody needs to know unless
            one is bad; None: `first_row` counts from the beginning of the file.
        files: The file of each row, where each is a file of its own; None: `file`.
        bad: Rows that could not be read, the first 20 of them, numbered like `first_row`.
        bad_rows: How many could not be read.
    """

    table: pa.Table
    file: str
    first_row: int = 0
    numbers: np.ndarray[Any, Any] | None = None
    rows_before: Callable[[], int] | None = None
    files: Sequence[str] | None = None
    bad: tuple[BadRow, ...] = ()
    bad_rows: int = 0

    def place(self, row: int) -> tuple[str, int]:
        """The file of a row of the table, and the row's number there."""
        if self.files is not None:
            return self.files[row], 0
        number = row if self.numbers is None else int(self.numbers[row])
        return self.file, self.first_row + number + self._before()

    def only(self, kept: np.ndarray[Any, Any], table: pa.Table) -> Piece:
        """Of these rows alone, which `table` holds; what could not be read is told of already."""
        return replace(
            self,
            table=table,
            numbers=kept if self.numbers is None else self.numbers[kept],
            files=None if self.files is None else [self.files[row] for row in kept],
            bad=(),
            bad_rows=0,
        )

    def part(self, start: int, stop: int) -> Piece:
        """The rows from `start` to `stop` alone."""
        return replace(
            self,
            table=self.table.slice(start, stop - start),
            first_row=self.first_row + (start if self.numbers is None else 0),
            numbers=None if self.numbers is None else self.numbers[start:stop],
            files=None if self.files is None else self.files[start:stop],
            bad=(),
            bad_rows=0,
        )

    def unread(self) -> tuple[BadRow, ...]:
        """`bad`, numbered from the beginning of the file."""
        before = self._before() if self.bad else 0
        return tuple(BadRow(file=b.file, row=b.row + before, why=b.why) for b in self.bad)

    def _before(self) -> int:
        return 0 if self.rows_before is None else self.rows_before()
