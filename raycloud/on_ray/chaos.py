"""A job twice on one Ray: undisturbed, then under faults; and how far the two are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint import open_store
from raycloud.clock import SystemClock
from raycloud.errors import CheckpointError, RaycloudError, SpecError
from raycloud.faults import (
    NO_CONNECTION,
    Action,
    Fault,
    Injector,
    LocalProcesses,
    NoConnectionError,
    check,
)
from raycloud.on_ray.attach import attached
from raycloud.on_ray.run import train
from raycloud.report.chaos import Bound, Outcome, bound_of, side_of
from raycloud.spec import Job, RunDirectory

if TYPE_CHECKING:
    from raycloud.checkpoint.payload import Difference
    from raycloud.events import Observed
    from raycloud.faults import Processes
    from raycloud.faults.injector import Ends

_LEAST_WORKERS = 2
_ANSWER_S = 10.0

Shown = Callable[[Job], AbstractContextManager[Callable[["Observed"], None]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Telling:
    """How what goes on is told."""

    say: Callable[[str], None]
    shown: Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """On which Ray it runs, and by chance or not.

    Attributes:
        address: A standing cluster; None: a Ray that is started here, for the time of it.
        seed: What the faults were drawn from; None: they were read.
    """

    address: str | None = None
    seed: int | None = None


def prepared(job: Job, steps: int | None = None) -> Job:
    """The job as it is run twice: with checkpoints in the runs' own places, and told to nobody.

    Raises:
        SpecError: It has less than two workers.
    """
    if job.most_workers < _LEAST_WORKERS:
        raise SpecError(
            "elastic.max_workers",
            job.most_workers,
            "faults need another worker that goes on",
            hint="write 2 or more, as in --set elastic.max_workers=3, and micro-batches for them",
        )
    update: dict[str, Any] = {
        "checkpoint": job.checkpoint.model_copy(update={"path": None}),
        "data": job.data.model_copy(update={"refresh": False}),
        "tracking": type(job.tracking)(),
    }
    if steps is not None:
        update |= {"steps": steps, "epochs": None}
    return job.model_copy(update=update)


def under_faults(
    job: Job, faults: Sequence[Fault], directory: Path, telling: Telling, *, where: Where
) -> Outcome:
    """Run a job undisturbed and under faults.

    Raises:
        RaycloudError: The undisturbed run failed.
    """
    check(faults, workers=job.most_workers, steps=job.steps)
    # As many processors as workers, so that each finds a place, and the next in the place of a lost
    # one, also where they have to share.
    placed = job.model_copy(
        update={"elastic": job.elastic.model_copy(update={"min_workers": job.most_workers})}
    )
    places, address = Places(directory), where.address
    with attached(placed, address):
        telling.say("the undisturbed run")
        _train(job, places.undisturbed, telling, address)
        telling.say("the run under faults")
        injector = Injector(faults, _processes(address), SystemClock(), telling.say)
        error = None
        try:
            with injector.at_work():
                _train(job, places.disturbed, telling, address, injector.see)
        except RaycloudError as found:  # it is what this is to find out
            error = found.message
        undisturbed, disturbed = side_of(places.undisturbed), side_of(places.disturbed, error)
        apart = bound = None
        if undisturbed.status == disturbed.status == "finished":
            apart, bound = _held(job, places, telling, address)
    return Outcome(
        job=job.name,
        seed=where.seed,
        workers=job.most_workers,
        undisturbed=undisturbed,
        disturbed=disturbed,
        difference=apart,
        bound=bound,
        hits=tuple(injector.hits),
        left=injector.left,
    )


def _processes(address: str | None) -> Processes:
    """On a Ray that is started here all workers are on this machine."""
    return LocalProcesses() if address is None else ClusterProcesses()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the runs are kept, in one directory."""

    path: Path

    @property
    def undisturbed(self) -> Path:
        """The run without faults."""
        return self.path / "undisturbed"

    @property
    def disturbed(self) -> Path:
        """The run with them."""
        return self.path / "disturbed"

    @property
    def alone(self) -> Path:
        """A run by one worker, where numbers are less precise than float64."""
        return self.path / "alone"


