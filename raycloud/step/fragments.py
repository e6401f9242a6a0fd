"""Fragments of a round: parts of the model that travel while members compute (Streaming DiLoCo).

A round is longer than a period here, and its parameters are in P fragments. In each period each
fragment is exchanged once, in turns, after each H / P steps: a member gives how far it has moved
what all have of it, and goes on. By the next turn the mean has come, and is applied after the same
step by all members, beside what each has done since (A. Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, where that is mixed instead, so that steps count more than once,
or less):

    base'  = base - outer(mean of base - theta_sent),   theta' = theta + (base' - theta_sent)

At the end of the round all fragments are exchanged at once, and all members have the same. Until
then nothing counts but what the round began with: where a generation breaks, that and the outer
momentum and residuals of then come back, and each member gives how far its own steps have led since
(`moved`), so that what it has sent counts once. Momentum is of steps, as what is exchanged after
fewer than a period has less of its own:

    m <- b m + D,   theta <- base - r (D + 0.85 (1 - b) / (1 - 0.85) m),   b = 0.85^(steps / H)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raycloud.step.rounds import OUTER_MOMENTUM, Rounds, outer_rate

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.lane import Lane
    from raycloud.order import Round
    from raycloud.step.collate import PartialStep
    from raycloud.step.stateful import Commit
    from raycloud.sync.buckets import Bucket
    from raycloud.sync.gradients import GradientExchange


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A fragment on its way.

    Attributes:
        number: Which fragment.
        steps: Of the round that this member had made.
        weight: What it had computed of it.
        sent: Its parameters then.
        begun_s: When it left.
        came_s: When it was found to have come; None: it has not.
    """

    number: int
    steps: int
    weight: float
    sent: list[torch.Tensor]
    begun_s: float
    came_s: float | None = None


