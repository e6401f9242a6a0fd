"""Run directory: what lies where, who may use it, and what a resumed run may change.

A start goes on with a run that is there, or does not:

| | no run there | a run with a checkpoint | a run without a checkpoint |
|---|---|---|---|
| never | begins | refuses, and names the command that goes on | refuses |
| allow | begins | goes on | sets its files aside and begins again |
| must | refuses | goes on | refuses |

On a cluster, workers that have outlived the command that drove them are as good as a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from raycloud.bounded import json_value, read_whole
from raycloud.errors import MachineError, RunDirectoryError, SpecError
from raycloud.spec.job import TaskReference
from raycloud.spec.load import dump_job, load_job
from raycloud.spec.mistakes import combined, mistake
from raycloud.spec.schema import plain_word
from raycloud.spec.secrets import place_of
from raycloud.spec.sections import POINT_FIELDS

if TYPE_CHECKING:
    from raycloud.spec.job import Job

Resume = Literal["must", "allow", "never"]
RESUMES: tuple[Resume, ...] = get_args(Resume)

RUNS = Path("runs")  # where runs without a place of their own go, below the current directory
ASIDE = "unsaved-"  # begins the names of folders with what starts without a checkpoint have left
_REQUEST = "range.request"  # the file in which people ask for another range of workers
_SERVERS_REQUEST = "servers.request"  # and for another number of servers
_POINT_REQUEST = "sync.request"  # and for another way of updates
MOST_SERVERS = 1024
_REQUEST_FORMAT = 1
_LARGEST_REQUEST_BYTES = 10_000

# The canonical order of samples, or what a sample is, follows from these.
KEPT = (
    "seed",
    "task",
    "drop_last",
    "data.path",
    "data.shuffle",
    "data.partition_by",
    "data.partition_bytes",
    "data.stratify",
    "data.window",
    "data.bad_rows",
)


class RunDirectory:
    """Where a run leaves what it leaves; `job.yaml` is written first: a directory with it is a run.

    Each file that is written again is the old one or the new after a kill in between.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job_yaml = path / "job.yaml"  # the job, resolved
        self.plan_json = path / "plan.json"
        self.events_jsonl = path / "events.jsonl"  # what happened, one event per line
        self.ledger = path / "ledger"  # which samples have been committed
        self.data_json = path / "data.json"  # the files that its samples come from
        self.checkpoints = path / "checkpoints"  # unless `checkpoint.path` names another place
        self.tensorboard = path / "tensorboard"
        self.summary_json = path / "summary.json"  # the outcome

    def write_job(self, job: Job) -> None:
        """Keep `job`, resolved, as the run's."""
        replace_text(self.job_yaml, dump_job(job))

    def write_plan(self, text: str) -> None:
        """Keep the text of a plan."""
        replace_text(self.plan_json, text)

    def never_saved(self) -> bool:
        """Whether the run has no checkpoint in its own place, nor a place elsewhere for them."""
        here = next(self.checkpoints.glob("step-*/manifest.json"), None)
        return here is None and self.job().checkpoint.path is None

    def job(self) -> Job:
        """The job of the run that is there; its task's file need not be.

        Raises:
            SpecError: `job.yaml` is damaged.
        """
        return load_job(self.job_yaml, check_files=False)


class RunTakenError(RunDirectoryError):
    """A run is in the directory already; `resume` says how to go on with it."""

    def __init__(self, message: str, *, hint: str = "", resume: Resume = "must") -> None:
        super().__init__(message, hint=hint)
        self.resume = resume


class NothingSavedError(RunDirectoryError):
    """A run has nothing to go on from."""


def choose(
    run_dir: str | Path | None, name: str, *, resume: bool, root: Path = RUNS
) -> RunDirectory:
    """The directory for a run: made if it is new, checked if it is there. Nothing is overwritten.

    Without a `run_dir` it is `<root>/<name>-<n>` with the first free n. With `resume` a run that is
    there shall go on.

    Raises:
        RunDirectoryError: The place is taken, or holds no run to resume, or cannot be made.
    """
    try:
        if resume:
            return _existing(run_dir, name, root)
        return RunDirectory(_next_free(name, root) if run_dir is None else _made(Path(run_dir)))
    except OSError as error:
        place = root if run_dir is None else run_dir
        raise RunDirectoryError(
            f"the run directory {place} cannot be used: {error.strerror}",
            hint="give a directory that can be written with --run-dir",
        ) from error


