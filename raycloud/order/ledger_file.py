"""A run's `ledger` file: JSON lines, appended to and never rewritten; written, read, audited.

    {"format": 3, "kind": "ledger", "samples": 60000}
    {"commit": {"first_step": 0, "last_step": 120, "epoch": 0, "start": 0, "stop": 3840, ...}}
    {"grow": {"epoch": 3, "samples": 61000}}
    {"skip": {"step": 100, "epoch": 0, "start": 3208, "stop": 3216, "why": "error"}}
    {"restore": {"next_step": 100, ...}}

A header opens the file, and again each later start of the run: from there on nothing is committed
until a `restore` record says what the checkpoint held. So replaying the file from the top gives
what counts now. There is one commit record per report, not per step. A `grow` record stands before
the first commit of its epoch, a `skip` record after the commit of its step. Format 1 had no `grow`,
formats 1 and 2 no `skip`.

In lockstep each record goes on where the one before it ended, in samples and in steps. So an audit
keeps only what is open: the gaps that records left, and what it has found.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from raycloud.bounded import json_value
from raycloud.errors import InternalError, RunDirectoryError
from raycloud.order.commits import Commit, SampleRange, Skip, lockstep_commits, skip_of
from raycloud.order.ledger import Ledger
from raycloud.order.steps import Position, Steps

FORMAT = 3
_DEFAULTS = {"epochs": 1, "left_out": 0}
_FIELDS = frozenset(f.name for f in fields(Commit))


def header_record(samples: int) -> dict[str, Any]:
    """The record that opens a ledger of `samples` samples per epoch."""
    return {"format": FORMAT, "kind": "ledger", "samples": samples}


def commit_record(commit: Commit) -> dict[str, Any]:
    """The record of one committed range."""
    return {"commit": {k: v for k, v in asdict(commit).items() if _DEFAULTS.get(k) != v}}


def growth_record(epoch: int, samples: int) -> dict[str, Any]:
    """The record that from `epoch` on an epoch has `samples` samples."""
    return {"grow": {"epoch": epoch, "samples": samples}}


def skip_record(skip: Skip) -> dict[str, Any]:
    """The record that a committed step took samples which did not count."""
    return {"skip": skip.to_record()}


def restore_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """The record that sets the ledger to `state` (see `Ledger.state`)."""
    return {"restore": dict(state)}


def ledger_line(record: Mapping[str, Any]) -> str:
    r"""One record as it stands in the file, with its line end.

    >>> ledger_line(header_record(10))
    '{"format":3,"kind":"ledger","samples":10}\n'
    """
    return json.dumps(record, separators=(",", ":")) + "\n"


def read_ledger(lines: Iterable[str], trail: Trail | None = None) -> Ledger:
    """Replay a ledger file.

    A last line that a killed writer left unfinished is not counted; it is kept in `Ledger.torn`.
    Ranges committed twice do not stop the replay: `Ledger.audit` names those of the last start.
    `trail` is told of every record; reading ends where it is full.

    Raises:
        RunDirectoryError: The file is no ledger, is damaged, or was written by a newer version.
    """
    ledger: Ledger | None = None
    broken: tuple[int, str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if broken:
            raise _damaged(broken[0], f"it is no JSON object, and more follows: {broken[1][:60]!r}")
        try:
            record = json_value(line)
        except ValueError:
            broken = (number, line)
            continue
        ledger = _replay(ledger, record, number, trail)
        if trail is not None and trail.full:
            break
    if ledger is None:
        raise RunDirectoryError(
            "the ledger has no header line, so nothing can be said about its run",
            hint="start the run again, or resume it from its last checkpoint",
        )
    ledger.torn = broken[1] if broken else ""
    return ledger


def _replay(
    ledger: Ledger | None, record: object, number: int, trail: Trail | None = None
) -> Ledger:
    try:
        match record:
            case {"kind": "ledger", "format": int(version), "samples": int(samples)}:
                if version > FORMAT:
                    raise RunDirectoryError(
                        f"line {number} of the ledger has format {version}, this version reads "
                        f"up to {FORMAT}",
                        hint="read it with the raycloud that wrote it, or a newer one",
                    )
                if trail is not None:
                    trail.start()
                return Ledger(samples=samples)
            case {"commit": dict(values)} if ledger is not None:
                commit = _commit(values)
                if trail is None:
                    ledger.replay(commit)
                else:
                    trail.replay(ledger, commit, number)
                return ledger
            case {"grow": {"epoch": int(epoch), "samples": int(samples)}} if ledger is not None:
                ledger.grow(epoch, samples)
                return ledger
            case {"skip": dict(values)} if ledger is not None:
                _skip(ledger, skip_of(values))
                return ledger
            case {"restore": dict(state)} if ledger is not None:
                ledger.restore(state)
                if trail is not None:
                    trail.restore(ledger)
                return ledger
            case _:
                raise _damaged(number, "not a record of a ledger, or one before its header")
    except (InternalError, KeyError, TypeError, ValueError) as error:
        raise _damaged(number, str(error)) from error


def _skip(ledger: Ledger, skip: Skip) -> None:
    if skip.stop > ledger.samples_in(skip.epoch):
        raise InternalError(f"not samples of the epoch: {skip}")
    with suppress(InternalError):  # what no record has is missing, and named as that
        ledger.skip(skip)


def _commit(values: dict[str, Any]) -> Commit:
    if not all(type(v) is int for v in values.values()):
        raise ValueError("a commit record holds whole numbers only")
    if unknown := sorted(values.keys() - _FIELDS):
        raise ValueError(f"a commit record has no field {unknown[0]!r}")
    return Commit(**values)


def _damaged(number: int, problem: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"line {number} of the ledger is damaged: {problem}",
        hint="restore the file from a copy; a run can still be resumed from its last checkpoint",
    )


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


class _Gap(NamedTuple):
    """Samples that were left out when steps were due. Later records may have some of them."""

    end: Position
    begin: Position
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
        begin, end = Position(epoch=commit.epoch, offset=commit.start), ledger.newest
        first, last = commit.first_step, commit.last_step
        self.found += (_fault(Kind.DOUBLED, commit, samples, line) for samples in doubled)
        if begin > due:
            self._gaps.append(_Gap(begin, due, step, max(first, step + 1), line))
        elif not doubled and (begin, first) != (due, step):
            samples = _range(commit, commit.stop + commit.left_out)
            self.found.append(_fault(Kind.MISPLACED, commit, samples, line))
        if commit.epochs > 1 and not _are_whole(ledger, commit):
            self._gaps.append(_Gap(end, begin, first, last, line))

    def missing(self, ranges: Iterable[SampleRange]) -> Iterator[Fault]:
        """What an audit misses, with the steps that should have taken it."""
        in_order = sorted(self._gaps, key=attrgetter("end"))
        for samples in ranges:
            begin = Position(epoch=samples.epoch, offset=samples.start)
            end = Position(epoch=samples.epoch + samples.epochs - 1, offset=samples.stop)
            later = in_order[bisect_right(in_order, begin, key=attrgetter("end")) :]
            gaps = list(takewhile(lambda gap: gap.begin < end, later))  # noqa: B023 - used at once
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


def _range(commit: Commit, stop: int) -> SampleRange:
    return SampleRange(epoch=commit.epoch, start=commit.start, stop=stop, epochs=commit.epochs)


def _fault(kind: Kind, commit: Commit, samples: SampleRange, line: int | None = None) -> Fault:
    first_step, last_step = commit.first_step, commit.last_step
    return Fault(kind=kind, range=samples, first_step=first_step, last_step=last_step, line=line)


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

    It is read as a stream: what is kept are ranges, and what is wrong with them. Where nothing is
    expected, while the run goes on or where it was killed, the ledger is asked about the samples
    before its own end.

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
            yield _fault(Kind.MISSING, commit, _range(commit, commit.stop))
