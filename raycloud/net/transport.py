"""What every way of exchanging tensors promises.

A transport joins the members of one generation. It never blocks a caller that does not ask for it,
and a member that gives up simply stops asking: it *abandons* the transport and its buffers, and the
next generation is built beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from raycloud.errors import TransportError

if TYPE_CHECKING:
    import torch

_LOOK_UP_S = 0.05


class Work(Protocol):
    """One exchange on its way."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; True when the exchange is complete and its buffer may be read.

        May be called again after False. On a GPU the result is on the device when this returns
        True.

        Raises:
            TransportError: The exchange failed and never will complete; its buffer is garbage.
        """
        ...


class Transport(Protocol):
    """Exchanges among the members of one generation.

    Every member calls the same operations in the same order with tensors of the same shape and
    type. From the call until its work is complete the tensor belongs to the transport; if the work
    fails or is abandoned, the tensor must never be read or reused.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Replace `tensor`, in place, by its sum over members."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Replace `tensor`, in place, by that of the member of rank `source`."""
        ...

    def all_reduce_bytes(self, size: int) -> int:
        """Bytes that this member sends in an `all_reduce` of so many."""
        ...

    def hang_up(self) -> None:
        """End what is under way, in any thread: this member gives the transport up."""
        ...

    def close(self) -> None:
        """Let go of sockets; only after every work is complete or abandoned."""
        ...


class Coding(Protocol):
    """What encodes parts of a message; `sync.codecs.Codec` is one. Values are fp32."""

    @property
    def name(self) -> str:
        """By which others know it."""
        ...

    @property
    def for_pair(self) -> Coding:
        """What encodes in its place where two exchange: their sum is not encoded again."""
        ...

    def bound(self, count: int) -> int:
        """Bytes of the code of `count` values."""
        ...

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the code of `values` to `codes`."""
        ...

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """Add what `codes` stand for to `to`."""
        ...

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """Subtract it."""
        ...


@runtime_checkable
class CodedTransport(Transport, Protocol):
    """A transport that sums through a codec, too."""

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> Work:
        """Sum `values`, shape (count,), over members, encoded; see `exchange.Reduction`."""
        ...

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        """Bytes that this member sends in a `reduce` of so many values."""
        ...


class Abandoned(TransportError):
    """The driver said that this generation is over; nothing is wrong with this member."""


def finish(work: Work, abandoned: Callable[[], bool]) -> None:
    """Wait for `work` without ever being stuck in it.

    Raises:
        Abandoned: `abandoned()` became true first.
        TransportError: The exchange failed.
    """
    while not work.wait(_LOOK_UP_S):
        if abandoned():
            raise Abandoned("the generation was abandoned during an exchange")
