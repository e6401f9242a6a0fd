"""Collators: processes on any node that make batches in the members' place, over keyed sockets.

A member asks for the passes of micro-batches ahead of their step, and a collator makes them just as
the member would: by their places in the sequence, whoever it is. So nothing depends on which of
them makes a pass. What a collator that is lost was asked for, another one is, or the member makes
it itself; so does it until the first one is there. A step is asked for in a few parts; a member
that would have to wait makes those that were asked for last.

    member                                  collator
    begin: order, version of the data  ->
                                       <-   begun, or why not
    make: id, groups of micro-batches  ->                        many ahead, answered in turn
    drop: id                           ->                        it is wanted no more
    extend: version, epoch, layout     ->                        the data has grown
                                       <-   id, passes, the bytes of their tensors
                                       <-   busy                 it lives, and is at work
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import astuple, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from raycloud.clock import SystemClock
from raycloud.errors import RaycloudError, TransportError
from raycloud.net.batches import unpacked
from raycloud.net.messages import hear, tell
from raycloud.net.stream import SOCKETS, Place, Sockets, Stream, connect
from raycloud.step.collate import Collate, Pass
from raycloud.threads import THREADS, Threads
from raycloud.worker.collator import order_record
from raycloud.worker.dataset import layout_record

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.messages import Array
    from raycloud.order import Layout, MicroBatch
    from raycloud.step.collate import Passes

_SILENT_S = 30.0  # one that was asked, and says nothing for so long, is lost
_LOOK_S = 1.0
_PARTS = 4  # of a member's share of a step, at most


def _heard(
    told: Sequence[Mapping[str, Any]], asked: Sequence[MicroBatch], arrays: Sequence[Array]
) -> Passes:
    """The passes; `TransportError`: they are not those that were asked for."""
    try:
        made = tuple(
            Pass(
                micro_batches=tuple(asked[at] for at in one["micro_batches"]),
                batch=unpacked(one["batch"], arrays),
                weight=float(one["weight"]),
                seed=int(one["seed"]),
                rows=int(one["rows"]),
                read_s=float(one["read_s"]),
                collate_s=float(one["collate_s"]),
            )
            for one in told
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TransportError(f"what came are no passes: {error!r:.200}") from error
    if [m for one in made for m in one.micro_batches] != [*asked]:
        raise TransportError("passes came of other micro-batches than were asked for")
    return made


class Peer:
    """A collator as a member knows it.

    What it is told is put in order under the lock of all, and sent under its own: one that is slow
    to take it keeps nobody waiting who asks another.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream: Stream | None = None  # from when it is to be told to begin
        self.ready = False
        self._told: deque[Mapping[str, Any]] = deque()
        self._turn = threading.Lock()
        self.asked: dict[int, Part] = {}
        self.heard_s = 0.0

    def tell(self, header: Mapping[str, Any]) -> None:
        """Next it is told this, by `send`."""
        self._told.append(header)

    def send(self) -> None:
        """Send all that it is to be told, in order; it is sent once this returns."""
        with self._turn:
            while self._told and self.stream is not None:
                try:
                    tell(self.stream, self._told.popleft())
                except TransportError:
                    self.stream.hang_up()  # who listens there finds out


