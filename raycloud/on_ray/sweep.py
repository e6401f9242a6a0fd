"""`sweep`: trials of a job, by Ray Tune, on seats that they share.

A trial is an actor of Tune's that drives a run of the job, as `train` does; its workers get their
places from the sweep's seats. Tune decides who goes on. What is kept is the sweep's own: a log of
all trials, and a run directory for each. Nothing of Tune's is read again.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.search import Searcher

from raycloud.clock import SystemClock
from raycloud.errors import JobError, MachineError, RunDirectoryError, SpecError
from raycloud.on_ray.attach import attached, environment, inventory
from raycloud.on_ray.run import with_secrets
from raycloud.on_ray.seats import SeatsHandle
from raycloud.on_ray.trials import (
    BROKEN,
    PAUSED,
    OwnTrial,
    SweepContext,
    TrialRun,
    copy_run,
    place_of,
    scheduler_of,
)
from raycloud.planner.inventory import PRICE_LABEL, price_per_hour, require
from raycloud.report import charts
from raycloud.report.sweep import best_of, page, scored_trials
from raycloud.spec import Environment, choose
from raycloud.spec.load import dump_minimal
from raycloud.spec.rundir import replace_text
from raycloud.spec.sweep import Parameter, Sweep, check, dump_sweep, trial_job
from raycloud.tuning.population import Population
from raycloud.tuning.results import (
    CHARTS,
    JOB,
    LOG,
    STOP,
    Measured,
    Results,
    Trial,
    finalist,
    objectives,
)
from raycloud.tuning.search import Search, search

if TYPE_CHECKING:
    from raycloud.planner.inventory import Inventory
    from raycloud.spec import Job
    from raycloud.spec.sweep import Point
    from raycloud.tuning.results import Fork

_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_MAX_PENDING_TRIALS_PG": "1024",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}
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
    place = _place(directory, job, resume=resume)
    results = Results.open(place / LOG, writes=True)
    filled = with_secrets(job).resolved()
    replace_text(place / JOB, dump_sweep(job, asked))  # as it was written, with ${NAME}
    address = address or Environment.from_process().ray_address
    with environment(_QUIET), attached(job, address):
        nodes = inventory()
        room = require(nodes, job.resources.worker, job.elastic.min_workers)
        _check_prices(asked, nodes)
        most = max(1, room // job.elastic.min_workers)
        parallel = min(most if asked.parallel == "auto" else asked.parallel, asked.trials)
        seats = SeatsHandle.start(job.resources.worker)
        try:
            seats.expect(parallel)
            context = SweepContext(job=filled, sweep=asked, seats=seats, directory=place.resolve())
            kind = PopulationSearcher if asked.searcher == "pbt" else TrialSearcher
            searcher = kind(context, looks, results, parallel, listener or (lambda *_: None))
            _tuned(context, searcher, parallel)
        finally:
            seats.close()
    return _found(job, asked, place, results)


def _place(directory: str | Path | None, job: Job, *, resume: bool) -> Path:
    """Where the sweep is kept.

    Raises:
        RunDirectoryError: There is one already; or none to go on with.
    """
    if directory is None:
        return choose(None, f"{job.name}-sweep", resume=False).path
    place = Path(directory)
    there = (place / LOG).exists()
    if there and not resume:
        hint = f"go on with it by `raycloud sweep resume {place}`, or name another directory"
        raise RunDirectoryError(f"{place} has a sweep already", hint=hint)
    if resume and not there:
        hint = "leave resume out to start one"
        raise RunDirectoryError(f"{place} has no sweep to go on with", hint=hint)
    (place / STOP).unlink(missing_ok=True)
    if resume:
        return place
    try:
        return choose(directory, job.name, resume=False).path
    except RunDirectoryError as error:
        hint = "name another directory, empty or not there yet"
        raise RunDirectoryError(error.message, hint=hint) from error


def _check_prices(asked: Sweep, nodes: Inventory) -> None:
    """Whether there is money to count.

    Raises:
        JobError: No node has a price.
    """
    counts = "money" in asked.minimize or asked.money is not None
    if counts and all(price_per_hour(node.labels) is None for node in nodes.nodes):
        raise JobError(
            "the sweep counts money, and no node says what it costs",
            hint=f"label nodes with {PRICE_LABEL}, or leave money out of the sweep",
        )


def _tuned(context: SweepContext, searcher: TrialSearcher, parallel: int) -> None:
    """Let Tune carry the trials out."""
    asked = context.sweep
    here = f"node:{ray.util.get_node_ip_address()}"
    kind = tune.with_resources(tune.with_parameters(TrialRun, context=context), {here: _SMALL})
    tuner = tune.Tuner(
        kind,
        tune_config=tune.TuneConfig(
            metric="measure",
            mode=asked.mode,
            search_alg=searcher,
            scheduler=scheduler_of(context),
            num_samples=-1,  # until the searcher is over
            max_concurrent_trials=parallel,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(context.directory),
            verbose=0,
            stop=BudgetStopper(searcher),
            callbacks=[ResultCallback(searcher)],
        ),
    )
    try:
        with _quiet(logging.getLogger("ray.tune")):  # what goes wrong in trials, the log has
            tuner.fit()
    except (OSError, EOFError) as error:
        raise MachineError(
            f"the files in {context.directory} cannot be written or read: {error}",
            hint="look at the free space there; then `raycloud sweep resume` goes on",
        ) from error


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Meanwhile it says nothing but that all is lost."""
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _found(job: Job, asked: Sweep, place: Path, results: Results) -> Found:
    """The best of what there is, and its job as a file."""
    best = best_of(scored_trials(results.whole, asked), asked)
    chosen = trial_job(job, asked, best[0].point) if best else None
    if chosen is not None:
        replace_text(place / "best.yaml", dump_minimal(chosen))
    trials = tuple(trial for _, trial in sorted(results.trials.items()))
    replace_text(place / "report.html", page(place.name, trials, asked))
    _write_hparams(place / "hparams", trials)
    charts.draw_if_possible(place / CHARTS, trials, asked)
    return Found(directory=place, trials=trials, best=tuple(best), job=chosen)


