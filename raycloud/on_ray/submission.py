"""Ray's Jobs API: sending a working directory, following a job's log, and how a job ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import requests
from ray.exceptions import AuthenticationError

from raycloud.clock import Clock, SystemClock
from raycloud.errors import JobError, MachineError, RaycloudError
from raycloud.on_ray.jobs_client import TOKEN_HINT, TUNNEL_HINT, JobsClient, endpoint
from raycloud.packing.working_dir import copied
from raycloud.spec import Environment

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

    from raycloud.packing.working_dir import WorkingDir

_SERVER_ERROR = 500
_FAREWELLS = 3  # turns of a loop, in which an encrypted connection that was closed is let go
_MACHINE, _STOPPED = 3, 130
_STOP_S = 300  # how long a stopped job may take to write its checkpoint before it is killed
_QUIET = logging.getLogger("raycloud.packing")
_NOT_FOUND = 127  # what a shell says of a command that is not there


def client(address: str | None, *, insecure: bool = False) -> JobsClient:
    """A client of the Jobs API at an address that may be spoken to, once it has answered.

    Raises:
        SpecError: As `endpoint`.
        JobError: It refuses the token, or wants one.
        MachineError: Nobody answers, or something else than a Jobs API.
    """
    where = endpoint(address, insecure=insecure)
    with speaking(where.url):
        return JobsClient(where)


@contextlib.contextmanager
def speaking(url: str) -> Iterator[None]:
    """Turns what Ray's client raises into errors that say whose fault it is."""
    try:
        yield
    except RaycloudError:
        raise
    except AuthenticationError:  # by Ray's client itself, before it asks
        raise JobError(
            f"RAY_AUTH_MODE is token, and there is no token to show to the cluster at {url}",
            hint=TOKEN_HINT,
        ) from None
    except (aiohttp.ClientError, requests.RequestException, OSError) as error:
        raise MachineError(
            f"no Jobs API answers at {url}: {_why(error)}",
            hint="the head's dashboard answers there (port 8265), where ray[default] is installed; "
            f"from outside, {TUNNEL_HINT}",
        ) from error
    except RuntimeError as error:
        raise MachineError(
            f"the Jobs API at {url} failed: {str(error).partition(chr(10))[0]}",
            hint="look for dashboard.log and job logs on the head",
        ) from error


def packed_by_ray(root: Path, stays: Callable[[Path], bool]) -> Iterator[Path]:
    """The files below a working directory that Ray packs, by its ignore files and its defaults."""
    # Private: Ray tells nowhere what it packs. `test_what_is_checked_is_what_ray_packs` holds it.
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found: list[Path] = []
    defaults = _get_excludes(root, ray_constants.get_runtime_env_default_excludes())
    setting = ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE
    ignores = Environment.from_process().variables.get(setting) != "1"
    _dir_travel(root, [defaults, stays], found.append, include_gitignore=ignores, logger=_QUIET)
    return (path for path in found if path.is_file())


def submit(
    jobs: JobSubmissionClient,
    working_dir: WorkingDir,
    *,
    submission_id: str,
    entrypoint: str,
    metadata: dict[str, str],
) -> str:
    """Send a copy of a working directory, and start its job; returns the submission's id.

    Raises:
        JobError: The token is refused.
        MachineError: The cluster does not take it.
        SpecError: As `copied`.
    """
    with copied(working_dir) as copy, speaking(jobs.get_address()):
        return str(
            jobs.submit_job(
                submission_id=submission_id,
                entrypoint=entrypoint,
                metadata=metadata,
                runtime_env={
                    "working_dir": str(copy),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S)},
                },
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How a job is looked after while its cluster comes and goes.

    Attributes:
        gone_s: How long the cluster may be gone: seconds from the first failure after which nothing
            more has come.
        again_s: Before the next look.
        soon_s: The same, while the log goes on.
    """

    gone_s: float = 30.0
    again_s: float = 1.0
    soon_s: float = 0.1


PATIENCE = Patience()


class Watch:
    """One look at a cluster after the other, of which some may fail."""

    def __init__(self, url: str, patience: Patience, clock: Clock) -> None:
        self._url, self._patience, self._clock = url, patience, clock
        self._gone_t: float | None = None
        self._heard_t = -math.inf

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Around a look: what another one may mend is passed over, until patience ends.

        Raises:
            JobError: As `speaking`.
            MachineError: As `speaking`, where the cluster says that it cannot be, or is gone.
        """
        began_t = self._clock.monotonic_s()
        try:
            with speaking(self._url):
                yield
        except MachineError as error:
            now_t, gone_s = self._clock.monotonic_s(), self._patience.gone_s
            if self._heard_t >= began_t and now_t - self._heard_t >= gone_s:
                self._gone_t = None  # it was there, and had nothing to say
            self._gone_t = now_t if self._gone_t is None else self._gone_t
            if _is_final(error) or now_t - self._gone_t >= gone_s:
                raise

    def heard(self, *, news: bool = False) -> None:
        """It answers in this look; after news the next failure is a first one."""
        self._heard_t = self._clock.monotonic_s()
        if news:
            self._gone_t = None

    def rest(self, *, soon: bool = False) -> None:
        """Wait for the next look."""
        threading.Event().wait(self._patience.soon_s if soon else self._patience.again_s)


def log_lines(
    jobs: JobSubmissionClient, job_id: str, *, patience: Patience = PATIENCE
) -> Iterator[str]:
    """The lines of a job's log, from its beginning, as they come, until the job has ended.

    A connection that breaks is made again, and no line comes twice.

    Raises:
        JobError: The token is refused.
        MachineError: The job is not there, or the cluster is gone for `patience.gone_s`.
    """
    watch = Watch(jobs.get_address(), patience, SystemClock())
    told, rest = 0, ""
    while True:
        met, before = 0, told
        with watch.look():
            ended = jobs.get_job_status(job_id).is_terminal()
            watch.heard()
            for chunk in _chunks(jobs.tail_job_logs(job_id)):
                new, met = chunk[max(0, told - met) :], met + len(chunk)
                told = max(told, met)
                watch.heard(news=bool(new))
                *lines, rest = (rest + new).split("\n")
                yield from lines
            if ended:
                break
            watch.heard(news=True)
        watch.rest(soon=told > before)
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
        for _ in range(_FAREWELLS):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def outcome(jobs: JobSubmissionClient, job_id: str, *, patience: Patience = PATIENCE) -> JobDetails:
    """How a job ended, once it has; raises as `log_lines` does."""
    watch = Watch(jobs.get_address(), patience, SystemClock())
    while True:
        with watch.look():
            details = jobs.get_job_info(job_id)
            if details.status.is_terminal():
                return details
            watch.heard(news=True)
        watch.rest()


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


def _is_final(error: MachineError) -> bool:
    """Whether asking again is in vain: it is refused there, or the certificate is refused here."""
    status = getattr(error.__cause__, "status", _SERVER_ERROR)  # of an `AnswerError`
    broken = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    root = _root(error)
    refused = isinstance(root, ssl.SSLError) and not isinstance(root, broken)
    return refused or status < _SERVER_ERROR


def _why(error: BaseException) -> str:
    """What an error came from, in a line."""
    root = _root(error)
    lines = str(root).strip().splitlines()
    return lines[-1].strip() if lines else type(root).__name__


def _root(error: BaseException) -> BaseException:
    """What an error came from: libraries wrap it several times."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return error
