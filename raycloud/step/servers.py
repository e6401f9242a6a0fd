"""Connections of a member to the servers of its run: of which each shard may have several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycloud.errors import TaskError, TransportError
from raycloud.net.messages import Array, hear, tell
from raycloud.net.stream import connect

if TYPE_CHECKING:
    from raycloud.net.stream import Place, Stream

SILENT_S = 300.0  # it may read a checkpoint; a server that says nothing for so long is lost
_UNHEARD = 64  # answers, at most
HUNG_S = 1.5  # and so is one whose machine acknowledges nothing

Find = Callable[[], Sequence[Sequence["Place | None"]]]
Agree = Callable[[Sequence[float]], Sequence[Sequence[float]]]
Name = tuple[int, int]  # of a server: its shard, and which of that shard's
Reply = tuple[dict[str, Any], list[Array]]


class LostServerError(TransportError):
    """A server does not answer any more, or answers again."""


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

    def meet(self) -> list[list[Name]]:
        """Connect to all that are there; the names of all, by shard."""
        if self._over:
            self.close()
            self._over = False
        places = self.find()
        self.shards = len(places)
        for shard, some in enumerate(places):
            for number, place in enumerate(some):
                name = shard, number
                if place is not None and place != self._places.get(name):
                    self.drop(name)
                if place is not None and name not in self._streams:
                    with contextlib.suppress(TransportError):
                        self._streams[name] = connect(
                            place, 0, silent_s=self._silent_s, hung_s=HUNG_S
                        )
                        self._places[name], self._unheard[name] = place, 0
        return [[(shard, at) for at in range(len(some))] for shard, some in enumerate(places)]

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

    @contextlib.contextmanager
    def _breaking(self, name: Name) -> Iterator[Stream]:
        if (stream := self._streams.get(name)) is None:
            raise LostServerError(f"the connection to server {name} is broken")
        try:
            yield stream
        except TransportError as error:
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
        for stream in [*self._streams.values()]:
            stream.hang_up()

    def close(self) -> None:
        """End all."""
        for name in [*self._streams]:
            self.drop(name)


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
