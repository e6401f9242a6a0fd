"""Chaos: what a run under faults came to, held against the same run without: a record, a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import RunDirectoryError
from raycloud.events import GenerationFormed, MemberLost, MemberSpawned, Recovered, RunStarted
from raycloud.faults.schedule import Action
from raycloud.redact import redact
from raycloud.report.audit import RunAudit, audit
from raycloud.report.figures import (
    counted,
    cut_line,
    duration,
    figure,
    finite,
    percent,
    printable_line,
    row,
)
from raycloud.report.log import read_events
from raycloud.report.summary import of_run
from raycloud.spec.rundir import RunDirectory

if TYPE_CHECKING:
    from raycloud.checkpoint.payload import Difference
    from raycloud.faults import Fault, Hit

FORMAT = 1

FLOAT64_BOUND = 1e-9
TIMES = 3.0  # of what another order of summing makes, in numbers less precise than float64
_SOON_S = 10.0  # a connection that was cut is noticed within this time
_EARLY_S = 0.02  # two clocks differ by so much, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """A worker from when its process was asked for to its end, in seconds from the run's start."""

    member: int
    from_s: float
    to_s: float
    lost: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two runs; `status`, `wall_s`, `goodput` and `error` are as in its summary.

    Attributes:
        directory: Where it is kept.
        audit: What its ledger proves; None where that cannot be read, and `unread` says why.
        pauses: Its recoveries, in seconds from `started_t`.
        started_t: Its start, in unix seconds.
    """

    directory: Path
    audit: RunAudit | None
    status: str
    wall_s: float
    goodput: Mapping[str, float]
    pauses: tuple[Recovered, ...]
    lives: tuple[Life, ...]
    started_t: float
    error: str | None = None
    unread: str = ""

    @property
    def exact(self) -> bool:
        """Each sample counted once, and the run came to its end."""
        return self.status == "finished" and self.audit is not None and self.audit.ledger.exact

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "directory": str(self.directory),
            "status": self.status,
            "error": self.error,
            "exact": self.exact,
            "unread": self.unread,
            "steps": 0 if self.audit is None else self.audit.ledger.steps,
            "samples": 0 if self.audit is None else self.audit.ledger.committed_samples,
            "wall_s": self.wall_s,
            "goodput": dict(self.goodput),
            "pauses": [
                {**asdict(pause), "lost": list(pause.lost), "seconds": pause.seconds}
                for pause in self.pauses
            ],
        }


def side_of(directory: Path, error: str | None = None) -> Side:
    """One of the two runs, read from what it has left.

    Raises:
        RunDirectoryError: Its log cannot be read.
    """
    summary, found, unread = of_run(directory), None, ""
    try:
        found = audit(directory)
    except RunDirectoryError as problem:
        unread = problem.message
    entries = list(read_events(RunDirectory(directory).events_jsonl))
    started_t = next((t for t, event in entries if isinstance(event, RunStarted)), 0.0)
    pauses = [  # by the log's clock, since the run's own seconds begin a little later
        replace(event, detected_s=t - event.seconds - started_t, resumed_s=t - started_t)
        for t, event in entries
        if isinstance(event, Recovered)
    ]
    return Side(
        directory=directory,
        audit=found,
        status=summary.status,
        wall_s=summary.wall_s,
        goodput=summary.goodput,
        pauses=tuple(pauses),
        lives=tuple(_lives(entries, started_t)),
        started_t=started_t,
        error=error or summary.error,
        unread=unread,
    )


def _lives(entries: Sequence[tuple[float, Any]], started_t: float) -> Iterator[Life]:
    began: dict[int, float] = {}
    ended: dict[int, tuple[float, bool]] = {}
    computed: set[int] = set()
    for t, event in entries:
        match event:
            case MemberSpawned():
                began.setdefault(event.member, t - started_t)
            case MemberLost() if event.member not in ended:
                ended[event.member] = t - started_t, True
            case GenerationFormed():
                for gone in computed - set(event.members) - ended.keys():
                    ended[gone] = t - started_t, False
                computed |= set(event.members)
            case _:
                pass
    end = (entries[-1][0] - started_t if entries else 0.0), False
    for member, from_s in began.items():
        to_s, lost = ended.get(member, end)
        yield Life(member=member, from_s=from_s, to_s=to_s, lost=lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far the two may be apart at most, and what that follows from."""

    value: float
    why: str


