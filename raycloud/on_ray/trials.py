"""A trial: a run of the job, driven by an actor of Tune's, on seats that are the sweep's."""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from raycloud.checkpoint import open_store, steps
from raycloud.checkpoint.naming import directory, published_step
from raycloud.clock import SystemClock
from raycloud.errors import MachineError, RaycloudError
from raycloud.events import Evaluated, GenerationFormed, Printed
from raycloud.on_ray.run import train
from raycloud.on_ray.seats import LeaseEndedError, SeatsHandle
from raycloud.report.snapshot import state_of
from raycloud.report.state import Tally
from raycloud.report.summary import cost
from raycloud.spec import RunDirectory
from raycloud.spec.load import with_values
from raycloud.spec.sweep import trial_job
from raycloud.tuning.results import Measured
from raycloud.tuning.rungs import Rungs, SpentRungs

if TYPE_CHECKING:
    from raycloud.events import Observed
    from raycloud.spec import Job
    from raycloud.spec.sweep import Point, Sweep

BROKEN = "broken"  # by machines: it is to be tried again
_MANY = 10**9  # steps of a job whose length is a number of epochs
PAUSED = "paused"  # where it was to, and is not over
_ENDS_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepContext:
    """What every trial is told."""

    job: Job
    sweep: Sweep
    seats: SeatsHandle
    directory: Path


def place_of(context: SweepContext, number: int) -> Path:
    """The run directory of a trial."""
    return context.directory / "trials" / f"{number:04}"


def checkpoints_of(context: SweepContext, place: Path) -> str:
    """Where the trial of a run directory keeps its checkpoints."""
    path = context.job.checkpoint.path
    return f"{path.rstrip('/')}/{place.name}" if path else str(RunDirectory(place).checkpoints)


def copy_run(context: SweepContext, one: int, other: int) -> None:
    """Make the run of a trial that of another: its job, log, ledger and newest checkpoint.

    Nobody writes to the first meanwhile. What a kill has left of the second is made anew.

    Raises:
        CheckpointError: The store does not let them be copied.
        OSError: Nor does the disk.
    """
    there, here = RunDirectory(place_of(context, one)), RunDirectory(place_of(context, other))
    shutil.rmtree(here.path, ignore_errors=True)
    source = open_store(checkpoints_of(context, there.path))
    target = open_store(checkpoints_of(context, here.path))
    names = source.names(directory(max(steps(source))))
    for name in sorted(names, key=lambda name: published_step(name) is not None):
        target.write(name, source.stream(name))  # its manifest last
    here.path.mkdir(parents=True, exist_ok=True)
    for name in ("data_json", "ledger", "events_jsonl", "job_yaml"):  # whose last makes it a run
        with contextlib.suppress(FileNotFoundError):  # a task with samples of its own has no files
            shutil.copyfile(getattr(there, name), getattr(here, name))


@dataclass
class TrialDriver:
    """One run of a trial, in a thread of its own.

    Attributes:
        place: Its run directory.
        before_s: Seconds that it had computed before.
        until: The step at which it pauses; None: it does not.
        words: Its measurements, and last how it ended.
        last: The newest measurement.
    """

    context: SweepContext
    place: Path
    point: Point
    before_s: float = 0.0
    until: int | None = None
    words: queue.SimpleQueue[Measured | dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    last: Measured | None = None

    def __post_init__(self) -> None:
        """Begin."""
        self._clock, self._began_s = SystemClock(), 0.0
        run = RunDirectory(self.place)
        log = run.events_jsonl
        if not run.job_yaml.exists():  # a try that broke before it began may have left something
            shutil.rmtree(self.place, ignore_errors=True)
        self._tally = state_of(log).tally if log.exists() else Tally()
        self._job = job = trial_job(self.context.job, self.context.sweep, self.point)
        if job.checkpoint.path:  # a place of its own, or they would be each other's
            own = checkpoints_of(self.context, self.place)
            self._job = with_values(job, {"checkpoint.path": own})
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
                seats=self.context.seats,
                only_steps=self.until,
            )
            paused = run.status == "finished" and self._pauses
            ended = {"status": PAUSED if paused else run.status}
        except LeaseEndedError:
            gone = {"status": BROKEN, "why": "its seats were taken back"}
            ended = {"status": "stopped"} if self._ending else gone
        except (MachineError, OSError) as error:
            ended = {"status": BROKEN, "why": str(getattr(error, "message", error))}
        except RaycloudError as error:
            ended = {"status": "failed", "why": error.message}
        except BaseException as error:  # noqa: BLE001 - the last line before the thread's end
            ended = {"status": "failed", "why": f"{type(error).__name__}: {error}"}
        self.words.put(ended)

    @property
    def _pauses(self) -> bool:
        return self.until is not None and self.until != self._job.steps

    def _see(self, event: Observed) -> None:
        if isinstance(event, Printed):
            return
        if isinstance(event, GenerationFormed) and not self._began_s:
            self._began_s = self._clock.monotonic_s()
        self._tally.apply(self._clock.unix_s(), event)
        measure = self.context.sweep.measure
        if isinstance(event, Evaluated) and measure in event.metrics:
            tally = self._tally
            self.words.put(
                Measured(
                    step=event.step,
                    measure=float(event.metrics[measure]),
                    seconds=self.before_s + self._clock.monotonic_s() - self._began_s,
                    samples=tally.samples_at(event.step),
                    bytes=tally.spent.bytes_sent,
                    money=cost(tally, self._clock.unix_s()),
                )
            )

    def next(self) -> dict[str, Any]:
        """The next measurement, or how it ended, as a result of Tune's.

        It raises nothing: what is raised Tune writes to files, and unpickles them in the end.
        """
        word = self.words.get()
        if isinstance(word, Measured):
            self.last = word
            reached = self._reached(word)
            if not reached and word.step in {self._job.steps, self.until}:
                return self.next()  # it is over in a moment, and how is what counts
            return {**asdict(word), "status": "reached" if reached else "running", "done": reached}
        last = {} if self.last is None else asdict(self.last)
        if self.last is None and word["status"] == "finished":
            what = f"Task.metrics gives no {self.context.sweep.measure!r} of held-out samples"
            word = {"status": "failed", "why": what}
        worst = float("inf") if self.context.sweep.mode == "min" else float("-inf")
        return {"measure": worst, "step": 0, **last, **word, "done": True}

    def _reached(self, word: Measured) -> bool:
        target, mode = self.context.sweep.target, self.context.sweep.mode
        if target is None:
            return False
        return word.measure <= target if mode == "min" else word.measure >= target

    def end(self) -> None:
        """End it at once, if it has not ended."""
        self._ending = True
        with contextlib.suppress(RaycloudError):
            self.context.seats.end(str(self.place))
        self._thread.join(_ENDS_S)


