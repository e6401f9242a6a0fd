"""Runs side by side: in what their jobs differ, and what came of each. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import RunDirectoryError
from raycloud.redact import redact
from raycloud.report.recoveries import counts
from raycloud.report.summary import Summary, of_run
from raycloud.spec.rundir import RunDirectory
from raycloud.spec.task_reference import TaskReference

if TYPE_CHECKING:
    from raycloud.spec.job import Job

FORMAT = 2  # 1 had one number for recoveries of all kinds

_MOST_SIBLINGS = 10_000  # numbers tried when an earlier run of the same job is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One thing that runs come to.

    Attributes:
        name: As in `--json`.
        label: For people.
        kind: How a value is shown: `text`, `list`, `count`, `counts` by name, `figure`, `seconds`,
            `bytes`, `share`.
        of: The value in a summary; None where it is not known.
        relative: Whether the distance from the first run says something.
    """

    name: str
    label: str
    kind: str
    of: Callable[[Summary], Any]
    relative: bool = False


def _told(
    name: str,
    label: str,
    kind: str,
    of: Callable[[Summary], Any] | None = None,
    *,
    far: bool = False,
) -> Outcome:
    return Outcome(name=name, label=label, kind=kind, of=of or attrgetter(name), relative=far)


OUTCOMES = (
    _told("status", "status", "text"),
    _told("steps", "steps", "count"),
    _told("samples", "samples", "count"),
    _told("final_loss", "loss", "figure", far=True),
    _told("samples_per_s", "samples per second", "figure", far=True),
    _told("step_s", "seconds per step", "figure", far=True),
    _told("first_step_s", "first step after", "seconds"),
    _told("train_s", "training", "seconds", lambda summary: summary.train_s or None),
    _told("wall_s", "in all", "seconds", lambda summary: summary.wall_s or None),
    _told("workers", "workers", "count"),
    _told("shares", "shares", "list", lambda summary: summary.shares or None),
    _told("generations", "generations", "count"),
    _told("recoveries", "recoveries", "counts", lambda summary: counts(summary.recoveries)),
    _told("bytes_sent", "bytes sent", "bytes", far=True),
    _told("compute_share", "computing", "share"),
    _told("exchange_share", "waiting for the exchange", "share"),
    _told("data_share", "waiting for data", "share"),
    _told("checkpoint_step", "last checkpoint", "count"),
    _told("cost", "cost", "figure", far=True),
)


class _Absent:
    """Stands for a field that a job does not have; there are such below `settings` only."""

    def __repr__(self) -> str:
        return "-"


ABSENT = _Absent()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs side by side, in the order asked for.

    Attributes:
        runs: Their directories.
        summaries: What each came to.
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
            Outcome(
                name=f"eval.{name}",
                label=f"held out {name}",
                kind="figure",
                of=partial(_held_out, name),
                relative=True,
            )
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
    jobs = [flat(_job(directory)) for directory in directories]
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
    return dict(_leaves(values, ""))


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


def _leaves(values: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in values.items():
        place = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            leaves += _leaves(value, f"{place}.")
        elif not isinstance(value, Mapping):
            leaves.append((place, value))
    return leaves


def _job(directory: Path) -> Job:
    run = RunDirectory(directory)
    if not run.job_yaml.is_file():
        raise RunDirectoryError(
            f"{directory} holds no run: there is no {run.job_yaml.name}",
            hint="name directories of runs, such as runs/gpt-1",
        )
    return run.job()


def _held_out(name: str, summary: Summary) -> float | None:
    return summary.eval.get(name)
