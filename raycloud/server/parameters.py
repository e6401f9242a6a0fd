"""Parameters on servers: a slice of them, moved by all members' own steps, as these come.

A round has many leases: what one member computes between two exchanges of its own. Its update, the
way that it has gone, weighted by its part of the samples, is added where it arrives, and what the
member gets back has those of all others that had come by then (stale synchronous parallel: Ho et
al., NeurIPS 2013; of local steps: Stich, ICLR 2019). At a round's end all members have the same
parameters, the `base` of the next one.

An update counts on all shards or on none: where a generation breaks, the next one says which leases
it goes on with, and a shard takes the others back. It keeps the newest of each member for that: one
sends the next when all shards have the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from raycloud.errors import InternalError, TransportError
from raycloud.server.shard import Answer
from raycloud.sync.codecs import CODECS

if TYPE_CHECKING:
    import threading

    from raycloud.net.messages import Array
    from raycloud.sync.codecs import Codec

NOWHERE = -1
_WAITS_S = 60.0  # until who asks is told to ask again: a silent server would be taken for lost


@dataclass(frozen=True, slots=True)
class Lease:
    """What one member has computed for an update.

    Attributes:
        places: Indices, in the round, of its micro-batches: what it is known by.
        weight: Theirs.
        loss: The sum of weight * loss over them.
        rows: Their `row_sum`.
    """

    places: tuple[int, ...]
    weight: float
    loss: float
    rows: int

    @classmethod
    def of(cls, told: Sequence[Any]) -> Lease:
        """What was told of it."""
        places, weight, loss, rows = told
        return cls(tuple(map(int, places)), float(weight), float(loss), int(rows))

    def told(self) -> list[Any]:
        """All of it, as a message has it."""
        return [list(self.places), self.weight, self.loss, self.rows]


@dataclass(frozen=True, slots=True)
class _Next:
    """The next round, from `step` on: its base, what members are `told` of it, and who has been."""

    step: int
    base: torch.Tensor
    told: torch.Tensor
    met: set[int] = field(default_factory=set)


class ParameterShard:
    """A slice of the parameters in a round. Pure: who calls it sees that they do so in turn.

    Attributes:
        step: The first of the round under way; NOWHERE: there are no parameters.
        generation: The newest that it has heard of.
        cut: The generation that has put parameters here, and in how many slices.
        leases: That are applied in this round, by their places.
    """

    def __init__(self) -> None:
        self.step = self.generation = NOWHERE
        self.cut = (NOWHERE, 0)
        self.leases: dict[tuple[int, ...], Lease] = {}
        self._values = self._base = torch.empty(0)
        self._next: _Next | None = None
        self._newest: dict[int, tuple[tuple[int, ...], str, torch.Tensor]] = {}
        self._known: dict[int, torch.Tensor] = {}  # what a member has, where that is not the base
        self._clocks: dict[int, int] = {}
        self._settled = NOWHERE

    def enter(self, generation: int) -> Answer:
        """A generation begins: updates of older ones count no more."""
        if generation < self.generation:
            return Answer.OLD_TERM
        if generation > self.generation:
            self.generation = generation
            self._next = None
            self._clocks.clear()
            self._known.clear()
        return Answer.APPLIED

    def settle(self, generation: int, places: Sequence[Sequence[int]] | None) -> Answer:
        """The generation goes on with the leases of these places; any other is taken back.

        None: members are going to put parameters here, and nothing is added before. The first who
        says so counts.
        """
        if generation < self.generation:
            return Answer.OLD_TERM
        if generation == self._settled:
            return Answer.DUPLICATE
        self._settled = generation
        if places is None:
            self._begin(NOWHERE)
            return Answer.APPLIED
        stay = {tuple(one) for one in places}
        newest = {places: (codec, codes) for places, codec, codes in self._newest.values()}
        for one in self.leases.keys() - stay:
            if one not in newest:
                raise InternalError(f"an update of {one} is not everywhere, and is not the newest")
            codec, codes = newest[one]
            CODECS[codec].subtract(codes, self._values)
            del self.leases[one]
        self._newest.clear()
        return Answer.APPLIED

    def put(self, generation: int, step: int, values: torch.Tensor, slices: int = 1) -> Answer:
        """A round begins with these, as all members have them: one of so many slices."""
        if generation < self.generation:
            return Answer.OLD_TERM
        self.cut = generation, slices
        self._values, self._base = values, values.clone()
        self._begin(step)
        return Answer.APPLIED

    def _begin(self, step: int) -> None:
        self.step, self._next = step, None
        self.leases, self._newest = {}, {}
        self._known.clear()
        self._clocks.clear()

    def push(
        self, generation: int, rank: int, lease: Lease, codec: str, codes: torch.Tensor | None
    ) -> Answer:
        """Add an update; None: the member had nothing to compute, and its clock goes on."""
        if generation < self.generation:
            return Answer.OLD_TERM
        self.generation = generation
        if codes is not None and lease.places in self.leases:
            return Answer.DUPLICATE
        self._clocks[rank] = self._clocks.get(rank, 0) + 1
        if codes is None:
            return Answer.APPLIED
        CODECS[codec].add(codes, self._values)
        self.leases[lease.places] = lease
        self._newest[rank] = lease.places, codec, codes
        return Answer.APPLIED

    def least(self, members: int) -> int:
        """How many updates the slowest of so many members has sent in this round."""
        return min((self._clocks.get(rank, 0) for rank in range(members)), default=0)

    def change(self, rank: int, codec: Codec) -> torch.Tensor:
        """How they differ from what a member has, as codes; it has that, then.

        What encoding loses is in the difference next time.
        """
        known = self._known.get(rank)
        if known is None:
            known = self._known[rank] = self._base.clone()
        codes = torch.empty(codec.bound(len(known)), dtype=torch.uint8)
        codec.encode(self._values - known, codes)
        codec.add(codes, known)
        return codes

    def whole(self, rank: int | None = None) -> torch.Tensor:
        """The parameters as they are, which a member has then whom differences are told."""
        if rank is not None:
            self._known[rank] = self._values.clone()
        return self._values.clone()

    def meet(self, step: int, rank: int, members: int, codec: Codec) -> torch.Tensor:
        """All updates are there, and the next round begins at `step`: what its base has become.

        As codes of the difference, the same for all members, or whole without a codec. The next
        round begins once all have asked.
        """
        if self._next is None or self._next.step != step:
            self._next = self._next_base(step, codec)
        coming = self._next
        coming.met.add(rank)
        if len(coming.met) == members:
            self._base = coming.base
            self._begin(step)
        return coming.told

    def _next_base(self, step: int, codec: Codec) -> _Next:
        if codec.name == "none":
            base = self._values.clone()
            return _Next(step, base, base)
        base = self._base.clone()
        codes = torch.empty(codec.bound(len(base)), dtype=torch.uint8)
        codec.encode(self._values - base, codes)
        codec.add(codes, base)
        return _Next(step, base, codes)


class ParameterActs:
    """What members ask of a shard's parameters.

    Args:
        turn: The server's: who calls holds it, and lets others have it while it waits here.
    """

    def __init__(self, turn: threading.Condition) -> None:
        torch.set_num_threads(1)  # it shares its node's processors with workers
        self._turn, self.shard = turn, ParameterShard()

    def enter(
        self, header: Mapping[str, Any], _: list[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        """Whether a generation can go on here with a round, and which leases of it have come."""
        generation, step = int(header["generation"]), int(header["step"])
        answer = self.shard.enter(generation)
        self._turn.notify_all()
        leases = [lease.told() for lease in self.shard.leases.values()]
        stands = answer is Answer.APPLIED and self.shard.step == step
        told = {"stands": stands, "leases": leases if stands else [], "cut": self.shard.cut}
        return {"answer": str(answer), **told}, []

    def settle(
        self, header: Mapping[str, Any], _: list[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        """See `ParameterShard.settle`."""
        return {"answer": str(self.shard.settle(int(header["generation"]), header["places"]))}, []

    def put(
        self, header: Mapping[str, Any], arrays: list[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        """See `ParameterShard.put`."""
        [values] = arrays
        generation, step = int(header["generation"]), int(header["step"])
        slices = int(header["slices"])
        answer = self.shard.put(generation, step, torch.from_numpy(values), slices)
        self._turn.notify_all()
        return {"answer": str(answer)}, []

    def push(
        self, header: Mapping[str, Any], arrays: list[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        """See `ParameterShard.push`; it waits until its round has begun here."""
        generation, step = int(header["generation"]), int(header["step"])
        if not self._wait(generation, lambda: self.shard.step == step):
            return {"later": True}, []
        codes = torch.from_numpy(arrays[0]) if arrays else None
        lease = Lease.of(header["lease"])
        answer = self.shard.push(generation, int(header["rank"]), lease, header["codec"], codes)
        self._turn.notify_all()
        return {"answer": str(answer)}, []

    def fetch(
        self, header: Mapping[str, Any], _: list[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        """What the parameters are, once the slowest member has sent so many updates."""
        generation, members, rank = (int(header[k]) for k in ("generation", "members", "rank"))
        need = int(header["need"])
        if not self._wait(generation, lambda: self.shard.least(members) >= need):
            return {"later": True}, []
        least = self.shard.least(members)
        codec = CODECS[header["codec"]]
        if codec.name == "none":
            return {"least": least}, [self.shard.whole().numpy()]
        if header["whole"]:
            return {"least": least}, [self.shard.whole(rank).numpy()]
        return {"least": least}, [self.shard.change(rank, codec).numpy()]

    def meet(self, header: Mapping[str, Any], _: list[Array]) -> tuple[dict[str, Any], list[Array]]:
        """See `ParameterShard.meet`."""
        generation = int(header["generation"])
        if generation < self.shard.generation:
            raise TransportError("the generation is over")
        rank, members, step = (int(header[k]) for k in ("rank", "members", "step"))
        codes = self.shard.meet(step, rank, members, CODECS[header["codec"]])
        self._turn.notify_all()
        return {}, [codes.numpy()]

    def _wait(self, generation: int, holds: Callable[[], bool]) -> bool:
        """Until it holds, or a while has gone; `TransportError`: another generation has begun."""
        shard = self.shard
        came = self._turn.wait_for(lambda: generation < shard.generation or holds(), _WAITS_S)
        if generation < shard.generation:
            raise TransportError("the generation is over")
        return came
