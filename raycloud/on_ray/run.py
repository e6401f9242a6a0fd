"""`train`: from a job to a run, on a Ray that is there or one started here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

# It has hooks at a fork: Ray, that forks meanwhile, would call the latter half of them alone.
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.clock import SystemClock
from raycloud.errors import SpecError
from raycloud.redact import know
from raycloud.spec import (
    Environment,
    Job,
    Resume,
    RunDirectory,
    check_resume,
    choose,
    goes_on,
    resume_word,
)
from raycloud.spec.rundir import NothingSavedError
from raycloud.spec.secrets import filled, secrets_of

if TYPE_CHECKING:
    from raycloud.events import Observed
    from raycloud.on_ray.session import Run, Seats, StopSwitch


def train(  # noqa: PLR0913 - each is one thing a caller may want to say
    job: Job,
    *,
    run_dir: str | Path | None = None,
    address: str | None = None,
    resume: bool | Resume = False,
    observer: Callable[[Observed], None] | None = None,
    stop: StopSwitch | None = None,
    started_s: float | None = None,
    seats: Seats | None = None,
    only_steps: int | None = None,
) -> Run:
    """Train `job` to its end.

    Args:
        job: What is asked.
        run_dir: Where the run is kept; None makes a new place below `runs/`.
        address: A Ray cluster; None takes `RAY_ADDRESS`, else the Ray this process is attached to,
            else starts one here for the time of the run.
        resume: `must` or True: go on from the newest checkpoint of the run in `run_dir`, or with
            its workers where they have outlived the command that drove them. `allow`: do so if
            there is either, and begin otherwise. `never` or False: refuse if there is a run.
        observer: Called with every event as it happens, in this thread.
        stop: Asks the run to checkpoint and end; a `RunHandle` may also ask for other workers.
        started_s: `SystemClock().monotonic_s()` when the caller's command began; None: now.
        seats: Where workers get their places, e.g. those of a sweep; None: they are reserved.
        only_steps: End after this many, whatever the job's length; a later start may go on.

    Raises:
        JobError: What was asked cannot be done.
        MachineError: A member was lost, or the cluster has no room. What the run has left by then
            can be resumed.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s() if started_s is None else started_s
    asked, job = job, with_secrets(job)
    word = resume_word(resume)
    address = address or Environment.from_process().ray_address

    resumes = goes_on(run_dir, word, lambda run: _is_there(run, asked, job, address))
    directory = choose(run_dir, job.name, resume=resumes)
    try:
        if resumes:
            check_resume(directory.job(), asked)
        shown = observer or (lambda _: None)
        with imported(job) as ready, _registered(job, directory, address, shown) as see:
            task, code = ready()
            from raycloud.on_ray.launch import drive
            from raycloud.on_ray.session import Session

            return drive(
                Session(
                    job=job,
                    asked=asked,
                    task=task,
                    code=code,
                    directory=directory,
                    resume=resumes,
                    clock=clock,
                    began_s=began_s,
                    observer=see,
                    stop=stop,
                    seats=seats,
                    only_steps=only_steps,
                )
            )
    except NothingSavedError:
        if word != "allow":
            raise
        goes_on(run_dir, word, lambda _: False)  # sets its files aside
    finally:
        if not resumes:
            with contextlib.suppress(OSError):  # a run that never began leaves nothing
                directory.path.rmdir()
    return train(
        asked,
        run_dir=run_dir,
        address=address,
        observer=observer,
        stop=stop,
        started_s=began_s,
        seats=seats,
        only_steps=only_steps,
    )


@contextlib.contextmanager
def _registered(
    job: Job, directory: RunDirectory, address: str | None, observer: Callable[[Observed], None]
) -> Iterator[Callable[[Observed], None]]:
    """Attach to Ray; on a cluster, so that the run is found there and can be followed."""
    from raycloud.on_ray.attach import attached

    if address is None:
        with attached(job, None):
            yield observer
        return
    from raycloud.on_ray.registration import Registration, gauged, logged

    registration = Registration.of(job, directory.path)
    with (
        attached(job, address, registration.to_metadata()),
        logged(job, registration, SystemClock(), observer) as told,
        gauged(job, registration.run, SystemClock(), told) as see,
    ):
        yield see


@contextlib.contextmanager
def imported(job: Job) -> Iterator[Callable[[], Any]]:
    """Import torch and the user's task in a thread, while Ray starts in this one.

    Yields:
        A function that waits, and returns the task's class and its code, or raises what importing
        it raised.
    """

    def work() -> Any:
        tasks = importlib.import_module("raycloud.on_ray.tasks")
        contract = importlib.import_module("raycloud.step.contract")
        kind = tasks.resolve(job)
        contract.check_settings(kind, job)
        importlib.import_module("raycloud.worker.member")
        return kind

    with ThreadPoolExecutor(1, thread_name_prefix="imports") as threads:
        found = threads.submit(work)

        def ready() -> Any:
            kind = found.result()
            from raycloud.on_ray.tasks import code_of

            return kind, code_of(job, kind)

        yield ready


def with_secrets(job: Job) -> Job:
    """The job with the secrets that it names, which no text shows from now on.

    Raises:
        SpecError: It names one that the environment has not; or it was kept without one.
        JobError: It asks for a tracker that is not installed.
    """
    from raycloud.report.tracking import require

    require(job)
    environment = Environment.from_process()
    job = filled(job, environment.variables)
    know(environment.secrets | secrets_of(job))
    return job


def _is_there(run: RunDirectory, asked: Job, job: Job, address: str | None) -> bool:
    """Whether the run has a checkpoint, or workers that may have outlived their killed command."""
    from raycloud.checkpoint import open_store, steps

    if steps(open_store(job.checkpoint.path or run.checkpoints)):
        return True
    if address is None:
        return False
    try:
        check_resume(run.job(), asked)
    except SpecError:
        return False
    return not run.summary_json.exists()
