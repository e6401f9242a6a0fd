"""Seconds that reading a source is predicted to take, and takes: `python -m benchmarks.storage`.

As root. A machine of the testbed reads from another one, over links of `--mbit` each and 20 ms one
way: large Parquet files and many small texts from a server that speaks S3 (moto), and small texts
over HTTP (`http.server`, by fsspec). First a part is sampled, as `raycloud plan` does; then all is
read as by one reader, up to rows in memory. Prints a line of JSON for each, and keeps them with
`--json FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from benchmarks.machine import ROOT
from benchmarks.testbed import NodeSpec, Spec, Testbed
from raycloud.clock import SystemClock
from raycloud.data.index import Input
from raycloud.data.location import locate
from raycloud.data.sampling import sample
from raycloud.data.slices import cut, read
from raycloud.task import Source

_PORTS = {"s3": 5000, "http": 5001}
_PLACES = {
    "s3 large": "s3://a:b@bucket/large?endpoint_override=http://{}:5000&region=us-east-1",
    "s3 small": "s3://a:b@bucket/small?endpoint_override=http://{}:5000&region=us-east-1",
    "http small": "http://{}:5001/small/",
}
_DELAY_S = 0.02
_SMALL, _MOST = 40_000, 1000  # bytes of a text, or more where there would be too many of them
_LARGE = 4  # files
_LONGEST_S = 300.0
_LOOK_S = 0.05


def fill(folder: Path, size: int) -> None:
    """Files of both kinds, of about `size` bytes each kind."""
    chance = np.random.default_rng(0)
    (folder / "large").mkdir()
    (folder / "small").mkdir()
    for at in range(_LARGE):
        numbers = chance.integers(0, 2**62, size // (8 * _LARGE))
        path = folder / "large" / f"{at}.parquet"
        pq.write_table(pa.table({"x": numbers}), path, row_group_size=2**18, use_dictionary=False)
    small = max(_SMALL, size // _MOST)
    for at in range(max(1, size // small)):
        (folder / "small" / f"{at:05}.txt").write_text(chance.bytes(small // 2).hex())


def serve(address: str, folder: Path) -> None:
    """S3 with these files in a bucket, until this process is ended."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - loads flask

    server = ThreadedMotoServer(ip_address=address, port=_PORTS["s3"], verbose=False)
    server.start()
    system = fs.S3FileSystem(
        access_key="a",
        secret_key="b",
        endpoint_override=f"http://{address}:{_PORTS['s3']}",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    system.create_dir("bucket")
    for path in sorted(folder.rglob("*.*")):
        with system.open_output_stream(f"bucket/{path.relative_to(folder)}") as out:
            out.write(path.read_bytes())
    Path(f"{folder}.ready").touch()
    threading.Event().wait()


def read_all(kind: str, address: str) -> dict[str, Any]:
    """What one source is predicted to take one reader, and what it takes."""
    source = Source(path=_PLACES[kind].format(address), unit="file" if "small" in kind else "line")
    files = locate(source)
    clock = SystemClock()
    began_s = clock.monotonic_s()
    sampled = sample(source, clock, 1, files)
    sampled_s = clock.monotonic_s() - began_s
    predicted_s = sampled.seconds()
    inputs = [Input(path=file.path, bytes=file.bytes, digest="") for file in files]
    began_s, rows = clock.monotonic_s(), 0
    for piece in cut(source, inputs):
        rows += sum(len(one.table) for one in read(source, piece))
    measured_s = clock.monotonic_s() - began_s
    return {
        "source": kind,
        "files": sampled.files,
        "bytes": sampled.bytes,
        "rows": rows,
        "sampled_s": round(sampled_s, 2),
        "predicted_s": round(predicted_s, 2),
        "measured_s": round(measured_s, 2),
        "off": round(predicted_s / measured_s - 1.0, 3),
    }


def measure(mbit: float, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """All kinds behind links of one rate, which are busy for so many seconds with each."""
    files = folder / "files"
    files.mkdir()
    fill(files, int(seconds * mbit * 125_000))
    rate = mbit * 1e6
    node = NodeSpec(name="n1", egress_bits_per_s=rate, ingress_bits_per_s=rate, delay_s=_DELAY_S)
    found = []
    with Testbed(Spec(nodes=(node,))) as bed:
        address = bed.head.address
        own = [sys.executable, "-m", "benchmarks.storage"]
        web = [sys.executable, "-m", "http.server", str(_PORTS["http"]), "--bind", address]
        served = [*own, "--serve", address, "--folder", str(files)]
        for name, words in (("s3", served), ("http", [*web, "--directory", str(files)])):
            bed.head.start(words, environment={}, log=folder / f"{name}.log", cwd=ROOT)
        _wait(Path(f"{files}.ready"), folder / "s3.log")
        for kind in _PLACES:
            told = folder / f"{kind}.json"
            words = [*own, "--read", kind, "--serve", address, "--json", str(told)]
            bed["n1"].start(words, environment={}, log=folder / "read.log", cwd=ROOT)
            _wait(told, folder / "read.log")
            found.append({"mbit_per_s": mbit, **json.loads(told.read_text())})
            print(json.dumps(found[-1]), flush=True)
    return found


def _wait(path: Path, log: Path) -> None:
    pause, until_s = threading.Event(), time.monotonic() + _LONGEST_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(log.read_text())
        pause.wait(_LOOK_S)


def main() -> None:
    """Measure, say it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=[5.0, 20.0, 100.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="that a link is busy, about")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", choices=[*_PLACES], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        draft = asked.json.with_suffix(".draft")
        draft.write_text(json.dumps(read_all(asked.read, asked.serve)))
        draft.rename(asked.json)
        return
    if asked.serve:
        serve(asked.serve, asked.folder)
        return
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json: there is no folder {asked.json.parent}; make it first")
    found: list[dict[str, Any]] = []
    for mbit in asked.mbit:
        with tempfile.TemporaryDirectory() as name:
            found += measure(mbit, asked.seconds, Path(name))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
