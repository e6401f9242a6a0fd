"""A case with members as threads of this process, which take turns; and a plain loop beside it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raycloud.checkpoint import latest
from raycloud.checkpoint.payload import load_tensors
from raycloud.errors import RaycloudError, public_name
from raycloud.events import Event, MemberFailed, Noticed, StepsCommitted
from raycloud.on_ray.tasks import code_of, resolve
from raycloud.order import Order, Position, Steps, stream_seed
from raycloud.report.log import to_line
from raycloud.simulate.world import World
from raycloud.spec import Job, load_job
from raycloud.step.randomness import seed_everything
from raycloud.task import Source, Task
from tests.blocks import Here
from tests.scenario.cluster import Story, ThreadCluster
from tests.scenario.faults import Faults
from tests.scenario.fleet import Disk, Fleet
from tests.scenario.run import Scenario, _Run
from tests.scenario.stage import Stage, here
from tests.scenario.wires import Wires

CASES = Path(__file__).parent
_BUILD_S = 1.0  # a member is placed by then
_MICRO_BATCH_S = 0.01
_UNTIL_S = 3000.0


@dataclass(kw_only=True)
class Ended:
    """What came of a case.

    Attributes:
        status: As of `Finish`.
        error: The kind of error that ended it; empty: none did.
        said: All that a person is told of it: the error with its hint, and what was noticed.
        steps: How many a member has committed.
        tensors: Parameters and buffers of the last checkpoint, by name.
    """

    status: str
    error: str = ""
    said: str = ""
    steps: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def imported(job: Job) -> Iterator[type[Task]]:
    """A job's task; what its file changes in this process is undone afterwards."""
    modules, path, kind = dict(sys.modules), list(sys.path), torch.get_default_dtype()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        code = code_of(job, resolve(job))
        for one in code.sources:  # a worker imports them anew
            sys.modules.pop(one.name, None)
        seed_everything(0)
        yield code.load()
    finally:
        torch.set_default_dtype(kind)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        sys.path[:] = path
        for name in set(sys.modules) - set(modules):
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(CASES)):
                del sys.modules[name]


def asked(name: str, members: int, **changes: Any) -> Job:
    """The job of a case for so many members."""
    job = load_job(CASES / name / "job.yaml")
    elastic = job.elastic.model_copy(update={"min_workers": members, "max_workers": members})
    return job.model_copy(update={"elastic": elastic, **changes})


def run(name: str, members: int, folder: Path) -> Ended:
    """A case with so many members.

    Args:
        name: Its folder's.
        members: How many.
        folder: An empty one, for its checkpoints and blocks.
    """
    job = asked(name, members)
    try:
        with contextlib.chdir(CASES / name), imported(job) as kind:
            job = job.model_copy(update={"task": _timed(kind)})
            return _CaseRun(job, members, folder).end()
    except RaycloudError as error:  # already where it is imported
        return Ended(status="failed", error=public_name(error), said=str(error))


