"""An audit for people, as plain lines. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.order import ERROR, NAN, Kind, LedgerAudit
from raycloud.redact import redact_text
from raycloud.report.figures import duration, printable_line

if TYPE_CHECKING:
    from raycloud.report.auditing import RunAudit

_MOST_NAMED = 20  # lines of a kind; `--json` has all
_WIDEST = 300  # letters of one
_WIDTH = 14
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
    verdict = "exact" if ledger.exact else "NOT EXACT"
    what = "each sample counted once" if ledger.exact else "not every sample counted exactly once"
    if ledger.exact and ledger.skips:
        what += ", but for those that were skipped"
    through = ledger.through
    lines = [
        f"{run}: {verdict}: {what}, as far as epoch {through.epoch}, sample {through.offset}",
        _row("steps", f"{ledger.steps}{_off(found)}"),
        _row("samples", f"{ledger.committed_samples} counted{_left_out(ledger)}"),
        _row("ledger", f"{_count(ledger.records, 'record')}, {_count(ledger.starts, 'start')}"),
    ]
    if ledger.torn:
        lines.append(_row("", "its last line is unfinished, and was left out"))
    lines += _listed("skipped", [f"{skip}: {_WHY[skip.why]}" for skip in ledger.skips])
    for kind in Kind:
        lines += _listed(kind.value, [f"{fault}: {_MEANING[kind]}" for fault in ledger.of(kind)])
    if ledger.more:
        lines.append(_row("", f"and {ledger.more} more ranges that are missing"))
    if not ledger.whole:
        lines.append(_row("", "so much is wrong that the rest was not read"))
    lines.append(_row("run", f"{found.status}, {_count(found.generations, 'generation')}"))
    lines += _listed("members lost", map(_lost, found.members_lost), or_none=True)
    lines += _listed("recoveries", map(_recovery, found.recoveries), or_none=True)
    lines += _listed("resumed", map(_resume, found.resumes))
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}}{text}".rstrip()


def _listed(label: str, texts: Iterable[str], *, or_none: bool = False) -> Iterator[str]:
    """A row with how many there are, and a line for each of the first."""
    lines = [printable_line(redact_text(text)) for text in texts]
    if lines or or_none:
        yield _row(label, str(len(lines) or "none"))
    for line in lines[:_MOST_NAMED]:
        yield _row("", line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …")
    if len(lines) > _MOST_NAMED:
        yield _row("", f"and {len(lines) - _MOST_NAMED} more, which --json names")


def _off(found: RunAudit) -> str:
    """What is told of steps where log and ledger differ, as they may while a run goes on."""
    logged = found.logged_steps
    return "" if logged == found.ledger.steps else f", and {logged} by the log"


def _left_out(ledger: LedgerAudit) -> str:
    samples = sum(part.samples for part in ledger.left_out)
    return f", {samples} left out by drop_last" if samples else ""


def _lost(entry: Mapping[str, Any]) -> str:
    return f"member {entry['member']} at step {entry['step']}: {entry['reason']}"


def _recovery(entry: Mapping[str, Any]) -> str:
    began_s, ended_s = entry["detected_s"], entry["resumed_s"]
    took = "" if began_s is None or ended_s is None else f" ({duration(ended_s - began_s)})"
    who = f"without {_members(entry['lost'])}" if entry["lost"] else "met anew"
    return (
        f"generation {entry['generation']}, {who}: detected at {_seconds(began_s)}, resumed at "
        f"{_seconds(ended_s)}{took}, "
        f"{_count(entry['lost_steps'], 'step')} lost: {entry['cause']}"
    )


def _seconds(moment_s: float | None) -> str:
    return "?" if moment_s is None else f"{moment_s:.2f} s"


def _resume(entry: Mapping[str, Any]) -> str:
    return f"from step {entry['step']}, {_count(entry['steps_again'], 'step')} computed again"


def _members(numbers: Sequence[int]) -> str:
    return f"member{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
