"""How long an exchange takes on thin links: `python -m benchmarks.exchanging`, as root.

Machines of the testbed behind links of `--bits-per-s`, with a member and a server each, exchange
`--bytes` of fp32 gradients in buckets, with nothing computed beside it: by a ring, directly, and by
servers that sum. They take turns in one run. Said are the median's seconds, and that against what
2 (n - 1) / n of the bytes take on one link, with the codec: servers are to be at most 1.25.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from threading import Event

import torch

from benchmarks.machine import ROOT, describe
from benchmarks.testbed import NodeSpec, Spec, Testbed
from raycloud.checkpoint import open_store
from raycloud.net.lane import Lane
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.net.stream import Place
from raycloud.net.transport import CodedTransport, finish
from raycloud.recovery.rendezvous import Meeting, meet
from raycloud.server.serving import Server
from raycloud.spec.sizes import bucket_bytes, coded_bytes, ring_bytes
from raycloud.sync.codecs import CODECS

_WARM = 3  # exchanges that do not count
_ENDS_S = 300.0
AT_MOST = 1.25
WAYS = (
    ("ring", "none"),
    ("direct", "none"),
    ("servers", "none"),
    ("direct", "int4"),
    ("servers", "int4"),
)


class _Places:
    """Servers that have written where they listen."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count

    def places(self) -> Sequence[Place]:
        """Once all have."""
        while len(found := sorted(self._folder.glob("*.place"))) < self._count:
            Event().wait(0.05)
        return [Place(*json.loads(one.read_text())) for one in found]

    def taken(self, which: Sequence[bool]) -> None:
        """All are there."""


def serve(number: int, folder: Path) -> None:
    """A server, until this process is ended."""
    store = open_store(str(folder / "kept"))
    made = Server(number, 1, store, os.environ["TESTBED_ADDRESS"], parameters=True)
    draft = folder / f"{number}.draft"
    draft.write_text(json.dumps(astuple(made.place)))
    draft.rename(draft.with_suffix(".place"))
    Event().wait()


def member(rank: int, folder: Path, asked: argparse.Namespace) -> None:
    """Exchange so many times; rank 0 writes what each took."""
    place = Place(*json.loads((folder / "meet").read_text()))
    torch.set_num_threads(1)
    meeting = Meeting(
        place=place,
        generation=0,
        rank=rank,
        members=tuple(range(asked.nodes)),
        shares=(1,) * asked.nodes,
    )
    transport, control = meet(
        meeting,
        os.environ["TESTBED_ADDRESS"],
        torch.device("cpu"),
        lambda: False,
        topology=asked.topology,
        servers=_Places(folder, asked.nodes) if asked.topology == "servers" else None,
    )
    lane, count = Lane(control), bucket_bytes(asked.bytes) // 4
    buckets = torch.randn(asked.bytes // 4).split(count)
    totals = [torch.empty_like(one) for one in buckets]
    took = []
    for _ in range(_WARM + asked.times):
        lane.sum([0.0])
        began_s = time.perf_counter()
        works = []
        for bucket, total in zip(buckets, totals, strict=True):
            if asked.codec == "none":
                works.append(transport.all_reduce(bucket))
            elif isinstance(transport, CodedTransport):
                works.append(transport.reduce(bucket, total, CODECS[asked.codec]))
        for work in works:
            finish(work, lambda: False)
        took.append(time.perf_counter() - began_s)
        for bucket in buckets:
            bucket.normal_()
    if rank == 0:
        (folder / "took.json").write_text(json.dumps(took[_WARM:]))
    lane.sum([0.0])
    transport.close()


def measured(
    bed: Testbed, folder: Path, asked: argparse.Namespace, way: tuple[str, str]
) -> list[float]:
    """Seconds of each exchange of one way; what is started ends with the bed."""
    folder.mkdir(parents=True)
    topology, codec = way
    program = [sys.executable, "-m", "benchmarks.exchanging", "--folder", str(folder)]
    program += ["--topology", topology, "--codec", codec, "--nodes", str(asked.nodes)]
    program += ["--bytes", str(asked.bytes), "--times", str(asked.times)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    log = folder / "log"
    bed.head.start([*program, "--meet"], environment=environment, log=log)
    while not (folder / "meet").exists():
        Event().wait(0.05)
    for number, node in enumerate(bed.nodes.values() if topology == "servers" else ()):
        node.start([*program, "--serve", str(number)], environment=environment, log=log)
    members = [
        node.start([*program, "--rank", str(rank)], environment=environment, log=log)
        for rank, node in enumerate(bed.nodes.values())
    ]
    if any([one.wait(_ENDS_S) for one in members]):  # noqa: C419 - all are waited for
        raise RuntimeError(log.read_text()[-3000:])
    found: list[float] = json.loads((folder / "took.json").read_text())
    return found


def main() -> None:
    """Measure all ways, in turns; or be one process of that."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=7_600_000)
    parser.add_argument("--bits-per-s", type=float, default=1e8)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cores", type=float)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    for name in ("--topology", "--codec"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--rank", "--serve"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.meet:
        place = astuple(Rendezvous(os.environ["TESTBED_ADDRESS"]).place)
        (asked.folder / "draft").write_text(json.dumps(place))
        (asked.folder / "draft").rename(asked.folder / "meet")
        Event().wait()
    elif asked.serve is not None:
        serve(asked.serve, asked.folder)
    elif asked.rank is not None:
        member(asked.rank, asked.folder, asked)
    else:
        compare(asked)


def compare(asked: argparse.Namespace) -> None:
    """All ways, in turns."""
    link = {"egress_bits_per_s": asked.bits_per_s, "ingress_bits_per_s": asked.bits_per_s}
    nodes = tuple(NodeSpec(name=f"n{at}", **link) for at in range(asked.nodes))
    found: dict[str, list[float]] = {}
    for repeat in range(asked.repeats):
        for topology, codec in WAYS:
            with tempfile.TemporaryDirectory() as folder, Testbed(Spec(nodes=nodes)) as bed:
                for node in bed.nodes.values() if asked.cores else ():
                    node.throttle(asked.cores)
                place = Path(folder) / f"{repeat}"
                took = measured(bed, place, asked, (topology, codec))
            found.setdefault(f"{topology}, {codec}", []).extend(took)
    rows = []
    for name, took in found.items():
        code = coded_bytes(asked.bytes, name.partition(", ")[2])
        floor_s = 8.0 * ring_bytes(code, asked.nodes) / asked.bits_per_s
        seconds = statistics.median(took)
        rows.append({"way": name, "seconds": seconds, "floor": seconds / floor_s, "took": took})
        print(f"{name:16}{seconds:8.3f} s{seconds / floor_s:8.2f} times the link's")
    if asked.json:
        machine = describe(os.sched_getaffinity(0))
        told = {"machine": machine, "asked": vars(asked) | {"json": None}, "rows": rows}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
