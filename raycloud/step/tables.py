"""Tables of a replica: the rows that a step reads from servers, and what it tells them in the end.

    forward   rows that the samples name are asked for, once a step
    push      before this member has its last part in the exchange: gradients of rows, and waits
    decide    with the step's commit: the servers change their rows, or do not

A server that is lost breaks the exchange. Members of the next generation agree on the servers that
all of them reach. Where a shard has a copy that is enough, and one that is started again is filled
while training goes on; else all go back to a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.checkpoint import StoreError
from raycloud.embedding import Embedding
from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.served import LostServerError
from raycloud.order import stream_seed
from raycloud.step.servers import (
    Agree,
    Connections,
    Filling,
    FindLayout,
    Name,
    Newest,
    Return,
    UnfitError,
    View,
    first_layout,
)
from raycloud.step.stateful import Stateful
from raycloud.sync.codecs import CODECS
from raycloud.sync.tables import Ids, TableSpec, Values, initial, shard_of, summed

if TYPE_CHECKING:
    from torch import nn

    from raycloud.net.messages import Array
    from raycloud.net.stream import Place
    from raycloud.spec import Job
    from raycloud.step.stateful import Commit

TABLES_STREAM = 7
_WRITES_S = 700.0  # longer than a server itself waits


_NOWHERE = -1
_AWAY, _ELSEWHERE, _STANDS = 0.0, 1.0, 3.0  # the last, and more by the generation that decided


class LostRowsError(TransportError):
    """Servers do not have the rows that a generation is to go on with."""


class Tables(Stateful):
    """All tables of a replica's model.

    Args:
        embeddings: The modules, by their names in the model.
        job: Whose seed rows begin with, and whose codec gradients travel in.
        seat: This member's rank, and how many there are.

    Attributes:
        find: Where the servers are; None: nobody knows yet, and rows are as they begin.
        scale: What the step's gradients are multiplied by.
    """

    def __init__(
        self, embeddings: Mapping[str, Embedding], job: Job, seat: Callable[[], tuple[int, int]]
    ) -> None:
        self._specs = {name: spec_of(name, one, job) for name, one in embeddings.items()}
        self._codec, self._seat = CODECS[job.sync_point.codec], seat
        self._connections: Connections | None = None
        self._view = View()
        # What was told last, and whom: one that was started again since must not take it.
        self._decided: tuple[dict[str, Any], dict[Name, Place]] = {}, {}
        self._vain: dict[Name, int] = {}  # how often a server was met that not all reach
        self._generation = self._step = -1
        self._trying = self._pushed = False
        self._plain = 0  # bytes of what was told, without a codec and copies
        self._read: dict[str, tuple[Ids, Values]] = {}  # of this step, ids rising
        self._passes: list[tuple[str, Ids, torch.Tensor]] = []
        self._gradients: dict[str, list[tuple[Ids, Values]]] = {}
        self.scale = 1.0
        self._return: Return | Filling | None = None
        self._find: FindLayout | None = None
        self._newest: Newest = first_layout
        self._layout, self._known = _NOWHERE, 0  # that rows are read from, and the newest
        # Servers of another layout, that are filled, and told meanwhile all that those here are.
        self._coming: Connections | None = None
        self._told_too: list[list[Name]] = []  # of these, by shard, in this generation
        for name, one in embeddings.items():
            one.bind(name, self.rows)

    @classmethod
    def of(cls, model: nn.Module, job: Job, seat: Callable[[], tuple[int, int]]) -> Tables | None:
        """Those of a model; None where it has none.

        Raises:
            TaskError: The job does not go together with them.
        """
        found = {n: one for n, one in model.named_modules() if isinstance(one, Embedding)}
        if not found:
            return None
        for what, wrong, remedy in (
            ("has no servers", not job.servers.shards, "write servers: 1, or more"),
            (
                "has its other parameters on servers, too",
                job.asynchronous,
                "leave sync.topology out",
            ),
            ("makes rounds of steps", job.most_period > 1, "write sync.period: 1"),
            ("has backup_micro_batches", job.elastic.backup_micro_batches > 0, "leave it out"),
            ("has compile: true", job.compile, "write compile: false"),
        ):
            if wrong:
                first = next(iter(found))
                raise TaskError(
                    f"the model has raycloud.Embedding {first!r}, and the job {what}", hint=remedy
                )
        return cls(found, job, seat)

    def serve(self, find: FindLayout, newest: Newest = first_layout) -> None:
        """The servers of a layout are found by `find`; `newest` says which there is."""
        self.close()
        self._find, self._newest = find, newest
        self._connections = Connections(find)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Passes within have no effect: rows are as they begin, and nobody is asked."""
        before, self._trying = self._trying, True
        try:
            yield
        finally:
            self._trying = before
            self._passes.clear()

    def enter(self, generation: int, step: int, agree: Agree) -> None:
        """A generation goes on with `step`; all its members call this together, maybe again.

        They agree on the servers: of each shard those that all of them reach. Who does not have the
        rows as of that step gets them from one that has, or from a checkpoint of it.

        Args:
            generation: Which.
            step: The next.
            agree: Returns what all members give it, as `Lane.gather`.

        Raises:
            TransportError: A shard has no server that all reach.
            LostRowsError: A shard has no server with these rows, nor a checkpoint.
        """
        self._take_layout(agree)
        connections = self._served()
        told = {"generation": generation, "step": step}
        coming, stand = self._look_at_coming(generation, step, agree)
        if coming and stand:
            self._move()
            connections = self._served()
        self._view, self._told_too = View(), []
        names = connections.meet()
        if not names:
            raise InternalError("the run has tables, and no servers were started for it")
        every = [name for shard in names for name in shard]
        seen = [self._look(name, generation, step) for name in every]
        common = _common(every, agree(seen))
        keeps = bool(coming) and not stand
        for shard in names:
            self._enter_shard(shard, common, told, keeps=keeps)
        if keeps and self._coming is not None:
            places = [_told_place(connections, name) for name in self._view.readers]
            fill = {"do": "fill", **told, "places": places, "anew": True}
            self._coming.ask_each([name for shard in coming for name in shard], fill)
            self._told_too = coming
        self._read.clear()
        self._generation, self._step, self._pushed = generation, step, False
        lost = {name for name in every if name not in self._view.all}
        met = {name for name, value in zip(every, seen, strict=True) if value != _AWAY}
        self._vain = {name: self._vain.get(name, 0) + 1 for name in lost & met}
        self._await(connections, lost)

    def _await(self, connections: Connections, lost: set[Name]) -> None:
        """Whatever would make another generation better than this one."""
        if self._return is not None:
            self._return.end()
        vain, self._return = max(self._vain.values(), default=0), None
        if self._told_too and self._coming is not None:
            self._return = Filling(self._coming.find)
        elif self._coming is not None:  # not all of these are reached
            every = {(shard, 0) for shard in range(self._coming.shards)}
            self._return = Return(self._coming.find, every, vain)
        elif lost:
            self._return = Return(connections.find, lost, vain)

    def _take_layout(self, agree: Agree) -> None:
        """Which servers have the rows, and which are to have them, as all members know."""
        told = agree([float(self._newest()), float(self._layout)])
        known, layout = int(min(row[0] for row in told)), int(max(row[1] for row in told))
        if layout == _NOWHERE:  # nobody has read a row
            layout = known
        if layout != self._layout:
            if layout and self._connections is not None and self._find is not None:
                self._connections.close()
                self._connections = Connections(partial(self._find, layout))
            self._layout = layout
        if known != self._known or (known > layout and self._coming is None):
            self._leave_coming()
            self._coming = self._found(known) if known > layout else None
            self._known = known

    def _found(self, layout: int) -> Connections:
        if self._find is None:
            raise InternalError("the tables' servers were to change, and nobody knows one")
        return Connections(partial(self._find, layout, least="none") if layout else self._find)

    def _leave_coming(self) -> None:
        if self._coming is not None:
            self._coming.close()
        self._coming = None

    def _look_at_coming(
        self, generation: int, step: int, agree: Agree
    ) -> tuple[list[list[Name]], bool]:
        """The servers that are to have the rows, if all reach all of them; whether they have."""
        if self._coming is None:
            return [], False
        names = self._coming.meet()
        every = [name for shard in names for name in shard]
        seen = [self._look(name, generation, step, self._coming) for name in every]
        common = _common(every, agree(seen)).values()
        if not every or _AWAY in common:
            return [], False
        return names, min(common) >= _STANDS

    def _move(self) -> None:
        """The servers that are to have the rows have them: they are read from there from now on."""
        before, self._connections = self._connections, self._coming
        self._coming, self._layout = None, self._known
        if self._connections is not None and self._find is not None:
            self._connections.find = partial(self._find, self._layout)  # each is waited for now
        self._decided = {}, {}
        if before is not None:
            before.retire()

    def _enter_shard(
        self,
        shard: list[Name],
        common: Mapping[Name, float],
        told: Mapping[str, Any],
        *,
        keeps: bool,
    ) -> None:
        """A generation goes on with the servers of a shard that all reach."""
        connections = self._served()
        there = [name for name in shard if common[name] != _AWAY]
        if not there:
            raise LostServerError(f"no server of shard {shard[0][0]} is reached by all")
        newest = max(common[name] for name in there)
        stand = [name for name in there if common[name] == newest]
        lack = [name for name in there if common[name] != newest]
        if newest < _STANDS:
            stand, lack = there, []
            self._load(stand, told)
        connections.ask_each(stand, {"do": "enter", **told, "keeps": keeps})
        fill = {"do": "fill", **told, "places": [_told_place(connections, stand[0])]}
        connections.ask_each(lack, fill)
        self._view.readers.append(stand[0])
        self._view.tellers.append([*stand, *lack])

    @property
    def due(self) -> bool:
        """To `enter` anew would be better: servers have come back, or others in their place."""
        came = self._return is not None and self._return.came
        return came or self._newest() > self._known

    def _look(
        self, name: Name, generation: int, step: int, others: Connections | None = None
    ) -> float:
        """What a server, here or of `others`, is to a generation that goes on with a step."""
        connections = others or self._connections
        if connections is None or not connections.has(name):
            return _AWAY
        try:
            for spec in self._specs.values():
                connections.ask_each([name], {"do": "open", "spec": asdict(spec)})
            told, whom = self._decided
            if others is None and whom.get(name) == connections.place(name):
                # It may not have come, where the generation was given up just then.
                connections.ask_each([name], told)
            asked = {"do": "look", "generation": generation, "step": step}
            found = connections.ask_each([name], asked)[name]
        except TransportError:
            return _AWAY
        return _STANDS + found["by"] if found["stands"] else _ELSEWHERE

    def _served(self) -> Connections:
        if self._connections is None:
            raise InternalError("rows are asked for, and nobody knows a server")
        return self._connections

    def _load(self, names: Sequence[Name], told: Mapping[str, Any]) -> None:
        try:
            self._served().ask_each(names, {"do": "load", **told})
        except UnfitError as error:
            raise TaskError(
                f"the checkpoint of step {told['step']} has other tables: {error.message}",
                hint="go on with the tables that the run began with",
            ) from error
        except TaskError as error:
            raise LostRowsError(error.message) from error

    def read_as_of(self, step: int) -> None:
        """What is read from now on is as all steps before this one have left it."""
        if step != self._step:
            self._read.clear()
            self._step = step

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """See `embedding.Rows`; with gradients, where those are wanted."""
        wanted = ids.cpu().numpy()
        values = torch.from_numpy(self._values(name, wanted)).to(ids.device)
        if torch.is_grad_enabled():
            values.requires_grad_()
            self._passes.append((name, wanted, values))
        return values

    def _values(self, name: str, ids: Ids) -> Values:
        spec = self._specs[name]
        if self._trying or self._generation < 0 or self._connections is None:
            return initial(spec, ids)
        known, rows = self._read.get(name, (np.zeros(0, np.int64), None))
        lacking = ids if rows is None else np.setdiff1d(ids, known, assume_unique=True)
        if len(lacking) or rows is None:
            got = self._asked(name, lacking)
            if rows is None:
                known, rows = lacking, got
            else:
                order = np.argsort(both := np.concatenate([known, lacking]))
                known, rows = both[order], np.concatenate([rows, got])[order]
            self._read[name] = known, rows
        return rows[np.searchsorted(known, ids)]

    def _asked(self, name: str, ids: Ids) -> Values:
        connections = self._served()
        found = np.empty((len(ids), self._specs[name].width), self._specs[name].dtype)
        shards, readers = shard_of(ids, connections.shards), self._view.readers
        parts = {readers[shard]: np.flatnonzero(shards == shard) for shard in np.unique(shards)}
        header = {"do": "read", "table": name, "step": self._step}
        asked = {server: (header, [ids[at]]) for server, at in parts.items()}
        for server, (_, [rows]) in connections.ask(asked).items():
            found[parts[server]] = rows
        return found

    def fold(self) -> bool:
        """Take in the gradients of passes that are computed; whether they are finite."""
        passes, self._passes = self._passes, []
        finite = True
        for name, ids, values in passes:
            if values.grad is not None:
                gradients = values.grad.cpu().numpy()
                finite = finite and bool(np.isfinite(gradients).all())
                self._gradients.setdefault(name, []).append((ids, gradients))
        return finite

    def push(self) -> None:
        """Tell the servers this member's part of the step, and wait until they have it.

        Raises:
            TransportError: A server is lost.
        """
        if self._pushed or self._connections is None:
            return
        codes: dict[str, tuple[Ids, Values]] = {}
        for name, parts in self._gradients.items():
            ids = np.concatenate([one for one, _ in parts])
            codes[name] = summed(ids, np.concatenate([one for _, one in parts]))
        self._gradients = {name: [one] for name, one in codes.items()}
        self._push(self._connections, self._view.tellers)
        if self._coming is not None and self._told_too:
            self._push(self._coming, self._told_too)
        self._pushed = True

    def _push(self, connections: Connections, tellers: Sequence[Sequence[Name]]) -> None:
        told: dict[int, tuple[list[tuple[str, str]], list[Array]]] = {}
        for name, [(ids, gradients)] in self._gradients.items():
            shards = shard_of(ids, len(tellers))
            for shard in np.unique(shards):
                at = np.flatnonzero(shards == shard)
                names, arrays = told.setdefault(int(shard), ([], []))
                codec, codes = self._coded(gradients[at])
                self._plain += (ids.itemsize + 4 * gradients.shape[1]) * len(at)
                names.append((name, codec))
                arrays += [ids[at], codes]
        header = {
            "do": "push",
            "step": self._step,
            "generation": self._generation,
            "rank": self._seat()[0],
        }
        words: dict[Name, tuple[Mapping[str, Any], Sequence[Array]]] = {}
        for shard, (names, arrays) in told.items():
            word = {**header, "tables": names}, arrays
            words |= dict.fromkeys(tellers[shard], word)
        for answer, _ in connections.ask(words).values():
            if answer.get("answer") == "old term":
                raise LostServerError("the generation is over: the servers are told by another")

    def take_bytes(self) -> tuple[int, int]:
        """Sent to servers since the last call: ids and gradients; and what those are in fp32."""
        plain, self._plain = self._plain, 0
        every = self._connections, self._coming
        return sum(one.take_bytes() for one in every if one is not None), plain

    def _coded(self, gradients: Values) -> tuple[str, Array]:
        size = self._codec.bound(gradients.size)
        if gradients.dtype != np.float32 or size >= gradients.nbytes:  # blocks of few are filled up
            return "none", gradients
        flat = torch.from_numpy(np.ascontiguousarray(gradients)).view(-1)
        codes = torch.empty(size, dtype=torch.uint8)
        self._codec.encode(flat, codes)
        return self._codec.name, codes.numpy()

    def clip(self, norm: float, limit: float) -> None:
        """As `GradientExchange.clip` does with the others."""
        self.scale *= min(1.0, limit / (norm + 1e-6))

    def norm(self) -> float:
        """Of the step's gradients of all rows, scaled; all members get the same."""
        if self._connections is None:
            return 0.0
        asked = {"do": "square", "step": self._step, "generation": self._generation}
        squares = self._connections.ask_each(self._view.readers, asked)
        return math.sqrt(sum(float(one["square"]) for one in squares.values())) * self.scale

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`; who catches up has nothing to say: others have said it."""
        if step.sums is None:
            self._decide(step.step, self.scale)
            self._forget(step.step + 1)

    def pass_over(self, step: int) -> None:
        """The step changes nothing."""
        self._decide(step, 0.0)
        self._forget(step + 1)

    def _decide(self, step: int, scale: float) -> None:
        if self._connections is not None and self._generation >= 0:
            told = {"do": "decide", "step": step, "generation": self._generation, "scale": scale}
            places = {name: self._connections.place(name) for name in self._view.all}
            self._decided = told, places
            self._connections.tell_each(self._view.all, told)
            if self._coming is not None:
                names = [name for shard in self._told_too for name in shard]
                self._coming.tell_each(names, told)

    def _forget(self, step: int) -> None:
        self._gradients.clear()
        self._passes.clear()
        self._read.clear()
        self._step, self._pushed = step, False

    def stage(self) -> None:
        """See `Stateful.stage`."""
        self.discard()

    def discard(self) -> None:
        """See `Stateful.discard`."""
        self._gradients.clear()
        self._passes.clear()
        self._pushed = False

    def save(self, step: int) -> Callable[[], None]:
        """Have the servers keep what they hold, as of this step; what waits until it is written.

        Raises:
            TransportError: A server is lost.
        """
        connections, readers = self._served(), [*self._view.readers]
        find = connections.find
        connections.ask_each(readers, {"do": "save", "step": step})

        tried = False

        def wait() -> None:
            nonlocal tried
            beside, again, tried = Connections(find, _WRITES_S), tried, True
            try:
                beside.meet()
                if again:  # nobody goes on from the last step: it is still there to be kept
                    beside.ask_each(readers, {"do": "save", "step": step})
                beside.ask_each(readers, {"do": "wait", "step": step})
            except (TaskError, TransportError) as error:
                raise StoreError(f"the tables of step {step} are not kept: {error}") from error
            finally:
                beside.close()

        return wait

    def hang_up(self) -> None:
        """In whichever thread: nothing more is waited for."""
        for one in (self._connections, self._coming):
            if one is not None:
                one.hang_up()

    def close(self) -> None:
        """End the connections."""
        if self._return is not None:
            self._return.end()
        for one in (self._connections, self._coming):
            if one is not None:
                one.close()


def _common(every: Sequence[Name], told: Sequence[Sequence[float]]) -> dict[Name, float]:
    """What servers are to all members together, by what each has told of them."""
    pairs = zip(every, *told, strict=True)
    return {name: _AWAY if _AWAY in values else max(values) for name, *values in pairs}


def _told_place(connections: Connections, name: Name) -> list[Any]:
    place = connections.place(name)
    return [place.address, place.port, place.key]


def spec_of(name: str, one: Embedding, job: Job) -> TableSpec:
    """What the table of a module is, by its name in the model."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return TableSpec(
        name=name,
        width=one.width,
        optimizer=one.optimizer,
        rate=one.lr * job.rate_factor,
        epsilon=one.eps,
        betas=one.betas,
        weight_decay=one.weight_decay,
        spread=one.spread,
        seed=stream_seed(job.seed, TABLES_STREAM, place),
        dtype=str(one.dtype).removeprefix("torch."),
        admit_after=one.admit_after,
        expire_steps=one.expire_steps,
    )
