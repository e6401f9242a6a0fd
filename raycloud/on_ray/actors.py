"""Actors: one line each into plain code.

What computes is loaded where an actor begins, so that who only starts actors need not load torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import ray

from raycloud.clock import SystemClock
from raycloud.doctor.links import LinkEnds
from raycloud.errors import RaycloudError
from raycloud.events import MemberLeaving, Noticed
from raycloud.net.heartbeat import HeartbeatPeer
from raycloud.on_ray.attach import keep_confidential
from raycloud.planner.inventory import core_watts, price_per_hour
from raycloud.preemption import PreemptionNotice, on_sigterm, watch_here
from raycloud.redact import know
from raycloud.spec import Environment
from raycloud.spec.secrets import secrets_of
from raycloud.worker.outbox import LogCapture, LogLines, Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray import ObjectRef

    from raycloud.commands import Change
    from raycloud.net.stream import Place
    from raycloud.recovery.rendezvous import Meeting
    from raycloud.step.straggler import Stalled, Straggling
    from raycloud.worker.context import MemberConfig, ServerNames
    from raycloud.worker.member import Member
    from raycloud.worker.outbox import OutboxEntry, Survivor


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Look for no garbage while much is loaded (a sixth of torch's time), nor later in that."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@ray.remote
class MemberActor:
    """A member of a run. What a driver of a superseded term asks is passed over.

    In a seat that is granted to one run after the other (`seats`), its process is that of several
    members, one at a time: `begin` and `end` follow each other.

    Args:
        told: What it begins with, as one object in Ray's store; empty: it waits for `begin`.
        term: Of the driver.
    """

    def __init__(self, told: Sequence[ObjectRef[MemberConfig]], term: int = 0) -> None:
        """Load what computes, and start building in the background where there is something."""
        environment, context = Environment.from_process(), ray.get_runtime_context()
        know(environment.secrets)
        self._clock, self._node = SystemClock(), context.get_node_id()
        self._member: Member | None = None
        self._begun = threading.Event()
        self._failed: Exception | None = None
        self._turn, self._term, self._number = threading.Lock(), term, -1
        self._probed, self._ends = HeartbeatPeer(self._clock), LinkEnds(self._clock)
        key = f"{context.get_job_id()}/{self._node}"
        self._watch = watch_here(-1, key, self._clock, environment.cloud)
        on_sigterm(self._watch.add)
        self._log = LogCapture(-1, self._clock, lambda: self._member.step if self._member else None)
        self._log.listen()
        sys.stdout, sys.stderr = map(self._log.capture, (sys.stdout, sys.stderr))
        with loading():
            config = ray.get(told[0]) if told else None  # the task comes with it, and torch
            from raycloud.on_ray.provider import RayProvider
            from raycloud.worker.member import Member
        self._provider_of, self._member_of = RayProvider, Member
        if config is not None:
            self._begin(config, term)

    def begin(self, told: Sequence[ObjectRef[MemberConfig]], term: int) -> None:
        """Be a member: see `__init__`; `poll` raises what this raises."""
        try:
            self._begin(ray.get(told[0]), term)
        except Exception as error:
            self._failed = error
            self._begun.set()
            raise

    def _begin(self, config: MemberConfig, term: int) -> None:
        know(secrets_of(config.job))
        labels = ray.get_runtime_context().get_node_labels().items()
        told = {name: str(text) for name, text in labels}
        address = ray.util.get_node_ip_address()
        placed = replace(
            config,
            node=self._node,
            address=address,
            price_per_hour=price_per_hour(told),
            core_watts=core_watts(told, os.cpu_count() or 1),
        )
        with self._turn:
            self._term, self._number = term, config.member
            self._log.member = self._watch.member = config.member
            self._provider = self._provider_of(config, self._node)
            self._outbox = Outbox(config.member)
            self._member = self._member_of(placed, provider=self._provider)
        self._begun.set()

    def end(self, term: int, _begun: None = None) -> None:
        """End the member of this term: nothing of it is left, and another may `begin`.

        Args:
            term: Of its driver.
            _begun: What `begin` returns, before which this does not run.

        Raises:
            InternalError: It cannot leave what it computes: the process is of no use any more.
        """
        member = self._member
        if member is None or term != self._term:
            return
        member.give_up_worker().close()
        with self._turn:
            self._term, self._number, self._member = term + 1, -1, None
            self._begun.clear()
            self._log.fetch()
            self._provider.close()
            del self._provider, self._outbox
        gc.collect()

    def poll(
        self, timeout_s: float, written: int = 0, term: int = 0, probes: Place | None = None
    ) -> list[OutboxEntry | LogLines | Stalled | Straggling]:
        """See `Member.poll`; with what its provider has noticed, and what was logged.

        Args:
            timeout_s: To wait for a word that the driver was not told.
            written: The driver has written down all up to this one.
            term: The driver's.
            probes: Where it asks whether this machine is there; None: nowhere.
        """
        self._begun.wait(timeout_s)  # it may be asked before it has begun
        member = self._member
        if member is not None and probes is not None and term == self._term:
            self._probed.keep(probes, self._number)
        if self._failed is not None:
            raise self._failed
        with self._turn:  # words are numbered in the order in which they were said
            if term != self._term or member is None or member is not self._member:
                return []
            waiting_s = 0.0 if self._outbox.unsent else timeout_s
            events = member.poll(waiting_s)
            noticed = map(self._event, self._watch.fetch())
            self._outbox.add(chain(events, self._provider.notices(), noticed))
            told = self._outbox.take(written)
        return [*told, *self._log.fetch(), *member.stalls()]

    def survivor(self, written: int, term: int) -> Survivor | None:
        """See `Member.survivor`; from now on this driver is told all words after `written`."""
        self._term = max(self._term, term)
        with self._turn:
            if self._member is None:
                return None
            self._outbox.resend(written)
        return self._member.survivor()

    def _event(self, told: PreemptionNotice | Noticed) -> MemberLeaving | Noticed:
        if not isinstance(told, PreemptionNotice):
            return told
        if not told.certain:
            what = "this machine may have to leave"
            return Noticed(what=what, member=self._number, detail={"why": told.reason})
        return MemberLeaving(
            member=self._number,
            reason=told.reason,
            deadline_s=told.deadline_s,
            node=self._node if told.node else "",
        )

    def rejoin(self, member: int, term: int = 0) -> list[OutboxEntry]:
        """Go on as another member: see `Member.rejoin_as`."""
        with self._turn:
            if term == self._term and self._member is not None:
                self._member = self._member.rejoin_as(member)
                self._number, self._outbox = member, self._outbox.rejoin_as(member)
                self._log.member = self._watch.member = self._provider.member = member
        return []

    def form(self, meeting: Meeting, term: int = 0) -> None:
        """See `Member.form`."""
        if term == self._term and self._member is not None:
            self._member.form(meeting)

    def listen(self, host: str) -> tuple[int, bytes]:
        """See `LinkEnds.listen`."""
        return self._ends.listen(host)

    def call(self, host: str, port: int, key: bytes, lasts_s: float) -> tuple[float, float | None]:
        """See `LinkEnds.call`."""
        return self._ends.call(host, port, key, lasts_s)

    def serve(self, layouts: Sequence[ServerNames], term: int = 0) -> None:
        """See `RayProvider.serve`."""
        if term == self._term and self._member is not None:
            self._provider.serve(layouts)

    def prepare(self, number: int, change: Change, term: int = 0) -> None:
        """See `Member.prepare`."""
        if term == self._term and self._member is not None:
            self._member.prepare(number, change)


@ray.remote
class CollatorActor:
    """A collator, in a process of its own."""

    def __init__(self, config: MemberConfig) -> None:
        from raycloud.on_ray.provider import RayProvider
        from raycloud.worker.collator import Collator, CollatorServer

        keep_confidential(config.job)
        provider = RayProvider(config, ray.get_runtime_context().get_node_id())
        self._collator = Collator(config, provider)
        self._server = CollatorServer(self._collator, ray.util.get_node_ip_address())

    def place(self) -> Place:
        """Where members reach it."""
        return self._server.place

    def measure(self) -> float | RaycloudError:
        """See `Collator.measure`; an error of ours is returned, so that it travels as it is."""
        try:
            return self._collator.measure()
        except RaycloudError as error:
            return error