class TrialRun(tune.Trainable):
    """A trial, as Tune has it: its run begins with the first step that is asked for.

    Tune makes actors that it then does without, where another one has become free meanwhile.
    """

    def setup(self, config: dict[str, Any], context: SweepContext | None = None) -> None:
        """Be told what the trial is."""
        assert context is not None  # noqa: S101 - `with_parameters` gives it
        self._context, self._asked = context, config
        self._driver: TrialDriver | None = None

    def step(self) -> dict[str, Any]:
        """Wait for its next measurement, or its end."""
        if self._driver is None:
            self._driver = self._driver_of(self._asked)
        return self._driver.next()

    def _driver_of(self, config: dict[str, Any]) -> TrialDriver:
        """What drives the run of a configuration."""
        given = {name: config[name] for name in ("point", "before_s", "until")}
        return TrialDriver(self._context, place_of(self._context, config["number"]), **given)

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
        if self._driver is not None:
            self._driver.end()
            self._driver = None


class OwnTrial(TrialRun):
    """A trial of a user's own Tuner: its configuration is the point."""

    def step(self) -> dict[str, Any]:
        """See `TrialRun.step`; the measure has its own name, too."""
        found = super().step()
        return {**found, self._context.sweep.measure: found["measure"]}

    def _driver_of(self, config: dict[str, Any]) -> TrialDriver:
        return TrialDriver(self._context, self._context.directory / self.trial_id, config)


def scheduler_of(context: SweepContext) -> Any:
    """What ends trials early.

    They are compared at equal samples: after as many steps a larger batch has seen more. But where
    a target is to be reached with the least of something, where they have spent as much of that.
    """
    asked, job = context.sweep, context.job
    grace = job.global_batch * (asked.grace_steps or job.evaluate.every_steps or 1)
    if asked.scheduler == "asha" and asked.spends is not None:
        return SpentScheduler(asked, grace)
    if asked.scheduler == "asha" and len(asked.minimize) > 1:
        return RungScheduler(asked, Rungs(grace, asked.reduction))
    if asked.scheduler == "asha":
        varied = asked.space.get("global_batch")
        largest = max([job.global_batch, *(varied.samples() if varied else ())])
        return tune.schedulers.ASHAScheduler(
            time_attr="samples",
            max_t=(job.steps or _MANY) * largest + 1,
            grace_period=grace,
            reduction_factor=asked.reduction,
        )
    if asked.scheduler == "median":
        return MedianScheduler(time_attr="samples", grace_period=grace)
    return tune.schedulers.FIFOScheduler()


class MedianScheduler(tune.schedulers.MedianStoppingRule):
    """Ends trials that are worse than the median of the others, but for finalists."""

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """A trial has measured."""
        if trial.config["whole"]:
            return str(self.CONTINUE)
        return str(super().on_trial_result(controller, trial, result))


class RungScheduler(tune.schedulers.FIFOScheduler):
    """Ends trials that others beat in all of several objectives: see `tuning.rungs`."""

    def __init__(self, asked: Sweep, rungs: Rungs) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # Ray says no types of it
        self._rungs = rungs
        self._names = [name for name in asked.minimize if name != "measure"]
        self._sign = -1.0 if asked.mode == "max" else 1.0

    def on_trial_result(self, _: Any, trial: Any, result: dict[str, Any]) -> str:
        """A trial has measured."""
        if not math.isfinite(result["measure"]):
            return str(self.STOP)
        costs = (float(result[name] or 0.0) for name in self._names)
        values = (self._sign * result["measure"], *costs)
        goes_on = self._rungs.goes_on(trial.trial_id, result["samples"], values)
        return str(self.CONTINUE if goes_on else self.STOP)


class SpentScheduler(tune.schedulers.FIFOScheduler):
    """Ends trials that are worse than others which have spent as much: see `tuning.rungs`.

    Args:
        asked: A sweep to a target.
        grace: Samples that each trial may see.
    """

    def __init__(self, asked: Sweep, grace: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # Ray says no types of it
        self._rungs, self._name = SpentRungs(asked.reduction), asked.spends or "seconds"
        self._grace = grace
        self._sign = -1.0 if asked.mode == "max" else 1.0

    def on_trial_result(self, _: Any, trial: Any, result: dict[str, Any]) -> str:
        """A trial has measured."""
        if trial.config["whole"]:
            return str(self.CONTINUE)
        if not math.isfinite(result["measure"]):
            return str(self.STOP)
        goes_on = self._rungs.goes_on(
            trial.trial_id,
            float(result[self._name] or 0.0),
            self._sign * result["measure"],
            graced=result["samples"] >= self._grace,
        )
        return str(self.CONTINUE if goes_on else self.STOP)
