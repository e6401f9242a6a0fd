"""What answers in the place of a head: Ray's paths of the Jobs API, and what was asked of them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOG = [f"line {n}\n" for n in range(50)]


@dataclass
class Api:
    """A head that is asked.

    Attributes:
        token: What it wants to be shown.
        breaks: How many followed logs break off in their middle.
        status: How its job ends, once its log was followed to the end.
        code: The exit code of that job's driver.
        jobs: What it lists.
        logs: The log of each job; one without is not readable.
        url: Where it answers.
        packages: What was sent.
        submitted: What was started.
        shown: The tokens that came.
        asked: The paths that were asked for, in order.
        followed: How many logs were followed.
    """

    token: str | None = None
    breaks: int = 0
    status: str = "SUCCEEDED"
    code: int | None = 0
    jobs: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    url: str = ""
    packages: dict[str, bytes] = field(default_factory=dict)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    followed: int = 0

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> Any:
        self.shown.append(request.headers.get("Authorization"))
        self.asked.append(request.path_qs)
        if self.token is not None:
            if "Authorization" not in request.headers:
                return web.Response(status=401, text="Unauthorized: Missing token")
            if request.headers["Authorization"] != f"Bearer {self.token}":
                return web.Response(status=403, text="Forbidden: Invalid token")
        return await handler(request)

    async def version(self, _: web.Request) -> web.StreamResponse:
        known = {"version": "4", "ray_version": ray.__version__, "ray_commit": "x"}
        return web.json_response(known)

    async def has(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.match_info["name"] in self.packages else 404)

    async def put(self, request: web.Request) -> web.Response:
        self.packages[request.match_info["name"]] = await request.read()
        return web.Response()

    async def start(self, request: web.Request) -> web.Response:
        self.submitted.append(await request.json())
        told = self.submitted[-1]["submission_id"]
        return web.json_response({"job_id": told, "submission_id": told})

    async def listed(self, _: web.Request) -> web.Response:
        return web.json_response(self.jobs)

    async def job(self, request: web.Request) -> web.Response:
        if request.match_info["id"] == "gone":
            return web.Response(status=404, text="Job gone does not exist")
        ended = self.followed > self.breaks
        answer = {"type": "SUBMISSION", "entrypoint": "x", "submission_id": "x-1"}
        ending = {"status": self.status, "driver_exit_code": self.code, "message": "it says why"}
        return web.json_response(answer | (ending if ended else {"status": "RUNNING"}))

    async def tail(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.followed += 1
        broken = self.followed <= self.breaks
        text = "".join(LOG)
        for at in range(0, len(text) // 2 if broken else len(text), 7):
            await socket.send_str(text[at : at + 7])
        if broken and request.transport is not None:
            request.transport.abort()
        return socket

    async def whole(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": self.logs[request.match_info["id"]]})

    async def file(self, request: web.Request) -> web.StreamResponse:
        text = self.logs.get(request.query.get("submission_id", request.query.get("filename", "")))
        if text is None:
            return web.Response(status=500, text="Agent for node id: x doesn't exist.")
        lines = text.splitlines(keepends=True)
        asked = int(request.query["lines"])  # -1: all
        return web.Response(text="".join(lines[-asked:] if asked > 0 else lines))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return await self.file(request)


@contextlib.contextmanager
def serving(api: Api, *, port: int = 0, certificate: Path | None = None) -> Iterator[Api]:
    """Serve from a thread of its own, at any port or this one; with a certificate, encrypted."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)

    async def serve() -> None:
        app = web.Application(middlewares=[api.guard], client_max_size=2**26)
        app.router.add_get("/api/version", api.version)
        app.router.add_get("/api/packages/{protocol}/{name}", api.has)
        app.router.add_put("/api/packages/{protocol}/{name}", api.put)
        app.router.add_post("/api/jobs/", api.start)
        app.router.add_get("/api/jobs/", api.listed)
        app.router.add_get("/api/jobs/{id}", api.job)
        app.router.add_get("/api/jobs/{id}/logs", api.whole)
        app.router.add_get("/api/jobs/{id}/logs/tail", api.tail)
        app.router.add_get("/api/v0/logs/file", api.file)
        app.router.add_get("/api/v0/logs/stream", api.stream)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, reuse_address=True)
        await site.start()
        scheme = "http" if context is None else "https"
        api.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await done.wait()
        await runner.cleanup()
        # Encrypted ones would wait for the other side's farewell.
        for _ in range(9):
            for connection in list(loop._transports.values()):  # type: ignore[attr-defined]
                connection.abort()
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield api
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def certificate_at(path: Path) -> Path:
    """Write a certificate of 127.0.0.1 that nobody has signed, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test's own")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path