def plain_loop(name: str, folder: Path) -> dict[str, Tensor]:
    """What a single process makes of it, written without any of raycloud's training code.

    Args:
        name: The case's folder's.
        folder: An empty one, for blocks.
    """
    job = asked(name, 1)
    with contextlib.chdir(CASES / name), imported(job) as kind:
        task = kind(**job.settings)
        torch.manual_seed(stream_seed(job.seed, 3))
        model = task.model()
        splits = task.data(job.data.path)
        samples: Any = splits.train
        if isinstance(samples, Source):
            samples = Here(job, folder).provide(task, splits).train
        optimizer = task.optimizer(model)
        steps = job.steps or 0
        scheduler = task.scheduler(optimizer, steps)
        order = Order(samples=len(samples), seed=job.seed, shuffle=job.data.shuffle)
        cut = Steps(
            samples=len(samples),
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            drop_last=job.drop_last,
        )
        at = Position()
        for number in range(steps):
            span = cut.span(number, at)
            at = cut.after(span)
            batches = [
                (m, task.batch(_read(samples, order.ids(m.epoch, m.start, m.stop)), None))
                for m in span.micro_batches
            ]
            weights = [float(task.weight(batch, m.samples)) for m, batch in batches]
            if hasattr(optimizer, "train"):
                optimizer.train()
            for (m, batch), weight in zip(batches, weights, strict=True):
                _seed(stream_seed(job.seed, 2, m.epoch, m.start))
                (task.loss(model, batch) * (weight / sum(weights))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm or float("inf"))
            optimizer.step()
            if isinstance(scheduler, ReduceLROnPlateau):
                if (number + 1) % (job.evaluate.every_steps or steps) == 0:
                    scheduler.step(_mean_loss(task, model, splits.held_out))
            elif scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        return {n: t.detach() for n, t in model.state_dict().items() if isinstance(t, Tensor)}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of an entry, as a part of the largest entry of its tensor."""
    assert one.keys() == other.keys()
    found = 0.0
    for name, a in one.items():
        assert a.shape == other[name].shape, name
        assert a.dtype == other[name].dtype, name
        wide = torch.complex128 if a.is_complex() else torch.float64
        x, y = a.to(wide), other[name].to(wide)
        if x.numel():
            found = max(found, float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)))
    return found


def _mean_loss(task: Task, model: nn.Module, held_out: Any) -> float:
    model.eval()
    with torch.no_grad():
        batch = task.batch([held_out[i] for i in range(len(held_out))], None)
        loss = float(task.loss(model, batch))
    model.train()
    return loss


def _read(samples: Any, ids: Any) -> Any:
    return samples.gather(ids) if hasattr(samples, "gather") else [samples[i] for i in ids]


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _timed(kind: type[Task]) -> type[Task]:
    """The same task, of which the model and each loss take a while of virtual time."""

    def model(self):
        _take(_BUILD_S, "build")
        return kind.model(self)

    def loss(self, model, batch):
        _take(_MICRO_BATCH_S, "compute")
        return kind.loss(self, model, batch)

    timed = {"model": model, "loss": loss, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), timed)


def _take(seconds: float, point: str) -> None:
    strand = here()
    if strand is not None:
        strand.stage.wait(seconds, point)


class _CaseRun(_Run):
    """One start, which nothing befalls."""

    def __init__(self, job: Job, members: int, folder: Path) -> None:
        self.scenario = Scenario(
            seed=0, members=members, least=members, norm=False, speeds=(), blows=()
        )
        self.world = World(0)
        self.stage = Stage(self.world)
        self.story = Story(folder=folder / "checkpoints", world=self.world)
        self.faults = Faults((), self.stage, self.story)
        self.job, self.members, self.folder = job, members, folder
        self.failed: list[MemberFailed] = []
        self.noticed: list[Noticed] = []
        self.steps = 0

    def end(self) -> Ended:
        """To its end."""
        with self._staged():
            try:
                finish = self._play()
            finally:
                self.stage.close()
        if self.failed:
            error = self.failed[0]
            said = [error.message, error.hint, str(finish.error)]
        else:
            error, said = None, [str(finish.error or "")]
        said += [f"{one.what} {dict(one.detail)}" for one in self.noticed]
        store = Disk(self.stage, self.story.folder)
        manifest = latest(store).manifest
        tensors = {} if manifest is None else load_tensors(store, manifest)
        return Ended(
            status=finish.status,
            error="" if error is None else error.error,
            said="\n".join(said),
            steps=self.steps,
            tensors={
                n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")
            },
        )

    def _play(self):
        speeds = [_MICRO_BATCH_S] * self.members
        fleet = Fleet(self.stage, Wires(self.stage), speeds, [True] * self.members)
        fleet.provider = Here(self.job, self.folder / "cache") if self._sourced() else None
        start = ThreadCluster(self.job, fleet, self.story, None)

        def tell(event: Event) -> None:
            if isinstance(event, MemberFailed):
                self.failed.append(event)
            if isinstance(event, Noticed):
                self.noticed.append(event)
            if isinstance(event, StepsCommitted):
                self.steps = max(self.steps, event.last_step)
            to_line(0.0, event)  # as the run's log would

        start.listener = tell
        start.start()
        while start.finish is None:
            assert self.world.next_s < _UNTIL_S, "\n".join(self.story.told[-30:])
            self.world.happen()
        fleet.close()
        return start.finish

    def _sourced(self) -> bool:
        kind = self.job.task
        assert isinstance(kind, type)
        try:
            return isinstance(kind(**self.job.settings).data(self.job.data.path).train, Source)
        except (Exception, SystemExit):  # noqa: BLE001 - told by the member, which asks too
            return False

    def _passes(self, process, point) -> None:
        pass
