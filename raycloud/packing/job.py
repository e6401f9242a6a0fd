"""A job made ready for a cluster: what must not be sent, what must travel, its command, its id."""

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
from raycloud.packing.working_dir import Walk, WorkingDir, survey
from raycloud.spec.job import TaskReference
from raycloud.spec.load import overriding_secrets, written_secrets
from raycloud.spec.mistakes import combined, mistake
from raycloud.spec.secrets import literal

if TYPE_CHECKING:
    from raycloud.spec.job import Job

RUNS = "raycloud/runs"  # below the home directory of the node that runs the driver

_LONGEST_NAME = 40
_PATTERN = re.compile(r"[*?\[]")


def working_dir_of(job_file: Path, asked: Path | None) -> Path:
    """The directory that travels: the one asked for, else the current one or the job's.

    Relative paths in a job start at the current directory, so that one comes first.
    """
    if asked is not None:
        return asked
    here = Path.cwd()
    return here if job_file.resolve().is_relative_to(here) else job_file.resolve().parent


def survey_for(job: Job, job_file: Path, root: Path, walk: Walk) -> WorkingDir:
    """Look through a working directory, and see that the job can be found in it.

    `job` is as it was loaded: relative paths as they were written, and `${NAME}` for secrets.

    Raises:
        SpecError: The job or its file holds a secret; the directory cannot travel, or what the job
            needs of it does not.
    """
    _check_secrets([*literal(job.model_dump()), *written_secrets(job_file)])
    path = job.checkpoint.path
    if path is not None and _is_relative(path):
        raise SpecError(
            "checkpoint.path",
            path,
            "would lie in the unpacked package, which Ray removes",
            hint="write a path of the cluster from its root or a URL, or leave it out: checkpoints "
            f"are then kept in ~/{RUNS} there",
        )
    cache = job.data.cache.path
    also = {(root / cache).resolve()} if cache and _is_relative(str(cache)) else set()
    found = survey(root, walk, also=also)
    task = TaskReference.parse(str(job.task)).file
    for needed in (job_file, *([task] if task else [])):
        check_travels(needed, found)
    _check_data(job, found)
    return found


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
    command = f"raycloud train {shlex.quote(named)} --run-dir {run_dir_of(submission)}"
    settings = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    return f"{command} --restarts {restarts} --cards{settings}"


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
    """Refuse a job that holds a secret itself, in these fields, given with what may be shown."""
    problem = (
        "holds a secret, which anyone could read on the cluster: in the job file that travels, or "
        "in the command that runs there"
    )
    hint = (
        "write ${NAME} in its place, and set NAME in the environment that the cluster's head is "
        "started in; if it is part of a longer text, let the task read it from there"
    )
    mistakes = [mistake(field, shown, problem, hint) for field, shown in dict(found).items()]
    if mistakes:
        raise combined(mistakes)


def check_travels(path: Path, found: WorkingDir) -> None:
    """See that a file travels that the job cannot start without."""
    place = path.absolute()
    resolved = place.parent.resolve() / place.name  # a link keeps its own name
    if not resolved.is_relative_to(found.root):
        raise SpecError(
            "--working-dir",
            str(found.root),
            f"does not hold {place}, which the job needs",
            hint="name a directory that holds both with --working-dir",
        )
    inner = resolved.relative_to(found.root).as_posix()
    if inner in found.sizes:
        return
    reason = found.why_left(inner)
    raise SpecError(
        "--working-dir",
        inner,
        f"is needed by the job and does not travel: {reason}",
        hint="take the secret out of it and read it from the environment"
        if "looks like" in reason
        else "rename it, or take it out of the ignore file",
    )


def _check_data(job: Job, found: WorkingDir) -> None:
    path = job.data.path
    if path is None or not _is_relative(str(path)):
        return
    inner = _before_pattern(path)
    folder = f"{inner}/" if inner else ""
    if any(f"{name}/".startswith(folder) for name in found.sizes):
        return
    outside = inner.startswith("..") or not (found.root / inner).exists()
    raise SpecError(
        "data.path",
        str(path),
        "is a place on this machine that does not travel: "
        + ("not in the working dir" if outside else found.why_left(inner)),
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
