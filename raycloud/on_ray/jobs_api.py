"""Runs on a cluster, through Ray's Jobs API: which there are, how they stand, what they log, stop.

Everything goes over HTTP with the cluster's token; nothing of a run is loaded here but text.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raycloud.errors import JobError, MachineError, RunDirectoryError
from raycloud.on_ray.registration import ASKED, Registration
from raycloud.on_ray.submission import (
    PATIENCE,
    AnswerError,
    Patience,
    client,
    log_lines,
    outcome,
    speaking,
)
from raycloud.report.run_status import RunStatus, parse_line

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

    from raycloud.clock import Clock

ENDED_CARDS = 20  # of runs that have ended, the newest so many are asked for their last card
_AT_ONCE = 8  # logs that are read at the same time
_TAIL_LINES = 400  # within them the newest card is looked for
_FOLLOW_S = 0.5  # between looks at a log that grows
_TIMEOUT_S = 10
_ANSWER = "raycloud-answer"  # above it in a job's log are Ray's own words
_MAIN = "from raycloud.cli import main; main()"
_TRAINS = re.compile(r"\braycloud\b +train\b")
_STATES = {
    "PENDING": "waiting",
    "RUNNING": "starting",
    "STOPPED": "stopped",
    "SUCCEEDED": "ended",
    "FAILED": "failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRun:
    """A run on a cluster.

    Attributes:
        id: Ray's name for its job: a submission's id, or a driver's job id.
        submitted: Whether the cluster started it; else someone did, with an address.
        state: Ray's word for how its job stands.
        said: What its job's metadata says of it.
        node_ip: The driver's node; empty before it has started.
        node_id: Ray's name for the node that keeps the log of a submitted run; empty before it has
            started.
        card: How it stood when it last said so; None: it has not.
        unread: Why its log cannot be read; empty where it was, or was not asked for.
    """

    id: str
    submitted: bool
    alive: bool
    state: str
    said: Registration
    entrypoint: str
    node_ip: str
    runtime_env: dict[str, Any]
    started_t: float | None
    node_id: str = ""
    card: RunStatus | None = None
    unread: str = ""

    @property
    def name(self) -> str:
        """The name of its run directory, as far as it is known."""
        return (self.card.run if self.card else "") or self.said.run

    @property
    def directory(self) -> str:
        """Its run directory, on the driver's node."""
        return (self.card.directory if self.card else "") or self.said.directory

    def standing(self, clock: Clock) -> RunStatus:
        """How it stands: its last card, corrected by whether its job is still alive."""
        if self.card is None:
            state = _STATES.get(self.state, self.state.lower())
            return RunStatus(
                run=self.name,
                job=self.said.job,
                status="unreadable" if self.alive and self.unread else state,
                t=clock.unix_s(),
                error=self.unread or None,
                directory=self.directory,
            )
        return self.card if self.alive else self.card.after_end()


