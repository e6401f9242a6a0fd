"""A job made ready to be sent: its package, the command that runs it there, its id."""

from __future__ import annotations

import itertools
import os.path
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import SpecError
from raycloud.packing.archive import Package, pack
from raycloud.spec.load import overriding_secrets, written_secrets
from raycloud.spec.mistakes import Mistake, refusal
from raycloud.spec.secrets import literal
from raycloud.spec.task_reference import TaskReference

if TYPE_CHECKING:
    from raycloud.spec.job import Job

RUNS = "raycloud/runs"  # below the home directory of the node that runs the driver

_LONGEST_NAME = 40
_PATTERN = re.compile(r"[*?\[]")


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
        job: As it was loaded, with relative paths as they were written, and `${NAME}` for secrets.
        job_file: Its file.
        root: The working directory.

    Raises:
        SpecError: The job or its file holds a secret; the directory cannot be packed, or what the
            job needs of it does not travel.
    """
    _check_secrets([*literal(job.model_dump()), *written_secrets(job_file)])
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

    Raises:
        SpecError: One of the overrides holds a secret.

    >>> entrypoint(Path("/p/a b.yaml"), Path("/p"), "x-1", overrides=["steps=5"], restarts=2)
    "raycloud train 'a b.yaml' --run-dir ~/raycloud/runs/x-1 --restarts 2 --cards --set steps=5"
    """
    _check_secrets(overriding_secrets(overrides))
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


def _check_secrets(found: Iterable[tuple[str, str]]) -> None:
    """Refuse a job that holds a secret itself.

    Raises:
        SpecError: For these fields, given with what may be shown of them.
    """
    if fields := dict(found):
        raise refusal(
            [
                Mistake(
                    field=field,
                    value=shown,
                    problem="holds a secret, which anyone could read on the cluster: in the job "
                    "file that travels, or in the command that runs there",
                    hint="write ${NAME} in its place, and set NAME in the environment that the "
                    "cluster's head is started in; if it is part of a longer text, let the task "
                    "read it from there",
                )
                for field, shown in fields.items()
            ]
        )


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
    inner = _before_pattern(path)
    folder = f"{inner}/" if inner else ""
    if any(f"{file.path}/".startswith(folder) for file in package.survey.files):
        return
    reason = package.survey.why_left(inner) or package.survey.why_left(f"{inner}/")
    raise SpecError(
        "data.path",
        str(path),
        f"is a place on this machine that does not travel: {reason or 'not in the working dir'}",
        hint="put the data where the cluster reads it, and write that path or URL",
    )


def _before_pattern(path: str) -> str:
    """The folder or file that a relative path begins with, before what is a pattern.

    >>> _before_pattern("./rows/a.csv"), _before_pattern("rows/*/a.csv"), _before_pattern("*.csv")
    ('rows/a.csv', 'rows', '')
    >>> _before_pattern(".")
    ''
    """
    parts = Path(os.path.normpath(path)).parts  # of `.`, none
    return "/".join(itertools.takewhile(lambda part: not _PATTERN.search(part), parts))


def _is_relative(location: str) -> bool:
    """Whether a location starts at the current directory."""
    if "://" in location or "::" in location:
        return False
    return not (location.startswith("~") or Path(location).is_absolute())
