"""Reading files that may be damaged or hostile: regular ones, of a bounded size, with flat JSON.

Also paths that people write: one that begins with `~` need not lead to a home.

What is read may have been written by someone else, or by a disk that failed: whatever it says, it
costs little to find out. All that is wrong with a file's content is one kind of error.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

LARGEST_BYTES = 32 * 2**20  # of a file that is read whole, and of a line
MOST_VALUES = 1_000_000  # in one JSON document: at most about 120 bytes of memory each


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading, but no pipe or device: opening those may wait for ever.

    Raises:
        OSError: It cannot be opened, or is none.
    """
    file = open(  # noqa: SIM115  # Path.open takes no opener; the caller closes it
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    )
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_whole(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= largest_bytes:
            return file.read(size)
    raise ValueError(f"it is larger than {largest_bytes} bytes")


def expanded(path: Path) -> Path:
    """The path with its `~` or `~user` as a directory; as it is where nobody knows that home.

    >>> str(expanded(Path("~nobody-is-called-so/a")))
    '~nobody-is-called-so/a'
    """
    try:
        return path.expanduser()
    except RuntimeError:  # no such user; or no HOME, and no line in the list of users
        return path


def text_lines(file: IO[bytes], largest_bytes: int = LARGEST_BYTES) -> Iterator[str]:
    """The lines of a file, with their ends; what is no UTF-8 in them is replaced.

    Raises:
        ValueError: A line is longer.
    """
    while line := file.readline(largest_bytes + 1):
        if len(line) > largest_bytes:
            raise ValueError(f"it is a line of more than {largest_bytes} bytes")
        yield line.decode("utf-8", errors="replace")


def json_value(
    text: str | bytes, most_values: int = MOST_VALUES, *, constants: bool = False
) -> Any:
    """The value of a JSON text; with `constants`, `NaN` and `Infinity` are numbers, too.

    Raises:
        ValueError: It is none, goes too deep, or holds too many values.

    >>> json_value('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    if isinstance(text, str):
        values = sum(text.count(mark) for mark in ",[{")
    else:
        values = sum(text.count(mark) for mark in b",[{")
    if values > most_values:
        raise ValueError(f"it holds more than {most_values} values")
    try:
        return json.loads(text, parse_constant=None if constants else _no_number)
    except RecursionError:
        raise ValueError("it goes too deep") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
