"""Collator: a process that makes batches in the members' place, asked over keyed sockets.

What is said between them stands in `worker.collators`, the members' side.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raycloud.clock import SystemClock
from raycloud.data.provider import Provided
from raycloud.errors import TransportError
from raycloud.net.batches import UnpackableError, packed
from raycloud.net.messages import Array, hear, tell
from raycloud.net.sockets import shut
from raycloud.net.stream import SOCKETS, Sockets, Stream, listen, welcome
from raycloud.order import MicroBatch, Order
from raycloud.step.collate import Collate, Making, Pass
from raycloud.step.contract import construct
from raycloud.task import Source, Splits
from raycloud.threads import THREADS, Threads
from raycloud.worker.dataset import DataSet, layout_of, layout_record, own_samples, task_splits
from raycloud.worker.fingerprint import fingerprint_of
from raycloud.worker.usage import cores_here, sustained_s

if TYPE_CHECKING:
    import socket

    from raycloud.data.provider import Provider
    from raycloud.order import Layout
    from raycloud.step.collate import Passes
    from raycloud.task import Samples
    from raycloud.worker.context import MemberConfig

_BUSY_S = 5.0  # between two words of one that has much to do
_LOOK_S = 1.0
_MOST_STRANGERS = 64  # that have not said the key
_MOST_TRIES, _ENOUGH_S = 8, 0.5  # of how long a micro-batch takes


class UnableError(Exception):
    """Why a collator makes no passes: members make them themselves."""


def order_record(order: Order) -> dict[str, Any]:
    """An order as plain values; `order_of_record` is the inverse.

    >>> order_of_record(order_record(Order(samples=4, seed=7))).extents
    ((0, 4, None),)
    """
    extents = [[first, count, layout_record(layout)] for first, count, layout in order.extents]
    return {"seed": order.seed, "shuffle": order.shuffle, "extents": extents}


def order_of_record(record: Mapping[str, Any]) -> Order:
    """The order whose `order_record` this is."""
    (_, samples, layout), *later = record["extents"]
    order = Order(
        samples=samples, seed=record["seed"], shuffle=record["shuffle"], layout=layout_of(layout)
    )
    for epoch, count, grown in later:
        order = order.extended(epoch, count, layout_of(grown))
    return order


class Collator:
    """Makes passes, as a member would. Not thread-safe.

    Args:
        config: As a member has it.
        provider: Of the data of a task that returns a `Source`.
    """

    def __init__(self, config: MemberConfig, provider: Provider) -> None:
        """The order comes with the first member that has it."""
        self._config, self._provider = config, provider
        self._collate: Collate | None = None
        self._samples: Samples | None = None
        self._versions: list[int] = []  # of the data, that it went through
        self._fingerprint: dict[str, str] = {}
        self._why = ""  # the newest thing that went wrong

    def begin(self, told: Mapping[str, Any]) -> None:
        """Make the task, and get at its data, unless another member has said so.

        Raises:
            UnableError: That is not possible here, or the data is not the member's.
        """
        version = int(told["version"])
        if self._collate is None or version not in self._versions:
            try:
                self._build(order_of_record(told["order"]), version, blocks=told["blocks"])
            except Exception as error:
                self._why = f"it could not begin: {type(error).__name__}: {error}"
                raise UnableError(self._why) from error
        theirs = told["fingerprint"]
        other = [n for n, one in self._fingerprint.items() if theirs.get(n, one) != one]
        if other or len(self._samples or ()) < told["samples"]:
            raise UnableError("Task.data gives other training samples there")

    def _build(self, order: Order, version: int, *, blocks: bool) -> None:
        job = self._config.job
        torch.set_num_threads(1)
        task = construct(self._config.task, job)
        if not blocks:
            data = own_samples(task_splits(task, job))
            samples = data.train
            self._fingerprint = training_fingerprint(samples)
        elif version and self._versions:
            samples = self._provider.grown(version)
        else:
            samples = self._provider.provide(task, Splits(train=())).train
            samples = self._provider.grown(version) if version else samples
        making = Making(apart=job.elastic.backup_micro_batches)
        made = Collate(task, samples, order, pinned=False, making=making, clock=SystemClock())
        made.draws = self._collate is not None and self._collate.draws
        self._collate, self._samples = made, samples
        self._versions.append(version)

    def measure(self) -> float:
        """Seconds that making the batch of a micro-batch takes here, in one thread.

        Raises:
            RaycloudError: The task or its data cannot be used.
        """
        job = self._config.job
        torch.set_num_threads(1)
        task = construct(self._config.task, job)
        splits = task_splits(task, job)
        sourced = isinstance(splits.train, Source)
        data = self._provider.provide(task, splits) if sourced else own_samples(splits)
        order = DataSet(job, data, None).order
        clock, quota = SystemClock(), cores_here()
        collate = Collate(task, data.train, order, pinned=False, clock=clock)
        size = min(job.micro_batch, order.samples)
        took_s: list[float] = []
        while len(took_s) <= 1 or (len(took_s) < _MOST_TRIES and sum(took_s) < _ENOUGH_S):
            at = len(took_s) * size % (order.samples - size + 1)
            cpu_s = clock.cpu_s()
            one = collate.one(MicroBatch(index=0, epoch=0, start=at, stop=at + size))
            made_s = one.read_s + one.collate_s
            took_s.append(sustained_s(made_s, clock.cpu_s() - cpu_s, quota))
        return min(took_s)

    def passes(self, groups: Sequence[list[MicroBatch]], version: int, *, joins: bool) -> Passes:
        """See `Collate.grouped`.

        Raises:
            UnableError: This one does not know the data.
        """
        if self._collate is None or version not in self._versions:
            raise UnableError(self._why or f"it was not told of version {version} of the data")
        self._collate.joins = joins
        return self._collate.grouped(groups)

    def extend(self, before: int, version: int, epoch: int, layout: Layout | None) -> None:
        """See `Collators.extend`; each member says so, and once is enough.

        Version `before` is the one that the member was at: a growth that was missed, no later one
        makes up for. What goes wrong is told by `passes`.
        """
        if self._collate is None or version in self._versions:
            return
        if before != self._versions[-1]:
            self._why = f"it missed version {before} of the data"
            return
        try:
            self._samples = samples = self._provider.grown(version)
            self._collate.extend(samples, epoch, layout)
            self._versions.append(version)
        except Exception as error:  # noqa: BLE001 - told to who asks for passes
            self._why = (
                f"it could not read version {version} of the data: {type(error).__name__}: {error}"
            )

    def notices(self) -> list[list[Any]]:
        """What had to be done in another way since the last call, as plain values."""
        fetch = getattr(self._provider, "notices", None)
        found = [] if fetch is None else fetch()
        return [[one.what, {k: str(v) for k, v in one.detail.items()}] for one in found]


def training_fingerprint(samples: Samples) -> dict[str, str]:
    """What tells a task's own training samples from others: see `fingerprint_of`."""
    return fingerprint_of(Provided(train=samples, held_out=None), SystemClock())


