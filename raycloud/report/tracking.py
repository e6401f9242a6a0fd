"""Trackers: MLflow and Weights & Biases get a run's numbers, each in a thread of its own.

None of them can hold the run up: what fails is tried again, then given up, and is a notice.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from raycloud.bounded import json_value, read_whole
from raycloud.errors import JobError
from raycloud.events import Noticed
from raycloud.redact import redact_text
from raycloud.spec.secrets import kept

if TYPE_CHECKING:
    from raycloud.spec.job import Job
    from raycloud.spec.sections import WandbSection

FORMAT = 1
FILE = "tracking.json"
LONGEST = 500  # letters of a parameter, the least that any tracker takes

MOST_WAITING = 10_000
TRIES = 3
_GATHER_S = 1.0  # numbers of so long go in one call
_END_S = 20.0
_WANDB_WAIT_S = 20.0
_MOST_METRICS = 1000  # in one call, which is the most that an MLflow server takes
_MOST_PARAMS = 100
_MLFLOW_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Measures after `step` steps, at unix second `t`; all of them finite."""

    t: float
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a tracker learns of a run first.

    Attributes:
        run: The name of the run directory.
        job: The job's name.
        asked: The job as it is kept, without secrets: dotted field to value, as text.
        version: Of raycloud.
        known: What the tracker called this run earlier; empty for a new one.
    """

    run: str
    job: str
    asked: Mapping[str, str]
    version: str
    known: str = ""


class Tracker(Protocol):
    """A tracker. All calls come from one thread, one after another; each may raise.

    A call that raised is made again with the same numbers, and more: if they arrive twice, they
    must count once.
    """

    def begin(self, about: About) -> str:
        """The run begins or goes on; returns the name that the tracker knows it by."""
        ...

    def add(self, numbers: Sequence[Numbers]) -> None:
        """Take in numbers, in order; all of them, or raise."""
        ...

    def end(self, status: str) -> None:
        """The run is over: `finished`, `stopped` or `failed`. Nothing comes after."""
        ...


class MlflowTracker:
    """A run in MLflow, on a server or in a database file.

    Numbers that arrive twice are one: they have the same name, step, time and value.

    Args:
        uri: Where runs are kept.
        experiment: Made if it is missing.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._entities: Any = None
        self._run = ""

    def begin(self, about: About) -> str:
        """Go on with the run of before, or begin one with the job's fields as parameters."""
        # An extra, and it takes seconds to import.
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        self._entities = importlib.import_module("mlflow.entities")
        if about.known:
            client.update_run(about.known, status="RUNNING")
            self._client, self._run = client, about.known
            return about.known
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            number = client.create_experiment(self._experiment)
        else:
            number = experiment.experiment_id
        tags = {"raycloud.version": about.version, "raycloud.job": about.job}
        run = client.create_run(number, run_name=about.run, tags=tags)
        params = [self._entities.Param(_mlflow_name(n), text) for n, text in about.asked.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run.info.run_id, params=params[first : first + _MOST_PARAMS])
        self._client, self._run = client, str(run.info.run_id)
        return self._run

    def add(self, numbers: Sequence[Numbers]) -> None:
        """In as few calls as the server takes."""
        metrics = [
            self._entities.Metric(_mlflow_name(name), value, int(one.t * 1000), one.step)
            for one in numbers
            for name, value in one.values.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, status: str) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._run, _MLFLOW_ENDS.get(status, "FAILED"))


