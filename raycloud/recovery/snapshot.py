"""A state on its way from those who have it to one who has not: each sends a part, while it trains.

The tensors are divided by bytes among those who have them, as for a checkpoint. A part is copied
beside the step that is computed, which changes no parameter before it commits, and travels after
that from a thread. It gives way to exchanges of gradients, though never quite.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint import decode, encode, split_names
from raycloud.errors import TransportError
from raycloud.net.stream import SILENT_S, Arrivals, Stream, connect
from raycloud.recovery.state_transfer import (
    Tensors,
    bytes_of,
    described,
    room_for,
)

if TYPE_CHECKING:
    import torch

    from raycloud.net.stream import Place
    from raycloud.recovery.rendezvous import Host
    from raycloud.step.stateful import ReplicaState

# While gradients travel at most 10 MB/s of all senders go on, nor more than a tenth of any link.
_GIVE_WAY_S = 0.1  # for each chunk and sender
_GIVE_WAY_TIMES = 9.0  # what the last one took to arrive
_LONGEST_S = SILENT_S / 3
_LOOK_UP_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the members of a generation share in sending.

    Attributes:
        rank: This member's.
        part: Which of the parts is its own.
        parts: How many have the state.
        places: Where those listen that have not.
        busy: Whether an exchange of gradients is under way.
        host: Where time, threads and connections come from.
    """

    rank: int
    part: int
    parts: int
    places: Sequence[Place]
    busy: Callable[[], bool]
    host: Host


class Outgoing:
    """This member's part of its state, as it is now, on its way to those that follow.

    Args:
        state: Its parameters and its optimizer's tensors must not change before `settle` returns.
        sharing: With whom.
    """

    def __init__(self, state: ReplicaState, sharing: Sharing) -> None:
        """Begin; buffers, which a forward pass may change, are copied at once."""
        self._sharing = sharing
        tensors = state.tensors()
        sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        self._live = {
            name: tensors[name] for name in split_names(sizes, sharing.parts)[sharing.part]
        }
        self._copies: Tensors = {n: _copy(self._live[n]) for n in self._live if state.is_buffer(n)}
        self._told: dict[str, Any] = {
            "tensors": described(self._live),
            "values": encode(state.values()) if sharing.part == 0 else None,
        }
        threads = sharing.host.threads
        self._copied, self._closed = threads.event(), threads.event()
        self._error: Exception | None = None
        self._turn = threading.Lock()
        self._sending = len(sharing.places)
        self._streams: list[Stream] = []
        for at, place in enumerate(sharing.places):
            threads.thread(self._send, place, name=f"send-{at}").start()
        threads.thread(self._copy, name="copy").start()

    def settle(self) -> None:
        """Wait until the state may change; from the second time on that is at once."""
        self._copied.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop; nobody waits for the rest any more."""
        self._closed.set()
        self._copied.wait()
        with self._turn:
            streams = list(self._streams)
        for stream in streams:
            stream.hang_up()  # each is closed by who sends there

    def _copy(self) -> None:
        try:
            for name, tensor in self._live.items():
                if self._closed.is_set():
                    break
                if name not in self._copies:
                    self._copies[name] = _copy(tensor)
        except Exception as error:  # noqa: BLE001 - raised to who waits
            self._error = error
        finally:
            self._copied.set()

    def _send(self, place: Place) -> None:
        """What fails here is missed there, and told there."""
        try:
            with contextlib.suppress(TransportError, OSError):
                self._send_all(place)
        finally:
            with self._turn:
                self._sending -= 1
                over = self._sending == 0
            if over:
                self._copied.wait()
                self._copies, self._live = {}, {}

    def _send_all(self, place: Place) -> None:
        stream = connect(place, self._sharing.rank, self._sharing.host.sockets)
        with self._turn:
            self._streams.append(stream)
        self._copied.wait()
        with contextlib.closing(stream):
            stream.tell(self._told)
            self._pour(stream)
            stream.finish()

    def _pour(self, stream: Stream) -> None:
        clock, chunk_bytes = self._sharing.host.clock, self._sharing.host.sockets.chunk_bytes
        since, haste = chunk_bytes, False
        began_s = clock.monotonic_s()
        for name, *_ in self._told["tensors"]:
            if name not in self._copies:
                raise TransportError("the generation was over before all was copied")
            whole = bytes_of(self._copies[name])
            for at in range(0, len(whole), chunk_bytes):
                if self._closed.is_set():
                    raise TransportError("the generation is over")
                if since >= chunk_bytes:
                    haste = haste or self._give_way(stream, began_s)
                    since, began_s = 0, clock.monotonic_s()
                chunk = whole[at : at + chunk_bytes]
                stream.send(chunk)
                since += len(chunk)

    def _give_way(self, stream: Stream, began_s: float) -> bool:
        """Wait a little while gradients travel; True once the other one is in haste.

        Args:
            stream: Whose next bytes wait.
            began_s: When those before them began to be sent.
        """
        clock, least_s = self._sharing.host.clock, _GIVE_WAY_S * self._sharing.parts
        now_s = clock.monotonic_s()
        arrived, until_s = False, now_s + _LONGEST_S
        while self._sharing.busy() and now_s < until_s:
            if not arrived and not stream.on_its_way():
                arrived = True
                longest_s = max(least_s, _GIVE_WAY_TIMES * (now_s - began_s))
                until_s = now_s + min(longest_s, _LONGEST_S)
            if stream.haste(_LOOK_UP_S):
                return True
            now_s = clock.monotonic_s()
        return False


class Incoming:
    """A state that comes from several members.

    Args:
        address: This node's, that they can reach.
        sources: How many send a part.
        host: Where threads and connections come from.

    Attributes:
        place: Where they are to connect.
    """

    def __init__(self, address: str, sources: int, host: Host) -> None:
        """Listen, and begin to take what comes."""
        self._sources = sources
        self._turn = host.threads.condition()
        self._parts: dict[int, Tensors] = {}
        self._values: Any = None
        self._error: TransportError | None = None
        self._arrivals = Arrivals(
            address, sources, self._read, self._fail, host.threads, host.sockets
        )
        self.place = self._arrivals.place

    def whole(self, timeout_s: float = 0.0) -> bool:
        """Whether everything is here; waits at most `timeout_s` for it.

        Raises:
            TransportError: It will not come.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._error is not None or self._complete, timeout_s)
            if self._error is not None and not self._complete:
                raise self._error
            return self._complete

    def take(self) -> tuple[Tensors, Mapping[str, Any]]:
        """The tensors and the plain values, once they are whole."""
        with self._turn:
            found = {name: t for part in self._parts.values() for name, t in part.items()}
            self._parts = {rank: {} for rank in self._parts}
        return found, decode(self._values)

    def hurry(self) -> None:
        """From now on it is waited for."""
        for stream in self._arrivals.streams:
            stream.hurry()

    def close(self) -> None:
        """Nothing more is taken."""
        self._arrivals.close()

    @property
    def _complete(self) -> bool:
        return len(self._parts) == self._sources

    def _read(self, rank: int, stream: Stream) -> None:
        told = stream.hear()
        part = room_for(told)
        for tensor in part.values():
            stream.receive(bytes_of(tensor))
        with self._turn:
            self._parts[rank] = part
            self._values = told["values"] if told.get("values") is not None else self._values
            self._turn.notify_all()

    def _fail(self, error: TransportError) -> None:
        with self._turn:
            self._error = self._error or error
            self._turn.notify_all()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True).contiguous()