class JobsApi:
    """The runs of one cluster, asked through a client that has been answered."""

    def __init__(self, jobs: JobSubmissionClient) -> None:
        self._jobs = jobs

    @classmethod
    def at(cls, address: str | None, *, insecure: bool = False) -> JobsApi:
        """That of the cluster at an address; raises as `submission.client` does."""
        return cls(client(address, insecure=insecure))

    @property
    def address(self) -> str:
        """Its URL."""
        return str(self._jobs.get_address())

    def runs(self) -> list[ClusterRun]:
        """All runs that the cluster knows, the newest first, without their cards."""
        with speaking(self.address):
            found = [_run_of(details) for details in self._jobs.list_jobs()]
        runs = [run for run in found if run is not None]
        return sorted(runs, key=lambda run: run.started_t or 0.0, reverse=True)

    def find(self, name: str) -> ClusterRun:
        """The run with this id, or the newest with this name or run directory.

        Raises:
            RunDirectoryError: There is none.
        """
        runs = self.runs()
        for run in runs:
            if name in {run.id, run.name, run.directory} - {""}:
                return self.with_card(run)
        known = ", ".join(run.id for run in runs[:5]) or "it knows no runs"
        raise RunDirectoryError(
            f"the cluster at {self.address} knows no run {name!r}",
            hint=f"`raycloud status` lists them; the newest: {known}",
        )

    def with_card(self, run: ClusterRun) -> ClusterRun:
        """The same run with the newest card in the end of its log, or why that cannot be read."""
        try:
            lines = self.log(run, lines=_TAIL_LINES)
        except MachineError as error:
            return replace(run, unread=f"its log cannot be read: {error.message}")
        cards = (parse_line(line) for line in reversed(lines))
        card = next((card for card in cards if card is not None), None)
        return run if card is None else replace(run, card=card)

    def with_cards(self, runs: Sequence[ClusterRun]) -> list[ClusterRun]:
        """The same runs in their order, as `with_card`: those that live first, several at a time.

        Of those that have ended, the first `ENDED_CARDS` are asked; the others come as they are.
        """
        alive = [run for run in runs if run.alive]
        ended = [run for run in runs if not run.alive][:ENDED_CARDS]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = {run.id: run for run in threads.map(self.with_card, [*alive, *ended])}
        return [found.get(run.id, run) for run in runs]

    def log(self, run: ClusterRun, *, lines: int = -1) -> list[str]:
        """The last lines of a run's log, all of them with -1; none where it has no log yet."""
        with speaking(self.address):
            if run.submitted and lines < 0:  # there Ray sets no limit to how long all of it takes
                text = str(self._jobs.get_job_logs(run.id))
            else:
                response = self._ask_log("file", run, lines)
                text = "" if response is None else response.content.decode(errors="replace")
        found = text.removesuffix("\n").split("\n") if text else []
        return found if lines < 0 else found[-lines:]

    def follow(self, run: ClusterRun, *, patience: Patience = PATIENCE) -> Iterator[str]:
        """The lines of a run's log from its beginning, as they come, until its job has ended.

        Raises:
            MachineError: As `log_lines`, or its log cannot be read.
        """
        if not run.submitted and not (run.said.log and run.node_ip):
            raise MachineError(
                f"{run.id} does not say where its log is", hint="it has just begun: ask again"
            )
        opened = None if run.submitted else partial(self._stream, run)
        for line in log_lines(self._jobs, run.id, opened=opened, patience=patience):
            yield line
            if not run.submitted and (card := parse_line(line)) and card.has_ended:
                return

    def _stream(self, run: ClusterRun) -> Iterator[str]:
        """The text of a driver's log, until it breaks or is long silent."""
        import requests

        with self._ask_log("stream", run, -1) as response:
            response.encoding = "utf-8"
            with contextlib.suppress(requests.RequestException):
                yield from response.iter_content(None, decode_unicode=True)

    def stop(self, run: ClusterRun) -> None:
        """Ask a run to write a checkpoint and end; returns at once for one that was submitted.

        Raises:
            JobError: It has ended, or the cluster cannot reach its driver.
        """
        if not run.alive:
            raise JobError(f"{run.id} has ended already", hint="`raycloud status` shows how")
        if run.submitted:
            with speaking(self.address):
                self._jobs.stop_job(run.id)
            return
        self.asked(run, ["stop", run.directory])

    def asked(self, run: ClusterRun, words: list[str]) -> list[str]:
        """What `raycloud WORDS...` prints on the node of a run's driver.

        Raises:
            JobError: It cannot be asked there.
        """
        if not run.node_ip or not run.directory:
            raise JobError(
                f"{run.id} does not say where its run directory is",
                hint="ask on the machine of its driver, with the run directory",
            )
        with speaking(self.address):
            job_id = self._jobs.submit_job(
                entrypoint=f"echo {_ANSWER}; exec {shlex.join([*_command_of(run), *words])}",
                metadata={ASKED: run.id},
                runtime_env=run.runtime_env,
                entrypoint_resources={f"node:{run.node_ip}": 0.001},
            )
        answer = outcome(self._jobs, job_id)
        with speaking(self.address):
            text = str(self._jobs.get_job_logs(job_id))
        # Ray writes the command itself into the log, before what it prints or just after.
        own = f"Running entrypoint for job {job_id}:"
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(own))
        said = text.partition(_ANSWER + "\n")[2]
        if answer.driver_exit_code != 0:
            why = said.strip() or answer.message or "it ended without a word"
            raise JobError(f"`raycloud {words[0]}` on the node of {run.id} failed: {why}")
        return said.removesuffix("\n").split("\n") if said else []

    def _ask_log(self, media: str, run: ClusterRun, lines: int) -> Any:
        """The dashboard's answer about a run's log; None where it has none yet."""
        query: dict[str, str | int] = {"lines": lines, "timeout": _TIMEOUT_S}
        if run.submitted and run.node_id:
            query |= {"node_id": run.node_id, "submission_id": run.id}
        elif not run.submitted and run.said.log and run.node_ip:
            query |= {"node_ip": run.node_ip, "filename": run.said.log}
        else:
            return None
        if media == "stream":
            query["interval"] = str(_FOLLOW_S)
        # Ray's client has no public way to a file of a node: this is how its own `get_log` asks.
        response = self._jobs._do_request(  # noqa: SLF001
            "GET", f"/api/v0/logs/{media}", params=query, stream=media == "stream"
        )
        if not response.ok:
            raise AnswerError(response.status_code, response.text)
        return response


def _run_of(details: JobDetails) -> ClusterRun | None:
    """A job as a run; None where it is none of raycloud's."""
    metadata = dict(details.metadata or {})
    said = Registration.from_metadata(metadata)
    submitted = str(getattr(details.type, "value", details.type)) == "SUBMISSION"
    if said is None:
        if ASKED in metadata or not submitted or not _TRAINS.search(details.entrypoint):
            return None
        said = Registration(run="", job="", directory="")
    driver = details.driver_info
    state = str(getattr(details.status, "value", details.status))
    return ClusterRun(
        id=str(details.submission_id or details.job_id),
        submitted=submitted,
        alive=state in {"PENDING", "RUNNING"},
        state=state,
        said=said,
        entrypoint=details.entrypoint,
        node_ip=str(driver.node_ip_address) if driver else "",
        runtime_env=dict(details.runtime_env or {}),
        started_t=details.start_time / 1000 if details.start_time else None,
        node_id=str(details.driver_node_id or ""),
    )


def _command_of(run: ClusterRun) -> list[str]:
    """How `raycloud` is called where the run's driver is."""
    if run.said.python:
        return [run.said.python, "-c", _MAIN]
    words = shlex.split(run.entrypoint)
    return words[: words.index("train")] if "train" in words else ["raycloud"]
