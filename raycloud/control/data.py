"""How far the job has come: committed steps, positions and the ledger."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median_high
from typing import TYPE_CHECKING, Any

from raycloud.commands import Command, Record
from raycloud.control.tables import MemberState
from raycloud.errors import InternalError
from raycloud.order import (
    Commit,
    Ledger,
    Position,
    Skip,
    Steps,
    lockstep_commits,
    skip_of,
    skip_record,
)

if TYPE_CHECKING:
    from raycloud.control.state import JobState
    from raycloud.events import StepsCommitted

_REPORTS = 5


@dataclass(slots=True)
class StepSeconds:
    """How long a step takes, by the last few reports that tell of later steps than those before.

    A single one says little: it may be of a short step at the end of an epoch, or tell also of the
    time until members had met.

    Attributes:
        usual_s: In the middle of these; 0 before there are any.
    """

    usual_s: float = 0.0
    _last_step: int = 0
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REPORTS))

    def note(self, event: StepsCommitted) -> None:
        """Take in a report; of the same steps the first one counts."""
        if event.last_step > max(self._last_step, event.first_step):
            self._last_step = event.last_step
            self._steps_s.append(event.wall_s / (event.last_step - event.first_step))
            self.usual_s = median_high(self._steps_s)

    def go_back(self, step: int) -> None:
        """What comes after `step` is computed, and reported, again."""
        self._last_step = step


class Progress:
    """Turns "all members have committed up to step s" into ledger entries.

    Args:
        steps: The cut of the sequence.
        step: The first step of this start.
        position: Where the sequence stands before it.
        ledger: What was committed before it, with epochs of the same sizes; from now on ours.
        generation: The first generation of this start.

    Attributes:
        committed_step: One past the last step that all members have committed.
        furthest: One past the newest step that was ever committed, also where it was taken back,
            or that was not finite.
        returns: How often steps were taken back since `furthest` has risen.
        sound_from: Steps of older generations were taken back.
        took: How long steps take.
    """

    def __init__(
        self, *, steps: Steps, step: int, position: Position, ledger: Ledger, generation: int
    ) -> None:
        """Start at `step`."""
        self.steps = steps
        self.ledger = ledger
        self._first_step = step
        self._first_position = position
        self._first_state = ledger.state()
        self.committed_step = self.furthest = step
        self.returns = self.sound_from = 0
        self.took = StepSeconds()
        self._generations: list[tuple[int, int]] = [(step, generation)]  # (first step, number)
        self._asked: tuple[int, Position] | None = None
        self._counted: tuple[tuple[int, int], int] | None = None
        self._growths: list[tuple[int, int, int]] = []  # (step, first epoch, samples)

    def position_at(self, step: int) -> Position:
        """Where the sequence stands before `step`.

        Raises:
            InternalError: The step lies before this start.
        """
        if step < self._first_step:
            raise InternalError(f"step {step} lies before the first step {self._first_step}")
        if step == self._first_step:
            return self._first_position  # a tail that this start leaves out is still to come
        if self._asked is None or self._asked[0] != step:  # many members ask for the same
            position = self.steps.position_after(step - self._first_step, self._first_position)
            self._asked = step, position
        return self._asked[1]

    def micro_batches(self, first_step: int, last_step: int) -> int:
        """Of steps [first_step, last_step)."""
        of = first_step, last_step
        if self._counted is None or self._counted[0] != of:  # many members ask for the same
            at = self.position_at(first_step)
            self._counted = of, self.steps.micro_batches(last_step - first_step, at)
        return self._counted[1]

    def same_position(self, one: Position, other: Position) -> bool:
        """Both lead to the same next sample."""
        after = self.steps.position_after
        return one == other or after(0, one) == after(0, other)

    def change_generation(self, generation: int, first_step: int) -> None:
        """From `first_step` on, steps are computed by `generation`; older ones have broken there.

        It may be said again and again, in any order.
        """
        if generation > self._generations[-1][1]:
            before = [(step, old) for step, old in self._generations if step < first_step]
            self._generations = [*before, (first_step, generation)]

    def grow(self, samples: int, step: int) -> int:
        """The first epoch that begins at `step` or after it has `samples` samples: returns it.

        Raises:
            InternalError: Something of that epoch is committed.
        """
        epoch = self.position_at(step).next_epoch
        self.ledger.grow(epoch, samples)
        self.steps, self._asked = self.steps.grown(epoch, samples), None
        self._counted = None
        self._growths.append((step, epoch, samples))
        return epoch

    def commit_to(self, step: int) -> tuple[Commit, ...]:
        """All members have committed up to `step`: count it, and return what is new."""
        if step <= self.committed_step:
            return ()
        commits = tuple(self._commits(self.committed_step, step))
        for commit in commits:
            self.ledger.commit(commit)
        self.committed_step = step
        if step > self.furthest:
            self.furthest, self.returns = step, 0
        return commits

    def ledger_at(self, step: int) -> dict[str, Any]:
        """The ledger's state as it is once all steps before `step` are committed, and no more.

        Members may have written a checkpoint of a step that they have not reported yet.
        """
        ledger = Ledger.from_state(self._first_state)
        for at, epoch, samples in self._growths:
            if at <= step:
                ledger.grow(epoch, samples)
        for commit in self._commits(self._first_step, step):
            ledger.commit(commit)
        for skip in self.ledger.skips:
            if self._first_step <= skip.step < step:
                ledger.skip(skip)
        return ledger.state()

    def _commits(self, first_step: int, last_step: int) -> Iterator[Commit]:
        known = self._generations
        at = max(
            0, bisect_right(known, first_step, key=itemgetter(0)) - 1
        )  # there may be very many
        ends = [first for first, _ in known[at + 1 :]] + [last_step]
        for (begin, generation), end in zip(known[at:], ends, strict=True):
            first, last = max(begin, first_step), min(end, last_step)
            if first < last:
                yield from lockstep_commits(
                    self.steps,
                    at=self.position_at(first),
                    first_step=first,
                    last_step=last,
                    generation=generation,
                )


def why_wrong(event: StepsCommitted) -> str:
    """Why these cannot be skips of these steps; empty if they can."""
    try:
        skips = [skip_of(record) for record in event.skips]
    except ValueError as error:
        return str(error)
    other = next((s for s in skips if not event.first_step <= s.step < event.last_step), None)
    return "" if other is None else f"{other} is of another step"


def hear_of_skips(state: JobState, event: StepsCommitted) -> None:
    """A member has committed steps without these samples; so have, or will, all others."""
    for record in event.skips:
        state.skips.setdefault(skip_of(record), set()).add(event.member)


def write_skips(state: JobState) -> Iterator[Command]:
    """Those of committed steps; but not on the word of lost members alone.

    A step that only they had committed was computed anew, and may have gone well then.
    """
    if not state.skips:
        return
    ledger, committed = state.formed().ledger, state.formed().committed_step
    due: list[Skip] = sorted(skip for skip in state.skips if skip.step < committed)
    yield from _write(ledger, [skip for skip in due if _sound(state, state.skips.pop(skip))])


def take_over_skips(
    state: JobState, ledger: Ledger, told: Mapping[int, Sequence[Mapping[str, Any]]], step: int
) -> Iterator[Command]:
    """What members had told the driver before, by member: the ledger may not have it.

    Those of steps before `step`, which are committed, are written at once.
    """
    for member, records in told.items():
        for record in records:
            state.skips.setdefault(skip_of(record), set()).add(member)
    due = sorted(skip for skip in state.skips if skip.step < step)
    for skip in due:
        del state.skips[skip]
    yield from _write(ledger, due)


def _write(ledger: Ledger, skips: Sequence[Skip]) -> Iterator[Command]:
    new = [skip for skip in skips if skip not in ledger.skips]
    for skip in new:
        ledger.skip(skip)
    if new:
        yield Record(records=tuple(skip_record(skip) for skip in new))


def _sound(state: JobState, members: set[int]) -> bool:
    return any(state.members[number].state is not MemberState.LOST for number in members)