def check_resume(old: Job, new: Job) -> None:
    """Refuse to resume `old` as `new` where that would change the canonical order of samples.

    The place of its checkpoints is kept, too; its password or token may change, as may workers,
    shares, length, batch sizes and all else. A task in a file may have moved with its project: file
    name and class are the same.

    Raises:
        SpecError: One or more fields differ that may not.
    """
    before, after = _order_of(old), _order_of(new)
    was, shall_be = (place_of(job.resolved().checkpoint.path) for job in (old, new))
    mistakes = [
        mistake(
            field,
            after[field],
            f"the run to resume has {before[field]!r}, which its order of samples follows",
            f"write {field} {plain_word(before[field])}, or start a new run: without --resume, in "
            "another --run-dir",
        )
        for field in KEPT
        if before[field] != after[field]
    ]
    if was != shall_be:
        problem = f"the run to resume keeps its checkpoints at {plain_word(was)}"
        hint = f"write checkpoint.path {plain_word(was)}, or move them and start a new run"
        mistakes.append(mistake("checkpoint.path", shall_be, problem, hint))
    if mistakes:
        raise combined(mistakes)


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: who reads it has the one before, or this."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _order_of(job: Job) -> dict[str, Any]:
    values = job.resolved().model_dump()
    found: dict[str, Any] = dict.fromkeys(KEPT, values)
    for field in KEPT:
        for name in field.split("."):
            found[field] = found[field][name]
    task, path = str(found["task"]), place_of(found["data.path"])
    return {**found, "task": TaskReference.parse(task).portable, "data.path": path}


def _existing(run_dir: str | Path | None, name: str, root: Path) -> RunDirectory:
    latest = _latest(name, root)
    hint = f"go on with {_command(latest)}" if latest else "leave out --resume to start one"
    if run_dir is None:
        hint = hint if latest else f"name its directory: --run-dir DIR; or {hint}"
        raise RunDirectoryError("--resume does not say which run", hint=hint)
    run = RunDirectory(Path(run_dir))
    if not run.job_yaml.is_file():
        lacks = f"has no {run.job_yaml.name}" if run.path.exists() else "does not exist"
        raise RunDirectoryError(f"no run to resume: {run.path} {lacks}", hint=hint)
    return run


def _made(path: Path) -> Path:
    other = "give another --run-dir"
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file, not a run directory", hint=other)
    path.mkdir(parents=True, exist_ok=True)
    if all(entry.name.startswith(ASIDE) for entry in path.iterdir()):
        return path
    run = RunDirectory(path)
    if not run.job_yaml.is_file():
        raise RunDirectoryError(f"{path} is not empty, and what it holds is not a run", hint=other)
    if run.never_saved():
        raise RunTakenError(
            f"{path} holds a run that ended before its first checkpoint",
            hint=f"set it aside and begin again with {_command(path, 'allow')}, or {other}",
            resume="allow",
        )
    raise RunTakenError(
        f"{path} holds a run already", hint=f"go on with {_command(path)}, or {other}"
    )


