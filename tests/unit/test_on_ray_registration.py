"""What a cluster is told of a run, and what is read out of its list of jobs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from ray.dashboard.modules.job.common import JobStatus
from ray.dashboard.modules.job.pydantic_models import DriverInfo, JobDetails, JobType

from raycloud.clock import VirtualClock
from raycloud.on_ray.jobs_api import ClusterRun, _command_of, _run_of
from raycloud.on_ray.registration import ASKED, Registration, _Log
from raycloud.report.run_status import RunStatus, to_line
from tests.lockstep import job

SAID = Registration(
    run="one", job="gpt", directory="/runs/one", log="raycloud-one-7.log", python="/venv/bin/python"
)
CARD = RunStatus(run="two", job="gpt", status="running", t=5.0, step=6, directory="/runs/two")


def details(
    *,
    submitted: bool = True,
    status: JobStatus = JobStatus.RUNNING,
    metadata: dict[str, str] | None = None,
    entrypoint: str = "python other.py",
) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION if submitted else JobType.DRIVER,
        job_id="01000000",
        submission_id="raysubmit_x" if submitted else None,
        driver_info=DriverInfo(id="01000000", node_ip_address="10.0.0.1", pid="7"),
        status=status,
        entrypoint=entrypoint,
        start_time=2000,
        metadata=metadata,
        runtime_env={"working_dir": "gcs://x.zip"},
    )


def found(one: JobDetails) -> ClusterRun:
    run = _run_of(one)
    assert run is not None
    return run


def test_registration_travels_as_metadata() -> None:
    metadata = SAID.to_metadata()
    assert all(isinstance(text, str) for text in metadata.values())
    assert Registration.from_metadata({**metadata, "job_submission_id": "x"}) == SAID
    assert Registration.from_metadata({"job_submission_id": "x"}) is None
    assert Registration.from_metadata({ASKED: "x"}) is None


def test_the_name_of_a_log_is_a_file_name() -> None:
    said = Registration.of(job(), Path("/runs/a b/../ü:" + "x" * 200))
    assert said.log.startswith("raycloud-")
    assert said.log.isascii()
    assert "/" not in said.log
    assert len(said.log) < 120
    assert said.directory.startswith("/runs/")


@pytest.mark.parametrize(
    ("one", "mine"),
    [
        (details(metadata=SAID.to_metadata()), True),
        (details(submitted=False, metadata=SAID.to_metadata()), True),
        (details(entrypoint="raycloud train job.yaml"), True),
        (details(entrypoint="/venv/bin/raycloud  train 'a b.yaml' --cards"), True),
        (details(entrypoint="raycloud trainer"), False),
        (details(entrypoint="python -m raycloudy train"), False),
        (details(submitted=False, entrypoint="raycloud train job.yaml"), False),
        (details(entrypoint="echo; exec raycloud train", metadata={ASKED: "x"}), False),
        (details(), False),
    ],
)
def test_which_jobs_are_runs(one: JobDetails, mine: bool) -> None:
    assert (_run_of(one) is not None) == mine


def test_a_job_as_a_run() -> None:
    run = found(details(metadata=SAID.to_metadata()))
    assert (run.id, run.submitted, run.alive, run.node_ip) == (
        "raysubmit_x",
        True,
        True,
        "10.0.0.1",
    )
    assert (run.name, run.directory, run.started_t) == ("one", "/runs/one", 2.0)
    assert run.runtime_env == {"working_dir": "gcs://x.zip"}
    driver = found(details(submitted=False, metadata=SAID.to_metadata()))
    assert (driver.id, driver.submitted) == ("01000000", False)


@pytest.mark.parametrize(
    ("status", "alone", "with_card"),
    [
        (JobStatus.PENDING, "waiting", "running"),
        (JobStatus.RUNNING, "starting", "running"),
        (JobStatus.STOPPED, "stopped", "killed"),
        (JobStatus.SUCCEEDED, "ended", "killed"),
        (JobStatus.FAILED, "failed", "killed"),
    ],
)
def test_a_card_is_corrected_by_whether_the_job_lives(
    status: JobStatus, alone: str, with_card: str
) -> None:
    from dataclasses import replace

    run = found(details(status=status, metadata=SAID.to_metadata()))
    clock = VirtualClock(9.0)
    card = run.standing(clock)
    assert (card.status, card.run, card.t) == (alone, "one", 9.0)
    told = replace(run, card=CARD)
    assert told.standing(clock).status == with_card
    assert (told.name, told.directory) == ("two", "/runs/two")
    ended = replace(run, card=replace(CARD, status="finished"))
    assert ended.standing(clock).status == "finished"


def test_a_run_is_asked_with_what_it_was_started_with() -> None:
    here = found(details(metadata=SAID.to_metadata()))
    assert _command_of(here)[0] == "/venv/bin/python"
    for entrypoint, words in (
        ("raycloud train a --run-dir ~/x", ["raycloud"]),
        ("/v/bin/raycloud train a", ["/v/bin/raycloud"]),
        ("python -m raycloud.cli train a", ["python", "-m", "raycloud.cli"]),
    ):
        said = {"raycloud.job": "gpt"}
        assert _command_of(found(details(entrypoint=entrypoint, metadata=said))) == words


def test_cards_come_more_rarely_as_a_log_grows() -> None:
    clock, file = VirtualClock(), io.StringIO()
    log = _Log(file, clock)
    line = to_line(CARD)

    def written() -> int:
        before = file.tell()
        log.card(line)
        return file.tell() - before

    assert written() == len(line) + 1
    assert written()  # as often as they come, as long as the log is small
    log.note("x" * (3 << 20))
    clock.advance(14.0)
    assert not written()
    clock.advance(1.0)
    assert written()
    last = to_line(CARD.after_end())
    log.card(last)  # the last word is always written
    assert file.getvalue().endswith(f"{last}\n")
    assert '"status":"killed"' in file.getvalue()