def _write_hparams(folder: Path, trials: Sequence[Trial]) -> None:
    """What TensorBoard's HParams page shows of trials that have measured; written anew."""
    from torch.utils.tensorboard import SummaryWriter  # loads much

    shutil.rmtree(folder, ignore_errors=True)
    for trial in trials:
        if (last := trial.last) is not None:
            given = {path: "null" if v is None else v for path, v in trial.point.items()}
            came = {"measure": last.measure, "seconds": last.seconds, "bytes": last.bytes}
            with SummaryWriter(str(folder / f"{trial.number:04}")) as writer:
                writer.add_hparams(given, came, run_name=".")


class TrialSearcher(Searcher):
    """Where a sweep stands: gives Tune points to try, and keeps what comes of them.

    Trials that an earlier start has left unfinished come first.
    """

    def __init__(
        self,
        context: SweepContext,
        looks: Search,
        results: Results,
        parallel: int,
        listener: Listener,
    ) -> None:
        super().__init__(metric="measure", mode=context.sweep.mode)
        self._context, self._looks, self.results = context, looks, results
        self._parallel, self._listener = parallel, listener
        for one in results.unfinished:
            if one.again is not None:  # what it took is not comparable: another one begins
                results.add(one.number, status="stopped", why="it was broken off")
        self._left: list[tuple[int, Any]] = [(one.number, None) for one in results.unfinished]
        self._begun: dict[str, tuple[int, Any]] = {}
        self._tries: dict[int, int] = {}
        for trial in results.trials.values():
            looks.remember(trial.point, self._values(trial))
        self._next = max(results.trials, default=-1) + 1
        self._exhausted = False
        self._clock = SystemClock()
        self._began_s = self._clock.monotonic_s()

    def __reduce__(self) -> Any:
        """Tune writes down what it was given; nothing reads that."""
        return Searcher, ()

    @property
    def over(self) -> bool:
        """Someone has asked for its end, or its seconds or its money are spent."""
        asked, trials = self._context.sweep, self.results.trials.values()
        took_s = self._clock.monotonic_s() - self._began_s
        spent = sum(trial.money for trial in trials)
        return (
            (self._context.directory / STOP).exists()
            or (asked.seconds is not None and took_s >= asked.seconds)
            or (asked.money is not None and spent >= asked.money)
        )

    def overtaken(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Whether a trial cannot be the best any more, where trials end early."""
        asked = self._context.sweep
        number, _ = self._begun.get(trial_id, (None, None))
        whole = number is not None and self.results.trials[number].again is not None
        if asked.target is None or asked.scheduler == "none" or whole:
            return False
        return self.results.overtaken(result, asked.minimize, asked.target)

    def end_all(self) -> None:
        """End the trials that run; another start may go on with them."""
        for number, _ in self._begun.values():
            self._give_back(number)

    def suggest(self, trial_id: str) -> Any:
        """What Tune tries next."""
        if self._left:
            return self._begin(trial_id, *self._left.pop(0))
        if (new := self._new()) is not None:
            return self._begin(trial_id, *new)
        return None if self._begun else str(Searcher.FINISHED)  # who runs may be tried again

    def _new(self) -> tuple[int, Any] | None:
        """A trial of a point that is looked at now, and the point's key; None: there are no more.

        A point that the job refuses is a trial that has failed.
        """
        while self._asks and (asked := self._looks.ask()) is not None:
            key, point = asked
            number, self._next = self._next, self._next + 1
            self._tell(self.results.add(number, point=point, status="running"))
            if (why := self._refused(point)) is None:
                return number, key
            self._looks.tell(key, None)
            self._tell(self.results.add(number, status="failed", why=why))
        self._exhausted = True
        return self._final()

    @property
    def _asks(self) -> bool:
        """Whether there are to be more points."""
        points = sum(trial.again is None for trial in self.results.trials.values())
        return points < self._context.sweep.trials

    def _final(self) -> tuple[int, Any] | None:
        """One of the best once more, by itself, as `train` would have it; None: not now."""
        asked, trials = self._context.sweep, self.results.trials
        if self._begun or not asked.finalists:
            return None
        finals = [trial for trial in trials.values() if trial.again is not None]
        broken = [trial.again for trial in finals if trial.status == "stopped"]
        begun = {trial.again for trial in finals if trial.status != "stopped"}
        begun |= {number for number in broken if broken.count(number) >= _TRIES}
        one = finalist(scored_trials(self.results.whole, asked), begun, asked.finalists)
        if one is None:
            return None
        with contextlib.suppress(MachineError):
            self._context.seats.expect(1)
        number, self._next = self._next, self._next + 1
        why = f"trial {one.number} once more"
        told = {"point": dict(one.point), "status": "running", "again": one.number, "why": why}
        self._tell(self.results.add(number, **told))
        return number, None

    def _begin(self, trial_id: str, number: int, key: Any) -> dict[str, Any]:
        """What Tune hands to the process that drives a trial."""
        self._begun[trial_id] = number, key
        trial = self.results.trials[number]
        before_s = trial.last.seconds if trial.last else 0.0
        point = dict(trial.point)
        told = {"number": number, "point": point, "before_s": before_s, "until": self._until()}
        return {**told, "whole": trial.again is not None}

    def _until(self) -> int | None:
        """The step at which a trial that begins now pauses; None: it does not."""
        return None

    def _refused(self, point: Point) -> str | None:
        """Why the job does not take a point; None: it does."""
        try:
            trial_job(self._context.job, self._context.sweep, point)
        except SpecError as error:
            return error.message
        return None

    def _give_back(self, number: int) -> None:
        with contextlib.suppress(MachineError):  # who keeps the seats is being started again
            self._context.seats.end(str(place_of(self._context, number)))

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
        self._give_back(number)
        self._tries[number] = self._tries.get(number, 0) + 1
        status = BROKEN if error else str((result or {}).get("status", BROKEN))
        if status == PAUSED:
            self._tries[number] = 0
            return
        final = self.results.trials[number].again is not None
        if status == BROKEN and final:  # what it took is not comparable: another one begins
            status = "stopped"
        elif status == BROKEN and self._tries[number] < _TRIES:  # it goes on, elsewhere
            self._left.append((number, key))
            return
        status = "failed" if status == BROKEN else status
        trial = self.results.add(number, status="stopped" if status == "running" else status)
        values = self._values(trial)
        if key is not None:
            self._looks.tell(key, values)
        else:
            self._looks.remember(trial.point, values)
        more = self._left or (not self._exhausted and self._asks)
        with contextlib.suppress(MachineError):
            self._context.seats.expect(self._parallel if more else len(self._begun))
        self._tell(trial)

    def died(self, number: int) -> None:
        """The process that drove a trial has ended."""
        self.results.add(number, why="the process that drove it has ended")

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
        asked = self._context.sweep
        found = objectives(trial, asked.minimize, mode=asked.mode, target=asked.target)
        plain = asked.target is None and asked.minimize == ("measure",)
        if trial.status == "stopped" and trial.last and plain:  # it came so far
            return (-trial.last.measure if asked.mode == "max" else trial.last.measure,)
        return found

    def _tell(self, trial: Trial) -> None:
        self._listener(self.results, trial)

    def save(self, checkpoint_path: str) -> None:
        """Nothing of this is kept by Tune."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""


class PopulationSearcher(TrialSearcher):
    """Where population-based training stands: trials pause where a generation ends.

    A trial that begins as another has its run directory: log, ledger and newest checkpoint.
    """

    def __init__(self, context: SweepContext, *given: Any) -> None:
        super().__init__(context, *given)
        asked, job = context.sweep, context.job
        self._population = Population(
            asked,
            job.steps or 1,
            asked.generation_steps or job.evaluate.every_steps or 1,
            self.results,
            lambda point: self._refused(point) is not None,
        )
        self._left.clear()  # the population knows where each of them stands
        self._selected_at = 0  # where the newest selection was, as far as this start knows

    def _until(self) -> int | None:
        return self._population.until

    def suggest(self, trial_id: str) -> Any:
        """See `TrialSearcher.suggest`."""
        founders = sum(trial.fork is None for trial in self.results.trials.values())
        if founders < self._context.sweep.trials and (new := self._new()) is not None:
            return self._begin(trial_id, *new)
        self._left.clear()  # what broke is tried again in its turn
        busy = {number for number, _ in self._begun.values()}
        if (at := self._population.at) != self._selected_at:
            if busy:  # the last of a generation has measured, and is not over
                return None
            for fork, point in self._population.forks():
                self._fork(fork, point)
            self._selected_at = at
        if (trial := self._population.next(busy)) is not None:
            return self._begin(trial_id, trial.number, None)
        return None if busy else str(Searcher.FINISHED)

    def _fork(self, fork: Fork, point: Point) -> None:
        """Begin a trial as another, in the place of a third."""
        number, trials = max(self.results.trials) + 1, self.results.trials
        copy_run(self._context, fork.parent, number)
        donor = trials[fork.parent].last
        self._tell(
            self.results.add(number, point=point, status="running", fork=fork, measured=donor)
        )
        if trials[fork.replaces].status != "failed":
            why = f"trial {fork.parent} was better, and has begun again as trial {number}"
            self._tell(self.results.add(fork.replaces, status="stopped", why=why))


class ResultCallback(tune.Callback):
    """Hands on what Tune hears of trials."""

    def __init__(self, searcher: TrialSearcher) -> None:
        self._searcher = searcher

    def __reduce__(self) -> Any:
        """See `TrialSearcher`."""
        return tune.Callback, ()

    def on_trial_result(self, *_: Any, **words: Any) -> None:
        """A trial has measured."""
        self._searcher.measured(words["trial"].config["number"], words["result"])

    def on_trial_error(self, *_: Any, **words: Any) -> None:
        """A trial's actor has died."""
        self._searcher.died(words["trial"].config["number"])


class BudgetStopper(tune.Stopper):
    """Ends the sweep where someone asks for it, or its money is spent; and who is overtaken."""

    def __init__(self, searcher: TrialSearcher) -> None:
        self._searcher = searcher

    def __reduce__(self) -> Any:
        """See `TrialSearcher`."""
        return tune.stopper.NoopStopper, ()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether one trial is to end."""
        return self._searcher.overtaken(trial_id, result)

    def stop_all(self) -> bool:
        """Whether all are: their seats are then given back, so that they end at once."""
        over = self._searcher.over
        if over:
            self._searcher.end_all()
        return over


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

    Ray has to be started before. Seats that no trial has for 20 s are given back, and who keeps
    them ends.

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
    require(inventory(), job.resources.worker, job.elastic.min_workers)
    seats = SeatsHandle.when_needed(job.resources.worker)
    context = SweepContext(job=job.resolved(), sweep=asked, seats=seats, directory=place)
    here = f"node:{ray.util.get_node_ip_address()}"
    return tune.with_resources(tune.with_parameters(OwnTrial, context=context), {here: _SMALL})
