"""The run directory: what lies where, who may use it, and what a resumed run may change."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import RunDirectoryError
from raycloud.spec.load import dump_job, load_job
from raycloud.spec.mistakes import Mistake, refusal
from raycloud.spec.schema import plain_word
from raycloud.spec.secrets import place_of
from raycloud.spec.task_reference import TaskReference

if TYPE_CHECKING:
    from raycloud.spec.job import Job
    from raycloud.spec.resuming import Resume

RUNS = Path("runs")  # where runs without a place of their own go, below the current directory
ASIDE = "unsaved-"  # begins the names of folders with what starts without a checkpoint have left

# The canonical order of samples, or what a sample is, follows from these.
_KEPT = (
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


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run leaves what it leaves.

    Attributes:
        path: The directory.
    """

    path: Path

    @property
    def job_yaml(self) -> Path:
        """The job, resolved. Written first: a directory with it is a run."""
        return self.path / "job.yaml"

    def write_job(self, job: Job) -> None:
        """Keep `job`, resolved, as the run's; a kill in between leaves the old one or the new."""
        _replace(self.job_yaml, dump_job(job))

    def write_plan(self, text: str) -> None:
        """Keep the text of a plan in the same way."""
        _replace(self.plan_json, text)

    @property
    def plan_json(self) -> Path:
        """What was planned."""
        return self.path / "plan.json"

    @property
    def events_jsonl(self) -> Path:
        """What happened, one event per line."""
        return self.path / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """Which samples have been committed."""
        return self.path / "ledger"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, unless `checkpoint.path` names another place."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The scalars for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def summary_json(self) -> Path:
        """The outcome."""
        return self.path / "summary.json"

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
    """A run is in the run directory already.

    Attributes:
        resume: The way to go on with it: `must`, or `allow` where nothing of it was saved.
    """

    def __init__(self, message: str, *, hint: str = "", resume: Resume = "must") -> None:
        """Keep the parts."""
        super().__init__(message, hint=hint)
        self.resume = resume


class NothingSavedError(RunDirectoryError):
    """A run has nothing to go on from."""


def choose(
    run_dir: str | Path | None, name: str, *, resume: bool, root: Path = RUNS
) -> RunDirectory:
    """The directory for a run: made if it is new, checked if it is there. Nothing is overwritten.

    Args:
        run_dir: The place asked for; `None` makes `<root>/<name>-<n>` with the first free n.
        name: The job's name.
        resume: Whether a run that is there shall go on.
        root: Where runs without a place of their own go.

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
    mistakes = [
        Mistake(
            field=field,
            value=after[field],
            problem=f"the run to resume has {before[field]!r}, which its order of samples follows",
            hint=f"write {field} {plain_word(before[field])}, or start a new run: without "
            "--resume, in another --run-dir",
        )
        for field in _KEPT
        if before[field] != after[field]
    ]
    was, shall_be = (place_of(job.resolved().checkpoint.path) for job in (old, new))
    if was != shall_be:
        kept = plain_word(was)
        mistakes.append(
            Mistake(
                field="checkpoint.path",
                value=shall_be,
                problem=f"the run to resume keeps its checkpoints at {kept}",
                hint=f"write checkpoint.path {kept}, or move them and start a new run",
            )
        )
    if mistakes:
        raise refusal(mistakes)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _order_of(job: Job) -> dict[str, object]:
    job = job.resolved()
    return {
        "seed": job.seed,
        "task": TaskReference.parse(str(job.task)).portable,
        "drop_last": job.drop_last,
        "data.path": place_of(job.data.path),
        "data.shuffle": job.data.shuffle,
        "data.partition_by": job.data.partition_by,
        "data.partition_bytes": job.data.partition_bytes,
        "data.stratify": job.data.stratify,
        "data.window": job.data.window,
        "data.bad_rows": job.data.bad_rows,
    }


def _existing(run_dir: str | Path | None, name: str, root: Path) -> RunDirectory:
    latest = _latest(name, root)
    suggestion = f"go on with {_command(latest)}" if latest else "leave out --resume to start one"
    if run_dir is None:
        hint = suggestion if latest else f"name its directory: --run-dir DIR; or {suggestion}"
        raise RunDirectoryError("--resume does not say which run", hint=hint)
    run = RunDirectory(Path(run_dir))
    if not run.path.exists():
        raise RunDirectoryError(f"no run to resume: {run.path} does not exist", hint=suggestion)
    if not run.job_yaml.is_file():
        raise RunDirectoryError(
            f"no run to resume: {run.path} has no {run.job_yaml.name}", hint=suggestion
        )
    return run


def _made(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise RunDirectoryError(
                f"{path} is a file, not a run directory", hint="give another --run-dir"
            ) from None
        if all(entry.name.startswith(ASIDE) for entry in path.iterdir()):
            return path
        if RunDirectory(path).job_yaml.is_file():
            if RunDirectory(path).never_saved():
                raise RunTakenError(
                    f"{path} holds a run that ended before its first checkpoint",
                    hint=f"set it aside and begin again with {_command(path, 'allow')}, or give "
                    "another --run-dir",
                    resume="allow",
                ) from None
            raise RunTakenError(
                f"{path} holds a run already",
                hint=f"go on with {_command(path)}, or give another --run-dir",
            ) from None
        raise RunDirectoryError(
            f"{path} is not empty, and what it holds is not a run", hint="give another --run-dir"
        ) from None
    return path


def _next_free(name: str, root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    n = 1
    while True:
        path = root / f"{name}-{n}"
        try:
            path.mkdir()
        except FileExistsError:  # of an earlier run, or one that starts at this moment
            n += 1
        else:
            return path


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
