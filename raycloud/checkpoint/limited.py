"""A store whose calls have a time limit: what does not answer is left to itself, and has failed.

A library may wait for an answer for as long as a connection stands, and nothing ends a thread from
outside. So each call is made in a thread of its own, which is abandoned where it comes no further.
What it wrote by then is a draft, or an upload that is not completed: nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from raycloud.checkpoint.naming import StoreError
from raycloud.threads import THREADS

if TYPE_CHECKING:
    from raycloud.checkpoint.store import Store
    from raycloud.threads import Threads

Result = TypeVar("Result")

LEAST_S = 60.0  # without any progress; what libraries try again takes less
_MOST_S = 300.0
# A write ends with making durable all that it was given: a disk, or a link, slower than this fails.
_SLOWEST_BYTES_PER_S = 16e6
_HINT = "see that the place can be reached and is not overloaded, or set `checkpoint.path`"


class _Call:
    """One call under way, and how far it has come."""

    def __init__(self, work: Callable[[], Any], threads: Threads) -> None:
        self._work, self._threads = work, threads
        self._turn = threads.condition()
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = self._abandoned = False
        self._pieces = 0
        self._given = 0.0

    def counted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The chunks; each one asked for is progress, and none comes once nobody waits."""
        for chunk in chunks:
            with self._turn:
                if self._abandoned:
                    raise StoreError("the write was given up", hint=_HINT)
                self._pieces += 1
                self._given += memoryview(chunk).nbytes
                self._turn.notify_all()
            yield chunk

    def result(self, least_s: float, what: str) -> Any:
        """What the call returns or raises.

        Raises:
            StoreError: It has come no further for too long.
        """
        self._threads.thread(self._run, name="store").start()
        with self._turn:
            while not self._over:
                pieces = self._pieces
                limit_s = min(least_s + self._given / _SLOWEST_BYTES_PER_S, _MOST_S)
                if not self._turn.wait_for(partial(self._moved, pieces), limit_s):
                    self._abandoned = True
                    raise StoreError(f"{what}: no answer for {limit_s:.0f} s", hint=_HINT)
        if self._error is not None:
            raise self._error
        return self._result

    def _moved(self, pieces: int) -> bool:
        return self._over or self._pieces != pieces

    def _run(self) -> None:
        result, error = None, None
        try:
            result = self._work()
        except BaseException as raised:  # noqa: BLE001 - raised to who waits
            error = raised
        with self._turn:
            self._result, self._error, self._over = result, error, True
            self._turn.notify_all()


class LimitedStore:
    """Another store, with time limits on all but reading.

    Args:
        store: The other one.
        least_s: How long a call may come no further; longer where many bytes were given to it.
        threads: Where calls are made.
    """

    def __init__(
        self, store: Store, *, least_s: float = LEAST_S, threads: Threads = THREADS
    ) -> None:
        """Nothing is called yet."""
        self._store, self._least_s, self._threads = store, least_s, threads
        self.read, self.stream = store.read, store.stream

    @property
    def place(self) -> str:
        """That of the other one."""
        return self._store.place

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write, as long as it comes further."""
        call = _Call(lambda: self._store.write(name, counted), self._threads)
        counted = call.counted(chunks)
        call.result(self._least_s, f"cannot write {self.place}/{name}")

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        return self._limited(partial(self._store.size, name), f"read {self.place}/{name}")

    def exists(self, name: str) -> bool:
        """Whether `name` is there."""
        return self._limited(partial(self._store.exists, name), f"read {self.place}/{name}")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """All files that start with `prefix`, drafts among them, and their sizes."""
        return self._limited(partial(self._store.sizes, prefix), f"list {self.place}")

    def names(self, prefix: str = "") -> list[str]:
        """All complete files that start with `prefix`."""
        return self._limited(partial(self._store.names, prefix), f"list {self.place}")

    def drafts(self, prefix: str = "") -> list[str]:
        """All unfinished files that start with `prefix`."""
        return self._limited(partial(self._store.drafts, prefix), f"list {self.place}")

    def remove(self, name: str) -> None:
        """Remove a file or a draft."""
        self._limited(partial(self._store.remove, name), f"remove {self.place}/{name}")

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files or drafts."""
        what = f"remove {len(names)} files of {self.place}"
        self._limited(partial(self._store.remove_all, names), what)

    def _limited(self, work: Callable[[], Result], what: str) -> Result:
        found: Result = _Call(work, self._threads).result(self._least_s, f"cannot {what}")
        return found
