"""State transfer: a replica's state from the members that have it to those that have not.

A receiver listens, and senders connect to it. Each sender says in a header what it has, and sends
the pieces that it is asked for; a few are asked for ahead, so that nobody waits for the next word.

Where all meet, every sender has the whole state, which stands still: a piece is asked of whoever
has sent another, so a slow sender sends less. Beside training, each sender has a part of its own,
divided by bytes as for a checkpoint. It copies its part while a step is computed, which changes no
parameter before it commits, and gives way to exchanges of gradients, though never quite.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.checkpoint import encode, split_names
from raycloud.errors import TransportError
from raycloud.net.stream import SILENT_S, connect
from raycloud.net.transport import finish
from raycloud.recovery.receiving import ASK, DONE, HURRY, Ask, Receiver, Row, described

if TYPE_CHECKING:
    import torch

    from raycloud.net.lane import Lane
    from raycloud.net.stream import Place, Stream
    from raycloud.recovery.receiving import Tensors
    from raycloud.recovery.rendezvous import Host
    from raycloud.step.stateful import ReplicaState

_MOST_SENDERS = 8  # to one receiver, where all meet
# While gradients travel at most 10 MB/s of all senders go on, nor more than a tenth of any link.
_GIVE_WAY_S = 0.1  # for each `chunk_bytes` and sender
_GIVE_WAY_TIMES = 9.0  # what the last ones took to arrive
_LONGEST_S = SILENT_S / 3
_GIVE_WAY_LOOK_S = 0.005


def hand_over(
    state: ReplicaState,
    *,
    givers: Sequence[int],
    takers: Sequence[int],
    lane: Lane,
    address: str,
    host: Host,
) -> None:
    """Give the state of `givers` to `takers` (ranks), while all wait; all members call this.

    The givers' states are the same, and must not change meanwhile; what is no tensor is the first
    one's.

    Raises:
        TransportError: The meeting broke, or was abandoned; this member's state is as it was.
    """
    rank = lane.transport.rank
    if rank in takers:
        senders = sources(givers, takers.index(rank))
        with closing(Receiver(address, len(senders), host)) as receiver:
            lane.gather_places(receiver.place)
            finish(receiver, lane.abandoned)
            state.load(*receiver.take())
        return
    every = lane.gather_places(None)
    places = [place for at, place in enumerate(every) if rank in sources(givers, at)]
    if places:
        with closing(Sender(state, rank, places, host, tells=rank == givers[0])) as sender:
            finish(sender, lane.abandoned)


def sources(givers: Sequence[int], taker: int) -> tuple[int, ...]:
    """From whom a taker has it: the first and, where there are many, some of the others in turn.

    >>> sources((0, 2, 5), 1), sources(range(10), 1)
    ((0, 2, 5), (0, 8, 9, 1, 2, 3, 4, 5))
    """
    if len(givers) <= _MOST_SENDERS:
        return tuple(givers)
    first, *others = givers
    begin, count = taker * (_MOST_SENDERS - 1), _MOST_SENDERS - 1
    return (first, *(others[(begin + k) % len(others)] for k in range(count)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A sender's part beside training, of so many `parts`; the first has what is no tensor, too.

    `busy` says whether an exchange of gradients is under way.
    """

    part: int
    parts: int
    busy: Callable[[], bool]


