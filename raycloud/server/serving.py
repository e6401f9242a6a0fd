"""A server: a shard that members ask over sockets, and that keeps itself in a store.

Each connection has a thread. Members are answered one after the other: a shard's words are short. A
server that has been started again is filled by another one of its shard: what it is told meanwhile
waits, and is done once it has the rows.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raycloud.checkpoint.naming import directory
from raycloud.clock import SystemClock
from raycloud.errors import CheckpointError, InternalError, RaycloudError, TransportError
from raycloud.net.messages import Array, hear, tell
from raycloud.net.sockets import shut
from raycloud.net.stream import Place, connect, listen, welcome
from raycloud.server.decode import decoded
from raycloud.server.shard import Shard
from raycloud.sync.tables import TableSpec, Values, shard_of
from raycloud.threads import THREADS

if TYPE_CHECKING:
    import socket

    from raycloud.checkpoint import Store
    from raycloud.net.stream import Stream
    from raycloud.server.sums import Sums

_FILE = re.compile(r"/tables-\d+-of-(\d+)\.npz$")
FORMAT = 1  # of a shard's file
_DECIDES_S = 1.0
_AGAIN_S = 0.1
_NOWHERE = -1  # no generation goes on from there
_CLOCK = SystemClock()
_FRESH_S = 60.0  # one that was started again may be asked to bring what it had
_PARTS = 16  # in which rows for other shards come, half of the time: who trains here goes on
_FEW_WORDS, _ROUNDS = 8, 32  # that members wait for at its end; and so often there may be more
_FILLS_S = 600.0  # another server may say nothing while it copies
_MOST_WAITING_BYTES = 2**31  # of words that wait for the rows
_MOST_STRANGERS = 64  # that have not said the key
_MOST_ROWS_BYTES = 2**44  # of another server, that is ours
WRITES_S = 600.0  # who waits for a file that is being written is told by then

When = tuple[int, int]
Reply = tuple[dict[str, Any], list[Array]]


def file_name(step: int, number: int, count: int) -> str:
    """The name, in a store of checkpoints, of what a shard holds before a step.

    >>> file_name(200, 0, 2)
    'step-00000200/tables-0-of-2.npz'
    """
    return f"{directory(step)}/tables-{number}-of-{count}.npz"


def _shards_in(name: str) -> int:
    found = _FILE.search(name)
    return int(found[1]) if found else 0


@dataclass
class _Written:
    """A checkpoint of this shard: being written, until it is `over`; `why` it is not."""

    over: threading.Event
    why: str = ""


class Server:
    """A shard, and who asks it.

    Args:
        number: Of this shard.
        count: Of shards.
        store: Where checkpoints are kept.
        address: This node's, that members can reach.
    """

    def __init__(
        self, number: int, count: int, store: Store, address: str, *, parameters: bool = False
    ) -> None:
        """Listen. There are no tables yet, and nothing of `parameters`, which a shard may be of."""
        self._number, self._count, self._store = number, count, store
        self.shard = Shard()
        self._turn = THREADS.condition()
        self._sums: Sums | None = None
        self._holds: Callable[[], bool] = lambda: False
        self._written: dict[int, _Written] = {}
        # When members said so: a generation, and its next step.
        self._filling: tuple[When, list[tuple[str, Mapping[str, Any], list[Array]]]] | None = None
        self._kept: tuple[When, dict[str, Any], dict[str, Values]] | None = None
        self._filled: When | None = None  # the newest
        self._retired = False
        self._began_s, self._asked = _CLOCK.monotonic_s(), False
        self._waiting_bytes = 0
        self._loaded = (-1, -1)  # by a generation, as of a step
        self._streams: set[Stream] = set()
        self._strangers = 0
        self._closed = False
        self._acts: dict[str, Callable[[Mapping[str, Any], list[Array]], Reply]] = {
            "open": self._open,
            "look": self._look,
            "load": self._load_all,
            "enter": self._enter,
            "fill": self._fill,
            "snapshot": self._snapshot,
            "push": self._push,
            "square": self._square,
            "decide": self._decide,
            "read": self._read,
            "filled": lambda *_: ({"filled": self._filling is None}, []),
            "retire": self._retire,
            "save": self._save,
            "wait": self._wait,
        }
        if parameters:
            from raycloud.server.parameters import ParameterActs  # noqa: PLC0415 - they load torch
            from raycloud.server.sums import Sums  # noqa: PLC0415 - likewise

            of, self._sums = ParameterActs(self._turn), Sums()
            self._holds = lambda: of.shard.step >= 0
            self._acts |= {
                "begin": of.enter,
                "settle": of.settle,
                "put": of.put,
                "update": of.push,
                "fetch": of.fetch,
                "meet": of.meet,
            }
        self._door, self.place = listen(address)
        self._door.settimeout(None)
        THREADS.thread(self._accept, name="server").start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed = True
        shut(self._door)
        with self._turn:
            streams = [*self._streams]
        for stream in streams:
            stream.hang_up()
        if self._sums is not None:
            self._sums.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._door.accept()
            except OSError:  # the connection was ended, or there are too many
                if not self._closed:
                    threading.Event().wait(_AGAIN_S)
                continue
            if self._strangers >= _MOST_STRANGERS:
                connection.close()
                continue
            with self._turn:
                self._strangers += 1
            THREADS.thread(self._answer, connection, name="asked").start()
        self._door.close()

    def _answer(self, connection: socket.socket) -> None:
        known = welcome(connection, self.place)
        with self._turn:
            self._strangers -= 1
        if known is None:
            return
        _, stream = known
        connection.settimeout(None)  # a member may compute for long; a dead one's node says so
        with self._turn:
            self._streams.add(stream)
        try:
            while not self._closed:
                header, arrays = hear(stream)
                if header.get("do") == "sum" and self._sums is not None:
                    self._join(self._sums, header, stream)
                    return
                limited = header.get("do") != "snapshot"
                tell(stream, *self._reply(header, arrays), limited=limited)
        except TransportError:
            pass  # whose it was is gone: others say so
        finally:
            with self._turn:
                self._streams.discard(stream)
            stream.close()

    def _join(self, sums: Sums, header: Mapping[str, Any], stream: Stream) -> None:
        """This connection is one over which members are told sums."""
        generation, rank, size = (int(header[name]) for name in ("generation", "rank", "size"))
        self._asked = True
        with self._turn:
            sums.check(generation)
            tell(stream, {})
            sums.join(generation, rank, size, stream)

    def _reply(self, header: Mapping[str, Any], arrays: list[Array]) -> Reply:
        asked = header.get("do")
        act = self._acts.get(asked) if isinstance(asked, str) else None
        self._asked = True
        try:
            if act is None:
                raise InternalError(f"a server was asked for {asked!r:.40}")
            if asked == "wait" or "kept" in header:  # neither changes anything, nor is changed
                return act(header, arrays)
            with self._turn:
                return act(header, arrays)
        except RaycloudError as error:
            return {"error": error.message, "kind": type(error).__name__}, []
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return {"error": f"{asked!r:.40} was asked for in a way that is not: {error!r}"}, []

    def _open(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        spec = header["spec"]
        self.shard.open(TableSpec(**{**spec, "betas": tuple(spec["betas"])}))
        return {}, []

    def _look(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        """Whether a generation can go on with a step here."""
        step, shard = int(header["step"]), self.shard
        if shard.step == step - 1 and shard.step:  # the word may be on its way from another member
            self._turn.wait_for(lambda: shard.step != step - 1, _DECIDES_S)
        stands = self._filling is None and shard.stands(step)
        stands = stands and int(header["generation"]) >= shard.generation
        return {"stands": stands, "by": shard.by}, []

    def _load_all(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        """Stand where a checkpoint does; the first member of a generation who says so counts."""
        generation, step = self._newest(header), int(header["step"])
        if (generation, step) != self._loaded:
            self._filling, self._written = None, {}
            self._load(step)
            self._loaded = generation, step
        return {}, []

    def _enter(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        generation, step = int(header["generation"]), int(header["step"])
        if step < self.shard.step:
            self._written = {}  # another way may lead there again
        answer = self.shard.enter(generation, step)
        if not header.get("keeps"):
            self._kept = None
        elif self._kept is None or self._kept[0] != (generation, step):
            told = {"step": self.shard.step, "by": self.shard.by}
            self._kept = (generation, step), told, dict(self.shard.arrays())
        return {"answer": str(answer)}, []

    def _retire(self, _: Mapping[str, Any], __: list[Array]) -> Reply:
        """Other servers have what there is here: nothing more is asked of this one."""
        self._retired, self._kept = True, None
        return {}, []

    @property
    def busy(self) -> bool:
        """Whether members may still need what is here, or, of a new one, are to bring it."""
        fresh = not self._asked and _CLOCK.monotonic_s() - self._began_s < _FRESH_S
        with self._turn:
            if fresh:
                return True
            holds = bool(self.shard.tables) or self._holds()
            return (holds and not self._retired) or (self._sums is not None and self._sums.going)

    def _newest(self, header: Mapping[str, Any]) -> int:
        """The generation that is named; `InternalError`: another one has begun since."""
        if (generation := int(header["generation"])) < self.shard.generation:
            raise InternalError(f"generation {generation} is over")
        return generation

    def _fill(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        """Get the rows from other servers; the first who says so counts.

        From one of this shard, as they are by then; or, where the shards are others, from one of
        each of these, as they were when the generation began.
        """
        when = self._newest(header), int(header["step"])
        if self._filled is not None and when <= self._filled:
            return {}, []  # others have said so before, and it is done
        if self._filling is None or self._filling[0] < when:
            places = [Place(str(a), int(port), int(key)) for a, port, key in header["places"]]
            self._filling, self._waiting_bytes = (when, []), 0
            asked: dict[str, Any] = {"do": "snapshot"}
            if header.get("anew"):
                asked |= {"kept": when, "number": self._number, "count": self._count}
            THREADS.thread(self._take_rows, places, asked, when, name="fills").start()
        return {}, []

    def _take_rows(self, places: list[Place], asked: dict[str, Any], when: When) -> None:
        try:
            told, found = {"step": 0, "by": -1}, dict[str, list[Values]]()
            for header, arrays in _snapshots(places, asked):
                if self._fills() != when:
                    return  # another generation has begun to, from another copy
                told = {name: max(int(header[name]), told[name]) for name in told}
                for name, one in zip(header["names"], arrays, strict=True):
                    found.setdefault(name, []).append(one)
            rows = {name: np.concatenate(parts) for name, parts in found.items()}
            made = Shard()
            for table in self.shard.tables.values():
                made.open(table.spec)
            made.load(told["step"], rows, told["by"])  # nobody waits for it
            made.enter(when[0], made.step)
            for at in range(_ROUNDS):
                if self._caught_up(made, when, last=at == _ROUNDS - 1):
                    return
        except Exception:  # noqa: BLE001 - the last line before the thread's end
            with self._turn:
                self._give_up(when)

    def _caught_up(self, made: Shard, when: When, *, last: bool) -> bool:
        """Make the words that have come meanwhile; true: it is the shard now, or is not needed.

        While there are many nobody waits for it: others may come. The `last` time all wait.
        """
        with self._turn:
            if self._filling is None or self._filling[0] != when:
                return True
            words = self._filling[1]
            if over := last or len(words) <= _FEW_WORDS:
                self._filling, self.shard, self._filled = None, made, when
                for word in words:
                    _act(made, *word)
                self._turn.notify_all()
            else:
                self._filling, self._waiting_bytes = (when, []), 0
        for word in () if over else words:
            _act(made, *word)
        return over

    def _fills(self) -> When | None:
        """For when rows are asked for, or were last; None: never."""
        return self._filled if self._filling is None else self._filling[0]

    def _give_up(self, when: When) -> None:
        """The rows do not come: who tells this server anything finds it gone, and meets anew.

        But where rows of a later generation are asked for by now.
        """
        if self._fills() == when and self.shard.generation <= when[0]:
            self._filling, self.shard.step = None, _NOWHERE
            for stream in self._streams:
                stream.hang_up()

    def _snapshot(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        """All rows, for another server of this shard; or of those `kept` the ones of another."""
        if "kept" in header:
            kept = self._kept
            if kept is None or [*kept[0]] != header["kept"]:
                raise InternalError("rows were asked for that are not kept")
            some = _part(kept[2], int(header["part"]))
            rows = own_rows(some, int(header["number"]), int(header["count"]))
            return {**kept[1], "names": [*rows]}, [*rows.values()]
        if self._filling is not None:
            raise InternalError("rows were asked for that are still to come")
        arrays = dict(self.shard.arrays())
        told = {"step": self.shard.step, "by": self.shard.by, "names": [*arrays]}
        return told, [*arrays.values()]

    def _push(self, header: Mapping[str, Any], arrays: list[Array]) -> Reply:
        if self._waits("push", header, arrays):
            return {}, []
        return _act(self.shard, "push", header, arrays)

    def _waits(self, what: str, header: Mapping[str, Any], arrays: list[Array]) -> bool:
        """Whether a word is kept until the rows are here."""
        if self._filling is None:
            return False
        self._filling[1].append((what, header, arrays))
        self._waiting_bytes += sum(one.nbytes for one in arrays)
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            self._give_up(self._filling[0])
        return True

    def _square(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        step, generation = int(header["step"]), int(header["generation"])
        return {"square": self.shard.square(step, generation)}, []

    def _decide(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        if self._waits("decide", header, []):
            return {}, []
        found = _act(self.shard, "decide", header, [])
        self._turn.notify_all()
        return found

    def _read(self, header: Mapping[str, Any], arrays: list[Array]) -> Reply:
        [ids] = arrays
        return {}, [self.shard.read(header["table"], ids, int(header["step"]))]

    def _save(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        """Copy what there is, and write it meanwhile; once for each step."""
        step = int(header["step"])
        if step != self.shard.step:
            raise InternalError(f"step {step} was to be kept, and the rows are as of another")
        if step not in self._written or self._written[step].why:
            arrays = dict(self.shard.arrays())
            before = [*self._written.items()][-1:]
            self._written = {**dict(before), step: (written := _Written(threading.Event()))}
            THREADS.thread(self._write, step, arrays, written, name="writes").start()
        return {}, []

    def _write(self, step: int, arrays: Mapping[str, Values], written: _Written) -> None:
        try:
            if self._number == 0:  # what a start with another number of shards has left
                strange = [n for n in self._sets(step) if n != self._count]
                names = self._store.names(f"{directory(step)}/tables-")
                self._store.remove_all([n for n in names if _shards_in(n) in strange])
            made = io.BytesIO()
            named: dict[str, Any] = {"format": np.array([FORMAT]), **arrays}
            np.savez(made, **named)
            name = file_name(step, self._number, self._count)
            self._store.write(name, [made.getbuffer()])
        except CheckpointError as error:
            written.why = error.message
        except Exception as error:  # noqa: BLE001 - the last line before the thread's end
            written.why = repr(error)
        written.over.set()

    def _wait(self, header: Mapping[str, Any], _: list[Array]) -> Reply:
        """Until what was kept for a step is written."""
        written = self._written.get(int(header["step"]))
        if written is None or not written.over.wait(WRITES_S):
            return {"error": f"the tables of step {header['step']} are not written"}, []
        return ({"error": written.why} if written.why else {}), []

    def _load(self, step: int) -> None:
        """Stand where a checkpoint does, that any number of shards has written."""
        found: dict[str, list[Values]] = {}
        if step:
            whole = [names for names in self._sets(step).values() if names]
            if len(whole) != 1:
                raise CheckpointError(
                    f"{self._store.place} has {len(whole)} whole sets of tables of step {step}"
                )
            for name in whole[0]:
                self._take(name, found)
        self.shard.load(step, {name: np.concatenate(parts) for name, parts in found.items()})

    def _sets(self, step: int) -> dict[int, list[str]]:
        """The files of a step by how many shards have written them; none of a set with gaps."""
        names = {*self._store.names(f"{directory(step)}/")}
        counts = {int(found[1]) for name in names if (found := _FILE.search(name))}
        sets = {n: [file_name(step, at, n) for at in range(n)] for n in sorted(counts)}
        return {n: files if names.issuperset(files) else [] for n, files in sets.items()}

    def _take(self, name: str, found: dict[str, list[Values]]) -> None:
        """Of a file, the rows that are this shard's."""
        try:
            with np.load(io.BytesIO(self._store.read(name)), allow_pickle=False) as file:
                if file["format"].tolist() != [FORMAT]:
                    raise CheckpointError(f"{name} is of format {file['format']}, not {FORMAT}")
                arrays = {key: file[key] for key in file.files if key != "format"}
        except (ValueError, OSError, KeyError) as error:
            raise CheckpointError(f"{name} is damaged: {error}") from error
        for path, values in own_rows(arrays, self._number, self._count).items():
            found.setdefault(path, []).append(values)


