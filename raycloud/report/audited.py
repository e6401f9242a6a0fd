"""An audit for people, as plain lines. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raycloud.order import ERROR, NAN, Kind, LedgerAudit
from raycloud.redact import redact_text
from raycloud.report.figures import printable_line
from raycloud.report.recoveries import NAMES, counts, counts_text, text_of

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
    verdict = "exact" if found.exact else "NOT EXACT"
    what = "each sample counted once" if found.exact else "not every sample counted exactly once"
    if found.exact and ledger.skips:
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
    lines += _listed("misread", [found.misread] if found.misread else [])
    lines += _listed("skipped", [f"{skip}: {_WHY[skip.why]}" for skip in ledger.skips])
    for kind in Kind:
        lines += _listed(kind.value, [f"{fault}: {_MEANING[kind]}" for fault in ledger.of(kind)])
    if ledger.more:
        lines.append(_row("", f"and {ledger.more} more ranges that are missing"))
    if not ledger.whole:
        lines.append(_row("", "so much is wrong that the rest was not read"))
    lines.append(_row("run", f"{found.status}, {_count(found.generations, 'generation')}"))
    if found.error:
        lines.append(_row("", _cut(found.error)))
    lines.append(_row("recoveries", counts_text(counts(found.recoveries))))
    for recovery, name in NAMES.items():
        of_kind = map(_recovery, found.recoveries_of(recovery))
        lines += _listed(name.replace("_", " "), of_kind)
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}}{text}".rstrip()


def _cut(text: str) -> str:
    line = printable_line(redact_text(text))
    return line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …"


def _listed(label: str, texts: Iterable[str]) -> Iterator[str]:
    """A row with how many there are, and a line for each of the first."""
    lines = [_cut(text) for text in texts]
    if lines:
        yield _row(label, str(len(lines)))
    for line in lines[:_MOST_NAMED]:
        yield _row("", line)
    if len(lines) > _MOST_NAMED:
        yield _row("", f"and {len(lines) - _MOST_NAMED} more, which --json names")


def _off(found: RunAudit) -> str:
    """What is told of steps where log and ledger differ, as they may while a run goes on."""
    logged = found.logged_steps
    return "" if logged == found.ledger.steps else f", and {logged} by the log"


def _left_out(ledger: LedgerAudit) -> str:
    samples = sum(part.samples for part in ledger.left_out)
    return f", {samples} left out by drop_last" if samples else ""


def _recovery(entry: Mapping[str, Any]) -> str:
    text = text_of(entry)
    if "generation" in entry:
        began_s, ended_s = entry["detected_s"], entry["resumed_s"]
        text += f"; generation {entry['generation']}, detected at {_seconds(began_s)}, "
        text += f"resumed at {_seconds(ended_s)}"
    why = entry.get("reason") or entry.get("cause")
    return f"{text}: {why}" if why else text


def _seconds(moment_s: float | None) -> str:
    return "?" if moment_s is None else f"{moment_s:.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
