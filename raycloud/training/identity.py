"""Whether the blocks at hand are those that a checkpoint was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.index import Index

DATA = "data"  # its name among a checkpoint's values


def identity(
    index: Index, *, blocks: int | None = None, files: int | None = None
) -> dict[str, Any]:
    """What tells a data set from another, as plain values for a checkpoint.

    Args:
        index: Of the data set.
        blocks: Count the first ones only.
        files: The same for the files that they were made from.
    """
    keys = [block.key for block in index.blocks][:blocks]
    digests = [file.digest for file in index.inputs][:files]
    return {
        "blocks": len(keys),
        "rows": sum(block.rows for block in index.blocks[:blocks]),
        "keys": _digest(keys),
        "files": len(digests),
        "digests": _digest(digests),
    }


def check_identity(
    index: Index | None, kept: Mapping[str, Any] | None, *, stratified: bool = False
) -> None:
    """Refuse data that is not what a checkpoint was trained on. It may have grown at its end.

    Args:
        index: Of the data at hand; None where the task's samples are its own.
        kept: The `identity` in the checkpoint; None where it has none.
        stratified: Whether rows are dealt to partitions by a column.

    Raises:
        DataError: It is not, and what has changed.
    """
    if index is None and kept is None:
        return
    if index is None or kept is None:
        was, now = ("samples of the task's own", "a Source")[:: 1 if kept is None else -1]
        raise DataError(
            f"Task.data returned {was} when the checkpoint was made, and {now} now",
            hint="resume with the task the run was started with, or start a new run",
        )
    found = identity(index, blocks=kept["blocks"], files=kept["files"])
    if found == kept:
        return
    if (found["files"], found["digests"]) != (kept["files"], kept["digests"]):
        raise DataError(
            f"the files of the data set have changed: the first {kept['files']} are not those that "
            f"the checkpoint was trained on",
            hint="bring them back, or start a new run: only files that are added can be taken up",
        )
    dealt = ", global_batch / micro_batch (rows are dealt by it)" if stratified else ""
    raise DataError(
        f"the rows made of the data set's files have changed: there are {found['rows']} in the "
        f"place of the {kept['rows']} that the checkpoint was trained on, or they are others",
        hint=f"undo the change to Task.preprocess, to the Source's options{dealt} or to raycloud's "
        "version, or start a new run",
    )


def _digest(names: Iterable[str]) -> str:
    """A digest of names in their order: 32 hex digits."""
    found = hashlib.blake2b(digest_size=16)
    for name in names:
        found.update(name.encode() + b"\n")
    return found.hexdigest()
