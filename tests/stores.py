"""Servers on this machine that hold files: HTTP and S3, also ones that fail a few times."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit


@dataclass
class Store:
    """Files behind HTTP, or another server's answers; `failures` answers are 503 before that."""

    files: dict[str, bytes] = field(default_factory=dict)
    upstream: str | None = None
    failures: int = 0
    status: int = 503
    only: str = ""  # the method that fails; empty: any
    url: str = ""
    asked: list[str] = field(default_factory=list)
    sent: int = 0  # bytes of answers

    def fails(self, method: str) -> bool:
        if self.failures and method.startswith(self.only):
            self.failures -= 1
            return True
        return False


@contextmanager
def serving(store: Store) -> Iterator[Store]:
    """The store on a free port; `store.url` is where."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            store.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if store.fails(self.command):
                self._send(store.status, {}, b"not now")
            elif store.upstream is not None:
                self._forward(body)
            else:
                self._own()

        do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 - what the server calls

        def _forward(self, body: bytes) -> None:
            upstream = http.client.HTTPConnection(urlsplit(store.upstream or "").netloc, timeout=20)
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            data = answer.read()
            kept = {n: v for n, v in answer.getheaders() if n.lower() not in _OWN_HEADERS}
            length = answer.getheader("Content-Length")
            upstream.close()
            self._send(answer.status, kept, data, length)

        def _own(self) -> None:
            data = store.files.get(self.path.partition("?")[0])
            if data is None:
                self._send(404, {}, b"")
                return
            span = self.headers.get("Range")
            if span is None:
                self._send(200, {"Accept-Ranges": "bytes", "ETag": '"1"'}, data)
                return
            first, _, last = span.removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1 if last else None]
            where = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self._send(206, {"Content-Range": where}, part)

        def _send(
            self, status: int, headers: dict[str, str], data: bytes, length: str | None = None
        ) -> None:
            store.sent += len(data) if self.command == "GET" else 0
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    store.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_OWN_HEADERS = frozenset({"content-length", "connection", "server", "date", "transfer-encoding"})
