"""Whether several machines see one store: a path may name another disk on each of them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycloud.errors import CheckpointError, SpecError

if TYPE_CHECKING:
    from raycloud.checkpoint.store import Store

_MARK = "mark-"


@contextlib.contextmanager
def marked(store: Store) -> Iterator[str]:
    """Write a mark that whoever sees this store can see, until the block is left; its name.

    Raises:
        CheckpointError: The store cannot be written.
    """
    for left in store.names(_MARK):  # by a driver that was killed
        store.remove(left)
    name = f"{_MARK}{secrets.token_hex(8)}"
    store.write(name, [b""])
    try:
        yield name
    finally:
        with contextlib.suppress(CheckpointError):  # the store is gone: nobody is misled
            store.remove(name)


def see(store: Store, mark: str, node: str) -> None:
    """Look for a mark from another machine.

    Args:
        store: As it is opened here.
        mark: What `marked` has written.
        node: The machine, for people.

    Raises:
        SpecError: It is not there, so this is another place.
    """
    if not store.exists(mark):
        raise SpecError(
            "checkpoint.path",
            store.place,
            f"is another place on node {node} than where the driver runs",
            hint="each member writes its own part: give a URL, such as s3://BUCKET/NAME, or a "
            "directory on a file system that all nodes share",
        )
