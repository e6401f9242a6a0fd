"""Metadata servers of three clouds on this machine, and ones that lie."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from raycloud.clock import SystemClock
from raycloud.preemption.metadata import MetadataServer

HOST = "127.0.0.1"
Told = tuple[int, dict[str, str], bytes]  # status, headers, body


@dataclass
class Asked:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Aws:
    """Asks for a token, and answers 404 while there is nothing.

    Attributes:
        action: What it tells of an interruption.
        rebalance: What it tells of rebalancing.
        tokens: Those that it gave; only the last one is taken.
    """

    action: Any = None
    rebalance: Any = None
    tokens: list[str] = field(default_factory=list)

    def __call__(self, asked: Asked) -> Told:
        if (asked.method, asked.path) == ("PUT", "/latest/api/token"):
            if "x-aws-ec2-metadata-token-ttl-seconds" not in asked.headers:
                return 400, {}, b""
            self.tokens.append(f"token{len(self.tokens)}==")
            return 200, {}, self.tokens[-1].encode()
        if asked.headers.get("x-aws-ec2-metadata-token") != (self.tokens or [None])[-1]:
            return 401, {}, b"unauthorized"
        told = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(asked.path)
        return (404, {}, b"not found") if told is None else (200, {}, json.dumps(told).encode())


@dataclass
class Google:
    """Wants its header.

    Attributes:
        preempted: What it says of a preemption.
        maintenance: What it says of maintenance.
    """

    preempted: str = "FALSE"
    maintenance: str = "NONE"

    def __call__(self, asked: Asked) -> Told:
        own = {"Metadata-Flavor": "Google"}
        if asked.headers.get("metadata-flavor") != "Google":
            return 403, {}, b""
        told = {
            "/computeMetadata/v1/instance/preempted": self.preempted,
            "/computeMetadata/v1/instance/maintenance-event": self.maintenance,
        }.get(asked.path)
        return (404, own, b"") if told is None else (200, own, told.encode())


@dataclass
class Azure:
    """Wants its header and a version.

    Attributes:
        events: What it tells, to all machines of the set.
        called: The name of this one.
    """

    events: Any = field(default_factory=list)
    called: str = "worker_3"

    def __call__(self, asked: Asked) -> Told:
        parts = urlsplit(asked.path)
        if asked.headers.get("metadata") != "true" or "api-version=" not in parts.query:
            return 400, {}, b'{"error": "bad request"}'
        if parts.path == "/metadata/instance/compute/name":
            return 200, {}, self.called.encode()
        told = {"DocumentIncarnation": 1, "Events": self.events}
        return 200, {}, json.dumps(told).encode()


@dataclass
class Running:
    """A server that answers.

    Attributes:
        port: Where.
        asked: What it was asked for, in order.
    """

    port: int
    asked: list[Asked] = field(default_factory=list)

    @property
    def client(self) -> MetadataServer:
        """To ask it with."""
        return MetadataServer(SystemClock(), HOST, self.port, answer_s=20.0)

    def paths(self) -> list[str]:
        """What it was asked for."""
        return [one.path for one in self.asked]


@contextlib.contextmanager
def answering(answer: Callable[[Asked], Told]) -> Iterator[Running]:
    """A server on this machine that answers so, until the block is left."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, headers)
            running.asked.append(asked)
            status, told, body = answer(asked)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **told}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = answer  # noqa: N815 - as http.server calls them

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # whoever asked has gone
            pass

    with Server((HOST, 0), Handler) as server:
        running = Running(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def saying(*pieces: bytes, every_s: float = 0.0, stay: bool = False) -> Iterator[int]:
    """A server that says these pieces to whoever connects; its port.

    Args:
        pieces: What it says.
        every_s: How long it waits before each.
        stay: Whether it then keeps the connection, and says nothing more.
    """
    over = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as connection:
            for piece in pieces:
                if over.wait(every_s):
                    return
                connection.sendall(piece)
            if stay:
                over.wait()

    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join()
