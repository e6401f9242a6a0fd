"""What a member does from its start to its end: build, measure itself, meet the others, compute."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from raycloud.checkpoint import encode, load, open_store
from raycloud.checkpoint.payload import load_tensors
from raycloud.errors import TaskError, TransportError
from raycloud.events import EvaluationPart, GenerationFormed, MemberDone, MemberReady, Noticed
from raycloud.order import MicroBatch, Order, Position
from raycloud.sync.agree import same_everywhere, take_from
from raycloud.sync.gloo import GlooTransport
from raycloud.sync.lane import Lane
from raycloud.sync.nccl import NcclTransport
from raycloud.training.contract import construct, cut, global_draws, load_samples
from raycloud.training.device import choose
from raycloud.training.evaluate import evaluate, show
from raycloud.training.feed import Collate
from raycloud.training.loop import Loop, Parts, Seat
from raycloud.training.memory import keep_freed_memory
from raycloud.training.replica import Replica
from raycloud.training.saver import Saver
from raycloud.training.state import digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from raycloud.clock import Clock
    from raycloud.events import Event
    from raycloud.spec import Job
    from raycloud.sync.transport import Transport
    from raycloud.task import Task
    from raycloud.training.changes import Changes

_MEETING_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """What a member is told at its start.

    `address` is this node's address that peers can reach. `checkpoints` is where they are kept;
    `resume_step` names the one to start from, None for the beginning.
    """

    member: int
    node: str
    address: str
    job: Job
    task: type[Task]
    checkpoints: str
    resume_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where and as what to meet the other members of a generation."""

    host: str
    port: int
    generation: int
    rank: int
    members: tuple[int, ...]
    shares: tuple[int, ...]


