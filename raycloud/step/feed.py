"""Feed: the steps to come, whose batches are made ahead of time in the background."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycloud.errors import InternalError
from raycloud.order import (
    PARTS,
    Assignment,
    MicroBatch,
    Position,
    Steps,
    StepSpan,
    assign,
    deal,
    whole_shares,
)
from raycloud.step.collate import Collate, Failures, Made, StepWork
from raycloud.step.contract import RaisedError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.order import Round

_DEALT = 4 * PARTS  # deals that are kept

Held = tuple[tuple[float, ...], ...]  # for each lane, the bytes of it that each rank's node has
Adopted = tuple[tuple[int, ...], ...]  # for each rank, indices of micro-batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """From `step` on, `generation` computes `shares`, one a rank."""

    step: int
    generation: int
    shares: tuple[float, ...]


class Schedule:
    """The shares of every step from the `first` piece on.

    Written by the loop, read by the feed's thread: a reader sees the list before or after a change,
    never in between, and a change lies ahead of every step that a feed may have asked for.

    Ranks are dealt what their nodes have `held`: for each lane, the bytes of its rows that each
    rank's node holds, the same on all ranks; where it is empty, contiguous runs. What a rank has
    been dealt it holds from then on: with other shares it keeps as much of that as it can. In steps
    of which something is `adopted` each rank computes that: they go on from what survivors have
    kept.
    """

    def __init__(
        self, first: Piece, held: Held = (), adopted: Mapping[int, Adopted] | None = None
    ) -> None:
        self._pieces: tuple[Piece, ...] = (first,)
        self._held = held
        self._held_in: tuple[Held, ...] = ()  # each piece, so far
        self._adopted = adopted or {}
        self._dealt: dict[tuple[int, tuple[int, ...], int], Assignment] = {}

    def at(self, step: int) -> Piece:
        """The piece that `step` belongs to."""
        return self._pieces[self._number_at(step)]

    def _number_at(self, step: int) -> int:
        """Which of the pieces `step` belongs to."""
        pieces = self._pieces
        for number in reversed(range(len(pieces))):
            if pieces[number].step <= step:
                return number
        raise InternalError(f"step {step} lies before the schedule {self._pieces}")

    def add(self, piece: Piece) -> None:
        """A change ahead. No piece is forgotten: they are few, and a feed may need an old one."""
        if piece.step < self._pieces[-1].step:
            raise InternalError(f"a change to {piece} would lie before {self._pieces[-1]}")
        self._pieces = (*self._pieces, piece)

    def micro_batches(self, span: StepSpan, rank: int) -> tuple[MicroBatch, ...]:
        """What the member of `rank` computes of `span`, in canonical order."""
        every = span.micro_batches
        if span.step in self._adopted:
            return tuple(every[k] for k in self._adopted[span.step][rank])
        number = self._number_at(span.step)
        counts = whole_shares(self._pieces[number].shares, span.step)
        asked = number, counts, len(every)
        if asked not in self._dealt:  # a few: the shares of each piece, full and short steps
            if len(self._dealt) >= _DEALT:
                self._dealt.clear()
            self._dealt[asked] = assign(counts, len(every), self._held_at(number) or None)
        return tuple(every[k] for k in self._dealt[asked].of(rank))

    def _held_at(self, number: int) -> Held:
        """What ranks hold from a piece on. Threads that ask at once find the same."""
        found = list(self._held_in)
        while self._held and len(found) <= number:
            before = found[-1] if found else self._held
            after = _with_own(before, self._pieces[len(found)].shares)
            found.append(before if after == before else after)  # mostly: ranks have had them all
            self._held_in = tuple(found)
        return found[number] if self._held else ()


def _with_own(held: Held, shares: Sequence[float]) -> Held:
    """The same, where each rank has all of what it is dealt."""
    whole = round(sum(shares))
    owners, each = assign(deal(shares, whole), whole, held).owners, whole // len(held)
    most = max(map(max, held)) or 1.0
    return tuple(
        tuple(most if rank in owners[k * each : (k + 1) * each] else has for rank, has in row)
        for k, row in enumerate(map(enumerate, held))
    )


def adopted_by_step(whole: StepSpan | Round, adopted: Adopted | None) -> dict[int, Adopted]:
    """What each rank computes of each step of a round, or a step, numbered within that step."""
    if adopted is None:
        return {}
    return {
        one.step: tuple(
            tuple(k - one.first for k in some if 0 <= k - one.first < len(one.micro_batches))
            for some in adopted
        )
        for one in whole.spans
    }


class Course:
    """The spans of all steps of this start, also where the data grows on the way.

    Written by the loop, read by the feed's thread: a reader sees the steps before or after a
    growth, never in between, and a growth reaches only epochs of which no feed can have asked for a
    step. Where the job's length is a number of `epochs`, growth makes it longer.
    """

    def __init__(
        self, steps: Steps, *, step: int, at: Position, last_step: int, epochs: int | None
    ) -> None:
        self._first_step, self._first_position = step, at
        self._epochs = epochs
        self._now = (steps, last_step)
        self._begun = -1  # the newest epoch that a walk has reached

    @property
    def steps(self) -> Steps:
        """The cut of the sequence, as it is known now."""
        return self._now[0]

    @property
    def last_step(self) -> int:
        """One past the last step, as it is known now."""
        return self._now[1]

    def walk(self, step: int, at: Position) -> Iterator[StepSpan]:
        """All spans from `step`, which stands `at`; growth is taken in while this goes on."""
        while step < self.last_step:
            span = self.steps.span(step, at)
            self._begun = span.epoch
            yield span
            step, at = step + 1, self.steps.after(span)

    def growth_at(self, step: int) -> int:
        """The first epoch that growth reaches which takes effect before `step`."""
        return self._position_at(step).next_epoch

    def grow(self, epoch: int, samples: int) -> bool:
        """From `epoch` on, an epoch has `samples` samples; whether this start will see any of them.

        Raises:
            InternalError: A walk has begun that epoch.
        """
        if epoch <= self._begun:
            raise InternalError(
                f"the data cannot grow from epoch {epoch} on: a feed has begun epoch {self._begun}"
            )
        steps, last_step = self._now
        steps = steps.grown(epoch, samples)
        if self._epochs is not None:
            last_step = self._first_step + steps.until_epoch(self._epochs, self._first_position)
        self._now = (steps, last_step)
        return epoch < self._position_at(last_step).next_epoch

    def _position_at(self, step: int) -> Position:
        return self.steps.position_after(step - self._first_step, self._first_position)


_HINT_STEPS = 8  # a hint is given this many steps before a step is made


class Feed:
    """The steps to come, at most `depth` of them in flight: being made, or waiting to be taken.

    Daemon threads make them, so that one that hangs does not keep the process alive. `choose` is
    asked once a span, in order, for this member's micro-batches of it; `fuse` for each step, since
    a fused pass may turn out not exact. The feed ends with the spans. In all `take` has waited
    `waited_s`.
    """

    def __init__(
        self,
        collate: Collate,
        choose: Callable[[StepSpan], tuple[MicroBatch, ...]],
        spans: Iterable[StepSpan],
        *,
        fuse: Callable[[], int],
        depth: int,
        clock: Clock,
    ) -> None:
        self._collate = collate
        self._choose = choose
        self._spans = iter(spans)
        self._fuse = fuse
        self._clock = clock
        self.waited_s = 0.0
        self._flight: deque[Future[StepWork]] = deque()
        self._asked: queue.SimpleQueue[Future[StepWork] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._away: dict[int, Made] = {}  # by identity: made elsewhere, and not yet back
        self._counted = threading.Lock()  # of `_away`
        making = collate.making
        count = min(making.threads, depth) if making.elsewhere is None else depth
        self._threads = [
            threading.Thread(target=self._work, name=f"feed-{i}", daemon=True) for i in range(count)
        ]
        for _ in range(depth):
            self._ask()
        for thread in self._threads:
            thread.start()

    def take(self) -> StepWork:
        """The next step's work; one more step is begun. Raises what making it raised.

        Whoever would wait for what is made elsewhere makes a part of what is to come meanwhile.
        """
        began_s, future = self._clock.monotonic_s(), self._flight.popleft()
        if (elsewhere := self._collate.making.elsewhere) is not None:
            while not future.done() and elsewhere.help():
                pass
        work = future.result()
        self.waited_s += self._clock.monotonic_s() - began_s
        self._ask()
        return work

    def close(self) -> None:
        """Stop; what is in flight is dropped. No thread is left when this returns."""
        self._over.set()
        for _ in self._threads:
            self._asked.put(None)
        with self._turn, self._counted:  # nothing is begun any more
            away = list(self._away.values())
        for made in away:
            made.cancel()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        future: Future[StepWork] = Future()
        self._flight.append(future)
        self._asked.put(future)

    def _work(self) -> None:
        """One thread: begins steps in turn with the others, makes them beside each other."""
        while True:
            with self._turn:
                future = self._asked.get()
                if future is None or self._over.is_set():
                    return
                try:
                    begun = self._begin()
                except BaseException as error:  # noqa: BLE001 - raised to who takes the step
                    future.set_exception(error)
                    continue
            try:
                future.set_result(self._make(*begun))
            except BaseException as error:  # noqa: BLE001 - raised to who takes the step
                future.set_exception(error)

    def _begin(self) -> tuple[StepSpan, tuple[MicroBatch, ...], int, Made | None]:
        span = next(self._spans, None)
        if span is None:
            raise InternalError("a step was asked for after the last one")
        mine, fuse, made = self._choose(span), self._fuse(), None
        if (elsewhere := self._collate.making.elsewhere) is not None:
            made = elsewhere.submit(mine, fuse)
            with self._counted:
                self._away[id(made)] = made
        return span, mine, fuse, made

    def _make(
        self, span: StepSpan, mine: tuple[MicroBatch, ...], fuse: int, made: Made | None
    ) -> StepWork:
        """The step's work; where making it fails, and that may be, of each micro-batch alone."""
        collate, making = self._collate, self._collate.making
        failed: Failures = ()
        try:
            if made is None:
                if span.samples == (making.batch or span.samples):
                    collate.want(mine, _HINT_STEPS, span.samples)
                passes = collate.passes(mine, fuse)
            else:
                try:
                    passes = collate.pinned(made.result())
                finally:
                    with self._counted:
                        del self._away[id(made)]
        except RaisedError:
            if not making.skips:
                raise
            passes, failed = collate.apart(mine)
        if making.copies is not None:  # batches are on the way to the device
            passes = tuple(replace(p, batch=making.copies.send(p.batch)) for p in passes)
        rows = collate.row_sum(one for one, _ in failed)
        return StepWork(span=span, passes=passes, failed=failed, failed_rows=rows)
