"""Azure: Scheduled Events, of which some end a machine.

Azure documentation, "Scheduled Events for Linux VMs". The first request switches them on, and may
stay without an answer for two minutes. All machines of a set are told of all events in it.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from raycloud.errors import MachineError
from raycloud.preemption.leaving import Leaving, seconds_until

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.preemption.metadata import Answer, MetadataServer

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_ENDS = {"Preempt", "Terminate", "Reboot", "Redeploy"}  # a Freeze only takes seconds


class Azure:
    """A virtual machine. Events are never approved early: that would end it at once.

    Args:
        server: Its metadata server.
        clock: To turn moments into seconds from now.
    """

    name = "azure"
    every_s = 5.0

    def __init__(self, server: MetadataServer, clock: Clock) -> None:
        """Its name is not known yet."""
        self._server = server
        self._clock = clock
        self._called = ""

    def leaving(self) -> Leaving | None:
        """Whether this machine is going to leave, and if several events say so, by the first one.

        Raises:
            MachineError: There is no answer, or none that makes sense.
        """
        events = self._ask(_EVENTS).record().get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise MachineError("the metadata server's answer holds no list of events")
        found = [self._leaving(event) for event in events if self._concerns(event)]
        return min(found, key=lambda leaving: leaving.deadline_s or 0.0, default=None)

    def _concerns(self, event: dict[str, Any]) -> bool:
        """Whether it ends this machine."""
        resources = event.get("Resources")
        if str(event.get("EventType")) not in _ENDS or not isinstance(resources, list):
            return False
        self._called = self._called or self._ask(_NAME).text().casefold()
        return self._called in {str(one).casefold() for one in resources}

    def _leaving(self, event: dict[str, Any]) -> Leaving:
        # Empty once it has begun.
        moment, now_s = str(event.get("NotBefore") or ""), self._clock.unix_s()
        return Leaving(
            reason=f"Azure has scheduled the end of this machine: {event['EventType']}",
            deadline_s=seconds_until(moment, now_s, parsedate_to_datetime) if moment else 0.0,
        )

    def _ask(self, path: str) -> Answer:
        return self._server.ask(path, {"Metadata": "true"})
