"""Audit: whether a run holds each sample exactly once, from its ledger and its log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import open_regular, text_lines
from raycloud.errors import RunDirectoryError
from raycloud.order import ERROR, NAN, Expected, Kind, LedgerAudit, Position, audit_ledger
from raycloud.redact import redact
from raycloud.report.figures import counted, cut_line, finite, printable_line, row
from raycloud.report.recoveries import LOST, NAMES, RESUMED, counts, counts_text, text_of
from raycloud.report.snapshot import state_of
from raycloud.report.summary import job_of
from raycloud.spec.rundir import RunDirectory

if TYPE_CHECKING:
    from raycloud.order import Fault
    from raycloud.report.state import Tally
    from raycloud.spec.job import Job

FORMAT = 2  # in 1, recoveries were those alone after which training went on in place

_COPY = "restore the file from a copy; a run can still be resumed from its last checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAudit:
    """What the ledger of the run in a directory proves, and what happened on the way.

    Attributes:
        status: As in its summary, as are `generations`, `error` and `recoveries`.
        logged_steps: Steps in the log. While a run goes on the ledger may be some ahead;
            where it was killed, the log.
        misread: What members say of steps for which other samples were read than they take.
    """

    run: Path
    status: str
    logged_steps: int
    ledger: LedgerAudit
    generations: int
    error: str | None = None
    misread: str | None = None
    recoveries: tuple[Mapping[str, Any], ...] = ()

    @property
    def exact(self) -> bool:
        """By the ledger, and by what members have read."""
        return self.ledger.exact and self.misread is None

    def recoveries_of(self, kind: str) -> list[Mapping[str, Any]]:
        """The recoveries of a kind."""
        return [recovery for recovery in self.recoveries if recovery["kind"] == kind]

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        ledger = self.ledger
        record = {
            "format": FORMAT,
            "run": str(self.run),
            "exact": self.exact,
            "status": self.status,
            "error": self.error,
            "misread": self.misread,
            "steps": ledger.steps,
            "logged_steps": self.logged_steps,
            "through": asdict(ledger.through),
            "samples": ledger.committed_samples,
            "left_out": [asdict(samples) for samples in ledger.left_out],
            "skipped": [skip.to_record() for skip in ledger.skips],
            **{kind.value: [_record_of(f) for f in ledger.of(kind)] for kind in Kind},
            "more": ledger.more,
            "whole": ledger.whole,
            "torn": ledger.torn,
            "records": ledger.records,
            "starts": ledger.starts,
            "generations": self.generations,
            "members_lost": self.recoveries_of(LOST),
            "recoveries": list(self.recoveries),
            "resumes": self.recoveries_of(RESUMED),
            "counts": counts(self.recoveries),
        }
        redacted: dict[str, Any] = redact(record)
        return redacted


def audit(directory: Path) -> RunAudit:
    """Read a run in any state: first its log, then its ledger, which is never behind it for long.

    Raises:
        RunDirectoryError: There is no run, or its log or ledger is missing or damaged.
        SpecError: Its job is damaged.
    """
    run, job = RunDirectory(directory), job_of(directory)
    tally = state_of(run.events_jsonl).tally
    steps = tally.steps if tally.ended_at is None else tally.ended_at
    return RunAudit(
        run=directory,
        status=tally.status,
        logged_steps=steps,
        ledger=_ledger(run.ledger, steps, _expected(tally, job)),
        generations=tally.generations,
        error=tally.error,
        misread=tally.misread,
        recoveries=tuple(map(finite, tally.recoveries)),
    )


def _expected(tally: Tally, job: Job) -> Expected | None:
    """Where the ledger has to end: nowhere if the last start wrote nothing into it."""
    if tally.ended_at is None or not tally.members:
        return None
    return Expected(
        steps=tally.ended_at,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        drop_last=job.drop_last,
    )


def _ledger(path: Path, steps: int, expected: Expected | None) -> LedgerAudit:
    try:
        with open_regular(path) as file:
            if not steps and not os.fstat(file.fileno()).st_size:  # members have not met yet
                return LedgerAudit(steps=0, through=Position(), committed_samples=0)
            return audit_ledger(text_lines(file), expected)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read the ledger {path}: {error.strerror}",
            hint=f"{_COPY}; without it nothing is proved",
        ) from error
    except ValueError as error:
        raise RunDirectoryError(f"the ledger {path} cannot be read: {error}", hint=_COPY) from error


def _record_of(fault: Fault) -> dict[str, Any]:
    """A fault as JSON-ready values; its kind is the name that it stands under."""
    where = {} if fault.range is None else asdict(fault.range)
    names = ("first_step", "last_step", "line")
    return {**where, **{name: getattr(fault, name) for name in names}}


_MOST_NAMED = 20  # lines of a kind; `--json` has all
_WIDEST = 300  # letters of one
_MEANING = {
    Kind.MISSING: "in no record",
    Kind.DOUBLED: "counted before",
    Kind.MISPLACED: "not where the record before ended",
}
_WHY = {
    ERROR: "it failed each time",
    NAN: "the loss or gradient was not finite",
}


def audited_text(found: RunAudit) -> str:
    """What is proved, what is not, and what happened on the way."""
    ledger, run = found.ledger, printable_line(str(found.run))
    # They may differ while a run goes on.
    logged = "" if found.logged_steps == ledger.steps else f", and {found.logged_steps} by the log"
    samples = sum(part.samples for part in ledger.left_out)
    left_out = f", {samples} left out by drop_last" if samples else ""
    verdict = "exact" if found.exact else "NOT EXACT"
    what = "each sample counted once" if found.exact else "not every sample counted exactly once"
    if found.exact and ledger.skips:
        what += ", but for those that were skipped"
    through = ledger.through
    lines = [
        f"{run}: {verdict}: {what}, as far as epoch {through.epoch}, sample {through.offset}",
        row("steps", f"{ledger.steps}{logged}"),
        row("samples", f"{ledger.committed_samples} counted{left_out}"),
        row("ledger", f"{counted(ledger.records, 'record')}, {counted(ledger.starts, 'start')}"),
    ]
    if ledger.torn:
        lines.append(row("", "its last line is unfinished, and was left out"))
    lines += _listed("misread", [found.misread] if found.misread else [])
    lines += _listed("skipped", [f"{skip}: {_WHY[skip.why]}" for skip in ledger.skips])
    for kind in Kind:
        lines += _listed(kind.value, [f"{fault}: {_MEANING[kind]}" for fault in ledger.of(kind)])
    if ledger.more:
        lines.append(row("", f"and {ledger.more} more ranges that are missing"))
    if not ledger.whole:
        lines.append(row("", "so much is wrong that the rest was not read"))
    lines.append(row("run", f"{found.status}, {counted(found.generations, 'generation')}"))
    if found.error:
        lines.append(row("", cut_line(found.error, _WIDEST)))
    lines.append(row("recoveries", counts_text(counts(found.recoveries))))
    for recovery, name in NAMES.items():
        of_kind = map(_recovery, found.recoveries_of(recovery))
        lines += _listed(name.replace("_", " "), of_kind)
    return "\n".join(lines)


def _listed(label: str, texts: Iterable[str]) -> Iterator[str]:
    """A row with how many there are, and a line for each of the first."""
    lines = [cut_line(text, _WIDEST) for text in texts]
    if lines:
        yield row(label, str(len(lines)))
    for line in lines[:_MOST_NAMED]:
        yield row("", line)
    if len(lines) > _MOST_NAMED:
        yield row("", f"and {len(lines) - _MOST_NAMED} more, which --json names")


def _recovery(entry: Mapping[str, Any]) -> str:
    text = text_of(entry)
    if "generation" in entry:
        detected, resumed = (
            "?" if entry[name] is None else f"{entry[name]:.2f} s"
            for name in ("detected_s", "resumed_s")
        )
        text += f"; generation {entry['generation']}, detected at {detected}, resumed at {resumed}"
    why = entry.get("reason") or entry.get("cause")
    return f"{text}: {why}" if why else text
