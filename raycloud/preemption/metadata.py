"""Metadata server of a cloud, asked over plain HTTP, within bounds of time and of size.

It is at the same link-local address in every cloud: a machine that is in none must not ask there.
No proxy is asked, no redirect followed, and nothing of the environment is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import TYPE_CHECKING, Any

from raycloud.bounded import json_value
from raycloud.errors import MachineError

if TYPE_CHECKING:
    from raycloud.clock import Clock

HOST, PORT = "169.254.169.254", 80
MOST_BYTES = 256 * 1024  # of an answer, with its headers
_MOST_VALUES = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back; header names are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def text(self) -> str:
        """What it says.

        Raises:
            MachineError: It is no answer to what was asked.
        """
        if self.status != 200:  # noqa: PLR2004 - OK
            raise MachineError(f"the metadata server answers with status {self.status}")
        return self.body.decode("utf-8", errors="replace").strip()

    def record(self) -> dict[str, Any]:
        """The JSON object that it is.

        Raises:
            MachineError: It is none.
        """
        try:
            found = json_value(self.text(), _MOST_VALUES)
        except ValueError as error:
            raise MachineError(f"the metadata server's answer is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise MachineError("the metadata server's answer is no JSON object")
        return found


class MetadataServer:
    """Asks the metadata server of the cloud that this machine is in.

    An answer may take `answer_s` in all.
    """

    def __init__(
        self, clock: Clock, host: str = HOST, port: int = PORT, *, answer_s: float = 2.0
    ) -> None:
        self._clock, self._answer_s = clock, answer_s
        self._host, self._port = host, port

    def ask(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> Answer:
        """Ask once, over a connection of its own.

        Raises:
            MachineError: There is no answer, or it is none of HTTP, too late or too long.
        """
        try:
            with contextlib.closing(_Bounded(self._clock, self._answer_s)) as connection:
                connection.connect((self._host, self._port))
                http = HTTPConnection(self._host, self._port)
                http.sock = connection
                http.request(method, path, headers=dict(headers))
                with http.getresponse() as response:
                    told = {name.lower(): value for name, value in response.getheaders()}
                    # With a size: without one, memory for the length that is claimed would be
                    # taken at once.
                    body = response.read(MOST_BYTES)
                    if response.length:
                        raise IncompleteRead(body, response.length)
                    return Answer(status=response.status, headers=told, body=body)
        except (OSError, HTTPException, ValueError) as error:
            why = str(error) or type(error).__name__
            raise MachineError(
                f"the metadata server at {self._host} gives no answer: {why}"
            ) from error


class _Bounded(socket.socket):
    """A connection that is given up after so many seconds, or bytes, in all.

    A socket's own time-out begins again with every byte that comes.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self._clock = clock
        self._until_s = clock.monotonic_s() + seconds
        self._left = MOST_BYTES
        self.settimeout(seconds)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        left_s = self._until_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "it takes too long")
        self.settimeout(left_s)
        came = super().recv_into(buffer, nbytes, flags)
        self._left -= came
        if self._left < 0:
            raise OSError(errno.EMSGSIZE, f"it is longer than {MOST_BYTES} bytes")
        return came
