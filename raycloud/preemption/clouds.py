"""Preemption notices of AWS, Google Cloud and Azure, and which cloud this machine is in.

Each cloud says on its metadata server that it takes a machine back, in a form of its own. The cloud
itself is found in what the firmware says, which Linux shows as files: nobody is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import read_whole
from raycloud.errors import MachineError, SpecError
from raycloud.preemption.metadata import Answer, MetadataServer

if TYPE_CHECKING:
    from raycloud.clock import Clock

DMI = Path("/sys/class/dmi/id")
_MOST_BYTES = 2**16  # a file there claims a page of memory
# What Azure writes there on all of its machines, and Hyper-V elsewhere does not.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    """Notice that a machine, or a process, is going to leave."""

    reason: str  # who says so, and why
    deadline_s: float | None = None  # from when it is told; None: nobody says, maybe at once
    certain: bool = True  # else it only may leave
    node: bool = True  # else only the process that tells it


class Cloud:
    """A cloud whose metadata server can be asked whether it takes this machine back."""

    name = ""  # as in `RAYCLOUD_CLOUD`
    every_s = 5.0  # from one question to the next

    def __init__(self, server: MetadataServer, clock: Clock) -> None:
        self._server, self._clock = server, clock

    def notice(self) -> PreemptionNotice | None:
        """The notice that there is now.

        Raises:
            MachineError: There is no answer, or none that makes sense.
        """
        raise NotImplementedError


class Aws(Cloud):
    """Interruption notices of EC2 spot instances, two minutes ahead, and rebalance recommendations.

    Amazon EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance
    recommendations" and "Use the Instance Metadata Service" (version 2, which asks for a token).
    """

    name = "aws"
    _token = ""
    _recommended = False

    def notice(self) -> PreemptionNotice | None:
        """An interruption; else a recommendation, which is never taken back."""
        told = self._record("/latest/meta-data/spot/instance-action")
        if told is not None:
            action = str(told.get("action"))
            if action not in {"terminate", "stop", "hibernate"}:
                raise MachineError("the metadata server tells of an interruption of no known kind")
            return PreemptionNotice(
                reason=f"AWS takes this spot instance back: {action}",
                deadline_s=_seconds_until(
                    str(told.get("time")), self._clock.unix_s(), datetime.fromisoformat
                ),
            )
        if not self._recommended:
            rebalance = "/latest/meta-data/events/recommendations/rebalance"
            self._recommended = self._record(rebalance) is not None
        if self._recommended:
            reason = "AWS may take this spot instance back soon: it recommends to rebalance"
            return PreemptionNotice(reason=reason, certain=False)
        return None

    def _record(self, path: str) -> dict[str, Any] | None:
        """What is told there; None: nothing."""
        for _ in range(2):  # a token that has expired is refused
            self._token = self._token or self._new_token()
            answer = self._server.ask(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status == 404:  # noqa: PLR2004 - not found
                return None
            if answer.status != 401:  # noqa: PLR2004 - unauthorized
                return answer.record()
            self._token = ""
        raise MachineError("the metadata server refuses the token that it gave")

    def _new_token(self) -> str:
        longest = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        token = self._server.ask("/latest/api/token", longest, method="PUT").text()
        if not re.fullmatch(r"[!-~]{1,1024}", token):
            raise MachineError("the metadata server's token is none")
        return token


class Google(Cloud):
    """Preemption of Compute Engine's spot machines, and maintenance that ends a machine.

    Compute Engine documentation, "Spot VMs" and "Query metadata server for maintenance event
    notices".
    """

    name = "google"
    every_s = 2.0  # only 30 s pass from the notice to the end

    def notice(self) -> PreemptionNotice | None:
        """A preemption, else maintenance."""
        told = self._ask("preempted")
        if told not in {"TRUE", "FALSE"}:
            raise MachineError("the metadata server says neither TRUE nor FALSE of a preemption")
        if told == "TRUE":
            return PreemptionNotice(reason="Google Cloud preempts this machine", deadline_s=30.0)
        maintenance = self._ask("maintenance-event")
        if maintenance in {"TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE"}:
            # Told 60 s before; an hour before on machines with GPUs, which the value does not say.
            reason = "Google Cloud ends this machine for maintenance of its host"
            return PreemptionNotice(reason=reason, deadline_s=60.0)
        return None

    def _ask(self, what: str) -> str:
        path = f"/computeMetadata/v1/instance/{what}"
        answer = self._server.ask(path, {"Metadata-Flavor": "Google"})
        if answer.headers.get("metadata-flavor") != "Google":
            raise MachineError("what answers is not Google Cloud's metadata server")
        return answer.text()


class Azure(Cloud):
    """Azure's Scheduled Events, of which some end a machine; all machines of a set see all of them.

    Azure documentation, "Scheduled Events for Linux VMs". The first request switches them on, and
    may stay without an answer for two minutes. Events are never approved early: that would end the
    machine at once.
    """

    name = "azure"
    _called = ""

    def notice(self) -> PreemptionNotice | None:
        """The first event that ends this machine."""
        events = self._ask("scheduledevents?api-version=2020-07-01").record().get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise MachineError("the metadata server's answer holds no list of events")
        found = [self._notice(event) for event in events if self._concerns(event)]
        return min(found, key=lambda notice: notice.deadline_s or 0.0, default=None)

    def _concerns(self, event: dict[str, Any]) -> bool:
        """Whether it ends this machine; a Freeze only takes seconds."""
        kind, resources = str(event.get("EventType")), event.get("Resources")
        if kind not in {"Preempt", "Terminate", "Reboot", "Redeploy"}:
            return False
        if not isinstance(resources, list):
            return False
        name = "instance/compute/name?api-version=2021-02-01&format=text"
        self._called = self._called or self._ask(name).text().casefold()
        return self._called in {str(one).casefold() for one in resources}

    def _notice(self, event: dict[str, Any]) -> PreemptionNotice:
        moment, now_s = str(event.get("NotBefore") or ""), self._clock.unix_s()
        return PreemptionNotice(
            reason=f"Azure has scheduled the end of this machine: {event['EventType']}",
            deadline_s=_seconds_until(moment, now_s, parsedate_to_datetime) if moment else 0.0,
        )

    def _ask(self, path: str) -> Answer:
        return self._server.ask(f"/metadata/{path}", {"Metadata": "true"})


CLOUDS: Mapping[str, type[Cloud]] = {kind.name: kind for kind in (Aws, Google, Azure)}


def cloud_here(clock: Clock, asked: str | None = None, dmi: Path = DMI) -> Cloud | None:
    """The cloud that this machine is in; None: it is in none, or is not to ask. Asks nobody.

    `asked` is what `RAYCLOUD_CLOUD` says; None: look at the firmware's words, which are in `dmi`.

    Raises:
        SpecError: `asked` is no cloud.
    """
    name = name_of(dmi) if asked is None else asked
    if name is None or name == "none":
        return None
    if name not in CLOUDS:
        raise SpecError(
            "RAYCLOUD_CLOUD",
            name,
            "is no cloud whose notices can be read",
            hint=f"write {', '.join(CLOUDS)} or none, or leave it out",
        )
    return CLOUDS[name](MetadataServer(clock), clock)


def name_of(dmi: Path) -> str | None:
    """The cloud that the firmware names; None: none of those that can be asked."""
    if "Amazon EC2" in (_text(dmi / "sys_vendor"), _text(dmi / "board_vendor")):
        return Aws.name
    if "amazon" in _text(dmi / "bios_version").lower():  # machines on Xen
        return Aws.name
    if _text(dmi / "product_name") == "Google Compute Engine":
        return Google.name
    if _text(dmi / "chassis_asset_tag") == _AZURE_TAG:
        return Azure.name
    return None


def _text(path: Path) -> str:
    try:
        return read_whole(path, _MOST_BYTES).decode("ascii", errors="replace").strip()
    except (OSError, ValueError):  # no firmware, or one that says nothing
        return ""


def _seconds_until(text: str, now_s: float, read: Callable[[str], datetime]) -> float | None:
    """Seconds until a moment, UTC unless it names a zone, at least 0; None: it cannot be read."""
    try:
        moment = read(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(0.0, moment.timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None
