"""Data: how far the job has come in it, what is committed, and what did not count.

What is remembered here changes here alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median_high
from typing import TYPE_CHECKING, Any

from raycloud.commands import Record
from raycloud.control.tables import MemberState
from raycloud.errors import InternalError
from raycloud.events import Noticed
from raycloud.order import (
    Commit,
    Ledger,
    Position,
    Skip,
    Steps,
    commit_record,
    growth_record,
    header_record,
    lockstep_commits,
    restore_record,
    skip_of,
    skip_record,
)

if TYPE_CHECKING:
    from raycloud.commands import Command, Extend
    from raycloud.control.member import Member
    from raycloud.control.settings import ControlSettings
    from raycloud.events import DataGrew, MemberReady, RolledBack, StepsCommitted

_REPORTS = 5


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
        returns: How often steps were taken back since `furthest` has risen, and to no later
            checkpoint than before: what is kept for good is progress, too.
        sound_from: Steps of older generations were taken back.
        step_s: Seconds of a step, in the middle of the last few reports; 0 before there are any. A
            single one says little: it may be of a short step at the end of an epoch, or tell also
            of the time until members had met.
    """

    def __init__(
        self, *, steps: Steps, step: int, position: Position, ledger: Ledger, generation: int
    ) -> None:
        self.steps = steps
        self.furthest = step
        self.returns = self.sound_from = self._timed_to = 0
        self._returned_to = step
        self.step_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_REPORTS)
        self._begin(step, position, ledger, generation)

    def _begin(self, step: int, position: Position, ledger: Ledger, generation: int) -> None:
        self.ledger, self.committed_step = ledger, step
        self._first_step, self._first_position = step, position
        self._first_state = ledger.state()
        self._generations: list[tuple[int, int]] = [(step, generation)]  # (first step, number)
        self._asked: tuple[int, Position] | None = None
        self._counted: tuple[tuple[int, int], int] | None = None
        self._growths: list[tuple[int, int, int]] = []  # (step, first epoch, samples)

    def go_back(self, step: int, ledger: Ledger, generation: int) -> None:
        """Steps from `step` on were taken back from generations before this one.

        Reports of the newest steps may be still to come.
        """
        self.reach(step)
        if step > self._returned_to:
            self.returns, self._returned_to = 0, step
        self.returns, self.sound_from, self._timed_to = self.returns + 1, generation, step
        self._begin(step, ledger.newest, ledger, generation)

    def time(self, event: StepsCommitted) -> None:
        """Take in how long steps took: of the same steps the first report counts."""
        if event.last_step > max(self._timed_to, event.first_step):
            self._timed_to = event.last_step
            self._steps_s.append(event.wall_s / (event.last_step - event.first_step))
            self.step_s = median_high(self._steps_s)

    @property
    def first_step(self) -> int:
        """The first that this start counts; those before it the ledger has."""
        return self._first_step

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

    def reach(self, step: int) -> None:
        """Members have come this far, though what they did is taken back."""
        self.furthest = max(self.furthest, step)

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
        known = self._generations  # there may be very many
        at = max(0, bisect_right(known, first_step, key=itemgetter(0)) - 1)
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


