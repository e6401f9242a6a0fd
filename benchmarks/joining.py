"""How long the others stand still when a member joins: `python -m benchmarks.joining`, as root.

Machines of the testbed, each behind a link of `--bits-per-s`, and with `--cores` if that is given.
All but the last train; that one joins them: it follows while the state comes, or, with `--at-once`,
takes it where all meet, who wait for it. Prints one line of JSON: the longest step of the first
while it joins, the steps before and after that, when it had the state, and where the time of that
longest step went, by member. The exit status is 1 where the pause is longer than 0.3 s.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.testbed import NodeSpec, Spec, Testbed
from raycloud import Job, Splits, Task
from raycloud.commands import Form, Meet, Reshare
from raycloud.events import MemberCaughtUp, MemberFailed, MemberReady
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.order import deal
from raycloud.recovery import quorum
from raycloud.recovery.rendezvous import Meeting
from raycloud.step import commit
from raycloud.step.feed import Feed
from raycloud.step.replica import Replica
from raycloud.step.stateful import ReplicaState
from raycloud.worker.context import MemberConfig
from raycloud.worker.loop import Loop
from raycloud.worker.member import Member
from raycloud.worker.transition import Transition
from raycloud.worker.worker import Worker

_PORT = 29400
_MEET = timedelta(seconds=120)
_LOOK_S = 0.001
_SAID = "> "  # before what a member says here, among what others print
_SHORT_S = 0.002  # of a part of a step, that is not told
AT_MOST_S = 0.3  # what one that joins may cost the others
_MICRO_BATCHES = 8
# What a member does, one inside of the other: its seconds are told.
_PARTS: tuple[tuple[Any, str], ...] = (
    (Worker, "meet"),
    (Transition, "enter"),
    (quorum, "gather_statuses"),
    (quorum, "hand_over"),
    (ReplicaState, "load"),
    (Loop, "enter"),
    (Loop, "settle"),
    (Loop, "save"),
    (Feed, "take"),
    (Feed, "close"),
    (Replica, "connect"),
    (Replica, "compute"),
    (commit, "collect"),
    (commit, "commit"),
)


class Layers(Task):
    """Equal layers side by side, of which the last `trained` are trained."""

    def __init__(self, *, width: int = 2048, layers: int = 8, trained: int = 8) -> None:
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
    "23MB": Layers(width=490),
    "400MB": Layers(),
    "400MB-few-trained": Layers(width=2048, layers=24, trained=1),
}


def member(number: int, case: str, place: str, *, joins: bool) -> None:
    """One member, told what to do through the store at `place`; ends when it is told so."""
    for owner, name in _PARTS:
        setattr(owner, name, _timed(getattr(owner, name), name, number))
    task = CASES[case]
    settings = {"width": task.width, "layers": task.layers, "trained": task.trained}
    job = Job(
        task=Layers,
        settings=settings,
        steps=100_000,
        global_batch=16,
        micro_batch=16 // _MICRO_BATCHES,
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
        joins=joins,
    )
    one = Member(told)
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


def _timed(function: Callable[..., Any], name: str, number: int) -> Callable[..., Any]:
    """The same, which prints when it began and ended."""

    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        began_s = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            ended_s = time.monotonic()
            if ended_s - began_s >= _SHORT_S:
                _say([name, number, began_s, ended_s])

    return timed


def _say(what: list[Any]) -> None:
    sys.stdout.write(f"{_SAID}{json.dumps(what)}\n")
    sys.stdout.flush()


def _clock_steps(one: Member, number: int) -> None:
    """Prints when each step began."""
    pause, before = threading.Event(), None
    while True:
        if (step := one.step) != before:
            before = step
            _say([number, step, time.monotonic()])
        pause.wait(_LOOK_S)


class Bench:
    """The driver of such a run."""

    def __init__(self, address: str, store: Any, members: int) -> None:
        """At this address members meet, by this store, which also carries what they are told."""
        self._store = store
        self._head = Rendezvous(address)
        self._told = [0] * members
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

    def run(self, warm_s: float, *, at_once: bool) -> tuple[float, float, str]:
        """When the newcomer was called, when it had its share, and what it said."""
        every = tuple(range(len(self._told)))
        *first, last = every
        for number in every:
            self.wait(f"MemberReady/{number}")
        begin = tuple(deal([1] * len(first), _MICRO_BATCHES))
        form = Form(generation=0, members=tuple(first), shares=begin, step=0)
        for rank in first:
            self.tell(rank, "form", self._meeting(form, rank))
        self._pause.wait(warm_s)
        called_s = time.monotonic()
        end = tuple(deal([1] * len(every), _MICRO_BATCHES))
        shares, following = (end, ()) if at_once else ((*begin, 0), (last,))
        meet = Meet(generation=1, members=every, shares=shares, following=following)
        for rank in every:
            meeting = replace(self._meeting(meet, rank), settled=1, planned=True)
            self.tell(rank, "form", replace(meeting, ahead=None if rank == last else 1))
        said = ""
        if at_once:
            self._pause.wait(warm_s)
        else:
            self.wait(f"MemberCaughtUp/{last}")
            said = self._store.get(f"MemberCaughtUp/{last}").decode()
            change = Reshare(generation=2, shares=end, caught_up=(last,))
            for number in every:
                self.tell(number, "prepare", 2, change)
        joined_s = time.monotonic()
        self._pause.wait(warm_s)
        for number in every:
            self.tell(number, "end")
        return called_s, joined_s, said

    def _meeting(self, told: Form | Meet, rank: int) -> Meeting:
        return Meeting.of(told, rank, self._head.place)


def main() -> None:
    """Measure, or be one of those that are measured."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("case", choices=CASES)
    asked.add_argument("--bits-per-s", type=float, default=1e9)
    asked.add_argument("--members", type=int, default=3)
    asked.add_argument("--cores", type=float)
    asked.add_argument("--warm-s", type=float, default=8.0)
    asked.add_argument("--at-once", action="store_true")
    asked.add_argument("--member", type=int)
    asked.add_argument("--place")
    asked.add_argument("--hold", action="store_true")
    told = asked.parse_args()
    if told.member is not None:
        member(told.member, told.case, told.place, joins=told.member == told.members - 1)
        return
    if told.hold:  # the store, on the head
        store = distributed.TCPStore("0.0.0.0", _PORT, is_master=True, wait_for_workers=False)
        bench = Bench(told.place, store, told.members)
        _say(list(bench.run(told.warm_s, at_once=told.at_once)))
        return
    _measure(told)


