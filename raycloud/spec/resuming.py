"""Whether a start goes on with a run that is there: must, allow or never.

| | no run there | a run with a checkpoint | a run without a checkpoint |
|---|---|---|---|
| never | begins | refuses, and names the command that goes on | refuses |
| allow | begins | goes on | sets its files aside and begins again |
| must | refuses | goes on | refuses |

On a cluster, workers that have outlived the command that drove them are as good as a checkpoint.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from raycloud.errors import RunDirectoryError, SpecError
from raycloud.spec.rundir import ASIDE, RunDirectory

Resume = Literal["must", "allow", "never"]

RESUMES: tuple[str, ...] = get_args(Resume)


def resume_word(asked: bool | str) -> Resume:  # noqa: FBT001 - Python says `resume=True`
    """What a caller asks for, as one of the three words.

    >>> resume_word(True), resume_word(False), resume_word("allow")
    ('must', 'never', 'allow')

    Raises:
        SpecError: It is none of them.
    """
    match asked:
        case True | "must":
            return "must"
        case False | "never":
            return "never"
        case "allow":
            return "allow"
        case _:
            raise SpecError(
                "resume", asked, "is not a way to resume", hint=f"give {', '.join(RESUMES)}"
            )


def goes_on(
    run_dir: str | Path | None, resume: Resume, saved: Callable[[RunDirectory], bool]
) -> bool:
    """Whether a start goes on with the run in `run_dir`; what stands in the way is set aside.

    Args:
        run_dir: The place asked for.
        resume: What is asked.
        saved: Whether a run has a checkpoint to go on from; asked only where it matters.

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