@dataclass(kw_only=True, slots=True)
class Data:
    """What the job trains on, and what of it is committed.

    Attributes:
        progress: None until the members have said how much data there is.
        samples: Samples of the newest data heard of; 0 before any.
        version: Its version.
        ahead: Data that has grown, of which members have not been told yet.
        first: What the first of those that met first said of itself, and so of the data.
        skips: What steps took and did not count, and who has said so; until it is written down.
        measured: The newest step after which all members have measured; 0: none.
    """

    progress: Progress | None = None
    samples: int = 0
    version: int = 0
    ahead: DataGrew | None = None
    first: MemberReady | None = None
    skips: dict[Skip, set[int]] = field(default_factory=dict)
    measured: int = 0

    def note_measured(self, step: int) -> None:
        """All members have measured after `step`."""
        self.measured = step

    def formed(self) -> Progress:
        """The progress, once a generation was told to form.

        Raises:
            InternalError: It was not.
        """
        if self.progress is None:
            raise InternalError("no generation was formed yet")
        return self.progress

    def begin(self, settings: ControlSettings, first: MemberReady) -> Iterator[Command]:
        """Members are about to meet for the first time: the ledger is opened."""
        steps = settings.steps(first.samples)
        ledger = _opened(steps, settings.ledger)
        records = [header_record(steps.samples)]
        if settings.ledger is not None:
            records.append(restore_record(settings.ledger))
        if steps.sizes != ledger.sizes:
            epoch, samples = steps.later[-1]
            yield _grown(epoch, samples, before=ledger.sizes.most)
            ledger.grow(epoch, samples)
            records.append(growth_record(epoch, samples))
        self._begin(settings, first, steps, ledger, settings.first_generation)
        if self.ahead is not None and self.ahead.samples <= steps.sizes.most:
            self.ahead = None  # these members have read it
        yield Record(records=tuple(records))

    def take_over(
        self,
        settings: ControlSettings,
        first: MemberReady,
        told: Mapping[int, Sequence[Mapping[str, Any]]],
    ) -> Iterator[Command]:
        """Members have outlived their driver: the ledger goes on where its file ends.

        It may lack what they have `told` of skips, by member, of steps that are committed.
        """
        steps = settings.steps(first.samples)
        ledger = _opened(steps, settings.ledger)
        for member, skips in told.items():
            self.note_skips(skips, member)
        yield from _write(ledger, self._take_skips(settings.step))
        self._begin(settings, first, steps, ledger, settings.first_generation - 1)

    def _begin(
        self,
        settings: ControlSettings,
        first: MemberReady,
        steps: Steps,
        ledger: Ledger,
        generation: int,
    ) -> None:
        self.first = first
        self.samples = max(self.samples, steps.sizes.most)
        self.progress = Progress(
            steps=steps,
            step=settings.step,
            position=settings.position,
            ledger=ledger,
            generation=generation,
        )

    def announce(self, event: DataGrew) -> None:
        """There is more data, of which members are to be told."""
        self.samples, self.version, self.ahead = event.samples, event.version, event

    def take_announced(self) -> DataGrew | None:
        """Data of which members are told now; None: there is none."""
        ahead, self.ahead = self.ahead, None
        return ahead

    def grow(self, change: Extend, step: int) -> Iterator[Command]:
        """Members have changed to more data before `step`."""
        before = self.formed().steps.sizes.most
        epoch = self.formed().grow(change.samples, step)
        yield Record(records=(growth_record(epoch, change.samples),))
        yield _grown(epoch, change.samples, before=before)

    def commit(self, step: int) -> Iterator[Command]:
        """All members have committed up to `step`."""
        if commits := self.formed().commit_to(step):
            yield Record(records=tuple(commit_record(c) for c in commits))

    def note_skips(self, records: Iterable[Mapping[str, Any]], member: int) -> None:
        """A member has committed steps without these samples; so have, or will, all others."""
        for record in records:
            self.skips.setdefault(skip_of(record), set()).add(member)

    def write_skips(self, members: Mapping[int, Member]) -> Iterator[Command]:
        """Those of committed steps; but not on the word of lost members alone.

        A step that only they had committed was computed anew, and may have gone well then.
        """
        progress = self.formed()
        sound = [
            skip
            for skip, by in self._take_skips(progress.committed_step).items()
            if any(members[number].state is not MemberState.LOST for number in by)
        ]
        yield from _write(progress.ledger, sound)

    def go_back(self, event: RolledBack, generation: int) -> Iterator[Command]:
        """Steps after the checkpoint do not count any more."""
        progress, steps = self.formed(), self.formed().steps
        ledger = _opened(steps, event.ledger)
        records = [restore_record(ledger.state())]
        if steps.sizes != ledger.sizes:  # it had grown before this start
            ledger.grow(*steps.later[-1])
            records.append(growth_record(*steps.later[-1]))
        progress.go_back(event.step, ledger, generation)
        self.measured = min(self.measured, event.step)
        self.skips.clear()
        yield Record(records=tuple(records))

    def _take_skips(self, step: int) -> dict[Skip, set[int]]:
        """Those before `step`, in order, and who has said so; they are not remembered any more."""
        due = sorted(skip for skip in self.skips if skip.step < step)
        return {skip: self.skips.pop(skip) for skip in due}


def _opened(steps: Steps, restored: Mapping[str, Any] | None) -> Ledger:
    ledger = Ledger(samples=steps.samples)
    if restored:
        ledger.restore(restored)
    return ledger


def _write(ledger: Ledger, skips: Iterable[Skip]) -> Iterator[Command]:
    new = [skip for skip in skips if skip not in ledger.skips]
    for skip in new:
        ledger.skip(skip)
    if new:
        yield Record(records=tuple(skip_record(skip) for skip in new))


def _grown(epoch: int, samples: int, *, before: int) -> Noticed:
    """What a person should know of more data."""
    return Noticed(
        what=f"the data has grown from {before} to {samples} samples, from epoch {epoch} on",
        detail={"epoch": epoch, "samples": samples},
    )