class Sender:
    """Sends a member's state, as it is now, to each that asks for pieces of it.

    Args:
        state: Where all wait it must not change before all have it; beside training parameters
            and the optimizer's tensors must not before `settle` returns.
        rank: This member's.
        places: Where receivers listen.
        host: Where time, threads and connections come from.
        tells: It says what the state consists of.
        beside: Its part, beside training; None: all of it, and all wait.
    """

    def __init__(
        self,
        state: ReplicaState,
        rank: int,
        places: Sequence[Place],
        host: Host,
        *,
        tells: bool = True,
        beside: Beside | None = None,
    ) -> None:
        """Connect, and answer; buffers, which a forward pass may change, are copied at once."""
        self._rank, self._host, self._beside = rank, host, beside
        # An optimizer keeps its tensors in the order in which it got them: not all got them alike.
        self._tensors: Tensors = dict(sorted(state.tensors().items()))
        if beside is not None:
            sizes = {name: t.numel() * t.element_size() for name, t in self._tensors.items()}
            own = split_names(sizes, beside.parts)[beside.part]
            self._tensors = {name: self._tensors[name] for name in own}
        part = 0 if beside is None else beside.part
        listed = described(self._tensors)
        self._told = {
            "part": part,
            "layout": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
            "tensors": listed if tells else None,
            "values": encode(state.values()) if tells and part == 0 else None,
        }
        threads = host.threads
        self._turn = threads.condition()
        self._left, self._over = len(places), False
        self._error: TransportError | None = None
        self._streams: list[Stream] = []
        self._copied, self._copy_error = threads.event(), list[Exception]()
        moving = [name for name in self._tensors if beside is not None and state.is_buffer(name)]
        self._tensors |= {name: _copy(self._tensors[name]) for name in moving}
        name = "give" if beside is None else "stream"
        for at, place in enumerate(places):
            threads.thread(self._serve, place, name=f"{name}-{at}").start()
        if beside is None:
            self._copied.set()
        else:
            still = [name for name in self._tensors if name not in moving]
            threads.thread(self._copy, still, name="copy").start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all have all of it, within `timeout_s`; `TransportError`: one broke off."""
        with self._turn:
            self._turn.wait_for(lambda: self._error or self._left == 0, timeout_s)
            if self._error is not None:
                raise self._error
            return self._left == 0

    def serve(self, stream: Stream) -> None:
        """Send to one that has connected by itself, and is none of those that are waited for.

        Raises:
            TransportError: It broke off.
        """
        self._send(stream)

    def settle(self) -> None:
        """Wait until the state may change; from the second time on that is at once."""
        self._copied.wait()
        for error in self._copy_error:
            raise error

    def close(self) -> None:
        """Stop; nobody waits for the rest any more."""
        with self._turn:
            self._over = True
            streams = list(self._streams)
        self._copied.wait()
        for stream in streams:
            stream.hang_up()  # each is closed by the thread that sends there

    def _copy(self, names: Iterable[str]) -> None:
        try:
            for name in names:
                if self._over:
                    break
                self._tensors[name] = _copy(self._tensors[name])
        except Exception as error:  # noqa: BLE001 - raised to who waits
            self._over = True
            self._copy_error.append(error)
        finally:
            self._copied.set()

    def _serve(self, place: Place) -> None:
        """Beside training, what fails here is missed there, and told there."""
        error: TransportError | None = None
        try:
            with closing(connect(place, self._rank, self._host.sockets)) as stream:
                self._send(stream)
        except TransportError as broken:
            error = broken
        except Exception as broken:  # noqa: BLE001 - the last line before the thread's end
            error = TransportError(f"the state could not be sent: {broken}")
        with self._turn:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
            self._turn.notify_all()
        if last:
            self._copied.wait()
            self._tensors = {}

    def _send(self, stream: Stream) -> None:
        with self._turn:
            self._streams.append(stream)
        self._copied.wait()
        if self._over:
            raise TransportError("the generation is over")
        stream.tell(self._told)
        clock, chunk_bytes = self._host.clock, self._host.sockets.chunk_bytes
        row, asked = Row(self._tensors.values()), deque[Ask]()
        hurried, since, began_s = self._beside is None, chunk_bytes, clock.monotonic_s()
        while True:
            start, count = ask = asked.popleft() if asked else _next_ask(stream)
            if ask == DONE:
                return
            if ask == HURRY:
                hurried = True
                continue
            if count > chunk_bytes or start + count > row.size:
                raise TransportError(f"{count} bytes from {start} on of {row.size} are asked")
            if not hurried and since >= chunk_bytes:
                hurried = self._give_way(stream, asked, began_s)
                since, began_s = 0, clock.monotonic_s()
            stream.send(row.read(start, start + count))
            since += count

    def _give_way(self, stream: Stream, asked: deque[Ask], began_s: float) -> bool:
        """Wait a little while gradients travel; True once the receiver is waited for.

        What is `asked` for meanwhile is kept. The bytes before began to be sent at `began_s`.
        """
        assert self._beside is not None  # noqa: S101 - beside training it is there
        clock, least_s = self._host.clock, _GIVE_WAY_S * self._beside.parts
        now_s = clock.monotonic_s()
        arrived, until_s = False, now_s + _LONGEST_S
        while self._beside.busy() and now_s < until_s:
            if not arrived and not stream.on_its_way():
                arrived = True
                longest_s = max(least_s, _GIVE_WAY_TIMES * (now_s - began_s))
                until_s = now_s + min(longest_s, _LONGEST_S)
            if stream.heard(_GIVE_WAY_LOOK_S):
                if (ask := _next_ask(stream)) == HURRY:
                    return True
                asked.append(ask)
            now_s = clock.monotonic_s()
        return False


def _next_ask(stream: Stream) -> Ask:
    while not stream.heard(SILENT_S):
        pass  # a slower one is still sending what is missing
    start, count = ASK.unpack(stream.take(ASK.size))
    return start, count


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True).contiguous()
