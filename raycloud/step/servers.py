"""Connections of a member to the servers of its run: of which each shard may have several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.exchange import parts_of
from raycloud.net.messages import Array, hear, tell
from raycloud.net.served import HUNG_S, MOST_BYTES, LostServerError
from raycloud.net.stream import connect

if TYPE_CHECKING:
    from raycloud.data.provider import Least
    from raycloud.net.stream import Place, Stream
    from raycloud.spec import Job
    from raycloud.sync.buckets import Bucket

SILENT_S = 300.0  # it may read a checkpoint; a server that says nothing for so long is lost
_FLOAT_BYTES = 4  # sums are of these
_UNHEARD = 64  # answers, at most
_LOOK_S = 2.0  # between two looks for one that is lost
_MOST_DOUBLED = 7
_FILLED_S = 0.2  # between two looks whether servers are filled
_AGAIN_S, _WORD_S = 0.25, 1.0  # for a connection to where a server was before, and a word from it

Servers = Sequence[Sequence["Place | None"]]
Find = Callable[[], Servers]


class FindLayout(Protocol):
    """Finds the servers of a layout; see `data.provider.Provider.servers`."""

    def __call__(self, layout: int = 0, *, least: Least = "each") -> Servers:
        """By shard."""


def first_layout() -> int:
    """The number of the only layout that there is."""
    return 0


Newest = Callable[[], int]  # says which layout of servers is the newest that is known
Agree = Callable[[Sequence[float]], Sequence[Sequence[float]]]
Name = tuple[int, int]  # of a server: its shard, and which of that shard's
Reply = tuple[dict[str, Any], list[Array]]


class UnfitError(TaskError):
    """A server says that what it is told is of another table, or step."""


class Connections:
    """To the servers of all shards.

    Args:
        find: Where they are; it waits where a shard has none.

    Attributes:
        shards: How many there are; known once they have been met.
    """

    def __init__(self, find: Find, silent_s: float = SILENT_S) -> None:
        self.find, self._silent_s = find, silent_s
        self.shards = 0
        self._places: dict[Name, Place] = {}
        self._streams: dict[Name, Stream] = {}
        self._unheard: dict[Name, int] = {}  # answers that nobody has waited for
        self._sent = 0
        self._over = False
        self._silent: set[str] = set()  # addresses that do not answer
        self._known: Servers = ()  # where they were found the last time
        self._whole = False  # all of them were met the last time

    def meet(self) -> list[list[Name]]:
        """Connect to all that are there; the names of all, by shard.

        Where all were met the last time, they are first looked for where they were then: to find
        them takes as long as one that is lost does not answer.
        """
        if self._over:
            self.close()
            self._over = False
        silent, self._silent = self._silent, set()
        if self._whole and self._reach(self._known, silent):
            self._whole = self._streams.keys() == set(chain(*_names(self._known)))
            if len({shard for shard, _ in self._streams}) == self.shards:
                return _names(self._known)
        self._known = self.find()
        self.shards = len(self._known)
        self._reach(self._known)
        self._whole = self._streams.keys() == set(chain(*_names(self._known)))
        return _names(self._known)

    def _reach(self, places: Servers, silent: Collection[str] | None = None) -> bool:
        """Connect to those to which there is no connection.

        Args:
            places: Where they are; or, where it is said which addresses are `silent`, were: there
                they are asked for a word.
            silent: They are not tried.

        Returns:
            Whether those that are not met are known to be gone.
        """
        known = True
        for shard, some in enumerate(places):
            for number, place in enumerate(some):
                name = shard, number
                moved = place is not None and place != self._places.get(name)
                if moved or (name in self._streams and self._streams[name].ended()):
                    self.drop(name)
                if place is None or name in self._streams or place.address in (silent or ()):
                    continue
                try:
                    stream = self._connected(place, again=silent is not None)
                except TransportError as error:
                    known = known and _is_gone(error)
                else:
                    self._streams[name] = stream
                    self._places[name], self._unheard[name] = place, 0
        return known

    def _connected(self, place: Place, *, again: bool) -> Stream:
        if again:
            return _met_again(place, self._silent_s)
        silent_s, timeout_s = self._silent_s, 2.0 * HUNG_S
        return connect(place, 0, silent_s=silent_s, hung_s=HUNG_S, timeout_s=timeout_s)

    def place(self, name: Name) -> Place:
        """Where a server listens that is met."""
        return self._places[name]

    def has(self, name: Name) -> bool:
        """Whether a server is met."""
        return name in self._streams

    def ask(
        self, asked: Mapping[Name, tuple[Mapping[str, Any], Sequence[Array]]]
    ) -> dict[Name, Reply]:
        """Ask some of them at once; what each answers.

        Raises:
            TransportError: A connection broke: there is none from now on.
            TaskError: A server cannot do it.
        """
        try:
            for name, (header, arrays) in asked.items():
                with self._breaking(name) as stream:
                    self._sent += tell(stream, header, arrays)
            answers = {name: self._heard(name) for name in asked}
        except TransportError:
            for name in asked:  # an answer that nobody hears would be taken for the next one
                self.drop(name)
            raise
        return {name: _answered(*answer) for name, answer in answers.items()}

    def ask_each(self, names: Sequence[Name], header: Mapping[str, Any]) -> dict[Name, Any]:
        """The same of each of these, without arrays."""
        found = self.ask(dict.fromkeys(names, (header, ())))
        return {name: answer for name, (answer, _) in found.items()}

    def _heard(self, name: Name) -> Reply:
        with self._breaking(name) as stream:
            while self._unheard[name]:
                self._unheard[name] -= 1
                _answered(*hear(stream))
            return hear(stream)

    def tell_each(self, names: Sequence[Name], header: Mapping[str, Any]) -> None:
        """Tell each, whose answers are heard with the next; one that is lost is found out then."""
        for name in names:
            with contextlib.suppress(TransportError), self._breaking(name) as stream:
                tell(stream, header)
                self._unheard[name] += 1
                while self._unheard[name] > _UNHEARD:
                    self._unheard[name] -= 1
                    _answered(*hear(stream))

    def retire(self) -> None:
        """Tell all that others have what they have, in a thread of its own; then end."""
        Thread(target=self._retire, name="retire", daemon=True).start()

    def _retire(self) -> None:
        with contextlib.suppress(TransportError):
            for name in chain(*self.meet()):
                with contextlib.suppress(TransportError):
                    self.ask_each([name], {"do": "retire"})
        self.close()

    @contextlib.contextmanager
    def _breaking(self, name: Name) -> Iterator[Stream]:
        if (stream := self._streams.get(name)) is None:
            raise LostServerError(f"the connection to server {name} is broken")
        try:
            yield stream
        except TransportError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._silent.add(self._places[name].address)
            self.drop(name)
            raise LostServerError(f"server {name} is lost: {error}") from error

    def take_bytes(self) -> int:
        """Of arrays, sent since the last call."""
        sent, self._sent = self._sent, 0
        return sent

    def drop(self, name: Name) -> None:
        """End a connection, if there is one."""
        if (stream := self._streams.pop(name, None)) is not None:
            stream.close()

    def hang_up(self) -> None:
        """In whichever thread: who waits for an answer is told that none comes."""
        self._over = True
        for name, stream in [*self._streams.items()]:
            if stream.is_silent():
                self._silent.add(self._places[name].address)
            stream.hang_up()

    def close(self) -> None:
        """End all."""
        for name in [*self._streams]:
            self.drop(name)


class Return:
    """Waits, in a thread of its own, until servers that a generation lacks are there again.

    Args:
        find: Where servers are.
        lost: Those that are waited for.
        vain: How often in a row they have been there, and were not reached by all.

    Attributes:
        came: They are there.
    """

    def __init__(self, find: Find, lost: Collection[Name], vain: int = 0) -> None:
        self.came, self._find, self._lost = False, find, lost
        self._over = Event()
        self._pause_s = _LOOK_S * 2.0 ** min(vain, _MOST_DOUBLED)
        Thread(target=self._wait, name="lost", daemon=True).start()

    def end(self) -> None:
        """They are waited for no longer."""
        self._over.set()

    def _wait(self) -> None:
        while not self._over.wait(self._pause_s):
            with contextlib.suppress(TransportError):
                places = self._find()
                if all(places[shard][number] is not None for shard, number in self._lost):
                    self.came = not self._over.is_set()
                    return


class Filling:
    """Waits, in a thread of its own, until servers have the rows that they are filled with.

    Args:
        find: Where they are.

    Attributes:
        came: They have them.
    """

    def __init__(self, find: Find) -> None:
        self.came, self._find, self._over = False, find, Event()
        Thread(target=self._wait, name="filling", daemon=True).start()

    def end(self) -> None:
        """They are waited for no longer."""
        self._over.set()

    def _wait(self) -> None:
        connections = Connections(self._find)
        while not self._over.wait(_FILLED_S):
            with contextlib.suppress(TransportError, TaskError):
                names = [name for shard in connections.meet() for name in shard]
                answers = connections.ask_each(names, {"do": "filled"}).values()
                if all(one["filled"] for one in answers):
                    self.came = not self._over.is_set()
                    break
        connections.close()


class Summing:
    """The servers that sum what members exchange in lockstep: of each shard one.

    Nothing on them outlives a message. So a generation goes on with those that there are, and the
    next one takes those back that have been started again.
    """

    def __init__(self) -> None:
        self._find: FindLayout | None = None
        self._newest: Newest = first_layout
        self._layout = 0
        self._every: Servers = ()
        self._places: list[tuple[Name, Place]] = []
        self._lost: list[Name] = []
        self._met = self._whole = False  # any ever, and all the last time
        self._vain = 0
        self._return: Return | None = None

    @classmethod
    def of(cls, job: Job, buckets: Sequence[Bucket]) -> Summing | None:
        """Those of a job, for messages of these `buckets`; None where members sum.

        Raises:
            TaskError: A message is too large for them.
        """
        if not job.served or job.asynchronous:
            return None
        plain = job.sync_point.codec == "none"
        for bucket in buckets:
            each = bucket.flat.itemsize if plain else _FLOAT_BYTES
            parts = parts_of(bucket.flat, max(1, job.servers.shards - 1))  # one may be lost
            if parts[0].numel() * each > MOST_BYTES:
                size = bucket.flat.numel() * each
                raise TaskError(
                    f"the gradient of {bucket.names[0]!r} has {size} bytes, and a server sums "
                    f"{MOST_BYTES} at most in one message",
                    hint=f"write servers: {size // MOST_BYTES + 2}, so that one may be lost, or "
                    "leave sync.topology out",
                )
        return cls()

    def serve(self, find: FindLayout, newest: Newest = first_layout) -> None:
        """The servers of a layout are found by `find`; `newest` says which there is."""
        self._find, self._newest = find, newest

    def places(self) -> list[Place]:
        """See `net.served.SumServers`; of the first generation all are waited for.

        Raises:
            TransportError: None comes.
        """
        if self._find is None:
            raise InternalError("servers were to sum, and nobody knows one")
        before, self._layout = self._layout, self._newest()
        every: Servers = ()
        if self._whole and self._layout == before:  # to find one that is lost takes longer
            every = _those_there(self._every)
        if not any(map(any, every)):
            every = self._find(self._layout, least="one" if self._met else "each")
        self._every = every
        self._places, self._lost = [], []
        for shard, some in enumerate(every):
            found = next(((n, place) for n, place in enumerate(some) if place is not None), None)
            if found is None:
                self._lost.append((shard, 0))
            else:
                self._places.append(((shard, found[0]), found[1]))
        return [place for _, place in self._places]

    def taken(self, which: Sequence[bool]) -> None:
        """See `net.served.SumServers`."""
        self._met = True
        self.close()
        pairs = zip(self._places, which, strict=True)
        unreached = [name for (name, _), goes in pairs if not goes]
        self._whole = not (self._lost or unreached)
        self._vain = self._vain + 1 if unreached else 0
        if (lost := [*self._lost, *unreached]) and self._find is not None:
            find = partial(self._find, self._layout, least="one")
            self._return = Return(find, lost, self._vain)

    @property
    def returned(self) -> bool:
        """All servers are there that this generation does without, or others in their place."""
        came = self._return is not None and self._return.came
        return came or self._newest() > self._layout

    def hang_up(self) -> None:
        """Nothing: connections are the transport's."""

    def close(self) -> None:
        """None is waited for."""
        if self._return is not None:
            self._return.end()
        self._return = None


