"""Asynchronous local steps: members give servers what they have gone, and take what others have.

Between two meetings of all members, a round, each member makes its own steps as in any round of
local steps (`step.rounds`). Every `period` of them it sends the servers how far it has come, times
its part of the samples, and goes on at once; a thread brings back the parameters with the updates
of all others that had come by then, and the member goes on from these, moved by what it has done
since. Nobody waits for another, unless the slowest is `staleness` updates behind. At a round's end
all have the same parameters.

What a member sends counts once all shards have it (see `server.parameters`). Where a generation
breaks, the next one goes on with the leases that all shards have, and computes the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.served import LostServerError
from raycloud.step.collate import PartialStep
from raycloud.step.rounds import Rounds
from raycloud.step.servers import (
    Connections,
    FindLayout,
    Name,
    Newest,
    Reply,
    Return,
    first_layout,
)
from raycloud.sync.codecs import CODECS

if TYPE_CHECKING:
    from raycloud.net.lane import Lane
    from raycloud.net.messages import Array
    from raycloud.order import Round
    from raycloud.spec import Job
    from raycloud.step.stateful import Commit
    from raycloud.sync.codecs import Codec

# Of a server, and a round; the last, and more by the generation that has put its parameters.
_AWAY, _THERE, _STANDS = 0.0, 1.0, 2.0


class Asynchronous(Rounds):
    """The parameters in a round whose members exchange updates by servers, each when it is ready.

    Order of calls: `enter` for each generation; in a round, beside those of `Rounds`, `before_step`
    and `after_step` for each step; `give`; once the round's exchange has ended, `meet`.

    Args:
        job: Whose topology is servers.
        given: See `Rounds`.
    """

    def __init__(self, job: Job, **given: Any) -> None:
        super().__init__(**given, nesterov=False, adapts=False)
        point = job.sync_point
        self._every, self._codec = point.period, CODECS[point.codec]
        self._bound = None if point.staleness == "unbounded" else point.staleness
        for name, p in zip(self._names, self._parameters, strict=True):
            if p.dtype is not torch.float32:
                raise TaskError(
                    f"parameter {name!r} is of {p.dtype}, and servers hold fp32",
                    hint="write another sync.topology than servers",
                )
        self._connections: Connections | None = None
        self._find: FindLayout | None = None
        self._newest: Newest = first_layout
        self._layout = 0
        self._servers: list[Name] = []  # that all members reach
        self._return: Return | None = None
        self._vain, self._met = 0, False  # whether servers of the layout were met
        self._who = {"generation": -1, "rank": 0, "members": 1}
        self._stands = -1  # at which round servers are
        self._halfway = False  # in the midst of it
        self._courier: _Courier | None = None
        self._in_flight, self._least = False, 0
        self._sent = PartialStep(step=-1)  # what of this member's part the servers have
        self._sent_loss = 0.0
        self._next = torch.empty(0)
        self._buffer, self._anchor, self._known, self._lost = (
            torch.zeros(sum(p.numel() for p in self._parameters)) for _ in range(4)
        )

    def serve(self, find: FindLayout, newest: Newest = first_layout) -> None:
        """The servers of a layout are found by `find`; `newest` says which there is."""
        self.close()
        self._find, self._newest = find, newest
        self._connections = Connections(find)

    @property
    def returned(self) -> bool:
        """There are servers that this generation lacks, or others in their place."""
        came = self._return is not None and self._return.came
        return came or self._newest() > self._layout

    def _take_layout(self, lane: Lane) -> None:
        """Go by the newest layout that all members know of; servers of another are not needed.

        The first generation of a layout waits for each server, others go on with those there are.
        """
        told = lane.gather([float(self._newest()), float(self._layout if self._met else -1)])
        known = int(min(row[0] for row in told))
        if self._find is None:
            return
        if known != self._layout:
            before, self._layout = self._connections, known
            self._connections, self._met = Connections(partial(self._find, known)), False
            if before is not None:
                before.retire()
        if any(row[1] == known for row in told):
            self._served().find = partial(self._find, known, least="one")

    def hang_up(self) -> None:
        """In whichever thread: nothing more is waited for."""
        if self._connections is not None:
            self._connections.hang_up()

    def close(self) -> None:
        """End the connections; nobody is waited for."""
        self._rest()
        if self._return is not None:
            self._return.end()
        self._return = None
        if self._connections is not None:
            self._connections.close()

    def take_bytes(self) -> int:
        """Sent to servers since the last call."""
        return 0 if self._connections is None else self._connections.take_bytes()

    def enter(
        self, generation: int, step: int, lane: Lane, *, planned: bool
    ) -> tuple[PartialStep | None, float]:
        """A generation goes on with the round of `step`; all its members call this together.

        Unless it was `planned`, updates may be taken back, and with them what encoding has lost.

        Returns what of the round is applied already, for rank 0, with the sum of its losses; else,
        and where nothing is, None.

        Raises:
            TransportError: There is no server that all reach.
        """
        self._rest()
        if not planned:
            self._lost.zero_()
        rank, size = lane.transport.rank, lane.transport.size
        self._who = {"generation": generation, "rank": rank, "members": size}
        self._take_layout(lane)
        connections = self._served()
        every = [shard[0] for shard in connections.meet()]
        asked = {"do": "begin", "generation": generation, "step": step}
        looks = [self._look(name, asked) for name in every]
        common = [min(of) for of in zip(*lane.gather([*map(_state, looks)]), strict=True)]
        self._servers = [name for name, state in zip(every, common, strict=True) if state != _AWAY]
        if not self._servers:
            raise LostServerError("there is no server that all reach")
        self._met = True
        self._await([name for name in every if name not in self._servers], every, looks)
        there = [one for one, state in zip(looks, common, strict=True) if state != _AWAY]
        found = [{tuple(one[0]): one for one in look["leases"]} for look in there]
        # They have one round's parameters, cut as they are now; else what they have is of no use.
        states = {state for state in common if state != _AWAY}
        intact = len(states) == 1 and min(states) >= _STANDS
        intact = intact and all(look["cut"][1] == len(there) for look in there)
        whole = set.intersection(*map(set, found)) if intact else set()
        self._halfway, self._stands = bool(whole), step if whole else -1
        # Where nothing has come everywhere, members have what the round began with, and put it.
        places = sorted(map(list, whole)) if whole else None
        told = {"do": "settle", "generation": generation, "places": places}
        connections.ask_each(self._servers, told)
        if rank or not whole:
            return None, 0.0
        kept = [found[0][one] for one in whole]
        claim = PartialStep(
            step=step,
            micro_batches=tuple(sorted(k for one in whole for k in one)),
            weight=sum(float(one[1]) for one in kept),
            rows=sum(int(one[3]) for one in kept),
        )
        return claim, sum(float(one[2]) for one in kept)

    def _await(self, lost: list[Name], every: list[Name], looks: Sequence[Any]) -> None:
        """Wait, beside the round, until those are there again that a generation lacks."""
        if self._return is not None:
            self._return.end()
        self._return = None
        reached = {name for name, one in zip(every, looks, strict=True) if one is not None}
        self._vain = self._vain + 1 if reached.intersection(lost) else 0
        if lost and self._find is not None and not self._who["rank"]:  # who says so to all
            find = partial(self._find, self._layout, least="one")
            self._return = Return(find, lost, self._vain)

    def _look(self, name: Name, asked: Mapping[str, Any]) -> Any:
        try:
            return self._served().ask_each([name], asked)[name]
        except TransportError:
            return None

    def _served(self) -> Connections:
        if self._connections is None:
            raise InternalError("the parameters are on servers, and nobody knows one")
        return self._connections

    def _join(self, step: int) -> None:
        """The round of `step`: servers get the parameters, or have those of one under way."""
        self._known.copy_(self._flat())
        who = {**self._who, "step": step}
        courier = _Courier(self._served(), self._servers, self._codec, who, self._known, self._lost)
        self._courier, self._in_flight, self._least = courier, False, 0
        if self._stands != step:
            courier.put()
        if self._halfway:
            courier.fetch(whole=True)
            self._write(self._known)
        self._anchor.copy_(self._known)
        self._stands, self._halfway = step, False

    def before_step(self, at: int, kept: PartialStep, loss: torch.Tensor) -> None:
        """Take what has come; wait while this member is too far ahead of the slowest."""
        if at == 0:
            self._join(kept.step)
            self._sent, self._sent_loss = kept, float(loss)
        self._take(wait=False)
        if self._bound is None or at % self._every:
            return
        while self._least < (need := at // self._every - self._bound):
            if not self._in_flight:
                self._running().ask(need)
                self._in_flight = True
            self._take(wait=True)

    def after_step(self, at: int, whole: Round, kept: PartialStep, loss: torch.Tensor) -> None:
        """Send how far this member has come, after every `period` steps, and the last."""
        begun, done = at // self._every * self._every, at + 1
        if done % self._every and done < len(whole.spans):
            return
        self._take(wait=True)
        new = sorted({*kept.micro_batches} - {*self._sent.micro_batches})
        weight, rows = kept.weight - self._sent.weight, kept.rows - self._sent.rows
        lease = [new, weight, float(loss) - self._sent_loss, rows]
        if new:  # beside what encoding has lost before; others' weights are not known yet
            every = whole.micro_batches
            samples = sum(every[k].samples for k in new)
            part = samples / sum(one.samples for one in whole.spans[begun:done])
            now = self._flat()
            self._lost.add_(now, alpha=part).sub_(self._anchor, alpha=part)
            self._buffer, self._anchor = self._anchor, now
        self._sent, self._sent_loss = kept, float(loss)
        self._running().send(lease)
        self._in_flight = True

    def give(self, weight: float) -> None:
        """All that this member has sent is on the servers, before the others hear its last word."""
        self._take(wait=True)
        self.weight, self.given = weight, 0.0
        self._forget_gradients()

    def meet(self, step: int) -> None:
        """All updates are on the servers: learn the parameters that the next round begins with.

        `TransportError`: a server is lost, and nobody can go past the round with what is here.
        """
        start = torch.cat([one.reshape(-1) for one in self._start]).cpu()
        self._next = self._running().meet(start, step)

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`."""
        if not step.local:
            self._stands = -1
            return
        self.unlike = True
        self._forget_gradients()
        self._write(self._next)
        for number in range(self._stepped, step.steps):
            self._update.apply(step.step + number)
        self._rest()
        self._started, self._stands = False, step.step + step.steps

    def suspend(self) -> None:
        """See `Stateful.suspend`: what is not on servers is computed again."""
        self.discard()

    def discard(self) -> None:
        """See `Stateful.discard`."""
        self._rest()
        super().discard()

    def _running(self) -> _Courier:
        if self._courier is None:
            raise InternalError("a round goes on that has not begun")
        return self._courier

    def _rest(self) -> None:
        if self._courier is None:
            return
        if self._in_flight:
            self.hang_up()
        self._courier.end()
        self._courier, self._in_flight = None, False

    def _take(self, *, wait: bool) -> None:
        """Go on from the parameters that have come, moved by what was done since they were sent."""
        if not self._in_flight or (least := self._running().back(wait=wait)) is None:
            return
        self._in_flight, self._least = False, least
        self._write(self._flat().sub_(self._anchor).add_(self._known))
        self._anchor.copy_(self._known)

    def _flat(self) -> torch.Tensor:
        """The parameters as they are; until the next call."""
        parts = self._buffer.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            part.copy_(p.detach().reshape(-1))
        return self._buffer

    def _write(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            parts = flat.split([p.numel() for p in self._parameters])
            for p, part in zip(self._parameters, parts, strict=True):
                p.copy_(part.view(p.shape))
        self._moved()


def _state(look: Any) -> float:
    if look is None:
        return _AWAY
    return _STANDS + float(look["cut"][0]) if look["stands"] else _THERE


class _Courier:
    """A thread that sends a member's updates in a round, one after the other, and brings answers.

    The member itself asks, and touches what both have, only while nothing is under way.

    Args:
        connections: To servers.
        servers: That have a slice each, in this order.
        codec: Of updates and answers.
        who: The generation, this member's rank and how many there are, and the round's first step.
        known: The parameters as the servers take this member to have them; follows the answers.
        lost: The update that is sent; then what encoding has lost of it.
    """

    def __init__(
        self,
        connections: Connections,
        servers: Sequence[Name],
        codec: Codec,
        who: Mapping[str, int],
        known: torch.Tensor,
        lost: torch.Tensor,
    ) -> None:
        self._connections, self._servers, self._codec = connections, servers, codec
        self._who, self._known, self._lost = who, known, lost
        self._jobs: Queue[tuple[Sequence[Any], int] | None] = Queue()
        self._answers: Queue[int | Exception] = Queue()
        self._thread = Thread(target=self._run, name="updates", daemon=True)
        self._thread.start()

    def put(self) -> None:
        """Give servers the parameters, of each shard one of the members."""
        rank, members = self._who["rank"], self._who["members"]
        told = {"do": "put", **self._who, "slices": len(self._servers)}
        parts = zip(self._servers, self._cut(self._known), strict=True)
        mine = {name: (told, [p.numpy()]) for name, p in parts if name[0] % members == rank}
        self._connections.ask(mine)

    def send(self, lease: Sequence[Any]) -> None:
        """Send the update of a lease, and learn the parameters."""
        self._jobs.put((lease, 0))

    def ask(self, need: int) -> None:
        """Learn the parameters once the slowest member has sent so many updates."""
        self._jobs.put(([], need))

    def back(self, *, wait: bool) -> int | None:
        """How many the slowest had sent when what was asked last came back; None: it has not."""
        if not wait and self._answers.empty():
            return None
        found = self._answers.get()
        if isinstance(found, Exception):
            raise found
        return found

    def meet(self, base: torch.Tensor, step: int) -> torch.Tensor:
        """What has become of the base in the round, for all members."""
        asked = {"do": "meet", **self._who, "step": step, "codec": self._codec.name}
        answers = self._connections.ask(dict.fromkeys(self._servers, (asked, ())))
        for name, part in zip(self._servers, self._cut(base), strict=True):
            self._learn(answers[name][1], part)
        return base

    def end(self) -> None:
        """Send nothing more; what is under way is over, or breaks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            lease, need = job
            try:
                if lease:
                    self._push(lease)
                self._answers.put(self.fetch(need))
            except Exception as error:  # noqa: BLE001 - the last line before the thread's end
                self._answers.put(error)

    def _push(self, lease: Sequence[Any]) -> None:
        told = {"do": "update", **self._who, "lease": lease, "codec": self._codec.name}
        words: dict[Name, tuple[Mapping[str, Any], Sequence[Array]]]
        words = dict.fromkeys(self._servers, (told, ()))
        for name, part in zip(self._servers, self._cut(self._lost), strict=True):
            if lease[0]:
                codes = torch.empty(self._codec.bound(len(part)), dtype=torch.uint8)
                self._codec.encode(part, codes)
                self._codec.subtract(codes, part)
                words[name] = told, [codes.numpy()]
        for answer, _ in self._ask(words).values():
            if answer["answer"] == "old term":
                raise LostServerError("the generation is over: the servers hear another")

    def _ask(
        self, words: Mapping[Name, tuple[Mapping[str, Any], Sequence[Array]]]
    ) -> Mapping[Name, Reply]:
        """What servers answer: those that wait for others are asked again until they do."""
        answers: dict[Name, Reply] = {}
        while left := {name: word for name, word in words.items() if name not in answers}:
            found = self._connections.ask(left)
            answers |= {name: one for name, one in found.items() if "later" not in one[0]}
        return answers

    def fetch(self, need: int = 0, *, whole: bool = False) -> int:
        """Learn the parameters; the `whole` as they are, or what has changed, encoded."""
        also = {"need": need, "whole": whole, "codec": self._codec.name}
        asked = {"do": "fetch", **self._who, **also}
        answers = self._ask(dict.fromkeys(self._servers, (asked, ())))
        for name, part in zip(self._servers, self._cut(self._known), strict=True):
            self._learn(answers[name][1], part, whole=whole)
        return min(int(answer["least"]) for answer, _ in answers.values())

    def _learn(self, arrays: Sequence[Array], part: torch.Tensor, *, whole: bool = False) -> None:
        [values] = arrays
        if whole or self._codec.name == "none":
            part.copy_(torch.from_numpy(values))
        else:
            self._codec.add(torch.from_numpy(values), part)

    def _cut(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        count, shards = len(flat), len(self._servers)
        sizes = [count * (k + 1) // shards - count * k // shards for k in range(shards)]
        return list(flat.split(sizes))