def _act(shard: Shard, what: str, header: Mapping[str, Any], arrays: list[Array]) -> Reply:
    """Take in what a member says of a step: its gradients, or that it is decided."""
    step, generation = int(header["step"]), int(header["generation"])
    if what == "decide":
        return {"answer": str(shard.decide(step, generation, float(header["scale"])))}, []
    gradients = {}
    for at, (name, codec) in enumerate(header["tables"]):
        ids, codes = arrays[2 * at], arrays[2 * at + 1]
        width = shard.tables[name].spec.width
        gradients[name] = ids, decoded(codec, codes, len(ids), width)
    return {"answer": str(shard.push(step, generation, int(header["rank"]), gradients))}, []


def _snapshots(
    places: Sequence[Place], asked: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[Array]]]:
    """What other servers answer. Of rows that are kept each part may take as long again."""
    clock, pause = SystemClock(), THREADS.event()
    for place in places:
        stream = connect(place, 0, silent_s=_FILLS_S)
        try:
            for part in range(_PARTS if "kept" in asked else 1):
                began_s = clock.monotonic_s()
                tell(stream, {**asked, "part": part})
                yield hear(stream, _MOST_ROWS_BYTES)
                if "kept" in asked:
                    pause.wait(clock.monotonic_s() - began_s)
        finally:
            stream.close()


def _part(arrays: Mapping[str, Values], part: int) -> dict[str, Values]:
    """A part of the rows: one after the other of `_PARTS` they are all."""
    return {
        path: values[len(values) * part // _PARTS : len(values) * (part + 1) // _PARTS]
        for path, values in arrays.items()
    }


def own_rows(arrays: Mapping[str, Values], number: int, count: int) -> dict[str, Values]:
    """Of arrays by `<table>/<name>` the rows that are of this one of so many shards."""
    own = {}
    for key in ("ids", "waiting"):
        for path in (p for p in arrays if p.endswith(f"/{key}")):
            own[path] = shard_of(arrays[path], count) == number
    found = {}
    for path, values in arrays.items():
        table, _, kind = path.rpartition("/")
        of = "waiting" if kind in {"waiting", "named"} else "ids"
        found[path] = values[own[f"{table}/{of}"]]
    return found
