"""The control lane: a few numbers per step beside the gradients, on the CPU, never compressed.

At the start of step s every member gives what the others must know before its gradients can be
scaled (the weight of its share of s), which micro-batches that is of, so that a fault in dealing
them is seen before it counts, a sum over the samples that were read for them, and what they want to
know of the step before (its loss). Now and then a digest of its state goes with that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from raycloud.net.stream import Place
from raycloud.net.transport import Transport, Work, finish

Places = tuple[float, float, float]
"""Of micro-batches: their number, and the sums of their indices and of the squares of these."""

NO_PLACES: Places = (0.0, 0.0, 0.0)
_PLACE_BYTES = 160  # of a place as JSON, at most
_NUMBERS = 8  # of a report, before its digest's words
DIGEST_WORDS = 3  # of 16 bits each: sums of squares stay exact for 2**21 members


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneDigest:
    """A digest of one member's state, or the sums over all members.

    Attributes:
        holds_off: 0 where the sender would compare digests now, else 1.
        given: 1 where there is a digest.
        words: Its words, and their `squares`, which tell in the sums whether all gave the same.
    """

    holds_off: float = 0.0
    given: float = 0.0
    words: tuple[float, ...] = (0.0,) * DIGEST_WORDS
    squares: tuple[float, ...] = (0.0,) * DIGEST_WORDS

    @classmethod
    def of(cls, words: Sequence[float], *, holds_off: float) -> LaneDigest:
        """The digest of these words."""
        squares = tuple(word * word for word in words)
        return cls(holds_off=holds_off, given=1.0, words=tuple(words), squares=squares)

    @property
    def same(self) -> bool:
        """Whether all that gave one gave the same: the variance of each word is 0."""
        pairs = zip(self.words, self.squares, strict=True)
        return all(int(self.given) * int(square) == int(word) ** 2 for word, square in pairs)


def places_of(indices: Iterable[int]) -> Places:
    """Of these micro-batches of a step."""
    found = tuple(indices)
    return float(len(found)), float(sum(found)), float(sum(k * k for k in found))


def all_places(count: int) -> Places:
    """Of all `count` micro-batches of a step, each once.

    >>> all_places(5) == places_of(range(5))
    True
    """
    return float(count), count * (count - 1) / 2, (count - 1) * count * (2 * count - 1) / 6


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """What one member gives, or (as `Lane.read` returns it) the sums over all members.

    Attributes:
        weight: Weight of the micro-batches of the step that begins.
        places: Which they are.
        rows: Sum over the samples that were read for them; see `worker.tally`.
        loss: Sum of weight * loss of the step before; 0 at the first step.
        digest: Of the state before the step that begins.
    """

    weight: float
    places: Places = NO_PLACES
    rows: float = 0.0
    loss: float = 0.0
    digest: LaneDigest = field(default_factory=LaneDigest)


class Lane:
    """The control lane of one generation: one small all-reduce a step, and talk between steps.

    All members make the same calls in the same order. All but `send` and `begin_sum` wait for the
    others, and raise `TransportError` where the exchange broke, `Abandoned` where the generation is
    over. The transport is the lane's own, so that its order is free of the gradients'.
    """

    def __init__(self, transport: Transport, abandoned: Callable[[], bool] = lambda: False) -> None:
        self.transport, self.abandoned = transport, abandoned
        self._work: Work | None = None
        self._buffer = torch.zeros(_NUMBERS + 2 * DIGEST_WORDS, dtype=torch.float64)

    def send(self, report: LaneReport) -> None:
        """Start this step's exchange; returns at once."""
        digest = report.digest
        told = report.weight, *report.places, report.rows, report.loss
        also = digest.holds_off, digest.given, *digest.words, *digest.squares
        self._buffer = torch.tensor((*told, *also), dtype=torch.float64)
        self._work = self.transport.all_reduce(self._buffer) if self.transport.size > 1 else None

    def read(self) -> LaneReport:
        """The sums over members of what was sent last."""
        if self._work is not None:
            finish(self._work, self.abandoned)
            self._work = None
        numbers = self._buffer.tolist()
        weight, count, total, squares, rows, loss, holds_off, given, *both = numbers
        words, word_squares = tuple(both[:DIGEST_WORDS]), tuple(both[DIGEST_WORDS:])
        digest = LaneDigest(holds_off=holds_off, given=given, words=words, squares=word_squares)
        places = count, total, squares
        return LaneReport(weight=weight, places=places, rows=rows, loss=loss, digest=digest)

    def _summed(self, numbers: torch.Tensor) -> Any:
        """Their sums over members, as Python numbers; nothing that was sent is unread."""
        if self.transport.size > 1:
            finish(self.transport.all_reduce(numbers), self.abandoned)
        return numbers.tolist()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over members of as many numbers from each."""
        return self.begin_sum(values)()

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """The same without waiting: what is returned waits for the sums, once."""
        numbers = torch.tensor(values, dtype=torch.float64)
        work = self.transport.all_reduce(numbers) if self.transport.size > 1 else None

        def read() -> list[float]:
            if work is not None:
                finish(work, self.abandoned)
            return list(numbers.tolist())

        return read

    def any_of(self, some: Iterable[int], count: int) -> tuple[int, ...]:
        """Indices, of `count` things, that any member gives in `some`."""
        named = [0.0] * count
        for index in some:
            named[index] = 1.0
        return tuple(k for k, many in enumerate(self.sum(named)) if many)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """As many numbers from each member, by rank."""
        rows = torch.zeros((self.transport.size, len(values)), dtype=torch.float64)
        rows[self.transport.rank] = torch.tensor(values, dtype=torch.float64)
        return list(self._summed(rows))

    def gather_text(self, text: str) -> list[str]:
        """A text from each member, by rank."""
        octets = text.encode()
        sizes = [int(row[0]) for row in self.gather([len(octets)])]
        rows = self.gather([*octets, *([0] * (max(sizes) - len(octets)))])
        return [bytes(map(int, row[:size])).decode() for row, size in zip(rows, sizes, strict=True)]

    def gather_places(self, own: Place | None) -> list[Place]:
        """Where members listen, by rank: those that give a place of their own."""
        told = b"" if own is None else json.dumps(astuple(own)).encode()
        every = self.gather([*told.ljust(_PLACE_BYTES)])
        texts = (bytes(map(int, row)).strip() for row in every)
        return [Place(*json.loads(text)) for text in texts if text]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor, on the CPU, with rank 0's."""
        if self.transport.size > 1 and tensor.numel():
            finish(self.transport.broadcast(tensor, 0), self.abandoned)
