"""Tells trackers beside the run: each in a thread of its own, so that none of them holds it up."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import json_value, read_whole
from raycloud.errors import JobError
from raycloud.events import Noticed
from raycloud.redact import redact_text
from raycloud.report.tracking.mlflow_runs import MlflowTracker
from raycloud.report.tracking.seam import About, Numbers, Tracker, flat
from raycloud.report.tracking.wandb_runs import WandbTracker
from raycloud.spec.secrets import kept

if TYPE_CHECKING:
    from raycloud.spec.job import Job

FORMAT = 1
FILE = "tracking.json"

MOST_WAITING = 10_000
TRIES = 3
_GATHER_S = 1.0  # numbers of so long go in one call
_END_S = 20.0


def asked_for(job: Job) -> tuple[str, ...]:
    """The trackers that a job asks for; each is the name of a package and of an extra."""
    wanted = {
        "mlflow": job.tracking.mlflow.uri is not None,
        "wandb": job.tracking.wandb.mode != "off",
    }
    return tuple(name for name, is_asked in wanted.items() if is_asked)


def require(job: Job) -> None:
    """Refuse a job that asks for a tracker which is not installed.

    Raises:
        JobError: One is missing.
    """
    for name in asked_for(job):
        spec = importlib.util.find_spec(name)
        # Without an origin it is a mere folder of that name, such as W&B makes where a run starts.
        if spec is None or spec.origin is None:
            raise JobError(
                f"tracking.{name} asks for the package {name}, which is not installed",
                hint=f"install raycloud with its extra {name}, in a checkout `pip install "
                f"'.[{name}]'`; or leave tracking.{name} out",
            )


class Trackers:
    """All trackers of one start of a run.

    Args:
        job: What is asked, with its secrets.
        folder: The run directory.
        version: Of raycloud.
    """

    def __init__(self, job: Job, folder: Path, *, version: str) -> None:
        """Nobody is told anything before the first numbers."""
        self._file = folder / FILE
        self._known = _read(self._file)
        about = About(
            run=folder.resolve().name,
            job=job.name,
            asked=flat(kept(job.resolved()).model_dump(mode="json")),
            version=version,
        )
        self._tellers = [
            Teller(name, _made(name, job, folder), replace(about, known=self._known.get(name, "")))
            for name in asked_for(job)
        ]

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Numbers after `step` steps at unix second `t`. Returns at once."""
        for teller in self._tellers:
            teller.add(Numbers(t=t, step=step, values=dict(values)))

    def notices(self) -> list[Noticed]:
        """What went wrong since the last call; also keeps what trackers call the run.

        Raises:
            OSError: That cannot be written.
        """
        found = [notice for teller in self._tellers for notice in teller.notices()]
        names = {teller.name: teller.called for teller in self._tellers if teller.called}
        if names and not names.items() <= self._known.items():
            self._known |= names
            _write(self._file, self._known)
        return found

    def close(self, status: str, *, wait_s: float = _END_S) -> list[Noticed]:
        """Tell how the run ended; waits at most `wait_s` for each tracker to take in the rest."""
        for teller in self._tellers:
            teller.finish(status)
        for teller in self._tellers:
            teller.join(wait_s)
        return self.notices()


class Teller:
    """Tells one tracker, in a thread of its own.

    What fails is tried again with the next numbers, and given up after 3 failures in a row.

    Args:
        name: Of the tracker, for notices.
        tracker: Who is told.
        about: What it is told first.
    """

    def __init__(self, name: str, tracker: Tracker, about: About) -> None:
        """The thread starts with the first numbers: it imports the tracker's package."""
        self.name = name
        self.called = ""
        self._tracker, self._about = tracker, about
        self._waiting: deque[Numbers] = deque()
        self._news = threading.Condition()
        self._notices: deque[Noticed] = deque()
        self._status: str | None = None
        self._left_out = 0
        self._failures = 0
        self._thread: threading.Thread | None = None

    def add(self, numbers: Numbers) -> None:
        """Put numbers into the queue; the oldest go where it is full."""
        with self._news:
            if self._failures >= TRIES:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self._left_out += 1
            self._waiting.append(numbers)
            if self._thread is None:
                name = f"tracker-{self.name}"
                self._thread = threading.Thread(target=self._tell, name=name, daemon=True)
                self._thread.start()
            self._news.notify_all()

    def finish(self, status: str) -> None:
        """Nothing comes any more."""
        with self._news:
            self._status = status
            self._news.notify_all()

    def join(self, wait_s: float) -> None:
        """Wait until it is told all; what it is not told by then is a notice."""
        if self._thread is None:
            return
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._notice("did not take in all numbers before the run ended", waited_s=wait_s)
        if self._left_out:
            self._notice("was too slow for all numbers", left_out=self._left_out)

    def notices(self) -> list[Noticed]:
        """What went wrong since the last call."""
        found = []
        while self._notices:
            found.append(self._notices.popleft())
        return found

    def _tell(self) -> None:
        batch: list[Numbers] = []
        while self._failures < TRIES:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._status is not None)
                if self._status is None:  # let some more come
                    self._news.wait_for(lambda: self._status is not None, _GATHER_S)
                batch += self._waiting
                self._waiting.clear()
                status = self._status
            try:
                if not self.called:
                    self.called = self._tracker.begin(self._about)
                if batch:
                    self._tracker.add(batch)
                    batch = []
                if status is not None:
                    self._tracker.end(status)
                    return
            except Exception as error:  # noqa: BLE001 - a tracker's trouble is never the run's
                self._failed(error)
            else:
                self._failures = 0

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        why = redact_text(f"{type(error).__name__}: {error}").strip().splitlines()[0]
        if self._failures == 1:
            self._notice("failed, and is tried again", why=why)
        elif self._failures == TRIES:
            self._notice("is told nothing more of this run", why=why)

    def _notice(self, what: str, **detail: object) -> None:
        self._notices.append(Noticed(what=f"tracking: {self.name} {what}", detail=detail))


def _made(name: str, job: Job, folder: Path) -> Tracker:
    asked = job.tracking
    if name == "mlflow":
        return MlflowTracker(str(asked.mlflow.uri), asked.mlflow.experiment or job.name)
    return WandbTracker(asked.wandb, asked.wandb.project or job.name, folder)


def _read(file: Path) -> dict[str, str]:
    """Empty where nothing is kept, or nothing that can be used: the run then begins anew there."""
    try:
        record: Any = json_value(read_whole(file))
        runs = record["runs"] if record["format"] == FORMAT else {}
        return {str(name): str(called) for name, called in runs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(file: Path, names: Mapping[str, str]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"format": FORMAT, "runs": dict(names)}) + "\n", encoding="utf-8")
    draft.replace(file)