class RemoteCollators:
    """The collators of a run, as a member uses them: `step.collate.Collators`. Thread-safe.

    Args:
        names: What they are called.
        where: Where one of them listens; may wait until it does, in a thread of its own. Raises
            `LookupError`: it is not there.
        collate: What the member makes passes with where no collator does.
        fingerprint: Of the member's own samples.
        notice: Told of collators that are lost.
        first: Which one is asked first, so that members spread.
    """

    def __init__(  # noqa: PLR0913 - what stands in for a collator is given too
        self,
        names: Sequence[str],
        where: Callable[[str], Place],
        collate: Collate,
        fingerprint: Mapping[str, str],
        notice: Callable[..., None],
        *,
        first: int = 0,
        clock: Clock | None = None,
        threads: Threads = THREADS,
        sockets: Sockets = SOCKETS,
    ) -> None:
        self.collate, self._notice, self._where = collate, notice, where
        self._fingerprint, self._clock = fingerprint, clock or SystemClock()
        self._sockets, self._threads = sockets, threads
        self._blocks = collate.reads_blocks
        self._lock = threading.RLock()
        self._numbers, self._turn = itertools.count(), first
        self._version, self._closed = 0, False
        self._peers = [Peer(name) for name in names]
        self.settled = threading.Event()  # each has begun, or is lost
        for peer in self._peers:
            threads.thread(self._follow, peer, name="collator-peer").start()

    def submit(self, micro_batches: tuple[MicroBatch, ...], fuse: int) -> Asked:
        """Give each part of it to the collator with the least to do."""
        groups = self.collate.groups(micro_batches, fuse)
        each = max(1, -(-len(groups) // _PARTS))
        parts = [Part(self, groups[at : at + each]) for at in range(0, len(groups), each)]
        for part in parts:
            part.ask()
        return Asked(parts)

    def help(self) -> bool:
        """Make the part here that was asked for last, unless a collator is likely to be at it."""
        with self._lock:
            waiting = [
                (number, peer)
                for peer in self._peers
                for number in sorted(peer.asked)[1:]  # it is at the first one
                if not peer.asked[number].fails
            ]
            if not waiting:
                return False
            number, peer = max(waiting, key=lambda one: one[0])
            part = peer.asked[number]
        if self.forget(peer, number):  # else it has come by now
            part.make()
        return True

    def extend(self, version: int, epoch: int, layout: Layout | None) -> None:
        """See `step.collate.Collators`; the member's own `collate` knows it already."""
        told = {"do": "extend", "before": self._version, "version": version, "epoch": epoch}
        with self._lock:
            self._version = version
            peers = [peer for peer in self._peers if peer.stream is not None]
            for peer in peers:
                peer.tell({**told, "layout": layout_record(layout)})
        for peer in peers:
            peer.send()

    def close(self) -> None:
        """Ask for nothing more; what is waited for is lost."""
        with self._lock:
            self._closed = True
            for peer in self._peers:
                if peer.stream is not None:
                    peer.stream.hang_up()

    @property
    def left(self) -> int:
        """How many there are, with those that are still to begin."""
        with self._lock:
            return len(self._peers)

    def give(self, asked: Part) -> Peer | None:
        """Ask one for it that is ready; None: there is none."""
        with self._lock:
            ready = [peer for peer in self._peers if peer.ready]
            if not ready or self._closed:
                return None
            self._turn += 1
            turned = [ready[(self._turn + i) % len(ready)] for i in range(len(ready))]
            peer = min(turned, key=lambda one: len(one.asked))
            if not peer.asked:
                peer.heard_s = self._clock.monotonic_s()
            number = next(self._numbers)
            peer.asked[number] = asked
            asked.number = number
            told = {
                "do": "make",
                "id": number,
                "groups": [[astuple(one) for one in group] for group in asked.groups],
                "version": self._version,
                "joins": self.collate.joins,
            }
            peer.tell(told)
        peer.send()
        return peer

    def forget(self, peer: Peer, number: int) -> bool:
        """This is wanted no more; whether it had not come yet."""
        with self._lock:
            known = peer.asked.pop(number, None) is not None
            if known:
                peer.tell({"do": "drop", "id": number})
        if known:
            peer.send()
        return known

    def drop(self, peer: Peer, what: str, why: str) -> None:
        """Ask a collator for nothing more; told once."""
        with self._lock:
            known = peer in self._peers
            if known:
                self._peers.remove(peer)
            peer.ready, left = False, len(self._peers)
            waiting, peer.asked = [*peer.asked.values()], {}
            closed = self._closed
        if peer.stream is not None:
            peer.stream.hang_up()
        self._look_settled()
        if known and not closed:
            self._notice(what, collator=peer.name, left=left, why=why)
        for asked in waiting:
            asked.answered(None)

    def _look_settled(self) -> None:
        with self._lock:
            if all(peer.ready for peer in self._peers):
                self.settled.set()

    def _follow(self, peer: Peer) -> None:
        """One collator's thread: reach it, let it begin, and hear what it says to its end."""
        try:
            place = self._where(peer.name)
            stream = connect(place, 0, self._sockets)
        except LookupError as error:
            self.drop(peer, "a collator was lost", str(error) or "is gone")
            return
        except TransportError as error:
            self.drop(peer, "a collator was lost", str(error))
            return
        try:
            with self._lock:
                if self._closed:
                    return
                peer.stream = stream
                told = {
                    "do": "begin",
                    "order": order_record(self.collate.order),
                    "version": self._version,
                    "blocks": self._blocks,
                    "samples": self.collate.samples,
                    "fingerprint": dict(self._fingerprint),
                }
                peer.tell(told)
                peer.heard_s = self._clock.monotonic_s()
            peer.send()
            while self._hear(peer, stream):
                pass
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody waits for it any more
            self.drop(peer, "a collator was lost", str(error) or type(error).__name__)
        finally:
            stream.close()

    def _hear(self, peer: Peer, stream: Stream) -> bool:
        """Whether there is more to hear."""
        if not stream.heard(_LOOK_S):
            with self._lock:
                late_s = self._clock.monotonic_s() - peer.heard_s
                waits = bool(peer.asked) or not peer.ready
                if self._closed:
                    return False
            if waits and late_s > _SILENT_S:
                raise TransportError(f"it has said nothing for {late_s:.0f} s")
            return True
        header, arrays = hear(stream)
        peer.heard_s = self._clock.monotonic_s()
        match header:
            case {"busy": _}:
                return True
            case {"begun": ""}:
                with self._lock:
                    peer.ready = True
                self._look_settled()
                return True
            case {"begun": str(why)} | {"unable": str(why)}:
                self.drop(peer, "a collator is not used any more", why)
                return False
            case {"id": int(number)}:
                with self._lock:
                    asked = peer.asked.pop(number, None)
                if asked is not None:
                    self._answer(asked, header, arrays)
                return True
            case _:
                pass
        raise TransportError(f"it has said {header!r:.80}")

    def _answer(self, asked: Part, header: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        if "failed" in header:
            asked.answered(str(header["failed"]))
            return
        try:
            passes = _heard(header["passes"], [*chain(*asked.groups)], arrays)
        except (TransportError, KeyError):
            asked.answered(None)
            raise TransportError("what came are not the passes that were asked for") from None
        for what, detail in header.get("notices", ()):
            self._notice(str(what), **{str(k): v for k, v in dict(detail).items()})
        asked.answered(passes)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Passes that are asked for in parts: `step.collate.Made`."""

    parts: list[Part]

    def result(self) -> Passes:
        """Them, as soon as all are there: see `Part.result`."""
        return tuple(chain.from_iterable(part.result() for part in self.parts))

    def cancel(self) -> None:
        """They are no longer wanted."""
        for part in self.parts:
            part.cancel()


@dataclass(slots=True, eq=False)
class Part:
    """The passes of some groups of micro-batches, that one collator is asked for.

    Attributes:
        fails: Making it here has failed: whether a collator can is found out by asking one.
    """

    collators: RemoteCollators
    groups: Sequence[list[MicroBatch]]

    number: int = -1
    fails: bool = False
    _peer: Peer | None = None
    _answer: Passes | str | None = None  # passes, what it failed with; None: it was lost
    _there: Any = None
    _dropped: bool = False

    def ask(self) -> bool:
        """Ask a collator, another one if the last was lost; whether there is one."""
        self._there, self._answer = threading.Event(), None
        self._peer = self.collators.give(self)
        return self._peer is not None

    def answered(self, found: Passes | str | None) -> None:
        """It has been answered; None: who was asked is lost."""
        self._answer = found
        self._there.set()

    def make(self) -> None:
        """Make it in this thread, in place of the collator, which is not asked any more."""
        made: Passes | None = None
        try:
            made = self.collators.collate.grouped(self.groups)
        except RaycloudError:
            self.fails = True
        self.answered(made)

    def result(self) -> Passes:
        """Them, as soon as they are there; what no collator makes, this process makes.

        Raises:
            CancelledError: Nobody wants them any more.
            RaycloudError: What making them here raised.
        """
        while (peer := self._peer) is not None:
            self._there.wait()
            if self._dropped:
                raise CancelledError
            match self._answer:
                case tuple() as passes:
                    return passes
                case str() as why:
                    return self._despite(peer, why)
                case None:
                    self.ask()
        if self._dropped:
            raise CancelledError
        return self.collators.collate.grouped(self.groups)

    def _despite(self, peer: Peer, why: str) -> Passes:
        """What failed there: an error of the task comes here too, one of the machine does not."""
        made = self.collators.collate.grouped(self.groups)
        self.collators.drop(peer, "a collator failed where this worker did not", why)
        return made

    def cancel(self) -> None:
        """They are no longer wanted."""
        self._dropped = True
        if (peer := self._peer) is not None:
            self.collators.forget(peer, self.number)
            self._there.set()
