"""`sweep`: trials of a job, by Ray Tune, on seats that they share.

A trial is an actor of Tune's that drives a run of the job, as `train` does; its workers get their
places from the sweep's seats. Tune decides who goes on. What is kept is the sweep's own: a log of
all trials, and a run directory for each. Nothing of Tune's is read again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.search import Searcher

from raycloud.clock import SystemClock
from raycloud.errors import MachineError, RaycloudError, RunDirectoryError
from raycloud.events import Evaluated, GenerationFormed, Printed
from raycloud.on_ray.attach import attached, environment, inventory
from raycloud.on_ray.run import train, with_secrets
from raycloud.on_ray.seats import LeaseEndedError, SeatsHandle
from raycloud.planner.inventory import require
from raycloud.report.state import Tally
from raycloud.report.summary import cost
from raycloud.report.sweep import page
from raycloud.spec import Environment, choose
from raycloud.spec.load import dump_minimal
from raycloud.spec.sweep import Parameter, Sweep, check, dump_sweep, trial_job
from raycloud.tuning.results import Measured, Results, Trial, front, objectives
from raycloud.tuning.search import Search, search

if TYPE_CHECKING:
    from raycloud.events import Observed
    from raycloud.spec import Job
    from raycloud.spec.sweep import Point

_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_MAX_PENDING_TRIALS_PG": "1024",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}
_ENDS_S = 5.0
_TRIES = 3  # of a trial whose machines fail
_SMALL = 1e-3  # of the resource that every node has by its name: it only says where

Listener = Callable[[Results, Trial], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a sweep came to.

    Attributes:
        directory: Where all of it is.
        trials: All, by number.
        best: The best trials: one, or with several objectives those that no other beats in all.
        job: The job with the values of the first of them; None: no trial came to anything.
    """

    directory: Path
    trials: tuple[Trial, ...]
    best: tuple[Trial, ...]
    job: Job | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What every trial is told."""

    job: Job
    sweep: Sweep
    seats: SeatsHandle
    directory: Path


def sweep(
    job: Job,
    asked: Sweep | None = None,
    *,
    directory: str | Path | None = None,
    address: str | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **fields: Any,
) -> Found:
    """Try a job with other values, and find those that serve best.

    Args:
        job: What is varied.
        asked: How; or give its fields: `sweep(job, space={"global_batch": {"choice": [16, 32]}})`.
        directory: Where the sweep is kept; None makes a new place below `runs/`.
        address: A Ray cluster, as of `train`.
        resume: Go on with the sweep in `directory`: what is over is not done again.
        listener: Called with each word of a trial, in this thread.
        fields: Of `Sweep`.

    Raises:
        JobError: What was asked cannot be done.
        MachineError: The cluster has no room.
    """
    asked = Sweep(**fields) if asked is None else asked
    check(job, asked)
    looks = search(asked)
    job = with_secrets(job)
    address = address or Environment.from_process().ray_address
    if directory is None or not resume:
        place = choose(directory, f"{job.name}-sweep", resume=False).path
    else:
        place = Path(directory)
    results = Results.open(place / "sweep.jsonl")
    if results.trials and not resume:
        raise RunDirectoryError(f"{place} has a sweep already", hint="resume it, or name another")
    (place / "sweep.yaml").write_text(dump_sweep(job, asked), encoding="utf-8")
    with environment(_QUIET), attached(job, address):
        room = require(inventory(), job.resources.worker, job.elastic.min_workers)
        most = max(1, room // job.elastic.min_workers)
        parallel = min(most if asked.parallel == "auto" else asked.parallel, asked.trials)
        seats = SeatsHandle.start(f"raycloud-seats-{os.getpid()}-{place.name}", room)
        try:
            told = Told(job=job, sweep=asked, seats=seats, directory=place.resolve())
            course = Course(told, looks, results, parallel, listener or (lambda *_: None))
            _tuned(told, course, parallel)
        finally:
            seats.close()
    return _found(job, asked, place, results)


def _tuned(told: Told, course: Course, parallel: int) -> None:
    """Let Tune carry the trials out."""
    asked = told.sweep
    here = f"node:{ray.util.get_node_ip_address()}"
    kind = tune.with_resources(tune.with_parameters(TrialRun, told=told), {here: _SMALL})
    tuner = tune.Tuner(
        kind,
        tune_config=tune.TuneConfig(
            metric="measure",
            mode=asked.mode,
            search_alg=course,
            scheduler=_scheduler(told),
            num_samples=-1,  # until the course is over
            max_concurrent_trials=parallel,
            time_budget_s=asked.seconds,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(told.directory),
            verbose=0,
            stop=Limits(course),
            callbacks=[Words(course)],
        ),
    )
    tuner.fit()


def _scheduler(told: Told) -> Any:
    asked, job = told.sweep, told.job
    grace = asked.grace_steps or job.evaluate.every_steps or 1
    if asked.scheduler == "asha":
        return tune.schedulers.ASHAScheduler(
            time_attr="step",
            max_t=job.steps or 10**9,
            grace_period=grace,
            reduction_factor=asked.reduction,
        )
    if asked.scheduler == "median":
        return tune.schedulers.MedianStoppingRule(time_attr="step", grace_period=grace)
    return tune.schedulers.FIFOScheduler()


def _found(job: Job, asked: Sweep, place: Path, results: Results) -> Found:
    """The best of what there is, and its job as a file."""
    scored = [
        (trial, values)
        for trial in results.whole
        if (values := objectives(trial, asked.minimize, mode=asked.mode, target=asked.target))
        is not None
    ]
    best = front(scored)
    if len(asked.minimize) == 1:
        best = best[:1]
    chosen = trial_job(job, asked, best[0].point) if best else None
    if chosen is not None:
        (place / "best.yaml").write_text(dump_minimal(chosen), encoding="utf-8")
    trials = tuple(trial for _, trial in sorted(results.trials.items()))
    (place / "report.html").write_text(page(place.name, trials, asked), encoding="utf-8")
    return Found(directory=place, trials=trials, best=tuple(best), job=chosen)


class Course(Searcher):
    """Where a sweep stands: gives Tune points to try, and keeps what comes of them.

    Trials that an earlier start has left unfinished come first.
    """

    def __init__(
        self, told: Told, looks: Search, results: Results, parallel: int, listener: Listener
    ) -> None:
        super().__init__(metric="measure", mode=told.sweep.mode)
        self._told, self._looks, self.results = told, looks, results
        self._parallel, self._listener = parallel, listener
        self._left: list[tuple[int, Any]] = [(one.number, None) for one in results.unfinished]
        self._begun: dict[str, tuple[int, Any]] = {}
        self._tries: dict[int, int] = {}
        for trial in results.trials.values():
            looks.remember(trial.point, self._values(trial))
        self._next = max(results.trials, default=-1) + 1
        self._over = len(results.whole)

    def __reduce__(self) -> Any:
        """Tune writes down what it was given; nothing reads that."""
        return Searcher, ()

    @property
    def over(self) -> bool:
        """Someone has asked for its end, or its money is spent."""
        most, last = self._told.sweep.money, (t.last for t in self.results.trials.values())
        spent = sum(one.money or 0.0 for one in last if one is not None)
        asked = (self._told.directory / "stop").exists()
        return asked or (most is not None and spent >= most)

    def suggest(self, trial_id: str) -> Any:
        """What Tune tries next."""
        if self._left:
            number, key = self._left.pop(0)
            self._begun[trial_id] = number, key
            return {"number": number, "point": dict(self.results.trials[number].point)}
        asked = self._looks.ask() if self._next < self._told.sweep.trials else None
        if asked is None:  # but who runs may have to be tried again
            return None if self._begun else str(Searcher.FINISHED)
        key, point = asked
        number, self._next = self._next, self._next + 1
        self._begun[trial_id] = number, key
        self._tell(self.results.add(number, point=point, status="running"))
        return {"number": number, "point": point}

    def on_trial_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None = None,
        error: bool = False,  # noqa: FBT001, FBT002 - Tune has it so
    ) -> None:
        """Let the search know, and the seats be another's."""
        if trial_id not in self._begun:
            return
        number, key = self._begun.pop(trial_id)
        self._told.seats.end(str(place_of(self._told, number)))
        self._tries[number] = self._tries.get(number, 0) + 1
        if error and self._tries[number] < _TRIES:  # machines have failed: it goes on, elsewhere
            self._left.append((number, key))
            return
        status = "failed" if error else str((result or {}).get("status", "failed"))
        trial = self.results.add(number, status="stopped" if status == "running" else status)
        self._over += 1
        left = self._told.sweep.trials - self._over
        self._told.seats.expect(min(self._parallel, left))
        if key is not None:
            self._looks.tell(key, self._values(trial))
        self._tell(trial)

    def measured(self, number: int, result: Mapping[str, Any]) -> None:
        """A trial has come so far."""
        names = Measured.__dataclass_fields__
        said: dict[str, Any] = {}
        if result.get("step"):
            said["measured"] = Measured(**{name: result[name] for name in names})
        if why := result.get("why"):
            said["why"] = why
        if said:
            self._tell(self.results.add(number, **said))

    def _values(self, trial: Trial) -> tuple[float, ...] | None:
        asked = self._told.sweep
        found = objectives(trial, asked.minimize, mode=asked.mode, target=asked.target)
        if found is None and trial.status == "stopped" and trial.last and asked.target is None:
            sign = -1 if asked.mode == "max" else 1
            found = tuple(sign * trial.last.measure for _ in asked.minimize[:1])
        return found if found is None or len(found) == len(asked.minimize) else None

    def _tell(self, trial: Trial) -> None:
        self._listener(self.results, trial)

    def save(self, checkpoint_path: str) -> None:
        """Nothing of this is kept by Tune."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""


class Words(tune.Callback):
    """Hands on what Tune hears of trials."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def __reduce__(self) -> Any:
        """See `Course`."""
        return tune.Callback, ()

    def on_trial_result(self, *_: Any, **told: Any) -> None:
        """A trial has measured."""
        self._course.measured(told["trial"].config["number"], told["result"])