def bound_of(precision: str, other_order: float | None = None) -> Bound:
    """What two runs of a job are held to.

    Args:
        precision: The number type of the model's parameters.
        other_order: How far a run by one worker is from the undisturbed one; needed where that type
            is not `float64`.
    """
    if precision == "float64":
        return Bound(value=FLOAT64_BOUND, why="float64")
    return Bound(
        value=TIMES * (other_order or 0.0),
        why=f"{precision}: {TIMES:g} times what a run by one worker, which adds up in another "
        "order, differs by",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the faults came to.

    Attributes:
        seed: What the faults were drawn from; None: they were read from a file.
        workers: Most workers.
        difference: Between their last checkpoints; None where they cannot be compared.
        bound: What that is held to.
        hits: What was done, in order.
        left: Faults that did not happen: the run ended before.
    """

    job: str
    seed: int | None
    workers: int
    undisturbed: Side
    disturbed: Side
    difference: Difference | None
    bound: Bound | None
    hits: tuple[Hit, ...] = ()
    left: tuple[Fault, ...] = ()

    @property
    def agrees(self) -> bool:
        """The parameters are those of the undisturbed run, within the bound."""
        if self.difference is None or self.bound is None:
            return False
        return self.difference.largest <= self.bound.value

    @property
    def proved(self) -> bool:
        """They agree, and both ledgers are exact."""
        return self.agrees and self.undisturbed.exact and self.disturbed.exact

    def at_s(self, hit: Hit) -> float:
        """When a fault was done, in seconds from the start of the run."""
        return hit.t - self.disturbed.started_t

    def pause_of(self, hit: Hit) -> Recovered | None:
        """The recovery that a fault made necessary; None: it needed none."""
        if hit.why:
            return None
        at_s = self.at_s(hit)
        harmed = (self.at_s(one) for one in self.hits if one.member == hit.member and not one.why)
        again_s = min((t for t in harmed if t > at_s), default=math.inf)
        for pause in self.disturbed.pauses:
            if hit.member in pause.lost and pause.detected_s <= again_s:
                return pause
            cut = hit.fault.action is Action.CUT and pause.resumed_s >= at_s
            if cut and -_EARLY_S <= pause.detected_s - at_s <= _SOON_S:
                return pause
        return None

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        apart = self.difference
        names = ("largest", "tensor", "parameters", "tensors", "step", "precision")
        record = {
            "format": FORMAT,
            "job": self.job,
            "seed": self.seed,
            "workers": self.workers,
            "proved": self.proved,
            "agrees": self.agrees,
            "difference": apart and finite({name: getattr(apart, name) for name in names}),
            "bound": self.bound and asdict(self.bound),
            "faults": [self._record_of(hit) for hit in self.hits],
            "left": [fault.to_record() for fault in self.left],
            "undisturbed": self.undisturbed.to_record(),
            "disturbed": self.disturbed.to_record(),
        }
        redacted: dict[str, Any] = redact(record)
        return redacted

    def _record_of(self, hit: Hit) -> dict[str, Any]:
        pause, at_s = self.pause_of(hit), self.at_s(hit)
        return {
            **hit.fault.to_record(),
            "member": hit.member,
            "step": hit.step,
            "t_s": at_s,
            "why": hit.why,
            "noticed_s": None if pause is None else pause.detected_s - at_s,
            "resumed_s": None if pause is None else pause.resumed_s - at_s,
        }


_WIDEST = 200  # letters of a line

_PARTS = {  # of all workers' time: its name, and its colour on the page
    "computing_s": ("computing", "#3f8a49"),
    "data_s": ("waiting for data", "#b9cfe9"),
    "exchange_s": ("waiting for the exchange", "#7fa8d9"),
    "lane_s": ("waiting for the control lane", "#3b73b9"),
    "recovering_s": ("recovering", "#e39a4c"),
    "lost_s": ("lost", "#b94a4a"),
    "starting_s": ("starting", "#c9ccd1"),
    "beside_s": ("beside the steps", "#8d939c"),
}
_MARKS = {"kill": "#b94a4a", "freeze": "#3b73b9", "terminate": "#7a5aa6", "cut": "#c26a22"}
_LOST, _STAYED, _PAUSE = "#d9a3a3", "#a9cfae", "#f6dfc4"
_BARS = {"stayed or left": _STAYED, "lost": _LOST, "pause": _PAUSE}
_WIDTH, _LEFT, _ROW = 900, 110, 24  # of a drawing
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262b; background: #fcfcfa;
       max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 1.6em }
.well { color: #2f6d38 } .ill { color: #a13030 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: 2px 14px 2px 0; text-align: left; vertical-align: top } .n { text-align: right }
svg { width: 100%; height: auto } .key { display: inline-block; width: .8em; height: .8em }
ol { padding-left: 1.5em } code { font-size: .9em }
"""


SCHEDULE, RECORD, PAGE = "schedule.yaml", "chaos.json", "chaos.html"
"""What is kept beside the two runs: the faults, to be asked for again, and the outcome twice."""


def keep(path: Path, text: str) -> None:
    """Write one of these files, whole or not at all.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {error.strerror}", hint="give another --out"
        ) from error


def keep_outcome(folder: Path, outcome: Outcome) -> None:
    """Keep the outcome, as a record and as a page.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    keep(folder / RECORD, json.dumps(outcome.to_record(), indent=2, allow_nan=False) + "\n")
    keep(folder / PAGE, outcome_page(outcome))


def outcome_text(outcome: Outcome) -> str:
    """What is proved, then each fault with what followed, and where the time went."""
    disturbed = outcome.disturbed
    lines = [
        f"{outcome.job}: {_verdict(outcome, 'NOT PROVED')}",
        row("parameters", _apart_text(outcome)),
        row("ledger", _ledger_text(disturbed)),
    ]
    if not outcome.undisturbed.exact:
        lines.append(row("", f"undisturbed: {_ledger_text(outcome.undisturbed)}"))
    if disturbed.error:
        lines.append(row("error", cut_line(disturbed.error, _WIDEST)))
    done = sum(not hit.why for hit in outcome.hits)
    lines.append(
        row("faults", f"{counted(done, 'worker')} {'was' if done == 1 else 'were'} harmed")
    )
    lines += [row("", hit) for hit in _hit_texts(outcome)]
    lines += [row("", fault) for fault in _left_texts(outcome)]
    lines.append(row("pauses", _pauses_text(disturbed)))
    lines += [row("", pause) for pause in _pause_texts(disturbed)]
    lines += ["", f"  {'time of all workers':<30}{'undisturbed':>20}{'under faults':>20}"]
    for label, *cells in _time_rows(outcome, "{} {:>5}"):
        lines.append(f"  {label:<30}{''.join(f'{cell:>20}' for cell in cells)}")
    return "\n".join(lines)


def _verdict(outcome: Outcome, otherwise: str) -> str:
    return "the run under faults is the undisturbed run" if outcome.proved else otherwise


def _apart_text(outcome: Outcome) -> str:
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


def _ledger_text(side: Side) -> str:
    if side.audit is None:
        return printable_line(f"NOT READ: {side.unread}")
    ledger = side.audit.ledger
    word = "exact" if ledger.exact else "NOT EXACT"
    counts = f"{ledger.committed_samples} samples counted in {ledger.steps} steps"
    return f"{word}: {counts}, {side.status}"


def _hit_texts(outcome: Outcome) -> Iterator[str]:
    for hit in outcome.hits:
        at_s, pause = outcome.at_s(hit), outcome.pause_of(hit)
        if hit.why:
            then = f"could not be done: {hit.why}"
        elif pause is None:
            then = "no pause"
        else:
            noticed_s, resumed_s = max(0.0, pause.detected_s - at_s), pause.resumed_s - at_s
            then = f"noticed after {duration(noticed_s)}, went on after {duration(resumed_s)}"
        yield _timed(at_s, f"s, step {hit.step}: {hit.fault}: member {hit.member}: {then}")


def _left_texts(outcome: Outcome) -> Iterator[str]:
    return (f"{fault}: did not happen, the run ended before" for fault in outcome.left)


def _pauses_text(side: Side) -> str:
    if not side.pauses:
        return "none"
    longest, whole = max(p.seconds for p in side.pauses), sum(p.seconds for p in side.pauses)
    return f"{len(side.pauses)}, {duration(whole)} together, the longest {duration(longest)}"


def _pause_texts(side: Side) -> Iterator[str]:
    for pause in side.pauses:
        who = f"without {', '.join(map(str, pause.lost))}" if pause.lost else "met anew"
        lost = f", {pause.lost_steps} steps lost" if pause.lost_steps else ""
        took = f"s: {duration(pause.seconds)}, generation {pause.generation}, {who}{lost}"
        yield _timed(pause.detected_s, f"{took}: {pause.cause}")


def _timed(at_s: float, text: str) -> str:
    return f"{at_s:6.1f} {cut_line(text, _WIDEST)}"


def _time_rows(outcome: Outcome, layout: str) -> Iterator[tuple[str, str, str]]:
    """Where the time of all workers went: a part, its seconds and percentage in both runs."""

    def cell(side: Side, name: str) -> str:
        whole_s = side.goodput.get("whole_s") or 0.0
        if not whole_s:
            return "-"
        seconds = side.goodput[name]
        return layout.format(duration(seconds), percent(seconds / whole_s))

    for name, (label, _) in (*_PARTS.items(), ("whole_s", ("together", ""))):
        yield label, cell(outcome.undisturbed, name), cell(outcome.disturbed, name)


def outcome_page(outcome: Outcome) -> str:
    """The page; every text in it is escaped."""
    title, disturbed = f"{outcome.job} under faults", outcome.disturbed
    seed = "" if outcome.seed is None else f", drawn from seed {outcome.seed}"
    facts = (
        ("parameters", _apart_text(outcome)),
        ("ledger", _ledger_text(disturbed)),
        ("undisturbed", _ledger_text(outcome.undisturbed)),
        ("workers", f"{outcome.workers} at most"),
        ("faults", f"{len(outcome.hits)}{seed}; {len(outcome.left)} did not happen"),
        ("pauses", _pauses_text(disturbed)),
        ("error", disturbed.error or ""),
    )
    times: list[tuple[str, ...]] = [("", "undisturbed", "under faults")]
    for (label, *cells), (_, colour) in zip(
        _time_rows(outcome, '<span class="n">{}, {}</span>'),
        (*_PARTS.values(), ("", "")),
        strict=True,
    ):
        times.append((f"{_key(colour)} {label}" if colour else label, *cells))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{escape(outcome.job)}: <span class="{"well" if outcome.proved else "ill"}">'
        f"{_verdict(outcome, 'not proved')}</span></h1>",
        _html_table((escape(a), escape(b)) for a, b in facts if b),
        "<h2>The workers of the run under faults</h2>",
        _timeline(outcome),
        "<p>"
        + " &nbsp; ".join(f"{_key(c)} {escape(name)}" for name, c in (_BARS | _MARKS).items())
        + "</p>",
        "<h2>Where the time went</h2>",
        _bars(outcome),
        _html_table(times),
        "<h2>Faults</h2>",
        _list(_hit_texts(outcome)),
        _list(_left_texts(outcome)),
        "<h2>Pauses</h2>",
        _list(_pause_texts(disturbed)),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _timeline(outcome: Outcome) -> str:
    """A row for each worker; what was done to it, and above all of them the pauses."""
    side = outcome.disturbed
    end_s = max([side.wall_s, *(life.to_s for life in side.lives), 1e-9])
    rows = {life.member: n for n, life in enumerate(side.lives)}
    height = _ROW * (len(rows) + 1)

    def x(second: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * min(1.0, max(0.0, second / end_s))

    shapes = []
    for pause in side.pauses:
        from_x, to_x = x(pause.detected_s), x(pause.resumed_s)
        shapes.append(_box(from_x, 0, max(2.0, to_x - from_x), height - _ROW, _PAUSE))
    for life in side.lives:
        top, width = _ROW * rows[life.member], max(1.0, x(life.to_s) - x(life.from_s))
        colour = _LOST if life.lost else _STAYED
        shapes.append(_words(0, top + 16, f"member {life.member}"))
        shapes.append(_box(x(life.from_s), top + 6, width, _ROW - 12, colour))
    for hit in outcome.hits:
        if hit.member in rows:
            top, colour = _ROW * rows[hit.member], _MARKS[hit.fault.action.value]
            shapes.append(_box(x(outcome.at_s(hit)) - 2, top + 2, 4, _ROW - 4, colour))
    shapes += [_words(_LEFT, height - 6, "0 s"), _words(_WIDTH - 50, height - 6, duration(end_s))]
    return _svg(height, shapes, "the workers over time, with the faults")


def _bars(outcome: Outcome) -> str:
    """Two bars to one scale: the time of all workers, by what it was spent for."""
    sides = (("undisturbed", outcome.undisturbed), ("under faults", outcome.disturbed))
    longest_s = max([side.goodput.get("whole_s") or 0.0 for _, side in sides] + [1e-9])
    shapes = []
    for number, (label, side) in enumerate(sides):
        shapes.append(_words(0, 1.5 * _ROW * number + 20, label))
        at = float(_LEFT)
        for name, (_, colour) in _PARTS.items():
            width = (_WIDTH - _LEFT) * (side.goodput.get(name) or 0.0) / longest_s
            shapes.append(_box(at, 1.5 * _ROW * number + 4, width, _ROW, colour))
            at += width
    return _svg(int(3 * _ROW), shapes, "where the time of all workers went")


def _svg(height: int, shapes: Iterable[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-size="13" fill="#22262b"><title>{escape(title)}</title>{"".join(shapes)}</svg>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _words(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _key(colour: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>'


def _html_table(rows: Iterable[Sequence[str]]) -> str:
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{''.join(lines)}</table>"


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text.strip())}</li>" for text in texts)
    return f"<ol>{items}</ol>" if items else ""
