"""Audit of a ledger's file: every sample counted exactly once, as far as the run has come.

In lockstep each record goes on where the one before it ended, in samples and in steps. So an audit
keeps only what is open: the gaps that records left, and what it has found. Where the run goes on
from a checkpoint, what lies after that is taken back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from raycloud.errors import RunDirectoryError
from raycloud.order.commits import Commit, SampleRange, lockstep_commits
from raycloud.order.ledger_text import read_ledger
from raycloud.order.steps import Position, Steps

if TYPE_CHECKING:
    from raycloud.order.commits import Skip
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


_MOST_SMALL = 1000  # epochs in a row without a step: data grows while a run goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Where a run that is over has come to, by its log, and how its last steps were cut."""

    steps: int
    global_batch: int
    micro_batch: int
    drop_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAudit:
    """What a ledger's file proves of the samples before `through`.

    Attributes:
        steps: Steps that it counts.
        through: The samples before this position are asked for.
        committed_samples: Samples that counted, each counted here once.
        left_out: Left out on purpose (`drop_last`).
        skips: Taken by a step, in which they did not count.
        faults: What is missing, doubled or misplaced: at most about a thousand.
        more: How many faults are not named.
        records: Commits that were read.
        starts: Starts of the run.
        torn: The last line is unfinished, and was left out.
        whole: The file was read to its end; it is not where so much is wrong.
    """

    steps: int
    through: Position
    committed_samples: int
    left_out: tuple[SampleRange, ...] = ()
    skips: tuple[Skip, ...] = ()
    faults: tuple[Fault, ...] = ()
    more: int = 0
    records: int = 0
    starts: int = 0
    torn: bool = False
    whole: bool = True

    @property
    def exact(self) -> bool:
        """Each sample counted once, or was skipped, and every record stands where it belongs."""
        return not self.faults

    def of(self, kind: Kind) -> tuple[Fault, ...]:
        """The faults of a kind."""
        return tuple(fault for fault in self.faults if fault.kind is kind)


def audit_ledger(lines: Iterable[str], expected: Expected | None = None) -> LedgerAudit:
    """Read a ledger's file and name every sample that it does not prove to have counted once.

    It is read as a stream: what is kept are ranges, and what is wrong with them.

    Args:
        lines: The lines of the file.
        expected: Where the run came to; None while it goes on, or where it was killed: then the
            ledger is asked about the samples before its own end.

    Raises:
        RunDirectoryError: The file is no ledger, or damaged; or it is of another job.
    """
    trail = Trail()
    ledger = read_ledger(lines, trail)
    own = ledger.audit()
    missing = own.missing
    faults = [*trail.missing(missing[:MOST_FAULTS]), *trail.found]
    through = ledger.newest
    if expected is not None and not trail.full and (off := expected.steps - ledger.next_step):
        steps = _cut(ledger, expected)
        faults += _at_the_end(ledger, expected.steps, steps)
        through = steps.position_after(max(0, off), through)
    return LedgerAudit(
        steps=ledger.next_step,
        through=through,
        committed_samples=ledger.committed_samples,
        left_out=own.left_out,
        skips=own.skips,
        faults=tuple(faults),
        more=max(0, len(missing) - MOST_FAULTS),
        records=trail.records,
        starts=trail.starts,
        torn=bool(ledger.torn),
        whole=not trail.full,
    )


def _cut(ledger: Ledger, expected: Expected) -> Steps:
    """The cut of the last start.

    Raises:
        RunDirectoryError: It leaves no step of the data that the ledger counts.
    """
    sizes, least = ledger.sizes, expected.global_batch if expected.drop_last else 1
    growths = ((0, sizes.samples), *sizes.later)
    large = next((epoch for epoch, samples in growths if samples >= least), None)
    if large is None or large - ledger.newest.epoch > _MOST_SMALL:
        raise RunDirectoryError(
            f"the ledger is not of this run's job: its epochs, of {sizes.samples} samples and "
            f"later {sizes.most}, have no step of global_batch {least}",
            hint="restore both files, job.yaml and the ledger, from one copy of the run",
        )
    return Steps(
        samples=sizes.samples,
        global_batch=expected.global_batch,
        micro_batch=expected.micro_batch,
        drop_last=expected.drop_last,
        later=sizes.later,
    )


def _at_the_end(ledger: Ledger, last_step: int, steps: Steps) -> Iterator[Fault]:
    """What the last records should have had, or the steps that the run never came to."""
    if ledger.next_step > last_step:
        yield Fault(
            kind=Kind.MISPLACED, range=None, first_step=last_step, last_step=ledger.next_step
        )
    for commit in lockstep_commits(
        steps,
        at=ledger.newest,
        first_step=ledger.next_step,
        last_step=last_step,
        generation=0,
    ):
        if commit.start < commit.stop:
            samples = SampleRange(
                epoch=commit.epoch, start=commit.start, stop=commit.stop, epochs=commit.epochs
            )
            yield Fault(
                kind=Kind.MISSING,
                range=samples,
                first_step=commit.first_step,
                last_step=commit.last_step,
            )
