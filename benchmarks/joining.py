"""How long the others stand still when a member joins: `python -m benchmarks.joining`, as root.

Three machines of the testbed, each behind a link of `--bits-per-s`. Two train; the third joins
them, either as it does (it follows while the state comes), or, with `--broadcast`, as it would if
all waited for the state. Prints one line of JSON: the longest step of the two while it joins, the
steps before and after that, and when it had the state.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.testbed import NodeSpec, Spec, Testbed
from raycloud import Job, Splits, Task
from raycloud.clock import SystemClock
from raycloud.commands import Form, Meet, Reshare
from raycloud.events import MemberCaughtUp, MemberFailed, MemberReady
from raycloud.training.member import Meeting, Member, MemberConfig

_PORT = 29400
_MEET = timedelta(seconds=120)
_LOOK_S = 0.001


class Layers(Task):
    """Equal layers side by side, of which the last `trained` are trained."""

    def __init__(self, *, width: int = 2048, layers: int = 8, trained: int = 8) -> None:
        """Of this width: a layer is its square."""
        self.width, self.layers, self.trained = width, layers, trained

    def model(self) -> nn.Module:
        """Layers, of which the first are frozen."""
        made = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))
        for layer in made[: self.layers - self.trained]:
            layer.requires_grad_(requires_grad=False)
        return made

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - it needs none
        """Numbers."""
        return Splits(train=list(range(512)))  # type: ignore[arg-type]

    def batch(self, samples: Sequence[Any], rng: Any) -> Tensor:  # noqa: ARG002
        """The same number in each column."""
        return torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, self.width) / 512.0

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Through what is trained alone."""
        return model[-self.trained :](batch).square().mean()  # type: ignore[index]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW: two more tensors for each that is trained."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4)


CASES = {
    "8MB": Layers(width=290),
    "400MB": Layers(),
    "400MB-few-trained": Layers(width=2048, layers=24, trained=1),
}


def member(number: int, case: str, place: str) -> None:
    """One member, told what to do through the store at `place`; ends when it is told so."""
    task = CASES[case]
    settings = {"width": task.width, "layers": task.layers, "trained": task.trained}
    job = Job(
        task=Layers,
        settings=settings,
        steps=100_000,
        global_batch=16,
        micro_batch=2,
        checkpoint={"every_steps": 1_000_000},  # type: ignore[arg-type]
    )
    store = distributed.TCPStore(place, _PORT, is_master=False, timeout=_MEET)
    told = MemberConfig(
        member=number,
        node="",
        address=os.environ["TESTBED_ADDRESS"],
        job=job,
        task=Layers,
        checkpoints=tempfile.mkdtemp(),
        joins=number == 2,
    )
    one = Member(told, SystemClock())
    threading.Thread(target=_clock_steps, args=(one, number), daemon=True).start()
    heard = 0
    while True:
        for event in one.poll(0.01):
            if isinstance(event, MemberReady | MemberCaughtUp | MemberFailed):
                store.set(f"{type(event).__name__}/{event.member}", repr(event))
        while store.check([f"told/{number}/{heard}"]):
            method, arguments = pickle.loads(store.get(f"told/{number}/{heard}"))
            heard += 1
            if method == "end":
                return
            getattr(one, method)(*arguments)


def _clock_steps(one: Member, number: int) -> None:
    """Prints when each step began."""
    pause, before = threading.Event(), None
    while True:
        if (step := one.step) != before:
            before = step
            sys.stdout.write(json.dumps([number, step, time.monotonic()]) + "\n")
            sys.stdout.flush()
        pause.wait(_LOOK_S)


