"""Retries where a store cannot answer just now, and a file that retries by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import RawIOBase
from threading import Event
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

_PAUSES_S = (0.5, 2.0)  # a store that sheds load wants seconds, not minutes
TRIES = 1 + len(_PAUSES_S)

Pause = Callable[[float], object]
"""Waits for so many seconds."""

T = TypeVar("T")

wait: Pause = Event().wait  # nobody sets it

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_STATUS = re.compile(r"\b(?:HTTP status|status(?: code)?|HTTP(?: error)?)[ :=]+(\d{3})\b", re.I)
_TRANSIENT_WORDS = re.compile(
    r"slow_?down|throttl|too many requests|timed? ?out|timeout|network_connection|curlcode"
    r"|connection (?:reset|refused|aborted|closed)|could(?:n.t| not) (?:connect|resolve)"
    r"|service_?unavailable|server disconnected|temporarily unavailable|incomplete read",
    re.I,
)
_TRANSIENT_CLASSES = frozenset(
    {"ClientConnectionError", "ClientPayloadError", "ConnectionError", "TimeoutError", "Timeout"}
)


def is_transient(error: BaseException) -> bool:
    """Whether an error may be gone at the next try: a server's 5xx or 429, a lost connection.

    File systems dress such errors as other ones, a missing file for example: their causes count.

    >>> is_transient(OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject"))
    True
    >>> is_transient(OSError("AWS Error ACCESS_DENIED (HTTP status 403) during HeadObject"))
    False
    """
    return any(map(_is_transient, _chain(error)))


def cause_of(error: BaseException) -> BaseException:
    """Of an error and its causes the first that speaks of a server's answer or a connection."""
    return next((e for e in _chain(error) if _status(e) or _is_transient(e)), error)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error or one of its causes speaks of."""
    return next((s for s in map(_status, _chain(error)) if s is not None), None)


def with_retries(act: Callable[[], T], pause: Pause) -> T:
    """What `act` returns, within `TRIES` tries.

    Raises:
        Exception: The last try's own error.
    """
    for pause_s in _PAUSES_S:
        try:
            return act()
        except Exception as error:  # file systems of any library raise what they like
            if not is_transient(error):
                raise
        pause(pause_s)
    return act()


class RetryingFile(RawIOBase):
    """A file that is read again where reading failed for the moment; for `pyarrow.PythonFile`.

    Not for several threads at once: `PythonFile` takes care of that.
    """

    def __init__(
        self,
        reopen: Callable[[], pa.NativeFile],
        pause: Pause,
        refuse: Callable[[Exception], Exception],
    ) -> None:
        """Open it; `refuse` makes of the last error what is raised."""
        self._reopen, self._pause, self._refuse = reopen, pause, refuse
        self._file: pa.NativeFile | None = None
        self._place = 0
        self._size: int = self._retried(lambda file: file.size())

    def read(self, count: int | None = -1) -> bytes:
        """Up to `count` bytes; None or a negative number: all that are left."""
        left = max(self._size - self._place, 0)
        wanted = left if count is None or count < 0 else min(count, left)
        if wanted == 0:
            return b""

        def read(file: pa.NativeFile) -> bytes:
            data: bytes = file.read_at(wanted, self._place)
            if len(data) < wanted:
                what = f"{len(data)} of {wanted} bytes at {self._place}"
                raise ConnectionError(f"incomplete read: {what}")
            return data

        data = self._retried(read)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place; as of Python's files."""
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _retried(self, act: Callable[[pa.NativeFile], T]) -> T:
        def once() -> T:
            if self._file is None:
                self._file = self._reopen()
            try:
                return act(self._file)
            except Exception:
                self._file = None  # it may be broken: the next try has its own
                raise

        try:
            return with_retries(once, self._pause)
        except Exception as error:  # noqa: BLE001 - see `with_retries`
            raise self._refuse(error) from None  # what was caught may hold credentials


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _status(error: BaseException) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 100 <= value < 600:  # noqa: PLR2004 - HTTP's range
                return value
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if any(kind.__name__ in _TRANSIENT_CLASSES for kind in type(error).__mro__):
        return True
    return isinstance(error, OSError) and _TRANSIENT_WORDS.search(str(error)) is not None