class Limits(tune.Stopper):
    """Ends the sweep where someone asks for it, or its money is spent."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def __reduce__(self) -> Any:
        """See `Course`."""
        return tune.stopper.NoopStopper, ()

    def __call__(self, *_: Any) -> bool:
        """Whether one trial is to end."""
        return False

    def stop_all(self) -> bool:
        """Whether all are."""
        return self._course.over


def place_of(told: Told, number: int) -> Path:
    """The run directory of a trial."""
    return told.directory / "trials" / f"{number:04}"


@dataclass
class Drive:
    """One run of a trial, in a thread of its own.

    Attributes:
        place: Its run directory.
        words: Its measurements, and last how it ended.
        last: The newest measurement.
    """

    told: Told
    place: Path
    point: Point
    words: queue.SimpleQueue[Measured | dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    last: Measured | None = None

    def __post_init__(self) -> None:
        """Begin."""
        self._clock, self._tally, self._began_s = SystemClock(), Tally(), 0.0
        self._job = trial_job(self.told.job, self.told.sweep, self.point)
        self._ending = False
        self.reason: str | None = None  # it is the run's `StopSwitch`
        self._thread = threading.Thread(
            target=self._run, name=f"trial {self.place.name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        ended: dict[str, Any]
        try:
            run = train(
                self._job,
                run_dir=self.place,
                resume="allow",
                observer=self._see,
                stop=self,
                seats=self.told.seats,
            )
            ended = {"status": run.status}
        except LeaseEndedError:
            gone = MachineError("who keeps the seats has taken them back")
            ended = {"status": "stopped"} if self._ending else {"raises": gone}
        except MachineError as error:
            ended = {"raises": error}
        except RaycloudError as error:
            ended = {"status": "failed", "why": error.message}
        except BaseException as error:  # noqa: BLE001 - the last line before the thread's end
            ended = {"raises": error}
        self.words.put(ended)

    def _see(self, event: Observed) -> None:
        if isinstance(event, Printed):
            return
        if isinstance(event, GenerationFormed) and not self._began_s:
            self._began_s = self._clock.monotonic_s()
        self._tally.apply(self._clock.unix_s(), event)
        measure = self.told.sweep.measure
        if isinstance(event, Evaluated) and measure in event.metrics:
            tally = self._tally
            self.words.put(
                Measured(
                    step=event.step,
                    measure=float(event.metrics[measure]),
                    seconds=self._clock.monotonic_s() - self._began_s,
                    samples=tally.samples_at(event.step),
                    bytes=tally.spent.bytes_sent,
                    money=cost(tally, self._clock.unix_s()),
                )
            )

    def next(self) -> dict[str, Any]:
        """The next measurement, or how it ended, as a result of Tune's.

        Raises:
            Exception: Machines failed: it may be tried again.
        """
        word = self.words.get()
        if isinstance(word, Measured):
            self.last = word
            reached = self._reached(word)
            if not reached and word.step == self._job.steps:
                return self.next()  # it is over in a moment, and how is what counts
            return {**asdict(word), "status": "reached" if reached else "running", "done": reached}
        if (error := word.get("raises")) is not None:
            raise error
        last = {} if self.last is None else asdict(self.last)
        if self.last is None and word["status"] == "finished":
            what = f"Task.metrics gives no {self.told.sweep.measure!r} of held-out samples"
            word = {"status": "failed", "why": what}
        worst = float("inf") if self.told.sweep.mode == "min" else float("-inf")
        return {"measure": worst, "step": 0, **last, **word, "done": True}

    def _reached(self, word: Measured) -> bool:
        target, mode = self.told.sweep.target, self.told.sweep.mode
        if target is None:
            return False
        return word.measure <= target if mode == "min" else word.measure >= target

    def end(self) -> None:
        """End it at once, if it has not ended."""
        self._ending = True
        with contextlib.suppress(RaycloudError):
            self.told.seats.end(str(self.place))
        self._thread.join(_ENDS_S)


class TrialRun(tune.Trainable):
    """A trial, as Tune has it: what is not asked for a step has not begun.

    Tune makes actors that it then does without, where another one has become free meanwhile.
    """

    def setup(self, config: dict[str, Any], told: Told | None = None) -> None:
        """Be told what the trial is."""
        assert told is not None  # noqa: S101 - `with_parameters` gives it
        self._told, self._asked = told, config
        self._drive: Drive | None = None

    def step(self) -> dict[str, Any]:
        """Wait for its next measurement, or its end."""
        if self._drive is None:
            self._drive = Drive(self._told, *self._run_of(self._asked))
        return self._drive.next()

    def _run_of(self, config: dict[str, Any]) -> tuple[Path, Point]:
        """The run directory, and the values."""
        return place_of(self._told, config["number"]), config["point"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Be another trial."""
        self.cleanup()
        self._asked = new_config
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The run keeps its own."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """See `save_checkpoint`."""

    def cleanup(self) -> None:
        """Tune lets the actor go."""
        if self._drive is not None:
            self._drive.end()
            self._drive = None


class OwnTrial(TrialRun):
    """A trial of a user's own Tuner: its configuration is the point."""

    def step(self) -> dict[str, Any]:
        """See `TrialRun.step`; the measure has its own name, too."""
        found = super().step()
        return {**found, self._told.sweep.measure: found["measure"]}

    def _run_of(self, config: dict[str, Any]) -> tuple[Path, Point]:
        return self._told.directory / self.trial_id, config


