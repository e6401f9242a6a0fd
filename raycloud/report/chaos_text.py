"""What a run under faults came to, for people, as plain lines. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from raycloud.redact import redact_text
from raycloud.report.figures import duration, figure, percent, printable_line

if TYPE_CHECKING:
    from raycloud.faults import Hit
    from raycloud.report.chaos import Outcome
    from raycloud.report.chaos_sides import Pause, Side

PARTS = (
    ("computing", "computing_s"),
    ("waiting for data", "data_s"),
    ("waiting for the exchange", "exchange_s"),
    ("waiting for the control lane", "lane_s"),
    ("recovering", "recovering_s"),
    ("lost", "lost_s"),
    ("starting", "starting_s"),
    ("beside the steps", "beside_s"),
)
_WIDTH = 14
_WIDEST = 200  # letters of a line


def outcome_text(outcome: Outcome) -> str:
    """What is proved, then each fault with what followed, and where the time went."""
    disturbed = outcome.disturbed
    word = "the run under faults is the undisturbed run" if outcome.proved else "NOT PROVED"
    lines = [
        f"{outcome.job}: {word}",
        _row("parameters", apart_text(outcome)),
        _row("ledger", ledger_text(disturbed)),
    ]
    if not outcome.undisturbed.exact:
        lines.append(_row("", f"undisturbed: {ledger_text(outcome.undisturbed)}"))
    if disturbed.error:
        lines.append(_row("error", _line(disturbed.error)))
    done = sum(not hit.why for hit in outcome.hits)
    lines.append(
        _row("faults", "1 worker was harmed" if done == 1 else f"{done} workers were harmed")
    )
    lines += [_row("", hit_text(outcome, hit)) for hit in outcome.hits]
    lines += [_row("", f"{fault}: did not happen, the run ended before") for fault in outcome.left]
    lines.append(_row("pauses", pauses_text(disturbed)))
    lines += [_row("", pause_text(pause)) for pause in disturbed.pauses]
    lines += ["", *_waterfall(outcome)]
    return "\n".join(lines)


def apart_text(outcome: Outcome) -> str:
    """How far the two are apart, and what that is held to."""
    apart, bound = outcome.difference, outcome.bound
    if apart is None:
        ended = outcome.undisturbed.status == outcome.disturbed.status == "finished"
        why = "their checkpoints cannot be" if ended else "not both runs came to their end"
        return f"not compared: {why}"
    where = f" in {apart.tensor}" if apart.largest else ""
    if bound is None:
        word, held = "NOT KNOWN", f"what rounding does in {apart.precision} could not be found out"
    else:
        word = "agree" if outcome.agrees else "DIFFER"
        held = f"at most {figure(bound.value)} is allowed ({bound.why})"
    found = f"{figure(apart.largest)} apart at most{where}, over {apart.tensors} tensors"
    return printable_line(f"{word}: {found}; {held}")


def ledger_text(side: Side) -> str:
    """What the ledger of a run proves."""
    if side.audit is None:
        return printable_line(f"NOT READ: {side.unread}")
    ledger = side.audit.ledger
    word = "exact" if ledger.exact else "NOT EXACT"
    return (
        f"{word}: {ledger.committed_samples} samples counted in {ledger.steps} steps, {side.status}"
    )


def hit_text(outcome: Outcome, hit: Hit) -> str:
    """One fault on one worker, and what followed."""
    at_s = hit.t - outcome.disturbed.started_t
    pause = outcome.pause_of(hit)
    if hit.why:
        then = f"could not be done: {hit.why}"
    elif pause is None:
        then = "no pause"
    else:
        noticed_s, resumed_s = pause.detected_s - at_s, pause.resumed_s - at_s
        then = f"noticed after {duration(max(0.0, noticed_s))}, went on after {duration(resumed_s)}"
    return _line(f"{at_s:6.1f} s, step {hit.step}: {hit.fault}: member {hit.member}: {then}")


def pauses_text(side: Side) -> str:
    """How many there were, and how long."""
    if not side.pauses:
        return "none"
    longest, whole = max(p.seconds for p in side.pauses), sum(p.seconds for p in side.pauses)
    return f"{len(side.pauses)}, {duration(whole)} together, the longest {duration(longest)}"


def pause_text(pause: Pause) -> str:
    """One recovery and its cause."""
    who = f"without {', '.join(map(str, pause.lost))}" if pause.lost else "met anew"
    lost = f", {pause.lost_steps} steps lost" if pause.lost_steps else ""
    return _line(
        f"{pause.detected_s:6.1f} s: {duration(pause.seconds)}, generation {pause.generation}, "
        f"{who}{lost}: {pause.cause}"
    )


def _waterfall(outcome: Outcome) -> Iterator[str]:
    sides = (outcome.undisturbed.goodput, outcome.disturbed.goodput)
    yield f"  {'time of all workers':<30}{'undisturbed':>20}{'under faults':>20}"
    for label, name in (*PARTS, ("together", "whole_s")):
        cells = "".join(f"{_part(side, name):>20}" for side in sides)
        yield f"  {label:<30}{cells}"


def _part(parts: Mapping[str, float], name: str) -> str:
    whole_s = parts.get("whole_s") or 0.0
    if not whole_s:
        return "-"
    return f"{duration(parts[name])} {percent(parts[name] / whole_s):>5}"


def _row(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}}{text}".rstrip()


def _line(text: str) -> str:
    line = redact_text(" " * (len(text) - len(text.lstrip())) + printable_line(text))
    return line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …"
