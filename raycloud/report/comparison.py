"""Comparison of runs: in what their jobs differ, and what came of each."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.redact import redact, redact_text
from raycloud.report.figures import (
    byte_count,
    duration,
    figure,
    leaves,
    percent,
    printable_line,
    sparkline,
)
from raycloud.report.recoveries import counts, counts_text
from raycloud.report.summary import Summary, job_of, of_run
from raycloud.spec.job import TaskReference
from raycloud.spec.rundir import RunDirectory
from raycloud.spec.schema import plain_word

if TYPE_CHECKING:
    from raycloud.spec.job import Job

FORMAT = 2  # 1 had one number for recoveries of all kinds

_MOST_SIBLINGS = 10_000  # numbers tried when an earlier run of the same job is looked for


@dataclass(frozen=True, slots=True)
class Outcome:
    """One thing that runs come to.

    Attributes:
        name: As in `--json`.
        label: For people.
        kind: How a value is shown: `text`, `list`, `count`, `counts` by name, `figure`, `seconds`,
            `bytes`, `share`.
        relative: Whether the distance from the first run says something.
    """

    name: str
    label: str
    kind: str
    relative: bool = False

    def of(self, summary: Summary) -> Any:
        """The value in a summary; None where it is not known."""
        if self.name.startswith(_HELD_OUT):
            return summary.eval.get(self.name.removeprefix(_HELD_OUT))
        if self.kind == "counts":
            return counts(summary.recoveries)
        value = getattr(summary, self.name)
        return value or None if self.name in {"train_s", "wall_s", "shares"} else value


_HELD_OUT = "eval."
OUTCOMES = (
    Outcome("status", "status", "text"),
    Outcome("steps", "steps", "count"),
    Outcome("samples", "samples", "count"),
    Outcome("final_loss", "loss", "figure", relative=True),
    Outcome("samples_per_s", "samples per second", "figure", relative=True),
    Outcome("step_s", "seconds per step", "figure", relative=True),
    Outcome("first_step_s", "first step after", "seconds"),
    Outcome("train_s", "training", "seconds"),
    Outcome("wall_s", "in all", "seconds"),
    Outcome("workers", "workers", "count"),
    Outcome("shares", "shares", "list"),
    Outcome("generations", "generations", "count"),
    Outcome("recoveries", "recoveries", "counts"),
    Outcome("bytes_sent", "bytes sent", "bytes", relative=True),
    Outcome("compute_share", "computing", "share"),
    Outcome("exchange_share", "waiting for the exchange", "share"),
    Outcome("data_share", "waiting for data", "share"),
    Outcome("checkpoint_step", "last checkpoint", "count"),
    Outcome("cost", "cost", "figure", relative=True),
)


class _Absent:
    """Stands for a field that a job does not have; there are such below `settings` only."""

    def __repr__(self) -> str:
        return "-"


ABSENT = _Absent()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs side by side, in the order asked for: directories, and what each came to.

    Attributes:
        differs: Fields in which their jobs differ, with the value of each run; `ABSENT` where one
            has no such field.
    """

    runs: tuple[Path, ...]
    summaries: tuple[Summary, ...]
    differs: Mapping[str, tuple[Any, ...]]

    def outcomes(self) -> list[tuple[Outcome, tuple[Any, ...]]]:
        """What the runs came to, held-out metrics included; what no run knows is left out."""
        names = dict.fromkeys(name for summary in self.summaries for name in summary.eval)
        held_out = [
            Outcome(f"{_HELD_OUT}{name}", f"held out {name}", "figure", relative=True)
            for name in names
        ]
        at = [outcome.name for outcome in OUTCOMES].index("final_loss") + 1
        rows = [
            (outcome, tuple(outcome.of(summary) for summary in self.summaries))
            for outcome in (*OUTCOMES[:at], *held_out, *OUTCOMES[at:])
        ]
        return [row for row in rows if any(value is not None for value in row[1])]

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        rows = self.outcomes()
        record = {
            "format": FORMAT,
            "differs": {
                name: [None if value is ABSENT else value for value in values]
                for name, values in self.differs.items()
            },
            "runs": [
                {
                    "run": str(run),
                    "job": summary.job,
                    "outcomes": {outcome.name: values[at] for outcome, values in rows},
                    "loss_curve": summary.loss_curve,
                    "rate_curve": summary.rate_curve,
                }
                for at, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True))
            ],
        }
        redacted: dict[str, Any] = redact(record)
        return redacted


def compare(directories: Sequence[Path]) -> Comparison:
    """Read runs, in any state, and set them side by side.

    Raises:
        RunDirectoryError: A directory holds no run, or its log cannot be read.
        SpecError: The job of a run is damaged.
    """
    jobs = [flat(job_of(directory)) for directory in directories]
    return Comparison(
        runs=tuple(directories),
        summaries=tuple(of_run(directory) for directory in directories),
        differs=differences(jobs),
    )


