"""Restore from a checkpoint, in place: members read it together where they meet.

Each part of a checkpoint is read from the store by one member, which broadcasts it to the others:
the store gives each byte to one of them, however many restore. Process, model and data stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from raycloud.checkpoint import load
from raycloud.checkpoint.payload import load_tensors, parse_part, read_content
from raycloud.errors import CheckpointError
from raycloud.net.transport import finish
from raycloud.step.commit import check_restored

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest, PartRecord, Store
    from raycloud.commands import Back
    from raycloud.net.transport import Transport
    from raycloud.step.replica import Replica

_CHUNK_BYTES = 2**24


class Restore:
    """Loads the checkpoint that members begin from, or go back to.

    The run starts from `origin`, if any. Where this member `joins`, others have begun already, and
    it takes their state.

    Raises:
        TaskError: The checkpoint is of another model, optimizer or schedule.
    """

    def __init__(
        self, store: Store, replica: Replica, origin: Manifest | None, *, joins: bool
    ) -> None:
        """Check that the checkpoint fits; it is loaded where members meet."""
        self._store, self._replica, self._origin = store, replica, origin
        self.begin_anew()
        if origin is not None and not joins:
            tensors = {name: at for part in origin.parts for name, at in part.tensors.items()}
            shapes = {name: record.shape for name, record in tensors.items()}
            replica.state.check_fits(shapes, origin.values)

    def begin_anew(self) -> None:
        """Forget roll-backs: the process is another member from now on."""
        self._manifest, self._left_out = self._origin, frozenset[int]()
        self._gone_back = -1  # the newest generation that began with going back

    def go_back(self, back: Back) -> Manifest | None:
        """Take the checkpoint that all go back to for the one to load.

        Returns:
            Its manifest; None where this member stands there: it was told before, or is new.

        Raises:
            CheckpointError: Its manifest cannot be read; or this member has begun from one, and
                all go back to the beginning.
        """
        if back.generation <= self._gone_back:
            return None
        self._gone_back, self._left_out = back.generation, frozenset(back.without)
        if back.step == 0:
            if self._manifest is not None:
                raise CheckpointError(
                    f"it began from step {self._manifest.step}, and all go back to the beginning",
                    hint="another worker comes in its place",
                )
            self._replica.history.left_out |= self._left_out
            return None
        self._manifest = load(self._store, back.step)
        return self._manifest

    def load(self, transport: Transport | None, abandoned: Callable[[], bool]) -> None:
        """Load the checkpoint, if there is one; nobody has computed yet.

        All members call this together, but where some were told of no checkpoint: then without a
        transport, each reads all.

        Raises:
            CheckpointError: It cannot be read.
            TaskError: It is of another model, optimizer or schedule.
            RollbackError: It is not finite, and the job goes back then.
            TransportError: The meeting broke, or was abandoned; nothing is loaded.
        """
        manifest, replica = self._manifest, self._replica
        if manifest is None:
            return
        if transport is None:
            tensors = load_tensors(self._store, manifest)
        else:
            tensors = read_together(self._store, manifest, transport, abandoned)
        if replica.kept is not None:
            replica.discard()
        replica.state.load(tensors, manifest.values)
        replica.history.left_out |= self._left_out
        replica.statistics.settle()
        if self._gone_back >= 0 and replica.errors.on_nan == "rollback":
            check_restored(replica.model, manifest.step)


def read_together(
    store: Store, manifest: Manifest, transport: Transport, abandoned: Callable[[], bool]
) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors: each part is read by one member, which sends it to all others.

    Raises:
        CheckpointError: A part that this member reads cannot be read.
        DamagedError: A part is missing or is not what was written.
        TransportError: It broke, or was abandoned.
    """
    rank, size = transport.rank, transport.size
    tensors: dict[str, torch.Tensor] = {}
    for start in range(0, len(manifest.parts), size):
        parts = manifest.parts[start : start + size]
        own = read_content(store, parts[rank]) if rank < len(parts) else None  # all at once
        for source, part in enumerate(parts):
            given = own if source == rank else None
            content = _broadcast(given, part, source, transport, abandoned)
            tensors.update(parse_part(content, part, store.place))
    return tensors


def _broadcast(
    content: bytes | None,
    part: PartRecord,
    source: int,
    transport: Transport,
    abandoned: Callable[[], bool],
) -> bytes:
    """The bytes of a part that the member of rank `source` has as `content`."""
    if transport.size == 1 and content is not None:
        return content
    pieces: list[bytearray] = []
    for start in range(0, part.bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, part.bytes - start)
        piece = bytearray(size if content is None else content[start : start + size])
        finish(transport.broadcast(torch.frombuffer(piece, dtype=torch.uint8), source), abandoned)
        if content is None:
            pieces.append(piece)
    return b"".join(pieces) if content is None else content
