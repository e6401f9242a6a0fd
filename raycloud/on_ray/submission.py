"""Ray's Jobs API: sending a package, following a job's log, and how a job ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import JobError, MachineError, RaycloudError
from raycloud.on_ray.endpoint import TOKEN_HINT, TUNNEL_HINT, endpoint

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

    from raycloud.on_ray.jobs_client import JobsClient

_AGAIN_S, _SOON_S = 1.0, 0.1
_TRIES = 30
_MACHINE, _STOPPED = 3, 130
_NOT_FOUND = 127  # what a shell says of a command that is not there


def client(address: str | None, *, insecure: bool = False) -> JobsClient:
    """A client of the Jobs API at an address that may be spoken to, once it has answered.

    Raises:
        SpecError: As `endpoint`.
        JobError: It refuses the token, or wants one.
        MachineError: Nobody answers, or no Jobs API.
    """
    where = endpoint(address, insecure=insecure)
    with speaking(where.url):
        from raycloud.on_ray.jobs_client import JobsClient

        return JobsClient(where)


@contextlib.contextmanager
def speaking(url: str) -> Iterator[None]:
    """Turns what Ray's client raises into errors that say whose fault it is.

    Args:
        url: Who is spoken to.
    """
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except RaycloudError:
        raise
    except AuthenticationError as error:
        wanted = "required" in str(error).partition("\n")[0]
        raise JobError(
            f"the cluster at {url} asks for a token, and got none"
            if wanted
            else f"the cluster at {url} refuses this token",
            hint=TOKEN_HINT if wanted else "it is another cluster's: " + TOKEN_HINT,
        ) from None
    except (ConnectionError, requests.RequestException, OSError) as error:
        raise MachineError(
            f"no Jobs API answers at {url}",
            hint="the head's dashboard answers there (port 8265), where ray[default] is installed; "
            f"from outside, {TUNNEL_HINT}",
        ) from error
    except RuntimeError as error:
        raise MachineError(
            f"the Jobs API at {url} failed: {str(error).partition(chr(10))[0]}",
            hint="look for dashboard.log and job logs on the head",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What is submitted.

    Attributes:
        id: The submission's id.
        entrypoint: The shell command that the head runs in the unpacked package.
        package: The archive of the working directory.
        metadata: Kept by Ray beside the job, for `status`.
        stop_s: How long a stopped job may take to write its checkpoint before it is killed.
    """

    id: str
    entrypoint: str
    package: Path
    metadata: dict[str, str]
    stop_s: int = 300


def submit(jobs: JobSubmissionClient, submission: Submission) -> str:
    """Send the package as it is and start the job; returns its id.

    Raises:
        JobError: The token is refused.
        MachineError: The cluster does not take it.
    """
    with speaking(jobs.get_address()):
        return str(
            jobs.submit_job(
                submission_id=submission.id,
                entrypoint=submission.entrypoint,
                metadata=submission.metadata,
                runtime_env={
                    # An archive that is there already: Ray packs nothing, and adds nothing.
                    "working_dir": str(submission.package),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(submission.stop_s)},
                },
            )
        )


def log_lines(jobs: JobSubmissionClient, job_id: str) -> Iterator[str]:
    """The lines of a job's log, from its beginning, as they come, until the job has ended.

    A connection that breaks is made again, and no line comes twice.

    Raises:
        JobError: The token is refused.
        MachineError: The job is not there, or the cluster is gone for half a minute.
    """
    import aiohttp

    told, failures, rest = 0, 0, ""
    while True:
        with speaking(jobs.get_address()):
            ended = jobs.get_job_status(job_id).is_terminal()
        met, before = 0, told
        try:
            for chunk in _chunks(jobs.tail_job_logs(job_id)):
                new, met = chunk[max(0, told - met) :], met + len(chunk)
                if new:
                    told, failures = met, 0
                *lines, rest = (rest + new).split("\n")
                yield from lines
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            failures += 1
            if failures > _TRIES:
                raise MachineError(f"the log of {job_id} broke off: {error}") from error
        else:
            if ended:
                break
        threading.Event().wait(_SOON_S if told > before else _AGAIN_S)
    if rest:
        yield rest


def _chunks(tail: AsyncIterator[str]) -> Iterator[str]:
    """An asynchronous iterator's values, in this thread."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(tail))
            except StopAsyncIteration:
                return
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(tail.aclose())  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def outcome(jobs: JobSubmissionClient, job_id: str) -> JobDetails:
    """How a job ended, once it has.

    Raises:
        MachineError: The cluster does not answer.
    """
    while True:
        with speaking(jobs.get_address()):
            details = jobs.get_job_info(job_id)
        if details.status.is_terminal():
            return details
        threading.Event().wait(_AGAIN_S)


def exit_code(details: JobDetails) -> int:
    """The exit code of a job that has ended: its driver's, where that ended by itself.

    Raises:
        MachineError: The driver never ran, or died with the cluster.
    """
    code = details.driver_exit_code
    if code == _NOT_FOUND:
        raise MachineError(
            "the head has no `raycloud` on its PATH",
            hint="install the same version there, in the environment that runs `ray start`",
        )
    match details.status.value:
        case "SUCCEEDED":
            return 0
        case "STOPPED":
            return _STOPPED
        case _ if code is not None:
            return code if code >= 0 else _MACHINE
        case _:
            said = (details.message or "the cluster does not say why").strip()
            raise MachineError(f"the job failed before its driver ended: {said}")
