"""Actors: one line each into plain code."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from raycloud.clock import SystemClock
from raycloud.training.member import Meeting, Member, MemberConfig

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.events import Event


@ray.remote
class MemberActor:
    """A member of a run, in a process of its own."""

    def __init__(self, config: MemberConfig) -> None:
        """Start building in the background."""
        here = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        self._member = Member(replace(config, node=here, address=address), SystemClock())

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Member.poll`."""
        return self._member.poll(timeout_s)

    def form(self, meeting: Meeting) -> None:
        """See `Member.form`."""
        self._member.form(meeting)

    def prepare(self, number: int, change: Change) -> None:
        """See `Member.prepare`."""
        self._member.prepare(number, change)

    def abandon(self) -> None:
        """See `Member.abandon`."""
        self._member.abandon()
