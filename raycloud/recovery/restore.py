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
from raycloud.step.commit import check

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest, PartRecord, Store
    from raycloud.commands import Back
    from raycloud.net.transport import Transport
    from raycloud.recovery.transition import Footing
    from raycloud.step.replica import Replica
    from raycloud.training.config import MemberConfig

_CHUNK_BYTES = 2**24


class Restoring:
    """The checkpoint that a member is to begin from, and its loading.

    Args:
        store: Where checkpoints are.
        replica: This member's.
    """

    def __init__(self, store: Store, replica: Replica) -> None:
        """It begins at the beginning."""
        self._store, self._replica = store, replica
        self._origin: Manifest | None = None  # of the run's start
        self._manifest: Manifest | None = None  # the one to begin from
        self._without: frozenset[int] = frozenset()
        self._gone_back = -1

    def begin(self, config: MemberConfig, origin: Manifest | None) -> None:
        """Begin from what the run starts from; it is loaded where members meet.

        Raises:
            TaskError: It is of another model, optimizer or schedule.
        """
        self._origin = self._manifest = origin
        if origin is not None and not config.joins:
            records = {name: at for part in origin.parts for name, at in part.tensors.items()}
            shapes = {name: record.shape for name, record in records.items()}
            self._replica.state.check_fits(shapes, origin.values)

    def begin_anew(self) -> None:
        """It is another member from now on, with none of the states that it had."""
        self._manifest, self._without = self._origin, frozenset()
        self._gone_back = -1

    def go_back(self, back: Back, footing: Footing) -> None:
        """Stand where the checkpoint does, unless that was done when it was told before.

        Raises:
            CheckpointError: Its manifest cannot be read; or this member was to begin from one, and
                is now to begin at the beginning.
        """
        if back.generation <= self._gone_back:
            return
        self._gone_back, self._without = back.generation, frozenset(back.without)
        if back.step == 0:
            if self._manifest is not None:
                raise CheckpointError(
                    f"it began from step {self._manifest.step}, and all go back to the beginning",
                    hint="another worker comes in its place",
                )
            self._replica.history.left_out |= self._without  # it is new
            return
        self._manifest = load(self._store, back.step)
        footing.go_back(self._manifest)

    def load(self, transport: Transport | None, abandoned: Callable[[], bool]) -> None:
        """Load it, where it begins from one: nobody has computed.

        All members call this together, but where some were told of no checkpoint.

        Args:
            transport: Any of the generation for tensors on the CPU; None: this member reads all.
            abandoned: Says that the generation is over.

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
        replica.history.left_out |= self._without
        replica.statistics.settle()
        if self._gone_back >= 0 and replica.errors.on_nan == "rollback":
            check(replica.model, manifest.step)


def read_together(
    store: Store, manifest: Manifest, transport: Transport, abandoned: Callable[[], bool]
) -> dict[str, torch.Tensor]:
    """Read a checkpoint's tensors: each part by one member, which sends it to all others.

    Args:
        store: Where it is, for each of them.
        manifest: The same for all of them.
        transport: Any of the generation for tensors on the CPU.
        abandoned: Says that the generation is over.

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
    """The bytes of a part that the member of rank `source` has; None: this one has not."""
    if transport.size == 1 and content is not None:
        return content
    pieces = []
    for start in range(0, part.bytes, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, part.bytes)
        if content is None:
            piece = torch.empty(stop - start, dtype=torch.uint8)
        else:
            piece = torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8)
        finish(transport.broadcast(piece, source), abandoned)
        pieces.append(piece)
    if content is None:
        content = b"".join(piece.numpy().data for piece in pieces)
    return content


def started_from(config: MemberConfig, store: Store) -> Manifest | None:
    """The checkpoint that the run has started from."""
    if config.joins or config.resume_step is None:
        return config.origin
    return load(store, config.resume_step)
