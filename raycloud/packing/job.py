"""A job made ready to be sent: its package, the command that runs it there, its id."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import SpecError
from raycloud.packing.archive import Package, pack
from raycloud.spec.task_reference import TaskReference

if TYPE_CHECKING:
    from raycloud.spec.job import Job

RUNS = "raycloud/runs"  # below the home directory of the node that runs the driver

_LONGEST_NAME = 40


def working_dir_of(job_file: Path, asked: Path | None) -> Path:
    """The directory to pack: the one asked for, the current one if it holds the job, or the job's.

    Relative paths in a job start at the current directory, so that one comes first.
    """
    if asked is not None:
        return asked
    here = Path.cwd()
    return here if job_file.resolve().is_relative_to(here) else job_file.resolve().parent


def pack_job(job: Job, job_file: Path, root: Path) -> Package:
    """Pack a working directory for a job, and see that the job can be found in it.

    Args:
        job: As it was loaded, with relative paths as they were written.
        job_file: Its file.
        root: The working directory.

    Raises:
        SpecError: The directory cannot be packed, or what the job needs of it does not travel.
    """
    cache = job.data.cache.path
    task = TaskReference.parse(str(job.task)).file
    _check_checkpoints(job)
    package = pack(
        root,
        needed=[job_file, *([task] if task else [])],
        also=(root / cache,) if cache and _is_relative(str(cache)) else (),
    )
    _check_data(job, package)
    return package


def entrypoint(
    job_file: Path, root: Path, submission: str, *, overrides: Sequence[str], restarts: int
) -> str:
    """The shell command that runs a job in its unpacked package.

    >>> entrypoint(Path("/p/a b.yaml"), Path("/p"), "x-1", overrides=["steps=5"], restarts=2)
    "raycloud train 'a b.yaml' --run-dir ~/raycloud/runs/x-1 --restarts 2 --cards --set steps=5"
    """
    inner = (job_file.parent.resolve() / job_file.name).relative_to(root.resolve()).as_posix()
    named = inner if not inner.startswith("-") else f"./{inner}"
    words = [
        f"raycloud train {shlex.quote(named)} --run-dir {run_dir_of(submission)}",
        f"--restarts {restarts} --cards",
        *(f"--set {shlex.quote(override)}" for override in overrides),
    ]
    return " ".join(words)


def run_dir_of(submission: str) -> str:
    """Where the run of a submission is kept, as the shell there reads it."""
    return f"~/{RUNS}/{submission}"


def submission_id(name: str, unix_s: float, salt: str) -> str:
    """A name that sorts by time and is free: job, moment in UTC, and a few random letters.

    >>> submission_id("GPT small", 0.0, "ab12")
    'gpt-small-19700101-000000-ab12'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-") or "job"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(unix_s))}-{salt}"


def _check_checkpoints(job: Job) -> None:
    path = job.checkpoint.path
    if path is not None and _is_relative(path):
        raise SpecError(
            "checkpoint.path",
            path,
            "would lie in the unpacked package, which Ray removes",
            hint="write a path of the cluster from its root or a URL, or leave it out: checkpoints "
            f"are then kept in ~/{RUNS} there",
        )


def _check_data(job: Job, package: Package) -> None:
    path = job.data.path
    if path is None or not _is_relative(str(path)):
        return
    inner = Path(path).as_posix().removeprefix("./").rstrip("/")
    if any(f.path == inner or f.path.startswith(f"{inner}/") for f in package.survey.files):
        return
    reason = package.survey.why_left(inner) or package.survey.why_left(f"{inner}/")
    raise SpecError(
        "data.path",
        str(path),
        f"is a place on this machine that does not travel: {reason or 'not in the working dir'}",
        hint="put the data where the cluster reads it, and write that path or URL",
    )


def _is_relative(location: str) -> bool:
    """Whether a location starts at the current directory."""
    if "://" in location or "::" in location:
        return False
    return not (location.startswith("~") or Path(location).is_absolute())