class Life:
    """What a member holds, in its own thread.

    Args:
        config: What it is told.
        clock: For the seconds reported.
        changes: Where changes arrive that the driver sends ahead.
        report: Gets every event.

    Raises:
        JobError: The task, its data or the checkpoint cannot be used.
    """

    def __init__(
        self,
        config: MemberConfig,
        clock: Clock,
        changes: Changes,
        report: Callable[[Event], None],
    ) -> None:
        """Build everything up to the first step."""
        job = config.job
        self._config, self._clock, self._report = config, clock, report
        keep_freed_memory()
        torch.set_num_threads(job.resources.worker.cpus)
        self._device = choose(job.resources.worker.gpus)
        self._task = construct(config.task, job)
        self._splits = load_samples(self._task, job)
        samples = len(self._splits.train)
        self._order = Order(samples=samples, seed=job.seed, shuffle=job.data.shuffle)
        steps = cut(job, samples)
        store = open_store(config.checkpoints)
        manifest = load(store, config.resume_step) if config.resume_step is not None else None
        self._step = manifest.step if manifest is not None else 0
        self._position = Position()
        if manifest is not None:
            self._position = Position(epoch=manifest.epoch, offset=manifest.offset)
        self._last_step = job.steps or (
            self._step + steps.until_epoch(job.epochs or 1, self._position)
        )
        self._replica = Replica(
            job, self._task, device=self._device, steps=self._last_step, clock=clock
        )
        if manifest is not None:
            self._replica.state.load(load_tensors(store, manifest), manifest.values)
        self._fuses = tuple(manifest.values["fuses"]) if manifest is not None else ()
        self._collate = Collate(
            self._task, self._splits.train, self._order, pinned=self._device.type == "cuda"
        )
        saver = Saver(store, member=config.member, clock=clock, report=report)
        self._parts = Parts(
            job=job,
            steps=steps,
            replica=self._replica,
            collate=self._collate,
            saver=saver,
            changes=changes,
            clock=clock,
            report=report,
            evaluate=self._evaluate,
        )

    def measure(self) -> None:
        """Compute a little without effect, and report how fast, how much and from what state."""
        job, replica = self._config.job, self._replica
        micro = min(job.micro_batch, self._order.samples)
        many = max(
            1, min(job.micro_batches // job.elastic.max_workers, self._order.samples // micro)
        )
        single_s = self._seconds(1, micro)
        if job.elastic.shares == "auto":
            single_s = self._seconds(1, micro)  # the first one warmed up
        fixed_s, micro_batch_s = 0.0, single_s
        if replica.fuse > 1 and many > 1 and job.elastic.shares == "auto":
            many_s = self._seconds(many, micro)
            micro_batch_s = max((many_s - single_s) / (many - 1), 0.05 * single_s)
            fixed_s = max(single_s - micro_batch_s, 0.0)
        tensors = replica.state.tensors()
        encode(replica.state.values())  # refuse now what no checkpoint could carry
        self._report(
            MemberReady(
                member=self._config.member,
                samples=self._order.samples,
                parameters=replica.parameters,
                state_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
                gradient_bytes=replica.gradients.gradient_bytes,
                fixed_s=fixed_s,
                micro_batch_s=micro_batch_s,
                state_digest=digest(tensors.items()),
                node=self._config.node,
            )
        )
        if names := replica.statistics.changing:
            self._notice("buffers averaged over replicas, not exact", buffers=list(names))

    def train(self, meeting: Meeting, abandoned: Callable[[], bool]) -> None:
        """Meet the others, compute to the end, measure and show the result."""
        size = len(meeting.shares)
        gradients, lane = self._meet(meeting, size)
        self._replica.connect(gradients)
        tensors = self._replica.state.tensors()
        if not same_everywhere(digest(tensors.items()), lane, abandoned):
            here = {name: t for name, t in tensors.items() if t.device.type == "cpu"}
            take_from(0, here, lane, abandoned)
            there = {name: t for name, t in tensors.items() if name not in here}
            take_from(0, there, gradients, abandoned)
            self._notice("members began from different parameters; rank 0's were taken")
        if len(self._fuses) == size:  # go on as this rank did, so that it rounds as it did
            self._replica.fuse = min(self._replica.fuse, self._fuses[meeting.rank])
        seat = Seat(
            members=meeting.members,
            rank=meeting.rank,
            generation=meeting.generation,
            shares=meeting.shares,
            step=self._step,
            position=self._position,
            last_step=self._last_step,
        )
        if meeting.rank == 0:  # it has met all others
            self._report(
                GenerationFormed(
                    generation=meeting.generation,
                    members=meeting.members,
                    shares=meeting.shares,
                    first_step=self._step,
                )
            )
        loop = Loop(self._parts, seat, Lane(lane), abandoned)
        loop.run()
        self._parts.saver.wait()
        self._report(MemberDone(member=self._config.member, step=loop.step))

    def _meet(self, meeting: Meeting, size: int) -> tuple[Transport, Transport]:
        try:
            store = dist.TCPStore(
                meeting.host,
                meeting.port,
                is_master=False,
                timeout=datetime.timedelta(seconds=_MEETING_S),
            )
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"the meeting place at {meeting.host}:{meeting.port} cannot be reached: {error}"
            ) from error

        def gloo(purpose: str, threads: int) -> Transport:
            prefix = dist.PrefixStore(f"generation-{meeting.generation}/{purpose}", store)
            return GlooTransport(
                prefix,
                rank=meeting.rank,
                size=size,
                address=self._config.address,
                threads=threads,
            )

        lane = gloo("lane", 1)
        if self._device.type == "cuda":
            prefix = dist.PrefixStore(f"generation-{meeting.generation}/gradients", store)
            return NcclTransport(prefix, rank=meeting.rank, size=size), lane
        return gloo("gradients", 2), lane

    def _evaluate(self, step: int, seat: Seat) -> None:
        last = step == seat.last_step
        states: dict[str, Any] = {}
        model = self._replica.model
        if self._splits.held_out is not None:
            metrics = evaluate(
                self._config.job,
                self._task,
                model,
                self._splits.held_out,
                rank=seat.rank,
                size=seat.size,
            )
            states = {name: metric.state() for name, metric in metrics.items()}
        text = None
        if last and seat.rank == 0:
            text = show(self._config.job, self._task, model)
        self._report(
            EvaluationPart(member=self._config.member, step=step, states=states, sample=text)
        )

    def _seconds(self, micro_batches: int, micro: int) -> float:
        group = [
            MicroBatch(index=i, epoch=0, start=i * micro, stop=(i + 1) * micro)
            for i in range(micro_batches)
        ]
        before = global_draws()
        passes = self._collate.passes(group, micro_batches)
        if global_draws() != before:
            raise TaskError(
                "reading samples or Task.batch drew from a global random generator, so that "
                "results would depend on timing",
                hint="draw from the `rng` that Task.batch is given",
            )
        began_s = self._clock.monotonic_s()
        for one in passes:
            self._replica.try_out(one)
        return self._clock.monotonic_s() - began_s

    def _notice(self, what: str, **detail: object) -> None:
        self._report(Noticed(what=what, member=self._config.member, detail=detail))
