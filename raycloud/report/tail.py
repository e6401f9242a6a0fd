"""Reads an event log while it grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.bounded import LARGEST_BYTES, open_regular
from raycloud.errors import RunDirectoryError
from raycloud.report.log import entries_of

if TYPE_CHECKING:
    from raycloud.events import Event

_MOST_BYTES = 1 << 20  # read at a time, so that a long log does not keep the page from being drawn


class Tail:
    """The lines of a log that are whole, each once, as they come.

    A line without its newline is still being written, or torn: it waits. The file need not be there
    yet. One that is replaced by a shorter one is read from its start, as a new log.

    Attributes:
        path: The log.
        replaced: How often it began anew.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self.path = path
        self._at = 0  # bytes that have been told
        self._lines = 0
        self._torn: tuple[int, int] | None = None  # the file, when nothing whole was left to tell
        self.replaced = 0

    def read(self) -> list[tuple[float, Event]]:
        """The (unix seconds, event) of what has come since; a part of it if that is much.

        Raises:
            RunDirectoryError: The log cannot be read, a line is damaged or without end, or a newer
                raycloud wrote it.
        """
        block = self._block()
        whole = block[: block.rfind(b"\n") + 1]
        if not whole and len(block) > LARGEST_BYTES:
            raise RunDirectoryError(
                f"{self.path}, line {self._lines + 1} is longer than {LARGEST_BYTES} bytes",
                hint="it is no event log, or is damaged",
            )
        self._at += len(whole)
        return [entry for line in whole.splitlines() for entry in self._entries(line)]

    def _block(self) -> bytes:
        """What stands behind the lines that have been told, if it may hold a whole one by now."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_size < self._at:
                    self._at = self._lines = 0
                    self.replaced += 1
                now = (found.st_size, found.st_mtime_ns)
                if now == self._torn:
                    return b""
                file.seek(self._at)
                block = file.read(_MOST_BYTES)
                if b"\n" not in block:  # a line that is longer than a block
                    block += file.readline(LARGEST_BYTES + 1 - len(block))
                self._torn = None if b"\n" in block else now
                return block
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RunDirectoryError(
                f"cannot read the event log {self.path}: {error.strerror}",
                hint="name the directory of a run, the one that holds events.jsonl",
            ) from error

    def _entries(self, line: bytes) -> list[tuple[float, Event]]:
        self._lines += 1
        try:
            entries = entries_of(line.decode("utf-8", errors="replace"))
            return [(t, event) for t, event, _ in entries]
        except ValueError as error:
            raise RunDirectoryError(
                f"{self.path}, line {self._lines} cannot be read: {error}",
                hint="read this run with the raycloud that wrote it, or a newer one",
            ) from error
