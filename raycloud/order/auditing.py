"""What a ledger's file proves: every sample counted exactly once, as far as the run has come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.errors import RunDirectoryError
from raycloud.order.commits import SampleRange, lockstep_commits
from raycloud.order.ledger_text import read_ledger
from raycloud.order.steps import Position, Steps
from raycloud.order.trail import MOST_FAULTS, Fault, Kind, Trail

if TYPE_CHECKING:
    from raycloud.order.ledger import Ledger
    from raycloud.order.skips import Skip

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