def trainable(
    job: Job,
    *,
    directory: str | Path | None = None,
    **fields: Any,
) -> Any:
    """What a `ray.tune.Tuner` of one's own can run: trials of a job, on seats that they share.

    The configuration of a trial is a value for each field that is varied, by its path. A result is
    a measurement: `measure`, also under its own name, `step`, `seconds`, `samples`, `bytes`.

        tuner = tune.Tuner(
            raycloud.trainable(job, directory="runs/mine"),
            param_space={"global_batch": tune.choice([16, 32])},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=8),
        )

    Ray has to be started before. Seats that no trial has for 20 s are given back.

    Args:
        job: What is varied.
        directory: Where the trials' runs are kept; None makes a new place below `runs/`.
        fields: Of `Sweep`, without `space`: `measure`, `mode`, `target`, `rate_scaling`.

    Raises:
        JobError: What was asked cannot be done.
        MachineError: Ray is not there, or has no room.
    """
    if not ray.is_initialized():
        raise MachineError("Ray is not started", hint="call ray.init() before raycloud.trainable")
    any_point = {"seed": Parameter(choice=[job.seed])}  # the space is the Tuner's
    asked = Sweep(**{"space": any_point, **fields})
    job = with_secrets(job)
    place = choose(directory, f"{job.name}-trials", resume=False).path.resolve()
    place.mkdir(parents=True, exist_ok=True)
    room = require(inventory(), job.resources.worker, job.elastic.min_workers)
    seats = SeatsHandle.start(f"raycloud-seats-{os.getpid()}-{place.name}", room)
    told = Told(job=job, sweep=asked, seats=seats, directory=place)
    here = f"node:{ray.util.get_node_ip_address()}"
    return tune.with_resources(tune.with_parameters(OwnTrial, told=told), {here: _SMALL})