def _mlflow_name(name: str) -> str:
    """As MLflow takes it: letters, digits, `_`, `-`, `.`, space and `/`."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)[:250]


class WandbTracker:
    """A run in Weights & Biases: offline into the run directory, or online.

    Its own view of the machine, the command line, the code and the terminal is switched off: they
    would show what this project takes out of everything it writes.

    Args:
        asked: What the job says of it.
        project: The project's name.
        folder: The run directory; what it writes goes to `wandb/` there.
    """

    def __init__(self, asked: WandbSection, project: str, folder: Path) -> None:
        self._asked, self._project, self._folder = asked, project, folder
        self._run: Any = None
        self._newest_t = -1.0  # of the numbers taken in

    def begin(self, about: About) -> str:
        """Begin a run with the job's fields as its configuration, or go on with it."""
        wandb: Any = importlib.import_module("wandb")  # an extra, and it takes a second
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            init_timeout=_WANDB_WAIT_S,
        )
        self._run = wandb.init(
            project=self._project,
            entity=self._asked.entity,
            mode="online" if self._asked.mode == "online" else "offline",
            name=about.run,
            id=about.known or None,
            resume="allow" if about.known else None,
            dir=str(self._folder),
            config={**about.asked, "raycloud": about.version},
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def add(self, numbers: Sequence[Numbers]) -> None:
        """Steps are a measure of their own, so that those taken back by a resume may come again."""
        for one in numbers:
            if one.t > self._newest_t:
                self._run.log({**one.values, "step": one.step, "_timestamp": one.t})
                self._newest_t = one.t

    def end(self, status: str) -> None:
        """Say how it ended; W&B's own process may write the last of it a moment later."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def asked_for(job: Job) -> tuple[str, ...]:
    """The trackers that a job asks for; each is the name of a package and of an extra."""
    mlflow, wandb = job.tracking.mlflow.uri is not None, job.tracking.wandb.mode != "off"
    return (*(("mlflow",) if mlflow else ()), *(("wandb",) if wandb else ()))


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
        """No tracker is called before the first numbers."""
        self._file = folder / FILE
        self._known = _read(self._file)
        asked, about = (
            job.tracking,
            About(
                run=folder.resolve().name,
                job=job.name,
                asked=flat(kept(job.resolved()).model_dump(mode="json")),
                version=version,
            ),
        )
        self._feeds = []
        for name in asked_for(job):
            tracker: Tracker
            if name == "mlflow":
                tracker = MlflowTracker(str(asked.mlflow.uri), asked.mlflow.experiment or job.name)
            else:
                tracker = WandbTracker(asked.wandb, asked.wandb.project or job.name, folder)
            self._feeds.append(Feed(name, tracker, replace(about, known=self._known.get(name, ""))))

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Numbers after `step` steps at unix second `t`. Returns at once."""
        for feed in self._feeds:
            feed.add(Numbers(t=t, step=step, values=dict(values)))

    def notices(self) -> list[Noticed]:
        """What went wrong since the last call; also keeps what trackers call the run.

        Raises:
            OSError: That cannot be written.
        """
        found = [notice for feed in self._feeds for notice in feed.notices()]
        names = {feed.name: feed.called for feed in self._feeds if feed.called}
        if names and not names.items() <= self._known.items():
            self._known |= names
            _write(self._file, self._known)
        return found

    def close(self, status: str, *, wait_s: float = _END_S) -> list[Noticed]:
        """Tell how the run ended; waits at most `wait_s` for each tracker to take in the rest."""
        for feed in self._feeds:
            feed.finish(status)
        for feed in self._feeds:
            feed.join(wait_s)
        return self.notices()


class Feed:
    """The queue of numbers for one tracker, and the thread that calls it.

    What fails is tried again with the next numbers, and given up after 3 failures in a row.

    Args:
        name: Of the tracker, for notices.
        tracker: Who is called.
        about: What it learns first.
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
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._news.notify_all()

    def finish(self, status: str) -> None:
        """Nothing comes any more."""
        with self._news:
            self._status = status
            self._news.notify_all()

    def join(self, wait_s: float) -> None:
        """Wait until the tracker has all numbers; what it does not have by then is a notice."""
        if self._thread is None:
            return
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._notice("did not take in all numbers before the run ended", waited_s=wait_s)
        if self._left_out:
            self._notice("was too slow for all numbers", left_out=self._left_out)

    def notices(self) -> list[Noticed]:
        """What went wrong since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def _run(self) -> None:
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


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as dotted names with texts.

    >>> flat({"steps": 3, "data": {"path": None, "shuffle": True}})
    {'steps': '3', 'data.path': 'null', 'data.shuffle': 'true'}
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, bool)
            text = json.dumps(value) if plain else str(value)
            found[prefix + str(name)] = text[:LONGEST]
    return found


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
