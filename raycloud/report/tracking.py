"""Trackers: MLflow and Weights & Biases get a run's numbers, each in a thread of its own.

None of them can hold the run up: what fails is tried again, then given up, and is a notice.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from raycloud.bounded import json_value, read_whole
from raycloud.errors import JobError
from raycloud.events import Noticed
from raycloud.redact import redact_text
from raycloud.report.figures import leaves
from raycloud.spec.load import kept_values

if TYPE_CHECKING:
    from raycloud.spec.job import Job

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


class Numbers(NamedTuple):
    """Measures after `step` steps, at unix second `t`; all of them finite."""

    t: float
    step: int
    values: Mapping[str, float]


class Tracker(Protocol):
    """A tracker. All calls come from one thread, one after another; each may raise.

    A call that raised is made again with the same numbers, and more: if they arrive twice, they
    must count once.
    """

    def begin(self, known: str) -> str:
        """The run begins, or goes on if it is `known` by a name; returns that name."""
        ...

    def add(self, numbers: Sequence[Numbers]) -> None:
        """Take in numbers, in order; all of them, or raise."""
        ...

    def end(self, status: str) -> None:
        """The run is over: `finished`, `stopped` or `failed`. Nothing comes after."""
        ...


class MlflowTracker:
    """A run in MLflow, on a server or in a database file; its experiment is made if missing.

    Numbers that arrive twice are one: they have the same name, step, time and value.
    """

    def __init__(self, job: Job, folder: Path, version: str) -> None:
        self._job, self._name, self._version = job, folder.resolve().name, version
        self._client: Any = None
        self._entities: Any = None
        self._run = ""

    def begin(self, known: str) -> str:
        """Go on with the run of before, or begin one with the job's fields as parameters."""
        job, asked = self._job, self._job.tracking.mlflow
        # An extra, and it takes seconds to import.
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=str(asked.uri))
        self._entities = importlib.import_module("mlflow.entities")
        if known:
            client.update_run(known, status="RUNNING")
        else:
            name = asked.experiment or job.name
            experiment = client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else client.create_experiment(name)
            tags = {"raycloud.version": self._version, "raycloud.job": job.name}
            run = client.create_run(number, run_name=self._name, tags=tags)
            known = str(run.info.run_id)
            params = [self._entities.Param(_mlflow_name(n), x) for n, x in fields_of(job).items()]
            for first in range(0, len(params), _MOST_PARAMS):
                client.log_batch(known, params=params[first : first + _MOST_PARAMS])
        self._client, self._run = client, known
        return known

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
    """A run in Weights & Biases: offline into `wandb/` of the run directory, or online.

    Its own view of the machine, the command line, the code and the terminal is switched off: they
    would show what this project takes out of everything it writes.
    """

    def __init__(self, job: Job, folder: Path, version: str) -> None:
        self._job, self._folder, self._version = job, folder, version
        self._run: Any = None
        self._newest_t = -1.0  # of the numbers taken in

    def begin(self, known: str) -> str:
        """Begin a run with the job's fields as its configuration, or go on with it."""
        wandb: Any = importlib.import_module("wandb")  # an extra, and it takes a second
        asked = self._job.tracking.wandb
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
            project=asked.project or self._job.name,
            entity=asked.entity,
            mode=asked.mode,
            name=self._folder.resolve().name,
            id=known or None,
            resume="allow" if known else None,
            dir=str(self._folder),
            config={**fields_of(self._job), "raycloud": self._version},
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
    """All trackers of one start of a run; none is called before the first numbers.

    Args:
        job: What is asked, with its secrets.
        folder: The run directory.
        version: Of raycloud.
    """

    def __init__(self, job: Job, folder: Path, *, version: str) -> None:
        self._file = folder / FILE
        self._known = _read(self._file)
        kinds: dict[str, type[MlflowTracker | WandbTracker]] = {
            "mlflow": MlflowTracker,
            "wandb": WandbTracker,
        }
        self._feeds = [
            Feed(name, kinds[name](job, folder, version), self._known.get(name, ""))
            for name in asked_for(job)
        ]

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Numbers after `step` steps at unix second `t`. Returns at once."""
        for feed in self._feeds:
            feed.add(Numbers(t, step, dict(values)))

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
        known: What the tracker called this run earlier; empty for a new one.
    """

    def __init__(self, name: str, tracker: Tracker, known: str = "") -> None:
        self.name, self._tracker, self._known = name, tracker, known
        self.called = ""
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
            if self._thread is None:  # it imports the tracker's package
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
                    self.called = self._tracker.begin(self._known)
                if batch:
                    self._tracker.add(batch)
                    batch = []
                if status is not None:
                    self._tracker.end(status)
                    return
                self._failures = 0
            except Exception as error:  # noqa: BLE001 - a tracker's trouble is never the run's
                self._failures += 1
                why = redact_text(f"{type(error).__name__}: {error}").strip().splitlines()[0]
                if self._failures == 1:
                    self._notice("failed, and is tried again", why=why)
                elif self._failures == TRIES:
                    self._notice("is told nothing more of this run", why=why)

    def _notice(self, what: str, **detail: object) -> None:
        self._notices.append(Noticed(what=f"tracking: {self.name} {what}", detail=detail))


def fields_of(job: Job) -> dict[str, str]:
    """The job as it is kept, without secrets: dotted field to value, as text."""
    found = {}
    for name, value in leaves(kept_values(job)):
        plain = value is None or isinstance(value, bool)
        found[name] = (json.dumps(value) if plain else str(value))[:LONGEST]
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
