"""What the readers of all formats share: opening an input, and saying what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from raycloud.data.hush import hushed
from raycloud.data.location import open_file
from raycloud.data.roots import paths_of
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.data.patience import Pause
    from raycloud.task import Source

_AGAIN = "write or fetch the file again, or leave it out by `Source.select`"


@contextmanager
def reading(source: Source, file: Input, pause: Pause) -> Iterator[pa.NativeFile]:
    """The input, open; what goes wrong with it inside is a `DataError` that names it."""
    try:
        with open_file(source, file.path, pause=pause) as opened:
            size = opened.size()
            if size != file.bytes:
                raise DataError(
                    f"{file.path!r} has changed: it was of {file.bytes} bytes when it was found, "
                    f"and is of {size}",
                    hint="leave files as they are while a run reads them",
                )
            yield opened
    except (pa.ArrowException, OSError, EOFError) as error:
        text = hushed(str(error), paths_of(source)).strip() or type(error).__name__
        raise DataError(f"{file.path!r} is damaged: {text.splitlines()[0]}", hint=_AGAIN) from error


def chosen(source: Source, there: Sequence[str], file: str) -> list[str]:
    """The columns to read of a file that has the columns `there`.

    Raises:
        DataError: The file lacks one.
    """
    if source.columns is None:
        return list(there)
    missing = [name for name in source.columns if name not in there]
    if missing:
        raise DataError(
            f"{file!r} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, there)) or 'none'}",
            hint="correct Source.columns",
        )
    return list(source.columns)
