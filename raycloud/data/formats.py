"""Formats of data files, by their names; and what a reader of any format takes and gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from raycloud.data.index import BadRow, Input
from raycloud.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.task import Format, Source

NAMED_BAD_ROWS = 20  # at most; all are counted

_SUFFIXES: dict[str, Format] = {
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
    **dict.fromkeys(("arrow", "arrows", "feather", "ipc"), "arrow"),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif"), "images"),
    **dict.fromkeys(("txt", "text", "md", "rst", "py", "log"), "text"),
}
_CODECS = {"gz": "gzip", "bz2": "bz2", "zst": "zstd", "lz4": "lz4"}
_LINED = frozenset({"csv", "jsonl", "text"})
_FOLDER = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
_NOTHING = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of the inputs, several small files or one, that is read at once: it becomes one block.

    Attributes:
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
    """Rows of a slice that could be read, in the order of the file.

    Attributes:
        numbers: The number of each row in the file, from the slice's beginning; None: 0, 1, 2, ...
        before: Counts the rows of the file before the slice, which nobody needs to know unless one
            is bad; `int` returns 0.
        files: By number, where each row is a file of its own; None: all are of `file`.
        bad: By number, rising, why a row could not be read.
    """

    table: pa.Table
    file: str
    numbers: np.ndarray[Any, Any] | None = None
    before: Callable[[], int] = int
    files: Sequence[str] | None = None
    bad: Mapping[int, str] = field(default_factory=dict)

    def bad_row(self, row: int, why: str) -> BadRow:
        """A row of the table that is bad, by its file and its number there."""
        return self.bad_number(row if self.numbers is None else int(self.numbers[row]), why)

    def bad_number(self, number: int, why: str) -> BadRow:
        """The same of a row that is known by its number."""
        if self.files is not None:
            return BadRow(file=self.files[number], row=0, why=why)
        return BadRow(file=self.file, row=number + self.before(), why=why)

    def only(self, kept: np.ndarray[Any, Any] | None, table: pa.Table) -> Piece:
        """These rows alone, which `table` holds; None: all. What is bad is told of already."""
        if kept is None:
            return replace(self, table=table, bad={})
        numbers = kept if self.numbers is None else self.numbers[kept]
        return replace(self, table=table, numbers=numbers, bad={})

    def part(self, start: int, stop: int) -> Piece:
        """The rows from `start` to `stop` alone."""
        return self.only(np.arange(start, stop), self.table.slice(start, stop - start))


def suffix_of(path: str) -> str:
    """What the file is, without what it is compressed with.

    >>> suffix_of("s3://bucket/part-0.CSV.gz"), suffix_of("https://host/a.png?size=1")
    ('csv', 'png')
    """
    stem, dot, last = _name(path).rpartition(".")
    if dot and last in _CODECS:
        stem, dot, last = stem.rpartition(".")
    return last if dot else ""


def codec_of(path: str) -> str | None:
    """What a text file is compressed with, by pyarrow's name.

    >>> codec_of("part-0.csv.gz"), codec_of("part-0.parquet")
    ('gzip', None)
    """
    return _CODECS.get(_name(path).rpartition(".")[2])


def has_format(wanted: Format, path: str) -> bool:
    """Whether a file that lies in a directory is read, by its suffix; one that was named always is.

    >>> has_format("auto", "a/b.csv"), has_format("text", "a/b.csv")
    (True, False)
    """
    found = _format(path)
    return found is not None if wanted == "auto" else found == wanted


def format_of(wanted: Format, paths: Iterable[str]) -> Format:
    """The one format of these files; a `DataError` where it cannot be told or there are several."""
    if wanted != "auto":
        return wanted
    found: dict[Format | None, str] = {}
    for path in paths:
        found.setdefault(_format(path), path)
    if None in found:
        raise DataError(
            f"what kind of file {found[None]!r} is cannot be told from its name",
            hint=f"give `Source.format`; known suffixes are {', '.join(sorted(_SUFFIXES))}",
        )
    if len(found) != 1:
        raise DataError(
            "files of several formats: "
            + "; ".join(f"{path!r} is {kind}" for kind, path in found.items()),
            hint="give `Source.format`, which takes those of one format from a directory, or pick "
            "files by a pattern or `Source.select`",
        )
    return next(kind for kind in found if kind is not None)


def suffixes_in(paths: Iterable[str]) -> str:
    """What there is, for an error: `.dat (3), .xml (1)`."""
    counts = Counter(f".{suffix_of(path)}" if suffix_of(path) else "none" for path in paths)
    return ", ".join(f"{suffix} ({count})" for suffix, count in counts.most_common(5))


def folders_of(path: str) -> dict[str, str | None]:
    """What the names of a file's directories say, as Hive writes them.

    >>> folders_of("/data/day=1/kind=a%20b/part.parquet")
    {'day': '1', 'kind': 'a b'}
    """
    found = (_FOLDER.fullmatch(name) for name in path.split("/")[:-1])
    said = {one["name"]: unquote(one["value"]) for one in found if one is not None}
    return {name: None if value == _NOTHING else value for name, value in said.items()}


def columns_to_read(source: Source, there: Sequence[str], file: str) -> list[str]:
    """The columns to read of a file that has those `there`, or a `DataError` where it lacks one."""
    if source.columns is None:
        return list(there)
    missing = [name for name in source.columns if name not in there]
    if set(missing) - folders_of(file).keys():
        lacks, has = (", ".join(map(repr, names)) for names in (missing, there))
        what = f"{file!r} has no column {lacks}; it has {has or 'none'}"
        raise DataError(what, hint="correct Source.columns")
    return [name for name in source.columns if name in there]


def _name(path: str) -> str:
    if "://" in path:
        path = path.partition("?")[0]
    return path.rpartition("/")[2].lower()


def _format(path: str) -> Format | None:
    kind = _SUFFIXES.get(suffix_of(path))
    return None if kind not in _LINED and codec_of(path) else kind
