"""Where checkpoints are kept: a flat set of named files that are complete or absent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from raycloud.checkpoint.local import LocalStore
from raycloud.errors import CheckpointError


class Store(Protocol):
    """Named files. A name is plain and relative, `a/b.json`; see `naming.check_name`.

    Every method raises `CheckpointError` with the place and a remedy when the store cannot do it,
    and `DamagedError` for a file that is not there. Methods may be called from several threads at
    once, for different names.
    """

    @property
    def place(self) -> str:
        """The path or URL, for people; without credentials."""
        ...

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write `name` from `chunks`, replacing what is there.

        Atomic: whoever reads sees the file as before or complete, also when the writer is killed. A
        chunk may be reused by its owner once the next one is asked for. On return the file survives
        a power cut (local) or is acknowledged by the service (remote). What `chunks` raises passes
        through, and nothing is written.
        """
        ...

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        ...

    def stream(self, name: str) -> Iterator[bytes]:
        """The bytes of `name`, piece by piece."""
        ...

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        ...

    def exists(self, name: str) -> bool:
        """Whether `name` is there."""
        ...

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """All files whose names start with `prefix`, drafts among them, and their bytes.

        Few calls, however many files there are.
        """
        ...

    def names(self, prefix: str = "") -> list[str]:
        """All names that start with `prefix`, sorted; drafts are not among them."""
        ...

    def drafts(self, prefix: str = "") -> list[str]:
        """Unfinished files that start with `prefix`, sorted: of live and killed writers."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or a draft, durably; nothing happens if it is not there."""
        ...

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove all of these, in few calls; some may be gone already, or after an error."""
        ...


def open_store(url_or_path: str | Path) -> Store:
    """The store at a local path or an fsspec URL (`memory://`, `s3://bucket/key`, ...).

    Nothing is created before the first write.

    Raises:
        CheckpointError: The URL's protocol is unknown, or its package is not installed.
    """
    text = str(url_or_path)
    protocol, found, rest = text.partition("://")
    if "::" in text:
        raise CheckpointError(
            f"checkpoint.path = {text!r} chains file systems",
            hint="give the URL of the place itself: a cache in between would hide what is written",
        )
    if not found:
        return LocalStore(Path(text))
    if protocol in {"file", "local"}:
        return LocalStore(Path(rest))
    # fsspec is only paid for by those who use it: a driver counts milliseconds to its first step.
    from raycloud.checkpoint.remote import RemoteStore  # noqa: PLC0415

    return RemoteStore(text)
