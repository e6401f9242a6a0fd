"""The worker of a member: it builds the model and the data set, measures itself, and trains."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from raycloud.checkpoint import LimitedStore, check_shared, load
from raycloud.data.index import TRAIN
from raycloud.errors import InternalError, TaskError
from raycloud.events import DataPreparing, EvaluationPart, MemberDone, MemberReady, Noticed
from raycloud.net.probing import probe_links
from raycloud.order import Position
from raycloud.recovery.restore import Restore
from raycloud.spec.sizes import coded_bytes
from raycloud.step.collate import Collate, Making
from raycloud.step.contract import construct
from raycloud.step.device import Copies, choose, keep_freed_memory
from raycloud.step.mutation import evaluating, has_modes
from raycloud.step.replica import Replica
from raycloud.step.state import digest
from raycloud.step.travel import no_rounds, travel_by
from raycloud.worker.calibration import Calibration
from raycloud.worker.context import LoopContext, Membership
from raycloud.worker.dataset import DataRequest, DataSet, data_values, prepared_event
from raycloud.worker.energy import meter_of
from raycloud.worker.evaluate import evaluate, measured_value, show_sample, states_of, try_metrics
from raycloud.worker.fingerprint import SAMPLES, check_samples, fingerprint_of
from raycloud.worker.outbox import Survivor
from raycloud.worker.saver import Saver
from raycloud.worker.transition import Transition
from raycloud.worker.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from raycloud.commands import Extend, Meet
    from raycloud.data.provider import Provider
    from raycloud.data.samples import BlockSamples
    from raycloud.events import Event
    from raycloud.net.transport import Transport
    from raycloud.recovery.rendezvous import Host, Meeting
    from raycloud.worker.context import Changes, MemberConfig

_PREPARING_S = 20.0  # between two signs of life
_NAMED = 10  # of many parameters


class Worker:
    """Model, data set and loop of a member; lives in the member's thread.

    `pace` says whether its share is late. `provider` prepares the data of a task that returns a
    `Source`.

    Raises:
        JobError: The task, its data or the checkpoint cannot be used.
    """

    def __init__(
        self,
        config: MemberConfig,
        host: Host,
        changes: Changes,
        report: Callable[[Event], None],
        provider: Provider | None = None,
    ) -> None:
        """Build everything up to the first step: the model while the data is prepared."""
        job = config.job
        self._config, self._host, self._clock, self._report = config, host, host.clock, report
        self._provider, self._growing, self._idle = provider, False, True
        keep_freed_memory()
        torch.set_num_threads(job.resources.worker.cpus)
        self._device = choose(job.resources.worker.gpus)
        self._task = construct(config.task, job)
        request = DataRequest(self._task, job, provider)
        store = LimitedStore(host.open_store(config.checkpoints), threads=host.threads)
        if config.mark:
            check_shared(store, config.mark, config.address or config.node)
        self._trained = manifest = (
            config.origin
            if config.joins or config.resume_step is None
            else load(store, config.resume_step)
        )
        self._step = manifest.step if manifest is not None else 0
        self._position = manifest.position if manifest is not None else Position()
        began_s = self._clock.monotonic_s()

        def waiting() -> None:
            report(DataPreparing(member=config.member, seconds=self._clock.monotonic_s() - began_s))

        def last_step() -> int:
            asked_s = self._clock.monotonic_s()
            data = request.result(waiting, _PREPARING_S)
            self._waited_s = self._clock.monotonic_s() - asked_s
            self._data_set = DataSet(job, data, manifest)
            left = self._data_set.steps.until_epoch(job.epochs or 1, self._position)
            return job.steps or self._step + left

        self._replica = Replica(
            job, self._task, device=self._device, steps=last_step, clock=host.clock
        )
        if provider is not None:
            for part in self._replica.served:
                part.serve(provider.servers, lambda: provider.layout)
        self.pace = self._replica.pace
        self._replica.notice = lambda what, detail: self._notice(what, **detail)
        self._grown: dict[int, BlockSamples] = {}
        self._ready: MemberReady | None = None
        self._met: tuple[int, tuple[Transport, ...]] = -1, ()  # of the present generation
        self._restoring = Restore(store, self._replica, manifest, joins=config.joins)
        self._replica.state.beside = data_values(self._data_set.data.train)
        self._saver = partial(Saver, store, clock=host.clock, threads=host.threads)
        self._context = LoopContext(
            job=job,
            steps=self._data_set.steps,
            replica=self._replica,
            collate=self._collating(),
            saver=self._saver(member=config.member, report=report),
            changes=changes,
            clock=host.clock,
            host=host,
            report=report,
            evaluate=self._evaluate,
            extend=self._extend,
            first_step=self._step,
            meter=meter_of(host.clock, self._device),
            usage=Usage(host.clock, self._device, job.resources.worker.cpus),
        )
        self._begun = partial(
            Transition,
            manifest=manifest,
            last_step=min(self._replica.steps, config.only_steps or self._replica.steps),
            held=self._data_set.lane_bytes,
            address=config.address,
            restore=self._restoring,
        )
        self._transition = self._begun(self._context)
        for split, prepared in self._data_set.data.prepared.items():
            waited_s = self._waited_s if split == TRAIN else 0.0
            report(prepared_event(job, split, prepared, member=config.member, waited_s=waited_s))

    def begin_anew(
        self, config: MemberConfig, changes: Changes, report: Callable[[Event], None]
    ) -> MemberReady:
        """Be another member, that joins: what is built stays, what was computed counts no more.

        Returns what the caller is to report, once this is the worker of that member.
        """
        if self._ready is None:
            raise InternalError(f"member {config.member} was to take over what is not built")
        if self._replica.residual is not None:  # the others may have committed with it
            self._replica.residual.forget()
        torch.set_num_threads(config.job.resources.worker.cpus)  # it is another thread
        self._config, self._report = config, report
        saver = self._saver(member=config.member, report=report)
        self._context = replace(self._context, saver=saver, changes=changes, report=report)
        self._restoring.begin_anew()
        self._transition = self._begun(self._context)
        self._ready = replace(self._ready, member=config.member)
        self._replica.discard()
        trial = self._trial()
        trial.warm_up(self._ready.fixed_s, self._ready.micro_batch_s)
        trial.end()
        return self._ready

    @property
    def step(self) -> int | None:
        """The step being computed; None before the first."""
        return None if self._transition.loop is None else self._transition.loop.step

    @property
    def usual_s(self) -> float | None:
        """See `StallWatch`; None also on a GPU, and where other processes compile."""
        known = self._device.type == "cpu" and not self._config.job.compile
        return self.pace.longest_s if known and self.pace.computing else None

    def survivor(self) -> Survivor | None:
        """What the next driver is told; None before this member has the state of the training."""
        seat, ready = self._transition.seat, self._ready
        if seat is None or ready is None or self._transition.lacking:
            return None
        number, coming = self._context.changes.newest
        return Survivor(
            member=self._config.member,
            ready=ready,
            members=seat.members,
            generation=seat.generation,
            newest=max(coming, seat.generation),
            changes=number,
            grown=self._growing,
        )

    def measure(self) -> None:
        """Compute a little without effect, and report how fast, how much and from what state."""
        replica, trial, joins = self._replica, self._trial(), self._config.joins
        if not joins or self._config.back is not None:  # nobody has the state: nobody else knows
            trial.compare()
            trial.find_memory(thorough=self._config.plans)
        if (speed := self._config.speed) is None:
            speed = trial.joining_speed() if joins else trial.speed()
        elif joins:
            trial.warm_up(*speed)
        if not joins:
            left = self._replica.steps - self._step
            trial.last_of_an_epoch(self._data_set.steps, self._position, left)
            if (held_out := self._data_set.data.held_out) is not None:
                with evaluating(replica.optimizer):
                    found = try_metrics(self._config.job, self._task, replica.model, held_out)
                if replica.by_measured:
                    measured_value(found)
            elif replica.by_measured:
                raise TaskError(
                    f"Task.scheduler returned {type(replica.scheduler).__name__}, which goes by "
                    "what is measured, and Task.data gives no held-out samples",
                    hint="give Splits.held_out",
                )
        trial.end()
        made_s = trial.collate_s if trial.collate_s < float("inf") else 0.0
        self._ready = replace(self._described(*speed), collate_s=made_s, **trial.passes())
        self._report(self._ready)
        if names := replica.statistics.changing:
            self._notice("buffers averaged over replicas, not exact", buffers=list(names))
        if replica.own_extra:
            what = "forward passes change what get_extra_state gives: each worker has its own"
            self._notice(what, kept="a checkpoint keeps that of the worker that comes first")
        if idle := [name for name, _ in replica.trained.idle]:
            what = "parameters that require a gradient, but no group of the optimizer has"
            self._notice(what, count=len(idle), parameters=idle[:_NAMED])
        if not joins:  # now it waits for the others
            self._data_set.copy_while(lambda: self._idle or None, self._config.member)

    def _described(self, fixed_s: float, micro_batch_s: float) -> MemberReady:
        """What this member sees and trains, how fast, and from what state."""
        config, replica = self._config, self._replica
        data = self._data_set.data
        fingerprint = fingerprint_of(data, self._clock)
        trained = None if self._trained is None else self._trained.values.get(SAMPLES)
        if not config.joins and (other := check_samples(fingerprint, trained)):
            self._notice("some samples are others than at the checkpoint", samples=other)
        replica.state.beside = {**replica.state.beside, SAMPLES: fingerprint}
        tensors = replica.state.tensors()
        replica.state.check()
        usage, reserved = self._context.usage, self._config.job.resources.worker.cpus
        return MemberReady(
            member=config.member,
            samples=len(data.train),
            held_out=0 if data.held_out is None else len(data.held_out),
            fingerprint=fingerprint,
            parameters=replica.parameters,
            state_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
            gradient_bytes=replica.gradients.gradient_bytes,
            fixed_s=fixed_s,
            micro_batch_s=micro_batch_s,
            state_digest=digest(tensors.items()),
            node=config.node,
            price_per_hour=config.price_per_hour,
            core_watts=config.core_watts,
            no_rounds=no_rounds(replica),
            cores=0.0 if usage is None else usage.cores,
            quota=0.0 if usage is None or usage.quota >= reserved else usage.quota,
            pid=os.getpid(),
            processor=replica.processor,
            role=config.role,
        )

    def _trial(self) -> Calibration:
        job, member, context = self._config.job, self._config.member, self._context
        return Calibration(
            job,
            self._replica,
            context.collate,
            member=member,
            clock=self._clock,
            quota=0.0 if context.usage is None else context.usage.quota,
        )

    def meet(self, meeting: Meeting, abandoned: Callable[[], bool]) -> tuple[Transport, Transport]:
        """Meet the others, in any thread; `TransportError`: not all came, or it is over."""
        self._idle = False  # links are about to be measured
        job, servers = self._config.job, self._replica.summing
        topology = (meeting.sync or job.sync_point).topology
        topology = "ring" if job.asynchronous else topology
        address, device = self._config.address, self._device
        more = {} if servers is None else {"servers": servers}
        return self._host.meet(meeting, address, device, abandoned, topology=topology, **more)

    def train(
        self,
        meeting: Meeting,
        abandoned: Callable[[], bool],
        met: tuple[Transport, Transport] | None = None,
    ) -> Meet | None:
        """Compute as a member of a generation to its end; measure and show the result at the last.

        `met` is what `meet` has returned; None: they meet first. Returns the generation that
        follows, as it was planned; None: there is nothing left to do.

        Raises:
            TransportError: The generation broke, or was abandoned. Nothing but the step under way
                is undone, and another call goes on with it in the next generation.
            CheckpointError: What it is to begin from, or to go back to, cannot be loaded.
            RollbackError: It, or a step, is not finite, and the job goes back then.
        """
        if meeting.back is not None and (to := self._restoring.go_back(meeting.back)) is not None:
            self._transition.go_back(to)
        gradients, lane = met or self.meet(meeting, abandoned)
        (last, before), self._met = self._met, (meeting.generation, (gradients, lane))
        if meeting.sync is not None:
            travel_by(self._replica, meeting.sync)
        self._replica.connect(gradients)
        with ExitStack() as over:
            over.callback(self._transition.leave)
            old = over.enter_context(ExitStack())
            old.callback(self._host.leave, before)
            if not meeting.planned:
                old.close()
            size = self._replica.gradients.gradient_bytes
            point = meeting.sync or self._config.job.sync_point
            probe = partial(
                probe_links,
                gradients,
                most_bytes=size,
                step_bytes=coded_bytes(size, point.codec, point.ratio),
                device=self._device,
                clock=self._clock,
            )
            loop = self._transition.enter(meeting, lane, abandoned, probe)
            if last < 0:  # the first, whose links are measured by now
                self._data_set.copy_while(self._in_rounds, self._config.member, gently=True)
            old.close()  # by now all others that go on have heard the last words there
            loop.run()
        if loop.next is not None:
            return loop.next
        self._context.saver.finish(abandoned)
        done = MemberDone(member=self._config.member, step=loop.step, generation=meeting.generation)
        self._report(done)
        return None

    def _in_rounds(self) -> bool | None:
        """Whether links are idle most of the time; None: they never are again."""
        rounds, (generation, _) = self._replica.rounds, self._met
        return None if rounds is None or generation < 0 else rounds.choice.period > 1

    def close(self) -> None:
        """Nobody has it any more, and all members are done."""
        self._idle = False
        (_, last), self._met = self._met, (-1, ())
        self._host.leave(last)
        for part in self._replica.served:
            part.close()
        if (elsewhere := self._context.collate.making.elsewhere) is not None:
            elsewhere.close()

    def finish_writing(self, most_s: float) -> None:
        """Wait until this member's part of a checkpoint is written and told, but not for longer."""
        self._context.saver.wait(most_s)

    def hang_up(self, generation: int) -> None:
        """In whichever thread: this generation, and any before it, is over."""
        met, transports = self._met
        for transport in transports if met <= generation else ():
            transport.hang_up()
        for part in self._replica.served if met <= generation else ():
            part.hang_up()

    def fetch(self, change: Extend) -> None:
        """Get at the grown data, in whichever thread; it is read once `change` takes effect."""
        if self._provider is None:
            raise InternalError(f"{change} came for data that nothing here has prepared")
        self._growing = True
        samples = self._provider.grown(change.version)
        if len(samples) != change.samples:
            raise InternalError(f"{change} came, but there are {len(samples)} samples")
        self._grown[change.version] = samples

    def _extend(self, change: Extend, epoch: int) -> None:
        """From `epoch` on, read the grown data."""
        samples = self._grown.pop(change.version)
        state, collate = self._replica.state, self._context.collate
        layout, prepared = self._data_set.extend(samples)
        collate.extend(samples, epoch, layout)
        if (elsewhere := collate.making.elsewhere) is not None:
            elsewhere.extend(change.version, epoch, layout)
        state.beside = {**state.beside, **data_values(samples)}
        told = {"member": self._config.member, "version": change.version}
        self._report(prepared_event(self._config.job, TRAIN, prepared, **told))

    def _collating(self) -> Collate:
        """How this member's batches are made."""
        job, cuda = self._config.job, self._device.type == "cuda"
        order = self._data_set.order
        data = self._data_set.data
        collate = Collate(
            self._task,
            data.train,
            order,
            pinned=cuda,
            making=Making(
                threads=job.data.threads,
                copies=Copies(self._device) if cuda else None,
                skips=job.errors.on_error == "skip",
                apart=job.elastic.backup_micro_batches,
                batch=job.global_batch,
            ),
            clock=self._clock,
        )
        collators = getattr(self._provider, "collators", None) if job.data.collators else None
        if collators is not None:
            collate.making = replace(collate.making, elsewhere=collators(collate, data.train))
        return collate

    def _evaluate(self, step: int, seat: Membership) -> dict[str, Any]:
        if seat.part is None:
            return {}
        job, model, held_out = self._config.job, self._replica.model, self._data_set.data.held_out
        states: dict[str, Any] = {}
        last = step == seat.last_step and seat.part == 0
        if self._replica.tables is not None:
            self._replica.tables.read_as_of(step)
        if has_modes(self._replica.optimizer):
            self._replica.settle()  # a newcomer gets the parameters that are trained
        with evaluating(self._replica.optimizer):
            if held_out is not None:
                shares = [seat.shares[seat.members.index(member)] for member in seat.holders]
                metrics = evaluate(job, self._task, model, held_out, rank=seat.part, shares=shares)
                states = states_of(metrics)
            text = show_sample(job, self._task, model) if last else None
        if step == seat.last_step:
            self._context.saver.wait()  # whatever becomes of what is told, the checkpoint is whole
        self._report(
            EvaluationPart(
                member=self._config.member,
                step=step,
                states=states,
                sample=text,
                generation=seat.generation,
                replica=seat.key[0],
                position=seat.key[1],
            )
        )
        return states

    def _notice(self, what: str, **detail: object) -> None:
        self._report(Noticed(what=what, member=self._config.member, detail=detail))