def _met_again(place: Place, silent_s: float) -> Stream:
    """A connection to where a server was, that has said a word: a process may stand still.

    Raises:
        TransportError: It is not there, by a `ConnectionError`, or nothing is known of it.
    """
    stream = connect(place, 0, silent_s=silent_s, hung_s=HUNG_S, timeout_s=_AGAIN_S)
    try:
        tell(stream, {"do": "filled"})
        said = stream.heard(_WORD_S) and hear(stream)
    except TransportError:
        stream.close()
        raise
    if not said:
        stream.close()
        raise TransportError("a server says nothing")
    return stream


def _those_there(places: Servers) -> Servers:
    """Without those that are gone; nothing where one says neither."""
    found: list[list[Place | None]] = []
    for some in places:
        found.append([])
        for place in some:
            there = place
            try:
                if place is not None:
                    _met_again(place, _WORD_S).close()
            except TransportError as error:
                if not _is_gone(error):
                    return ()
                there = None
            found[-1].append(there)
    return found


def _is_gone(error: TransportError) -> bool:
    """Nobody listens there any more; else it may only be slow."""
    return isinstance(error.__cause__, ConnectionError)


def _names(places: Servers) -> list[list[Name]]:
    return [[(shard, at) for at in range(len(some))] for shard, some in enumerate(places)]


def _answered(header: dict[str, Any], arrays: list[Array]) -> Reply:
    if "error" in header:
        kinds = {"InternalError": UnfitError, "TransportError": LostServerError}
        kind: Any = kinds.get(header.get("kind", ""), TaskError)
        raise kind(f"a server says: {header['error']}")
    return header, arrays


@dataclass
class View:
    """The servers that a generation goes by, the same for all its members.

    Attributes:
        readers: Of each shard the one that is asked for rows.
        tellers: All that are told of gradients and steps.
    """

    readers: list[Name] = field(default_factory=list)
    tellers: list[list[Name]] = field(default_factory=list)

    @property
    def all(self) -> list[Name]:
        """All that are told."""
        return [name for shard in self.tellers for name in shard]