def differences(jobs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The fields that are not the same in all jobs, each with all values.

    >>> differences([{"steps": 1, "seed": 0}, {"steps": 2, "seed": 0, "settings.x": 5}])
    {'steps': (1, 2), 'settings.x': (-, 5)}
    """
    names = dict.fromkeys(name for job in jobs for name in job)
    rows = {name: tuple(job.get(name, ABSENT) for job in jobs) for name in names}
    return {
        name: values
        for name, values in rows.items()
        if any(type(value) is not type(values[0]) or value != values[0] for value in values[1:])
    }


def flat(job: Job) -> dict[str, Any]:
    """The resolved job by dotted field, as `--set` names them.

    A task in a file is named without the file's folder: the runs of a project that was moved, or
    sent elsewhere, have the same task.
    """
    values = job.resolved().model_dump(mode="json")
    values["task"] = TaskReference.parse(str(values["task"])).portable
    return dict(leaves(values))


def earlier(directory: Path) -> Path | None:
    """The newest run of the same name before the one in `directory`: `runs/gpt-1` of `gpt-2`."""
    stem, dash, number = directory.name.rpartition("-")
    if not dash or not number.isascii() or not number.isdigit():
        return None
    newest = min(int(number), _MOST_SIBLINGS) - 1
    for n in range(newest, 0, -1):
        candidate = directory.with_name(f"{stem}-{n}")
        if RunDirectory(candidate).summary_json.is_file():
            return candidate
    return None


_CURVE_CELLS = 16
_MOST_CELL = 48  # characters; longer values of a job are cut
_GAP = 3
_INDENT = 2


def comparison_lines(comparison: Comparison, *, width: int) -> list[tuple[str, str]]:
    """The comparison as lines of `width` characters, each behind its style.

    Runs that do not fit beside the others stand below.
    """
    names, tables = _names(comparison), _tables(comparison)
    first = max((len(label) for rows in tables.values() for label, _ in rows), default=0)
    grid = [names, *(cells for table in tables.values() for _, cells in table)]
    columns = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines: list[tuple[str, str]] = []
    for picked in _fitting(columns, width - first - _INDENT):

        def line(label: str, cells: Sequence[str], picked: Sequence[int] = picked) -> str:
            padded = "".join(" " * _GAP + cells[at].ljust(columns[at]) for at in picked)
            return f"{'':{_INDENT}}{label:<{first}}{padded}".rstrip()

        lines += [("", "")] * (2 if lines else 0)
        lines.append(("cyan", line("", names)))
        for title, rows in tables.items():
            lines += [("", ""), ("bold", title), *(("", line(*row)) for row in rows)]
    return lines


def _names(comparison: Comparison) -> list[str]:
    """The directories without what they all begin with, as far as that leaves them apart."""
    paths = [str(run) for run in comparison.runs]
    above = {os.path.dirname(path) for path in paths}  # noqa: PTH120 - of texts as they were given
    shown = [os.path.basename(path) for path in paths]  # noqa: PTH119
    return [printable_line(name) for name in (shown if len(above) == 1 and all(shown) else paths)]


def _tables(comparison: Comparison) -> dict[str, list[tuple[str, list[str]]]]:
    differs = [
        (printable_line(name), [_value(value) for value in values])
        for name, values in comparison.differs.items()
    ]
    came = [
        (one.label, [_shown(one, value) + _off(one, value, values[0]) for value in values])
        for one, values in comparison.outcomes()
    ]
    curves = _curves(comparison)
    if any(curves):
        at = next((i + 1 for i, (label, _) in enumerate(came) if label == "loss"), len(came))
        came.insert(at, ("loss curve", curves))
    title = "what differs in the jobs" if differs else "the jobs are the same"
    return {title: differs, "what came of them": came}


def _curves(comparison: Comparison) -> list[str]:
    """The curves of the losses, all on one scale."""
    curves = [[loss for _, loss in summary.loss_curve] for summary in comparison.summaries]
    known = [loss for curve in curves for loss in curve if loss is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return [sparkline(curve, width=_CURVE_CELLS, low=low, high=high) for curve in curves]


_FORMS: dict[str, Callable[[Any], str]] = {
    "seconds": duration,
    "bytes": byte_count,
    "share": percent,
    "figure": figure,
    "counts": counts_text,
    "list": lambda values: " ".join(map(str, values)),
}


def _shown(outcome: Outcome, value: Any) -> str:
    if value is None:
        return "-"
    form = _FORMS.get(outcome.kind)
    return printable_line(str(value)) if form is None else form(value)


def _off(outcome: Outcome, value: Any, first: Any) -> str:
    """How far a value is from that of the first run; nothing where they are the same."""
    if not outcome.relative or value is None or not first or not math.isfinite(first):
        return ""
    off = f"{100 * (value / first - 1):+.1f}%"
    return "" if off in {"+0.0%", "-0.0%"} else f" {off}"


def _value(value: Any) -> str:
    if value is ABSENT:
        return "-"
    text = printable_line(redact_text(plain_word(value)))
    return text if len(text) <= _MOST_CELL else text[: _MOST_CELL - 1] + "…"


def _fitting(columns: Sequence[int], width: int) -> Iterator[list[int]]:
    """The numbers of the columns that stand side by side, at least one at a time."""
    picked: list[int] = []
    for at, column in enumerate(columns):
        if picked and sum(_GAP + columns[one] for one in picked) + _GAP + column > width:
            yield picked
            picked = []
        picked.append(at)
    yield picked