class Fragments(Rounds):
    """The parameters in a round within which fragments of them travel.

    Order of calls: `enter` for each generation; in a round those of `Rounds`.

    Args:
        stream: How many fragments; a divisor of the period.
        gradients: What exchanges; its buckets are put into fragments.
        round_steps: Of a round, where nothing ends it earlier, by the period.
        ends_early: It may end at any step.
        clock: Tells what was hidden.
        given: See `Rounds`.

    Attributes:
        stop: Where the round under way ends, where that is sooner than others do; 0: nowhere.
    """

    def __init__(
        self,
        stream: int,
        gradients: GradientExchange,
        *,
        round_steps: Callable[[int], int],
        ends_early: bool,
        clock: Clock,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._gradients, self._clock, self._ends_early = gradients, clock, ends_early
        self._round_steps = round_steps
        number = {id(p): k for k, p in enumerate(self._parameters)}
        self._fragments = in_fragments(gradients.buckets, stream)
        self._indices = [
            [[number[id(p)] for p in bucket.parameters] for bucket in some]
            for some in self._fragments
        ]
        self._turn = {k: n for n, some in enumerate(self._indices) for one in some for k in one}
        self._lane: Lane | None = None
        self._behind: Callable[[], bool] = lambda: True
        self._travels = self._whole = self._next_whole = False
        self.stop, self._end = 0, 0
        self._hidden_s, self._sent_bytes = 0.0, 0
        self._forget()

    def _forget(self) -> None:
        """Nothing of a round is exchanged."""
        self._asked: Callable[[], list[float]] | None = None
        self._flight: _Flight | None = None
        self._base: dict[int, torch.Tensor] = {}  # what all have of a parameter, where it has moved
        self._moved_own: dict[int, torch.Tensor] = {}  # by what this member has sent of it
        self._momentum_before: dict[int, torch.Tensor] = {}
        self._steps = [0] * len(self._fragments)  # of the round, that are in what all have
        self._weights = [0.0] * len(self._fragments)  # of this member's part of these

    @property
    def round_steps(self) -> int:
        """Steps of a round, where nothing ends it earlier."""
        period = self.choice.period
        return self._round_steps(period) if self._travels else period

    @property
    def _every(self) -> int:
        return self.choice.period // len(self._fragments)

    def enter(
        self, lane: Lane, step: int, *, mine: bool, travels: bool, behind: Callable[[], bool]
    ) -> None:
        """A generation goes on before `step`; all its members call this together.

        Where a round is under way, it ends after the steps that a member has made of it, and all
        that was done in it is exchanged then.

        Args:
            lane: Its control lane.
            step: Where all go on.
            mine: This member stands there.
            travels: Fragments travel in this generation's rounds.
            behind: Whether the next change is not at hand.
        """
        self._lane, self._behind, self._travels = lane, behind, travels
        end = (step + self._stepped if self._ends_early else self._end) if self._suspended else 0
        self.stop = max(int(row[0]) for row in lane.gather([float(end if mine else 0)]))
        self._next_whole = self.stop > step

    def take_bytes(self) -> int:
        """Sent of fragments since the last call."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def take_hidden_s(self) -> float:
        """Seconds in which they travelled while this member computed, since the last call."""
        hidden_s, self._hidden_s = self._hidden_s, 0.0
        return hidden_s

    def start(self) -> None:
        """See `Rounds.start`: what has broken in the midst is exchanged as a whole."""
        super().start()
        self._whole, self._next_whole = self._next_whole or not self._travels, False

    def foretell(self, at: int, whole: Round, weight: float) -> None:
        """See `Rounds.foretell`: before a turn members learn what all have computed by then."""
        self._end = whole.step + len(whole.spans)
        done = at + 1
        if not self._is_turn(done, whole) or self._lane is None:
            return
        own = weight - self._weights[self._next(done)]
        self._asked = self._lane.begin_sum([own, float(self._behind())])

    def _is_turn(self, done: int, whole: Round) -> bool:
        return not self._whole and done % self._every == 0 and done < len(whole.spans)

    def _next(self, done: int) -> int:
        return (done // self._every - 1) % len(self._fragments)

    def after_step(self, at: int, whole: Round, kept: PartialStep, loss: torch.Tensor) -> None:  # noqa: ARG002 - the sum of losses is of no interest
        """Apply the fragment that was to come by now, and send the next one."""
        if self._whole:
            return
        done, flight = at + 1, self._flight
        if flight is not None and flight.came_s is None and self._gradients.arrived():
            flight.came_s = self._clock.monotonic_s()
        if done % self._every == 0:
            self._land()
        if self._is_turn(done, whole):
            self._send(done, whole, kept.weight)

    def _send(self, done: int, whole: Round, weight: float) -> None:
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        total, lack = asked()
        if lack == 0.0 and self._ends_early:  # all hold a change, and it waits for the round's end
            self.stop = min(whole.step + done + self._every, whole.step + len(whole.spans))
        number = self._next(done)
        own = weight - self._weights[number]
        bases, flat = self._bases(), self._indices[number]
        moved = [[bases[k] - self._parameters[k].detach() for k in one] for one in flat]
        self._flight = _Flight(
            number=number,
            steps=done,
            weight=weight,
            sent=[self._parameters[k].detach().clone() for one in flat for k in one],
            begun_s=self._clock.monotonic_s(),
        )
        scale = 1.0 / total * own if total > 0.0 else 0.0
        self._gradients.begin_fragment(self._fragments[number], moved, scale)

    def _land(self) -> None:
        """All have now what has come."""
        flight, lane = self._flight, self._lane
        if flight is None or lane is None:
            return
        waits_s = self._clock.monotonic_s()
        buckets = self._fragments[flight.number]
        self._sent_bytes += self._gradients.finish_fragment(buckets, lane.abandoned)
        self._hidden_s += (waits_s if flight.came_s is None else flight.came_s) - flight.begun_s
        self._flight, bases = None, self._bases()
        means = [mean for bucket in buckets for mean in bucket.slots]
        every = [k for one in self._indices[flight.number] for k in one]
        steps = flight.steps - self._steps[flight.number]
        for k, mean, sent in zip(every, means, flight.sent, strict=True):
            moved = bases[k] - sent
            self._moved_own[k] = self._moved_own[k].add_(moved) if k in self._moved_own else moved
            base = bases[k] - self._step_by(k, mean, steps)
            with torch.no_grad():
                self._parameters[k].add_(base - sent)
            self._base[k] = base
        self._steps[flight.number], self._weights[flight.number] = flight.steps, flight.weight
        self._moved()

    def _step_by(self, k: int, mean: torch.Tensor, steps: int) -> torch.Tensor:
        """By how much the outer step moves what all have, after so many steps."""
        if not self._momentum:
            return mean
        keeps: float = OUTER_MOMENTUM ** (steps / self.choice.period)
        before = self._momentum[k]
        self._momentum_before.setdefault(k, before)
        momentum = self._momentum[k] = before * keeps + mean
        factor = OUTER_MOMENTUM * (1.0 - keeps) / (1.0 - OUTER_MOMENTUM)
        return (mean + factor * momentum) * outer_rate(self.choice.period)

    def give(self, weight: float) -> None:
        """See `Rounds.give`."""
        if not self._whole and not self._follows():
            self._land()
        super().give(weight)

    def _bases(self) -> Sequence[torch.Tensor]:
        return [self._base.get(k, start) for k, start in enumerate(self._start)]

    def _way(self) -> list[torch.Tensor]:
        moved = super()._way()
        if self._whole:
            for k, sent in self._moved_own.items():
                moved[k] += sent
        return moved

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`."""
        if not step.local:
            return
        if self._whole or step.sums is not None:
            self._forget()
        self._committed = step.steps
        super().commit(step)
        self._forget()

    def _outer(self, k: int, mean: torch.Tensor) -> torch.Tensor:
        return self._step_by(k, mean, self._committed - self._steps[self._turn[k]])

    def discard(self) -> None:
        """See `Stateful.discard`."""
        super().discard()
        self._go_back()
        self._forget()

    def suspend(self) -> None:
        """See `Stateful.suspend`: what has come of fragments comes again as a whole."""
        super().suspend()
        self._go_back()
        self._asked = self._flight = None

    def begin(self) -> None:
        """See `Stateful.begin`."""
        super().begin()
        self._forget()

    def _go_back(self) -> None:
        """The momentum is that of the round's start."""
        for k, before in self._momentum_before.items():
            self._momentum[k] = before
        self._momentum_before.clear()


def in_fragments(buckets: Sequence[Bucket], count: int) -> list[list[Bucket]]:
    """Put buckets, in their order, into so many groups of about equal bytes.

    A large one may leave others empty.
    """
    whole = sum(bucket.payload_bytes for bucket in buckets)
    groups: list[list[Bucket]] = [[] for _ in range(count)]
    before = 0
    for bucket in buckets:
        middle = before + bucket.payload_bytes / 2
        groups[min(count - 1, int(middle * count / whole))].append(bucket)
        before += bucket.payload_bytes
    return groups
