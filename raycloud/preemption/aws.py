"""AWS: interruption notices of spot instances, and recommendations to rebalance.

Amazon EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance
recommendations" and "Use the Instance Metadata Service" (version 2, which asks for a token).
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raycloud.errors import MachineError
from raycloud.preemption.leaving import Leaving, seconds_until

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.preemption.metadata import MetadataServer

_TOKEN = "/latest/api/token"
_TOKEN_S = 21_600  # the longest that there is
_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_ACTIONS = {"terminate", "stop", "hibernate"}
_REFUSED, _NOTHING = 401, 404


class Aws:
    """An EC2 instance. Two minutes pass between an interruption notice and the end.

    Args:
        server: Its metadata server.
        clock: To turn moments into seconds from now.
    """

    name = "aws"
    every_s = 5.0  # as the guide recommends

    def __init__(self, server: MetadataServer, clock: Clock) -> None:
        """No token yet."""
        self._server = server
        self._clock = clock
        self._token = ""
        self._recommended = False

    def leaving(self) -> Leaving | None:
        """Whether this machine is going to leave.

        Raises:
            MachineError: There is no answer, or none that makes sense.
        """
        told = self._record(_INTERRUPTION)
        if told is not None:
            return self._interruption(told)
        if not self._recommended:  # it is never taken back
            self._recommended = self._record(_REBALANCE) is not None
        if self._recommended:
            reason = "AWS may take this spot instance back soon: it recommends to rebalance"
            return Leaving(reason=reason, certain=False)
        return None

    def _interruption(self, told: dict[str, Any]) -> Leaving:
        action, moment = str(told.get("action")), str(told.get("time"))
        if action not in _ACTIONS:
            raise MachineError("the metadata server tells of an interruption of no known kind")
        return Leaving(
            reason=f"AWS takes this spot instance back: {action}",
            deadline_s=seconds_until(moment, self._clock.unix_s(), datetime.fromisoformat),
        )

    def _record(self, path: str) -> dict[str, Any] | None:
        """What is told there; None: nothing."""
        for _ in range(2):  # a token that has expired is refused
            self._token = self._token or self._new_token()
            answer = self._server.ask(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status == _NOTHING:
                return None
            if answer.status != _REFUSED:
                return answer.record()
            self._token = ""
        raise MachineError("the metadata server refuses the token that it gave")

    def _new_token(self) -> str:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        token = self._server.ask(_TOKEN, wanted, method="PUT").text()
        if not re.fullmatch(r"[!-~]{1,1024}", token):
            raise MachineError("the metadata server's token is none")
        return token