class Bench:
    """The driver of such a run."""

    def __init__(self, address: str, store: Any) -> None:
        """At this address members meet, by this store, which also carries what they are told."""
        self._address, self._store = address, store
        self._told = [0, 0, 0]
        self._pause = threading.Event()

    def tell(self, number: int, method: str, *arguments: object) -> None:
        """Call a method of a member."""
        text = pickle.dumps((method, arguments))
        self._store.set(f"told/{number}/{self._told[number]}", text)
        self._told[number] += 1

    def wait(self, key: str) -> None:
        """Wait until the store has this."""
        for _ in range(6000):
            if self._store.check([key]):
                return
            self._pause.wait(0.02)
        raise RuntimeError(f"no {key}")

    def run(self, warm_s: float, *, broadcast: bool) -> tuple[float, float, str]:
        """When the newcomer was called, when it had its share, and what it said."""
        for number in range(3):
            self.wait(f"MemberReady/{number}")
        form = Form(generation=0, members=(0, 1), shares=(4, 4), step=0)
        for rank in (0, 1):
            self.tell(rank, "form", self._meeting(form, rank))
        self._pause.wait(warm_s)
        called_s = time.monotonic()
        shares, following = ((3, 3, 2), ()) if broadcast else ((4, 4, 0), (2,))
        meet = Meet(generation=1, members=(0, 1, 2), shares=shares, following=following)
        for rank in (0, 1, 2):
            meeting = replace(self._meeting(meet, rank), settled=1, planned=True)
            self.tell(rank, "form", replace(meeting, ahead=None if rank == 2 else 1))
        said = ""
        if broadcast:
            self._pause.wait(3 * warm_s)
        else:
            self.wait("MemberCaughtUp/2")
            said = self._store.get("MemberCaughtUp/2").decode()
            change = Reshare(generation=2, shares=(3, 3, 2), caught_up=(2,))
            for number in range(3):
                self.tell(number, "prepare", 2, change)
        joined_s = time.monotonic()
        self._pause.wait(warm_s)
        for number in range(3):
            self.tell(number, "end")
        return called_s, joined_s, said

    def _meeting(self, told: Form | Meet, rank: int) -> Meeting:
        return Meeting(
            host=self._address,
            port=_PORT,
            generation=told.generation,
            rank=rank,
            members=told.members,
            shares=told.shares,
            following=told.following,
        )


def main() -> None:
    """Measure, or be one of those that are measured."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("case", choices=CASES)
    asked.add_argument("--bits-per-s", type=float, default=1e9)
    asked.add_argument("--warm-s", type=float, default=8.0)
    asked.add_argument("--broadcast", action="store_true")
    asked.add_argument("--member", type=int)
    asked.add_argument("--place")
    asked.add_argument("--hold", action="store_true")
    told = asked.parse_args()
    if told.member is not None:
        member(told.member, told.case, told.place)
        return
    if told.hold:  # the store, on the head
        store = distributed.TCPStore("0.0.0.0", _PORT, is_master=True, wait_for_workers=False)
        bench = Bench(told.place, store)
        sys.stdout.write(json.dumps(bench.run(told.warm_s, broadcast=told.broadcast)) + "\n")
        return
    _measure(told)


def _measure(told: argparse.Namespace) -> None:
    rate = {"egress_bits_per_s": told.bits_per_s, "ingress_bits_per_s": told.bits_per_s}
    spec = Spec(nodes=tuple(NodeSpec(name=f"n{i}", **rate) for i in range(3)))
    again = [sys.executable, "-m", "benchmarks.joining", told.case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, Testbed(spec) as bed:
        logs = [Path(folder) / f"{i}.log" for i in range(4)]
        options = ["--warm-s", str(told.warm_s), *(["--broadcast"] if told.broadcast else [])]
        hold = [*again, "--hold", "--place", bed.head.address, *options]
        head = bed.head.start(hold, environment=environment, log=logs[3])
        for i in range(3):
            one = [*again, "--member", str(i), "--place", bed.head.address]
            bed[f"n{i}"].start(one, environment=environment, log=logs[i])
        head.wait(280.0)
        text = logs[3].read_text().strip().splitlines()
        if not text or not text[-1].startswith("["):
            sys.stderr.write("\n".join(log.read_text()[-3000:] for log in logs))
            raise SystemExit(1)
        called_s, joined_s, said = json.loads(text[-1])
        _show(told, logs[0].read_text(), (called_s, joined_s), said)


def _show(told: argparse.Namespace, log: str, joining_s: tuple[float, float], said: str) -> None:
    began = [json.loads(line) for line in log.splitlines() if line.startswith("[0, ")]
    steps = [(at, end - at) for (_, a, at), (_, b, end) in itertools.pairwise(began) if a and b]
    called_s, joined_s = joining_s
    before = [s for at, s in steps[1:] if at + s < called_s]
    after = [s for at, s in steps if at > joined_s + 1.0]
    during = [s for at, s in steps if at + s >= called_s and at <= joined_s]
    usual = max(statistics.median(before), statistics.median(after) if after else 0.0)
    found = {
        "case": told.case,
        "broadcast": told.broadcast,
        "step_before_s": statistics.median(before),
        "step_after_s": statistics.median(after) if after else None,
        "longest_before_s": max(before),
        "steps_during": len(during),
        "median_during_s": statistics.median(during),
        "longest_during_s": max(during),
        "pause_s": max(during) - usual,
        "joining_s": joined_s - called_s,
        "during_s": [round(s, 3) for s in during],
        "said": said,
    }
    sys.stdout.write(
        json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}) + "\n"
    )


if __name__ == "__main__":
    main()
