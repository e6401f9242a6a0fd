"""Google Cloud: preemption of spot machines, and maintenance that ends a machine.

Compute Engine documentation, "Spot VMs", "Query metadata server for maintenance event notices" and
"View and query VM metadata" (`wait_for_change`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from raycloud.errors import MachineError
from raycloud.preemption.leaving import Leaving

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.preemption.metadata import Answer, MetadataServer

_ROOT = "/computeMetadata/v1/instance/"
_WAIT_S = 5
_PREEMPTED_S = 30.0  # then the machine is off
# Told so long before; an hour before on machines with GPUs, which the value does not say.
_MAINTENANCE_S = 60.0
_ENDS = {"TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE"}  # others migrate
_MOST_LETTERS = 256  # of an ETag


class Google:
    """A machine of Compute Engine. The server itself waits for the preemption to be told.

    Args:
        server: Its metadata server.
        clock: Not looked at: nothing that is told here is a moment.
    """

    name = "google"
    every_s = 5.0

    def __init__(self, server: MetadataServer, clock: Clock) -> None:  # noqa: ARG002 - see `Cloud`
        """Nothing is known yet."""
        self._server = server
        self._etag = ""

    def leaving(self) -> Leaving | None:
        """Whether this machine is going to leave; waits up to 5 s for that to change.

        Raises:
            MachineError: There is no answer, or none that makes sense.
        """
        if self._preempted():
            return Leaving(reason="Google Cloud preempts this machine", deadline_s=_PREEMPTED_S)
        if self._ask("maintenance-event").text() in _ENDS:
            reason = "Google Cloud ends this machine for maintenance of its host"
            return Leaving(reason=reason, deadline_s=_MAINTENANCE_S)
        return None

    def _preempted(self) -> bool:
        """Whether it is told; the second call and later ones wait for a change."""
        if not self._etag:
            answer = self._ask("preempted")
        else:
            etag = quote(self._etag, safe="")
            wanted = f"preempted?wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={etag}"
            answer = self._ask(wanted, wait_s=_WAIT_S)
        told = answer.text()
        if told not in {"TRUE", "FALSE"}:
            raise MachineError("the metadata server says neither TRUE nor FALSE of a preemption")
        self._etag = answer.headers.get("etag", "")[:_MOST_LETTERS]
        return told == "TRUE"

    def _ask(self, what: str, wait_s: float = 0.0) -> Answer:
        answer = self._server.ask(_ROOT + what, {"Metadata-Flavor": "Google"}, wait_s=wait_s)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MachineError("what answers is not Google Cloud's metadata server")
        return answer