def _held(
    job: Job, places: Places, telling: Telling, address: str | None
) -> tuple[Difference | None, Bound | None]:
    """How far the two are apart, and what that is held to."""
    try:
        apart = _difference(places.undisturbed, places.disturbed)
    except CheckpointError as error:
        telling.say(f"the two cannot be compared: {error.message}")
        return None, None
    if apart.precision == "float64":
        return apart, bound_of(apart.precision)
    telling.say(f"a run by one worker, to see what rounding does in {apart.precision}")
    alone = job.elastic.model_copy(update={"min_workers": 1, "max_workers": 1, "shares": "auto"})
    try:
        _train(job.model_copy(update={"elastic": alone}), places.alone, telling, address)
        other = _difference(places.undisturbed, places.alone)
    except RaycloudError as error:  # the two runs are kept, and told of
        telling.say(f"what rounding does is not known, since that run failed: {error.message}")
        return apart, None
    return apart, bound_of(apart.precision, other.largest)


def _difference(one: Path, other: Path) -> Difference:
    from raycloud.checkpoint.payload import difference

    stores = (open_store(str(RunDirectory(path).checkpoints)) for path in (one, other))
    return difference(*stores)


def _train(
    job: Job,
    place: Path,
    telling: Telling,
    address: str | None,
    see: Callable[[Observed], None] | None = None,
) -> None:
    with ExitStack() as stack:
        shown = stack.enter_context(telling.shown(job))

        def observer(event: Observed) -> None:
            if see is not None:
                see(event)
            shown(event)

        train(job, run_dir=place, address=address, observer=observer)


class ProcessesActor:
    """The processes on one node; what cannot be done is returned as words."""

    def __init__(self) -> None:
        self._processes = LocalProcesses()

    def hold(self, member: int, node: str, pid: int) -> str:
        """See `Processes.hold`."""
        return _why(self._processes.hold, member, node, pid)

    def harm(self, member: int, action: str) -> str:
        """See `Processes.harm`; not for connections, which have another end."""
        return _why(self._processes.harm, member, Action(action))

    def ends(self, member: int) -> list[Ends]:
        """See `LocalProcesses.ends`."""
        return self._processes.ends(member)

    def cut(self, member: int, others: list[Ends]) -> str:
        """See `LocalProcesses.cut`."""
        return _why(self._processes.cut, member, set(others))

    def thaw(self, member: int) -> None:
        """See `Processes.thaw`."""
        self._processes.thaw(member)

    def close(self) -> None:
        """See `Processes.close`."""
        self._processes.close()


class ClusterProcesses:
    """Processes on every node that has a worker of the run."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}  # by node
        self._nodes: dict[int, str] = {}
        self._holds: dict[int, Any] = {}  # what `hold` is going to answer

    def hold(self, member: int, node: str, pid: int) -> None:
        """See `Processes.hold`; it is not waited for, so `harm` says what was wrong."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._actors:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(num_cpus=0, max_restarts=0)(ProcessesActor)
            self._actors[node] = actor.options(scheduling_strategy=there).remote()
        self._nodes[member] = node
        self._holds[member] = self._actors[node].hold.remote(member, node, pid)

    def harm(self, member: int, action: Action) -> None:
        """See `Processes.harm`."""
        if member not in self._holds:
            raise ProcessLookupError("it has not said where it is")
        actor = self._actors[self._nodes[member]]
        why = self._answer(self._holds[member])
        if not why and action is Action.CUT:
            why = self._answer(actor.cut.remote(member, self._others(member)))
        elif not why:
            why = self._answer(actor.harm.remote(member, action.value))
        if why == NO_CONNECTION:
            raise NoConnectionError(why)
        if why:
            raise OSError(why)

    def thaw(self, member: int) -> None:
        """See `Processes.thaw`; it is not waited for."""
        if member in self._nodes:
            self._actors[self._nodes[member]].thaw.remote(member)

    def close(self) -> None:
        """See `Processes.close`; actors on nodes that are gone have nobody to let go."""
        import ray

        closing = [actor.close.remote() for actor in self._actors.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_S)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._nodes.clear()

    def _others(self, member: int) -> list[Ends]:
        """The ends of all others' connections; of those that are still there."""
        asked = [
            self._actors[node].ends.remote(other)
            for other, node in self._nodes.items()
            if other != member
        ]
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        found: list[Ends] = []
        for answer in asked:
            try:
                found += [(here, there) for here, there in ray.get(answer, timeout=_ANSWER_S)]
            except (RayError, GetTimeoutError):  # its process was never held, or its node is gone
                continue
        return found

    @staticmethod
    def _answer(answer: Any) -> str:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return str(ray.get(answer, timeout=_ANSWER_S))
        except (RayError, GetTimeoutError) as error:
            return f"its node does not answer: {type(error).__name__}"


def _why(act: Any, *arguments: Any) -> str:
    """Do it; why it could not be done, empty where it was."""
    try:
        act(*arguments)
    except OSError as error:
        return error.strerror or str(error)
    return ""