def _next_free(name: str, root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        path = root / f"{name}-{n}"
        with contextlib.suppress(FileExistsError):  # of an earlier run, or one that starts now
            path.mkdir()
            return path
    raise AssertionError  # a count does not end


def _command(path: Path, how: str = "") -> str:
    """What a person types to go on with a run."""
    words = ["raycloud", "train", "--resume", how, "--run-dir", str(path)]
    return f"`{shlex.join(word for word in words if word)}`"


def _latest(name: str, root: Path) -> Path | None:
    numbers = [
        int(suffix)
        for path in root.glob(f"{name}-*/job.yaml")
        if (suffix := path.parent.name.removeprefix(f"{name}-")).isascii() and suffix.isdigit()
    ]
    return root / f"{name}-{max(numbers)}" if numbers else None


def resume_word(asked: bool | str) -> Resume:  # noqa: FBT001 - Python says `resume=True`
    """What a caller asks for, as one of the three words.

    >>> resume_word(True), resume_word(False), resume_word("allow")
    ('must', 'never', 'allow')

    Raises:
        SpecError: It is none of them.
    """
    if isinstance(asked, bool):
        return "must" if asked else "never"
    if asked not in RESUMES:
        hint = f"give {', '.join(RESUMES)}"
        raise SpecError("resume", asked, "is not a way to resume", hint=hint)
    return asked


def goes_on(
    run_dir: str | Path | None, resume: Resume, saved: Callable[[RunDirectory], bool]
) -> bool:
    """Whether a start goes on with the run in `run_dir`; what stands in the way is set aside.

    `saved`, whether a run has a checkpoint to go on from, is asked only where it matters.

    Raises:
        RunDirectoryError: `allow` without a place, or the run that would be set aside is still
            going.
    """
    if resume != "allow":
        return resume == "must"
    if run_dir is None:
        raise RunDirectoryError(
            "--resume allow does not say which run",
            hint="name a place, where there may be a run already: --run-dir DIR",
        )
    run = RunDirectory(Path(run_dir))
    if not run.job_yaml.is_file():
        return False
    if saved(run):
        return True
    _set_aside(run)
    return False


def _set_aside(run: RunDirectory) -> None:
    """Move what a run without a checkpoint has left into a folder of its own; nothing is lost."""
    try:
        with run.events_jsonl.open("a") as log:
            fcntl.flock(log.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = [path for path in run.path.iterdir() if not path.name.startswith(ASIDE)]
            taken = sum(1 for _ in run.path.glob(f"{ASIDE}*"))
            aside = run.path / f"{ASIDE}{taken + 1}"
            aside.mkdir()
            for path in sorted(left, key=lambda path: path == run.job_yaml):
                path.rename(aside / path.name)  # job.yaml last: until then it is still a run
    except BlockingIOError as error:
        raise RunDirectoryError(
            f"another process is writing the run in {run.path}",
            hint="wait until it ends, or end it, before going on with its run",
        ) from error
    except OSError as error:
        raise RunDirectoryError(
            f"what an earlier start left in {run.path} cannot be set aside: {error.strerror}",
            hint="remove it, or give another --run-dir",
        ) from error


class Range(TypedDict):
    """The elastic range that is asked for: fewest and most workers, 1 <= fewest <= most."""

    min_workers: int
    max_workers: int


def parse_range(text: str, most: int, why: str) -> Range:
    """A range as people write it: `4`, `2:6`; more than `most` cannot be used: `why` is a clause.

    Raises:
        SpecError: It is none, or too large.

    >>> parse_range("2:6", 8, "a step has 8 micro-batches")
    {'min_workers': 2, 'max_workers': 6}
    """
    fewest, _, highest = text.partition(":")
    try:
        asked = checked_range(int(fewest), int(highest or fewest))
    except ValueError:
        hint = "write the number of workers, or the fewest and the most: 4 or 2:6"
        raise SpecError("WORKERS", text, "is no range of workers", hint=hint) from None
    if asked["max_workers"] > most:
        raise SpecError(
            "WORKERS",
            text,
            f"{why}, so more workers would have nothing to compute",
            hint=f"ask for at most {most}, or start a run that can use more",
        )
    return asked


def ask_range(directory: Path, asked: Range) -> None:
    """Leave the wish for another range; one that was not taken yet is replaced.

    Raises:
        MachineError: It cannot be written.
    """
    _ask(directory / _REQUEST, asked)


def _ask(file: Path, asked: Mapping[str, Any]) -> None:
    directory, draft = file.parent, file.with_name(f"{file.name}.{os.getpid()}.draft")
    try:
        draft.write_text(json.dumps({"format": _REQUEST_FORMAT, **asked}), encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise MachineError(
            f"cannot leave a wish in {directory}: {error.strerror}",
            hint="ask as the user who started the run",
        ) from error


def take_range(directory: Path) -> Range | None:
    """The wish that was left, taken away; None: there is none.

    Raises:
        ValueError: What was left is no range; it is taken away, too.
    """
    found = _taken(directory / _REQUEST)
    if found is None:
        return None
    return checked_range(found.get("min_workers"), found.get("max_workers"))


def _taken(path: Path) -> dict[str, Any] | None:
    taken = path.with_name(f"{path.name}.taken")
    if not path.exists():
        return None
    try:
        path.replace(taken)  # another wish may come at any moment
        try:
            found: Any = json_value(read_whole(taken, _LARGEST_REQUEST_BYTES))
        finally:
            taken.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be taken: {error.strerror}") from error
    if not isinstance(found, dict) or found.get("format") != _REQUEST_FORMAT:
        raise ValueError(f"{path} is of another format")
    return found


def ask_servers(directory: Path, servers: int) -> None:
    """Leave the wish for so many servers; one that was not taken yet is replaced.

    Raises:
        SpecError: That is no number of servers.
        MachineError: It cannot be written.
    """
    try:
        checked_servers(servers)
    except ValueError as error:
        hint = f"write a number from 1 to {MOST_SERVERS}"
        raise SpecError("--servers", servers, str(error), hint=hint) from None
    _ask(directory / _SERVERS_REQUEST, {"servers": servers})


def take_servers(directory: Path) -> int | None:
    """The wish that was left, taken away; None: there is none.

    Raises:
        ValueError: What was left is no number of servers; it is taken away, too.
    """
    found = _taken(directory / _SERVERS_REQUEST)
    return None if found is None else checked_servers(found.get("servers"))


def ask_point(directory: Path, point: Mapping[str, Any]) -> None:
    """Leave the wish for another way of updates; one that was not taken yet is replaced.

    Raises:
        MachineError: It cannot be written.
    """
    _ask(directory / _POINT_REQUEST, {"point": dict(point)})


def take_point(directory: Path) -> dict[str, Any] | None:
    """The wish that was left, fields of `sync`, taken away; None: there is none.

    Raises:
        ValueError: What was left names none; it is taken away, too.
    """
    found = _taken(directory / _POINT_REQUEST)
    if found is None:
        return None
    point = found.get("point")
    if not isinstance(point, dict) or not point.keys() <= {*POINT_FIELDS}:
        raise ValueError(f"{point!r:.80} is no way for updates to travel")
    return point


def checked_servers(servers: object) -> int:
    """The number; `ValueError`: it is none."""
    if type(servers) is not int or not 1 <= servers <= MOST_SERVERS:
        raise ValueError(f"{servers!r} is no number of servers")
    return servers


def checked_range(fewest: object, most: object) -> Range:
    """The range; `ValueError`: it is none."""
    if type(fewest) is not int or type(most) is not int or not 1 <= fewest <= most:
        raise ValueError(f"{fewest!r} to {most!r} is no range of workers")
    return Range(min_workers=fewest, max_workers=most)
