"""Members in threads of this process, told by a test what a driver would tell them.

They share torch's generator, so their task must draw nothing while they compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycloud.commands import Change, Form, Meet
from raycloud.events import Event, MemberFailed, MemberReady
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.recovery.rendezvous import Meeting
from raycloud.spec import Job
from raycloud.step.replica import Replica
from raycloud.task import Task
from raycloud.worker.context import MemberConfig
from raycloud.worker.member import _OVER as OVER
from raycloud.worker.member import Member
from tests.live_tasks import Paced
from tests.sockets import close_all

WAIT_S = 60.0
_ENDS_S = 5.0  # for what a member computes just then

_OPEN: list[Fellows] = []


def end_all() -> None:
    """End the members of the test that is over: a generation left open costs time for ever."""
    while _OPEN:
        _OPEN.pop().close()


class Fellows:
    """`count` members that begin, and more that join them; each is built before any computes."""

    def __init__(
        self, folder: Path, job: Job, count: int, joining: int = 1, task: type[Task] = Paced
    ) -> None:
        self._rendezvous = Rendezvous("127.0.0.1")
        self.events: list[Event] = []
        self.members: list[Member] = []
        self.nodes: tuple[str, ...] = ()  # by number; empty: nobody says where they are
        self._pause = threading.Event()
        _OPEN.append(self)
        for number in range(count + joining):
            told = MemberConfig(
                member=number,
                node="",
                address="127.0.0.1",
                job=job,
                task=task,
                checkpoints=str(folder),
                joins=number >= count,
            )
            self.members.append(Member(told))
            self.until(MemberReady, members=[number])

    def close(self) -> None:
        """End all members, and their rendezvous."""
        lives = [member._worker for member in self.members]  # who ends badly lets go of it
        for member in self.members:
            member.abandon(OVER)
            member._meetings.put(None)
        for member in self.members:
            member._thread.join(_ENDS_S)
        close_all(t for life in lives if life is not None for t in life._met[1])
        self._rendezvous.close()

    def form(self, told: Form) -> None:
        """Its members meet; all others are left out."""
        for rank, member in enumerate(told.members):
            self.members[member].form(replace(self._meeting(told, rank), settled=told.settled))

    def prepare(self, number: int, change: Change, members: Iterable[int]) -> None:
        """Send a change ahead to `members`, and a `Meet` also to those that come."""
        if not isinstance(change, Meet):
            for member in members:
                self.members[member].prepare(number, change)
            return
        for rank, member in enumerate(change.members):
            meeting = replace(self._meeting(change, rank), settled=number, planned=True)
            ahead = number if member in members else None
            self.members[member].form(replace(meeting, ahead=ahead))
        for member in set(members) - set(change.members):
            self.members[member].prepare(number, change)

    def until(
        self,
        kind: type[Event],
        members: Iterable[int],
        more: int = 1,
        unless: type[Event] | None = None,
    ) -> None:
        """Wait until each of these members has said so `more` times; or until any says `unless`."""
        end = time.monotonic() + WAIT_S
        while any(len(self.of(kind, member)) < more for member in members):
            if unless is not None and self.of(unless):
                return
            for member in self.members:
                self.events += member.poll(0.0)
            failed = [e for e in self.events if isinstance(e, MemberFailed)]
            assert not failed, failed
            assert time.monotonic() < end, f"no {kind.__name__} of {members}: {self.events}"
            self._pause.wait(0.005)

    def come_to(self, member: int, step: int) -> None:
        """Wait until this member computes `step`."""
        end = time.monotonic() + WAIT_S
        while (self.members[member].step or 0) < step:
            assert time.monotonic() < end, f"member {member} has not come to step {step}"
            self._pause.wait(0.002)

    def of(self, kind: type[Any], member: int | None = None) -> list[Any]:
        """What was said of this kind, by this member."""
        said = [event for event in self.events if isinstance(event, kind)]
        return [e for e in said if member is None or e.member == member]

    def replica(self, member: int) -> Replica:
        """What it computes with."""
        life = self.members[member]._worker
        assert life is not None
        return life._replica

    def _meeting(self, told: Form | Meet, rank: int) -> Meeting:
        return Meeting(
            place=self._rendezvous.place,
            generation=told.generation,
            rank=rank,
            members=told.members,
            shares=told.shares,
            nodes=tuple(self.nodes[member] for member in told.members) if self.nodes else (),
            following=told.following,
            back=told.back if isinstance(told, Form) else None,
            sync=told.sync,
        )
