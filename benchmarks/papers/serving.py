"""Images over HTTP at a limited rate: one by one, or all of them as a Parquet file.

    python -m benchmarks.papers.serving --file PARQUET --rows N --bits-per-s R --port P

The rate is that of all answers together. `/train.parquet` is a file (parts of it, too),
`/labels` a list of numbers as JSON, and `/images/N` the JPEG of one row.
"""

from __future__ import annotations

import argparse
import http
import http.client
import io
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq

from raycloud.data.images import decode

_CHUNK = 16 << 10  # bytes that are sent at once
_PATIENCE_S = 60.0


class Pace:
    """Lets so many bits a second through, of all threads together."""

    def __init__(self, bits_per_s: float) -> None:
        self._bytes_per_s = bits_per_s / 8
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, count: int) -> None:
        """Until `count` bytes may go."""
        with self._lock:
            at_s = max(self._free_s, time.monotonic())
            self._free_s = at_s + count / self._bytes_per_s
        time.sleep(max(0.0, at_s - time.monotonic()))


def read(file: Path, rows: int) -> tuple[bytes, list[bytes], list[int]]:
    """The first rows of a file: as a file of Parquet, as JPEGs, and their labels."""
    table = pq.read_table(file).slice(0, rows)
    written = io.BytesIO()
    pq.write_table(table, written, compression="none", row_group_size=1000)
    return written.getvalue(), table["image"].to_pylist(), table["label"].to_pylist()


def answering(whole: bytes, images: list[bytes], labels: list[int], pace: Pace) -> type[Any]:
    """What answers requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay
        disable_nagle_algorithm = True  # a body does not wait for its head to be acknowledged

        def do_HEAD(self) -> None:
            self._begin(len(whole), 200, {"Accept-Ranges": "bytes"})

        def do_GET(self) -> None:
            if self.path == "/labels":
                self._send(json.dumps(labels).encode())
            elif self.path.startswith("/images/"):
                self._send(images[int(self.path.rpartition("/")[2])])
            elif found := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(found[1]), int(found[2] or len(whole) - 1)
                part = whole[first : last + 1]
                where = f"bytes {first}-{first + len(part) - 1}/{len(whole)}"
                self._send(part, 206, {"Content-Range": where})
            else:
                self._send(whole)

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def _begin(self, count: int, code: int, more: Mapping[str, str]) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(count), **more}.items():
                self.send_header(name, value)
            self.end_headers()

        def _send(self, body: bytes, code: int = 200, more: Mapping[str, str] = {}) -> None:
            self._begin(len(body), code, more)
            for at in range(0, len(body), _CHUNK):
                chunk = body[at : at + _CHUNK]
                pace.wait(len(chunk))
                self.wfile.write(chunk)

    return Handler


class Remote:
    """Images of such a server, fetched when they are asked for, and not kept.

    Args:
        url: Of the server.
        at_once: Connections over which several images are fetched at the same time.
    """

    def __init__(self, url: str, at_once: int = 8) -> None:
        self._host, self._at_once = urlsplit(url).netloc, at_once
        self._local, self._connections = threading.local(), list[http.client.HTTPConnection]()
        self._threads: ThreadPoolExecutor | None = None
        self._labels = json.loads(self._get("/labels"))
        self.close()  # data loaders fork

    def __len__(self) -> int:
        """How many there are."""
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One, by a request of its own."""
        [image] = decode([self._get(f"/images/{index}")], size=(32, 32))
        return {"image": image, "label": self._labels[index]}

    def __getitems__(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Many, each by a request of its own, several at a time."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._at_once)
        return [*self._threads.map(self.__getitem__, ids)]

    def close(self) -> None:
        """End all connections, and the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        while self._connections:
            self._connections.pop().close()
        self._local = threading.local()

    def _get(self, path: str) -> bytes:
        if (there := getattr(self._local, "connection", None)) is None:
            there = http.client.HTTPConnection(self._host, timeout=_PATIENCE_S)
            self._local.connection = there
            self._connections.append(there)
        try:
            there.request("GET", path)
            answer = there.getresponse()
            body = answer.read()
        except (http.client.HTTPException, OSError):
            del self._local.connection
            raise
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"{self._host}{path}: the server answers {answer.status}")
        return body


class Local:
    """Some images of a file, decoded: those held out, which lie on each node."""

    def __init__(self, file: Path, rows: int) -> None:
        table = pq.read_table(file).slice(0, rows)
        self._images = decode(table["image"].to_pylist(), size=(32, 32))
        self._labels = table["label"].to_pylist()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One of them."""
        return {"image": self._images[index], "label": self._labels[index]}


def together(samples: Any) -> dict[str, Any]:
    """Samples as columns, from rows of the pipeline or a list of single ones."""
    if isinstance(samples, list):
        labels = np.array([one["label"] for one in samples], np.int64)
        return {"image": np.stack([one["image"] for one in samples]), "label": labels}
    return {name: samples[name] for name in ("image", "label")}


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--bits-per-s", type=float, required=True)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    answers = answering(*read(asked.file, asked.rows), Pace(asked.bits_per_s))
    with ThreadingHTTPServer(("0.0.0.0", asked.port), answers) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