def _measure(told: argparse.Namespace) -> None:
    rate = {"egress_bits_per_s": told.bits_per_s, "ingress_bits_per_s": told.bits_per_s}
    nodes = (NodeSpec(name=f"n{i}", cores=told.cores, **rate) for i in range(told.members))
    again = [sys.executable, "-m", "benchmarks.joining", told.case, "--members", str(told.members)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, Testbed(Spec(nodes=tuple(nodes))) as bed:
        logs = [Path(folder) / f"{i}.log" for i in range(told.members + 1)]
        options = ["--warm-s", str(told.warm_s), *(["--at-once"] if told.at_once else [])]
        hold = [*again, "--hold", "--place", bed.head.address, *options]
        head = bed.head.start(hold, environment=environment, log=logs[-1])
        for i in range(told.members):
            one = [*again, "--member", str(i), "--place", bed.head.address]
            bed[f"n{i}"].start(one, environment=environment, log=logs[i])
        head.wait(280.0)
        *said_by, last = (_lines(log) for log in logs)
        if not last:
            sys.stderr.write("\n".join(log.read_text()[-3000:] for log in logs))
            raise SystemExit(1)
        called_s, joined_s, said = last[-1]
        if _show(told, said_by, (called_s, joined_s), said) > AT_MOST_S:
            raise SystemExit(f"the pause is longer than {AT_MOST_S:g} s")


def _lines(log: Path) -> list[list[Any]]:
    """What a member has printed."""
    lines = log.read_text().splitlines()
    return [json.loads(line.removeprefix(_SAID)) for line in lines if line.startswith(_SAID)]


def _show(
    told: argparse.Namespace,
    said_by: Sequence[list[list[Any]]],
    joining_s: tuple[float, float],
    said: str,
) -> float:
    """Print it; the seconds that the longest step had more than usual."""
    began = [line for line in said_by[0] if line[0] == 0]
    steps = [(at, end - at) for (_, a, at), (_, b, end) in itertools.pairwise(began) if a and b]
    called_s, joined_s = joining_s
    before = [s for at, s in steps[1:] if at + s < called_s]
    after = [s for at, s in steps if at > joined_s + 1.0]
    during = [(s, at) for at, s in steps if at + s >= called_s and at <= joined_s]
    usual = max(statistics.median(before), statistics.median(after) if after else 0.0)
    longest_s, at_s = max(during)
    found = {
        "case": told.case,
        "members": told.members,
        "cores": told.cores,
        "at_once": told.at_once,
        "step_before_s": statistics.median(before),
        "step_after_s": statistics.median(after) if after else None,
        "longest_before_s": max(before),
        "steps_during": len(during),
        "median_during_s": statistics.median([s for s, _ in during]),
        "longest_during_s": longest_s,
        "pause_s": longest_s - usual,
        "joining_s": joined_s - called_s,
        "during_s": [round(s, 3) for s, _ in during[:40]],
        "said": said,
        "longest": [_within(lines, at_s, at_s + longest_s) for lines in said_by],
    }
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")
    return longest_s - usual


def _within(lines: list[list[Any]], began_s: float, ended_s: float) -> list[list[Any]]:
    """What a member did then: what, when, for how long."""
    return [
        [name, round(at - began_s, 3), round(end - at, 3)]
        for name, _, at, end in (line for line in lines if isinstance(line[0], str))
        if end > began_s and at < ended_s
    ]


if __name__ == "__main__":
    main()
