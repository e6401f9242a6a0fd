"""Reads an event log while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import RunDirectoryError
from raycloud.report.log import from_line

if TYPE_CHECKING:
    from raycloud.events import Event

_MOST_BYTES = 1 << 20  # read at a time, so that a long log does not keep the page from being drawn


class Tail:
    """The lines of a log that are whole, each once, as they come.

    A line without its newline is still being written, or torn: it waits. The file need not be there
    yet. One that is replaced by a shorter one is read from its start, as a new log.

    Args:
        path: The log.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self._path = path
        self._at = 0  # bytes that have been told
        self._lines = 0
        self.replaced = 0  # how often the log began anew

    def read(self) -> list[tuple[float, Event]]:
        """The (unix seconds, event) of each line that has come since; a part of them if many have.

        Raises:
            RunDirectoryError: The log cannot be read, a line is damaged, or a newer raycloud wrote
                it.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at = self._lines = 0
                    self.replaced += 1
                file.seek(self._at)
                block = file.read(_MOST_BYTES)
                if b"\n" not in block:
                    block += file.readline()  # a line that is longer than a block
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunDirectoryError(
                f"cannot read the event log {self._path}: {error.strerror}",
                hint="name the directory of a run, the one that holds events.jsonl",
            ) from error
        whole = block[: block.rfind(b"\n") + 1]
        self._at += len(whole)
        return [self._event(line) for line in whole.splitlines()]

    def _event(self, line: bytes) -> tuple[float, Event]:
        self._lines += 1
        try:
            return from_line(line.decode("utf-8", errors="replace"))
        except ValueError as error:
            raise RunDirectoryError(
                f"{self._path}, line {self._lines} cannot be read: {error}",
                hint="read this run with the raycloud that wrote it, or a newer one",
            ) from error
