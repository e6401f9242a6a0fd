"""How much sooner a state is there where a third member relays it: `python -m benchmarks.relaying`.

As root. Three machines of the testbed: two have a state and give a part of it each, the third takes
it. Each sends at most 50 Mbit/s (`--wide`), and what the first and the third send to each other
goes over a link of its own, which is thin (`--thin`, 5 Mbit/s). Measured are the seconds from the
first word until all of it is there, checked; alternately without and with a relay, each `--times`
times. Prints a line of JSON, and keeps it with `--json FILE`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from benchmarks.testbed import Machine, NodeSpec, Spec, Testbed
from benchmarks.testbed.link import queue
from benchmarks.testbed.shell import inside, ip
from raycloud.net.stream import Place
from raycloud.recovery.receiving import Receiver
from raycloud.recovery.relay import Relay
from raycloud.recovery.rendezvous import HOST
from raycloud.recovery.state_transfer import Beside, Sender
from raycloud.step.stateful import ReplicaState

_MEMBERS = ("n1", "n2", "n3")
_TAKES = 2  # the rank of who has none
_LOOK_S = 0.01
_LONGEST_S = 300.0


class Bytes(ReplicaState):
    """So many bytes, which do not change."""

    def __init__(self, size: int) -> None:
        chance = torch.Generator().manual_seed(1)
        self._held = {
            f"{k}": torch.randint(256, (size // 8,), dtype=torch.uint8, generator=chance)
            for k in range(8)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """In eight pieces."""
        return self._held

    def values(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def is_buffer(self, name: str) -> bool:  # noqa: ARG002 - none is
        """No."""
        return False


def member(rank: int, folder: Path, size: int, *, relays: bool) -> None:
    """What runs on a machine; who takes the state says how long that took."""
    state = Bytes(size)
    address = json.loads((folder / "addresses").read_text())[rank]
    with ExitStack() as stack:
        door = Relay(address, HOST)
        stack.callback(door.close)
        own: dict[str, Any] = {"door": astuple(door.place)}
        if rank == _TAKES:
            taking = Receiver(address, 2, HOST)
            stack.callback(taking.close)
            own["takes"] = astuple(taking.place)
        told = _gather(folder, rank, own)
        doors = [Place(*one["door"]) for one in told]
        if rank != _TAKES:
            place = Place(*told[_TAKES]["takes"])
            beside = Beside(part=rank, parts=2, busy=lambda: False)
            sending = Sender(state, rank, [place], HOST, beside=beside)
            stack.callback(sending.close)
            door.begin(rank, doors, sending.serve)
            _gather(folder, rank, {}, "done")
            return
        door.begin(rank, doors, None)
        noticed: list[str] = []
        if relays:
            taking.relay(rank, doors, lambda what, detail: noticed.append(f"{what} {dict(detail)}"))
        began_s = time.monotonic()
        if not taking.wait(_LONGEST_S):
            raise TimeoutError("the state has not come")
        took_s = time.monotonic() - began_s
        tensors, _ = taking.take()
        if not all(torch.equal(tensors[name], t) for name, t in state.tensors().items()):
            raise ValueError("another state has come")
        _tell(folder / "took", {"took_s": took_s, "noticed": noticed})
        _gather(folder, rank, {}, "done")


def _tell(path: Path, told: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(told))
    draft.rename(path)


def _gather(folder: Path, rank: int, own: Mapping[str, Any], word: str = "told") -> list[Any]:
    """What all say, by rank; the machines have one file system."""
    _tell(folder / f"{word}-{rank}", own)
    pause, paths = threading.Event(), [folder / f"{word}-{one}" for one in range(len(_MEMBERS))]
    while not all(path.exists() for path in paths):
        pause.wait(_LOOK_S)
    return [json.loads(path.read_text()) for path in paths]


def _join(one: Machine, other: Machine, rate_bits_per_s: float) -> None:
    """A link between two machines, beside the switch: what one sends to the other goes over it."""
    ends = [f"name thin0 netns {machine.namespace}" for machine in (one, other)]
    ip([f"link add {ends[0]} type veth peer {ends[1]}"])
    for here, there in ((one, other), (other, one)):
        inside(
            here.namespace,
            ip=["link set thin0 up", f"route add {there.address}/32 dev thin0 src {here.address}"],
            tc=[queue("thin0", rate_bits_per_s)],
        )


def measure(asked: argparse.Namespace, *, relays: bool) -> dict[str, Any]:
    """One transfer on a new bed."""
    wide = asked.wide * 1e6
    nodes = tuple(NodeSpec(name=one, egress_bits_per_s=wide) for one in _MEMBERS)
    with tempfile.TemporaryDirectory() as name, Testbed(Spec(nodes=nodes)) as bed:
        _join(bed[_MEMBERS[0]], bed[_MEMBERS[_TAKES]], asked.thin * 1e6)
        folder = Path(name)
        (folder / "addresses").write_text(json.dumps([bed[one].address for one in _MEMBERS]))
        for rank, one in enumerate(_MEMBERS):
            words = [sys.executable, "-m", "benchmarks.relaying", "--rank", str(rank)]
            words += ["--folder", name, "--bytes", str(asked.bytes)]
            words += ["--relays"] if relays else []
            bed[one].start(words, environment={}, log=folder / f"log-{rank}", cwd=Path.cwd())
        pause, until_s = threading.Event(), time.monotonic() + _LONGEST_S
        while not (folder / "took").exists():
            if time.monotonic() > until_s:
                logs = [(folder / f"log-{rank}").read_text() for rank in range(len(_MEMBERS))]
                raise TimeoutError("\n".join(logs))
            pause.wait(_LOOK_S)
        told: dict[str, Any] = json.loads((folder / "took").read_text())
        return told


def main() -> None:
    """Measure, say it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thin", type=float, default=5.0, help="Mbit/s of the direct link")
    parser.add_argument("--wide", type=float, default=50.0, help="Mbit/s that each sends")
    parser.add_argument("--bytes", type=int, default=24_000_000, help="of the state")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--relays", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        member(asked.rank, asked.folder, asked.bytes, relays=asked.relays)
        return
    direct, relayed = [], []
    for _ in range(asked.times):
        direct.append(measure(asked, relays=False))
        relayed.append(measure(asked, relays=True))
    direct_s = [round(one["took_s"], 2) for one in direct]
    relayed_s = [round(one["took_s"], 2) for one in relayed]
    told = {
        "thin_mbit_per_s": asked.thin,
        "wide_mbit_per_s": asked.wide,
        "state_bytes": asked.bytes,
        "direct_s": direct_s,
        "relayed_s": relayed_s,
        "times_as_fast": round(statistics.median(direct_s) / statistics.median(relayed_s), 2),
        "noticed": relayed[0]["noticed"],
    }
    print(json.dumps(told))
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