class _Connection:
    """A member at a collator: what it asked for, and what it is told."""

    def __init__(self, stream: Stream, threads: Threads) -> None:
        self.stream = stream
        self.wanted: set[int] = set()  # by number, of what it asked for and is not begun
        self.asked = self.done = 0  # each is counted by one thread
        self.over = False
        self._answers: queue.Queue[tuple[dict[str, Any], list[Array]] | None] = threads.queue()
        self._thread = threads.thread(self._send, name="collator-send")
        self._thread.start()

    def answer(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Tell it something, once what was said before has left."""
        self._answers.put((header, list(arrays)))

    def close(self) -> None:
        """It has left."""
        self.over = True
        self._answers.put(None)
        self.stream.hang_up()

    def _send(self) -> None:
        try:
            while True:
                try:
                    one = self._answers.get(timeout=_BUSY_S)
                except queue.Empty:
                    if self.asked > self.done:
                        tell(self.stream, {"busy": True})
                    continue
                if one is None:
                    break
                tell(self.stream, one[0], one[1], limited=False)
        except TransportError:
            self.over = True
        finally:
            self.stream.hang_up()


class CollatorServer:
    """A collator that members reach at its `place`; what they ask is done in turn.

    Args:
        collator: Makes passes; asked in one thread.
        address: This node's, that members can reach.
    """

    def __init__(
        self,
        collator: Collator,
        address: str,
        *,
        threads: Threads = THREADS,
        sockets: Sockets = SOCKETS,
    ) -> None:
        self._collator, self._threads, self._sockets = collator, threads, sockets
        self._todo: queue.Queue[tuple[_Connection, dict[str, Any]] | None] = threads.queue()
        self._turn = threading.Lock()
        self._members: list[_Connection] = []
        self._strangers, self._closed = 0, False
        self._door, self.place = listen(address, sockets)
        for work, name in ((self._accept, "collator-door"), (self._work, "collator")):
            threads.thread(work, name=name).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed = True
        shut(self._door)
        with self._turn:
            members = [*self._members]
        for one in members:
            one.close()
        self._todo.put(None)

    def _accept(self) -> None:
        with self._door:
            while not self._closed:
                try:
                    connection, _ = self._door.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                with self._turn:
                    known = self._strangers < _MOST_STRANGERS
                    self._strangers += known
                if not known:
                    connection.close()
                    continue
                self._threads.thread(self._hear, connection, name="collator-hear").start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            known = welcome(connection, self.place, self._sockets)
        finally:
            with self._turn:
                self._strangers -= 1
        if known is None:
            return
        stream = known[1]
        member = _Connection(stream, self._threads)
        with self._turn:
            self._members.append(member)
        try:
            while not (member.over or self._closed):
                if not stream.heard(_LOOK_S):
                    continue
                header, _ = hear(stream, 0)
                if header.get("do") == "drop":
                    member.wanted.discard(int(header["id"]))
                    continue
                if header.get("do") == "make":
                    member.wanted.add(int(header["id"]))
                member.asked += 1
                self._todo.put((member, header))
        except (TransportError, OSError, KeyError, TypeError, ValueError):
            pass  # it has left, or is none of ours
        finally:
            member.close()
            with self._turn:
                self._members.remove(member)
            stream.close()

    def _work(self) -> None:
        while (one := self._todo.get()) is not None:
            member, header = one
            if member.over:
                continue
            try:
                self._do(member, header)
            except Exception:  # noqa: BLE001 - it does not speak as members do, and others do
                member.close()
            member.done += 1

    def _do(self, member: _Connection, header: dict[str, Any]) -> None:
        match header.get("do"):
            case "begin":
                why = ""
                try:
                    self._collator.begin(header)
                except UnableError as error:
                    why = str(error)
                member.answer({"begun": why})
            case "make":
                self._make(member, header)
            case "extend":
                told = header["before"], header["version"], header["epoch"]
                self._collator.extend(*told, layout_of(header["layout"]))
            case _:
                member.close()

    def _make(self, member: _Connection, header: dict[str, Any]) -> None:
        number = header["id"]
        if number not in member.wanted:  # it was dropped meanwhile
            return
        member.wanted.discard(number)
        arrays: list[Array] = []
        groups = [
            [
                MicroBatch(index=index, epoch=epoch, start=start, stop=stop)
                for index, epoch, start, stop in group
            ]
            for group in header["groups"]
        ]
        asked = [one for group in groups for one in group]
        try:
            version, joins = header["version"], bool(header["joins"])
            made = self._collator.passes(groups, version, joins=joins)
            told = [_told(one, asked, arrays) for one in made]
        except (UnableError, UnpackableError) as error:
            member.answer({"id": number, "unable": str(error)})
        except Exception as error:  # noqa: BLE001 - the member finds out whose fault it is
            member.answer({"id": number, "failed": f"{type(error).__name__}: {error}"})
        else:
            answer = {"id": number, "passes": told, "notices": self._collator.notices()}
            member.answer(answer, arrays)


def _told(one: Pass, asked: Sequence[MicroBatch], arrays: list[Array]) -> dict[str, Any]:
    return {
        "micro_batches": [asked.index(m) for m in one.micro_batches],
        "batch": packed(one.batch, arrays),
        "weight": one.weight,
        "seed": one.seed,
        "rows": one.rows,
        "read_s": one.read_s,
        "collate_s": one.collate_s,
    }
