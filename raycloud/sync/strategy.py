"""How the gradients of all members become one mean: strategies to sum buckets of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from raycloud.errors import InternalError
from raycloud.net.transport import CodedTransport
from raycloud.sync.codecs import CODECS, Int4, TopK
from raycloud.sync.residual import Residual

if TYPE_CHECKING:
    from raycloud.events import SyncPoint
    from raycloud.net.transport import Transport, Work
    from raycloud.sync.buckets import Bucket
    from raycloud.sync.codecs import Codec


class SyncStrategy(Protocol):
    """Sums gradients over the members of a generation, bucket by bucket.

    Order of calls: `connect` for each generation; in each step `start` for each bucket, in the same
    order everywhere, while the last backward pass goes on; then, once the works of all have
    arrived, `finish` for each; then `commit` or `discard`, or all of it once more. From `start` to
    `finish` a bucket is the strategy's. An exchange that breaks has no `finish`: `connect` follows,
    and the buckets are others where messages were on their way. Flags travel beside all that, in a
    message of their own.
    """

    @property
    def residual(self) -> Residual | None:
        """What this member keeps of what encoding has lost; None: nothing is lost."""

    def connect(self, transport: Transport) -> None:
        """Exchange over `transport` from now on."""

    def start(self, bucket: Bucket) -> Work | None:
        """Begin to sum `bucket.flat`, this member's part of the mean; None: nothing travels.

        Raises:
            TransportError: The connections are broken.
        """

    def finish(self, bucket: Bucket) -> None:
        """Its messages have arrived: `bucket.flat` is the sum from now on, the same everywhere."""

    def bytes_sent(self, bucket: Bucket) -> int:
        """Bytes that this member has sent of it in a step."""


class AllReduce:
    """The exact sum, by an all-reduce of each bucket as it is."""

    residual: Residual | None = None

    def __init__(self) -> None:
        self._transport: Transport | None = None

    def connect(self, transport: Transport) -> None:
        """See `SyncStrategy.connect`."""
        self._transport = transport

    def start(self, bucket: Bucket) -> Work | None:
        """See `SyncStrategy.start`."""
        transport = self._transport
        if transport is None or transport.size == 1:
            return None
        return transport.all_reduce(bucket.flat)

    def finish(self, bucket: Bucket) -> None:
        """Nothing: the sum has come where the part was."""

    def bytes_sent(self, bucket: Bucket) -> int:
        """See `SyncStrategy.bytes_sent`."""
        transport = self._transport
        return 0 if transport is None else transport.all_reduce_bytes(bucket.payload_bytes)


class Coded(AllReduce):
    """The sum through a codec, by direct exchange, with error feedback.

    Gradients that are not fp32 go as they are. Without a codec all do: what was kept while there
    was one goes with the first of them, and nothing is left.

    Args:
        codec: How gradients travel, and their sums; None: as they are.
        updates: How those of rounds do; None: likewise.
        residual: What is kept by now; None: nothing.
    """

    def __init__(
        self,
        codec: Codec | None,
        updates: Codec | None = None,
        residual: Residual | None = None,
    ) -> None:
        super().__init__()
        self.residual: Residual = Residual() if residual is None else residual
        self._gradients, self._updates = codec, updates or codec
        self._coded: CodedTransport | None = None
        self._totals: dict[Bucket, torch.Tensor] = {}

    def connect(self, transport: Transport) -> None:
        """See `SyncStrategy.connect`."""
        if self._gradients is None:
            super().connect(transport)
            self.residual.abandon()
            return
        if not isinstance(transport, CodedTransport):
            raise InternalError(f"a codec needs a transport that takes one, not {transport!r}")
        super().connect(transport)
        self._coded = transport
        self._totals.clear()
        self.residual.abandon()

    @property
    def _codec(self) -> Codec | None:
        return self._updates if self.residual.of_updates else self._gradients

    def start(self, bucket: Bucket) -> Work | None:
        """See `SyncStrategy.start`."""
        if not _encodes(bucket):
            return super().start(bucket)
        self.residual.add_to(bucket)
        if self._codec is None:
            return super().start(bucket)
        if self._coded is None or self._coded.size == 1:
            return None
        total = self._totals[bucket] = self.residual.room(bucket)
        return self._coded.reduce(bucket.flat, total, self._codec)

    def finish(self, bucket: Bucket) -> None:
        """See `SyncStrategy.finish`."""
        if not _encodes(bucket):
            return
        total = self._totals.pop(bucket, None)
        if total is None:  # of a single member, or without a codec: nothing is lost
            self.residual.stage(bucket, None)
        else:
            self.residual.stage(bucket, bucket.flat)
            bucket.hold(total)

    def bytes_sent(self, bucket: Bucket) -> int:
        """See `SyncStrategy.bytes_sent`."""
        if self._coded is None or self._codec is None or not _encodes(bucket):
            return super().bytes_sent(bucket)
        return self._coded.reduce_bytes(bucket.flat.numel(), self._codec)


def _encodes(bucket: Bucket) -> bool:
    return bucket.flat.dtype is torch.float32


# By the codec of a job; `none`, the all-reduce, is `sync: exact`.
STRATEGIES: dict[str, Callable[[], SyncStrategy]] = {
    **{name: partial(Coded, codec) for name, codec in CODECS.items()},
    "none": AllReduce,
}


def strategy_of(point: SyncPoint) -> SyncStrategy:
    """What sums gradients at such a point; where nobody waits for servers, there is nothing to sum.

    With `topk` what rounds have moved goes by it, and gradients, step by step, as int4.
    """
    if point.topology == "servers" and point.staleness:
        return STRATEGIES["none"]()
    if point.ratio is not None:
        return Coded(CODECS[Int4.name], TopK(point.ratio))
    return STRATEGIES[point.codec]()


def changed_to(point: SyncPoint, residual: Residual | None) -> Coded:
    """What sums gradients at a point that a run has changed to; it goes on with what is kept."""
    if point.ratio is not None:
        made = Coded(CODECS[Int4.name], TopK(point.ratio), residual)
    else:
        codec = None if point.codec == "none" else CODECS[point.codec]
        made = Coded(codec, residual=residual)
    made.residual.passing = point.codec == "none"
    return made
