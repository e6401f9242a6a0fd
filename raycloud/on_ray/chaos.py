"""A job twice on one Ray: undisturbed, then under faults; and how far the two are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
)
from raycloud.on_ray.attach import attached
from raycloud.on_ray.run import train
from raycloud.report.chaos import Bound, Outcome, bound_of, side_of
from raycloud.spec import Job, RunDirectory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from raycloud.checkpoint.payload import Difference
    from raycloud.events import Observed

_LEAST_WORKERS = 2
_ANSWER_S = 10.0


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


class Chaos:
    """A job's runs, in one directory: `undisturbed`, `disturbed`, and `alone`, by one worker.

    Args:
        directory: Where they are kept.
        address: A standing cluster; None: a Ray that is started here, for the time of it.
        say: Told what goes on.
        shown: Shows a run's events.
    """

    def __init__(
        self,
        directory: Path,
        address: str | None,
        say: Callable[[str], None],
        shown: Callable[[Job], AbstractContextManager[Callable[[Observed], None]]],
    ) -> None:
        self._directory, self._address, self._say, self._shown = directory, address, say, shown

    def run(self, job: Job, faults: Sequence[Fault]) -> Outcome:
        """Run a job undisturbed and under faults.

        Raises:
            RaycloudError: The undisturbed run failed.
        """
        # As many processors as workers, so that each finds a place, and the next in the place of a
        # lost one, also where they have to share.
        elastic = job.elastic.model_copy(update={"min_workers": job.most_workers})
        with attached(job.model_copy(update={"elastic": elastic}), self._address):
            self._say("the undisturbed run")
            self._train(job, "undisturbed")
            self._say("the run under faults")
            # On a Ray that is started here all workers are on this machine.
            processes = LocalProcesses() if self._address is None else ClusterProcesses()
            injector = Injector(faults, processes, SystemClock(), self._say)
            error = None
            try:
                with injector.at_work():
                    self._train(job, "disturbed", injector.see)
            except RaycloudError as found:  # it is what this is to find out
                error = found.message
            undisturbed = side_of(self._directory / "undisturbed")
            disturbed = side_of(self._directory / "disturbed", error)
            apart = bound = None
            if undisturbed.status == disturbed.status == "finished":
                apart, bound = self._held(job)
        return Outcome(
            job=job.name,
            seed=None,
            workers=job.most_workers,
            undisturbed=undisturbed,
            disturbed=disturbed,
            difference=apart,
            bound=bound,
            hits=tuple(injector.hits),
            left=injector.left,
        )

    def _held(self, job: Job) -> tuple[Difference | None, Bound | None]:
        """How far the two are apart, and what that is held to."""
        try:
            apart = self._difference("disturbed")
        except CheckpointError as error:
            self._say(f"the two cannot be compared: {error.message}")
            return None, None
        if apart.precision == "float64":
            return apart, bound_of(apart.precision)
        self._say(f"a run by one worker, to see what rounding does in {apart.precision}")
        one = {"min_workers": 1, "max_workers": 1, "shares": "auto"}
        elastic = job.elastic.model_copy(update=one)
        try:
            self._train(job.model_copy(update={"elastic": elastic}), "alone")
            other = self._difference("alone")
        except RaycloudError as error:  # the two runs are kept, and told of
            self._say(f"what rounding does is not known, since that run failed: {error.message}")
            return apart, None
        return apart, bound_of(apart.precision, other.largest)

    def _difference(self, name: str) -> Difference:
        from raycloud.checkpoint.payload import difference

        places = (RunDirectory(self._directory / each) for each in ("undisturbed", name))
        return difference(*(open_store(str(place.checkpoints)) for place in places))

    def _train(self, job: Job, name: str, see: Callable[[Observed], None] | None = None) -> None:
        with self._shown(job) as shown:

            def observer(event: Observed) -> None:
                if see is not None:
                    see(event)
                shown(event)

            train(job, run_dir=self._directory / name, address=self._address, observer=observer)


class ProcessesActor:
    """The processes on one node; what cannot be done is returned as words."""

    def __init__(self) -> None:
        self._processes = LocalProcesses()

    def call(self, method: str, *args: Any) -> Any:
        """What a method of `LocalProcesses` returns, or why it could not do it."""
        try:
            return getattr(self._processes, method)(*args)
        except OSError as error:
            return error.strerror or str(error)


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
        self._holds[member] = self._actors[node].call.remote("hold", member, node, pid)

    def harm(self, member: int, action: Action) -> None:
        """See `Processes.harm`."""
        if member not in self._holds:
            raise ProcessLookupError("it has not said where it is")
        actor = self._actors[self._nodes[member]]
        why = _answer(self._holds[member])
        if not why:
            cuts = action is Action.CUT
            told = ("cut", member, self._others(member)) if cuts else ("harm", member, action)
            why = _answer(actor.call.remote(*told))
        if why == NO_CONNECTION:
            raise NoConnectionError(why)
        if why:
            raise OSError(why)

    def thaw(self, member: int) -> None:
        """See `Processes.thaw`; it is not waited for."""
        if member in self._nodes:
            self._actors[self._nodes[member]].call.remote("thaw", member)

    def close(self) -> None:
        """See `Processes.close`; actors on nodes that are gone have nobody to let go."""
        import ray

        closing = [actor.call.remote("close") for actor in self._actors.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_S)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._nodes.clear()

    def _others(self, member: int) -> set[tuple[str, str]]:
        """The ends of all others' connections; of those that are still there."""
        asked = [
            self._actors[node].call.remote("ends", other)
            for other, node in self._nodes.items()
            if other != member
        ]
        answers = [_answer(one) for one in asked]  # words where its process is not held, or gone
        return {ends for one in answers if not isinstance(one, str) for ends in one}


def _answer(call: Any) -> Any:
    """What an actor returns, or that it does not."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(call, timeout=_ANSWER_S)
    except RayError as error:
        return f"its node does not answer: {type(error).__name__}"
