"""How files are read, by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.task import Format

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


def suffix_of(path: str) -> str:
    """What the file is, without what it is compressed with.

    >>> suffix_of("s3://bucket/part-0.CSV.gz"), suffix_of("https://host/a.png?size=1")
    ('csv', 'png')
    """
    name = _name(path)
    stem, dot, last = name.rpartition(".")
    if dot and last in _CODECS:
        stem, dot, last = stem.rpartition(".")
    return last if dot else ""


def codec_of(path: str) -> str | None:
    """What a text file is compressed with, by pyarrow's name.

    >>> codec_of("part-0.csv.gz"), codec_of("part-0.parquet")
    ('gzip', None)
    """
    return _CODECS.get(_name(path).rpartition(".")[2])


def is_taken(wanted: Format, path: str) -> bool:
    """Whether a file that lies in a directory is read, by its suffix; one that was named always is.

    >>> is_taken("auto", "a/b.csv"), is_taken("auto", "a/b.dat"), is_taken("text", "a/b.csv")
    (True, False, False)
    """
    found = _format(path)
    return found is not None if wanted == "auto" else found == wanted


def format_of(wanted: Format, paths: Iterable[str]) -> Format:
    """The one format of these files.

    Raises:
        DataError: They are of several, or it cannot be told.
    """
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


def _name(path: str) -> str:
    if "://" in path:
        path = path.partition("?")[0]
    return path.rpartition("/")[2].lower()


def _format(path: str) -> Format | None:
    kind = _SUFFIXES.get(suffix_of(path))
    return None if kind not in _LINED and codec_of(path) else kind
