"""What in a ledger's file does not follow: samples missing or taken twice, and records astray.

In lockstep, which is the only way of training yet, each record goes on where the one before it
ended, in samples and in steps. So what is kept here is what is open: the places where a record left
samples out, and what was found. Where the run goes on from a checkpoint, what lies after that is
taken back; what the checkpoint's steps did stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from raycloud.order.commits import Commit, SampleRange
from raycloud.order.steps import Position

if TYPE_CHECKING:
    from raycloud.order.ledger import Ledger

MOST_FAULTS = 1000  # that are named: a ledger with more is not this run's, or is no ledger


class Kind(StrEnum):
    """What is wrong with a range."""

    MISSING = "missing"  # no record has it
    DOUBLED = "doubled"  # a record has it that another has, too
    MISPLACED = "misplaced"  # its record does not go on where the one before it ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Samples that are not proved to have counted exactly once.

    Attributes:
        range: Which; None where it is steps alone that do not follow.
        first_step: Of the steps [first_step, last_step) that took them, or should have.
        last_step: None, like `first_step`, where no record says it.
        line: Of the record that shows it; None where a record lacks at the end.
    """

    kind: Kind
    range: SampleRange | None
    first_step: int | None = None
    last_step: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        """As people read it.

        >>> samples = SampleRange(epoch=1, start=0, stop=8)
        >>> str(Fault(kind=Kind.DOUBLED, range=samples, first_step=5, last_step=6, line=9))
        'epoch 1 [0, 8), steps [5, 6), seen in line 9'
        """
        parts = [] if self.range is None else [str(self.range)]
        if self.first_step is not None:
            parts.append(f"steps [{self.first_step}, {self.last_step})")
        if self.line is not None:
            parts.append(f"seen in line {self.line}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    """Samples from `begin` to `end` that were left out when steps [first_step, last_step) were due.

    Later records may have some of them.
    """

    begin: Position
    end: Position
    first_step: int
    last_step: int
    line: int


class Trail:
    """Follows the records of a ledger's file, in order.

    Attributes:
        records: How many commits there were.
        starts: How often the run was started.
        found: What was doubled or misplaced, as far as it counts by now.
    """

    def __init__(self) -> None:
        """Nothing is read."""
        self.records = self.starts = 0
        self.found: list[Fault] = []
        self._gaps: list[_Gap] = []
        self._holes = 0  # that a checkpoint brought along
        self._anew = False

    @property
    def full(self) -> bool:
        """There is more wrong than is named: there is no use in going on."""
        return len(self.found) + len(self._gaps) + self._holes > MOST_FAULTS

    def start(self) -> None:
        """A header: nothing counts, unless a checkpoint is named next."""
        self.starts += 1
        self._anew = True

    def restore(self, ledger: Ledger) -> None:
        """The run goes on from a checkpoint, to which `ledger` has gone back."""
        self._anew = False
        self._holes = len(ledger.audit().missing)
        self._take_back(ledger.next_step)

    def replay(self, ledger: Ledger, commit: Commit, line: int) -> None:
        """Count a record in `ledger`, and see whether it follows.

        Raises:
            InternalError: Its range is not inside the epoch.
        """
        if self._anew:
            self._anew = False
            self._take_back(0)
        due, step = ledger.newest, ledger.next_step
        doubled = ledger.replay(commit)
        self.records += 1
        begin = Position(epoch=commit.epoch, offset=commit.start)
        for samples in doubled:
            self._add(Kind.DOUBLED, samples, commit, line)
        if begin > due:
            last_step = max(commit.first_step, step + 1)
            gap = _Gap(begin=due, end=begin, first_step=step, last_step=last_step, line=line)
            self._gaps.append(gap)
        elif not doubled and (begin, commit.first_step) != (due, step):
            self._add(Kind.MISPLACED, _whole(commit), commit, line)
        if commit.epochs > 1 and not _are_whole(ledger, commit):
            first, last = commit.first_step, commit.last_step
            gap = _Gap(begin=begin, end=ledger.newest, first_step=first, last_step=last, line=line)
            self._gaps.append(gap)

    def missing(self, ranges: Iterable[SampleRange]) -> Iterator[Fault]:
        """What an audit misses, with the steps that should have taken it."""
        in_order = sorted(self._gaps, key=attrgetter("end"))
        for samples in ranges:
            gaps = _of(samples, in_order)
            yield Fault(
                kind=Kind.MISSING,
                range=samples,
                first_step=min((gap.first_step for gap in gaps), default=None),
                last_step=max((gap.last_step for gap in gaps), default=None),
                line=gaps[0].line if gaps else None,
            )

    def _take_back(self, next_step: int) -> None:
        """Only the steps before `next_step` count."""
        self.found = [fault for fault in self.found if (fault.first_step or 0) < next_step]
        self._gaps = [gap for gap in self._gaps if gap.first_step < next_step]

    def _add(self, kind: Kind, samples: SampleRange, commit: Commit, line: int) -> None:
        fault = Fault(
            kind=kind,
            range=samples,
            first_step=commit.first_step,
            last_step=commit.last_step,
            line=line,
        )
        self.found.append(fault)


def _whole(commit: Commit) -> SampleRange:
    stop = commit.stop + commit.left_out
    return SampleRange(epoch=commit.epoch, start=commit.start, stop=stop, epochs=commit.epochs)


def _of(samples: SampleRange, in_order: list[_Gap]) -> list[_Gap]:
    """The gaps that some of these samples lie in, of all by their ends."""
    begin = Position(epoch=samples.epoch, offset=samples.start)
    end = Position(epoch=samples.epoch + samples.epochs - 1, offset=samples.stop)
    first = bisect_right(in_order, begin, key=attrgetter("end"))
    return list(takewhile(lambda gap: gap.begin < end, in_order[first:]))


def _are_whole(ledger: Ledger, commit: Commit) -> bool:
    """Whether a record of several epochs leaves nothing of them open."""
    last = commit.epoch + commit.epochs - 1
    return commit.start == 0 and commit.stop + commit.left_out >= ledger.samples_in(last)
