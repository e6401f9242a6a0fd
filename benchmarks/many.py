"""Many members on one machine, as processes with real sockets: `python -m benchmarks.many`.

    python -m benchmarks.many [--members 64] [--steps 50] [--json FILE]

Each computes one micro-batch of a step. A third of the way one is killed, and those that are left
go on from where they agree that they are. In the end all have the same parameters, to the bit, and
they are those of a plain loop of PyTorch in one process; the exit status is 1 where they are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe, load
from raycloud import Job, Splits, Task
from raycloud.commands import Form
from raycloud.events import ExchangeBroken, MemberDone, MemberFailed, MemberReady, StepsCommitted
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.order import Order, Position, Steps, stream_seed
from raycloud.recovery.rendezvous import Meeting
from raycloud.worker.context import MemberConfig
from raycloud.worker.member import Member

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ADDRESS = "127.0.0.1"
MICRO_BATCH, SAMPLES, WIDTH = 2, 512, 64
EXACT = 1e-9
_LIMIT_S = 600.0
_POLL_S = 0.02


class Points(Task):
    """Random points, doubles; the loss is of a small perceptron."""

    def model(self) -> nn.Module:
        """In float64, so that what differs is no rounding of float32."""
        layers = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        return layers.double()

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - it needs none
        """Rows of eight numbers and what they sum to."""
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0)).double()
        return Splits(train=list(torch.cat([x, x.sum(1, keepdim=True)], 1)))

    def batch(self, samples: Sequence[Any], rng: Any) -> Tensor:  # noqa: ARG002
        """Shape (samples, 9)."""
        return torch.stack(list(samples))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean squared error."""
        return nn.functional.mse_loss(model(batch[:, :8]), batch[:, 8:])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


def be_member(number: int, job: Job, folder: str, wire: Connection) -> None:
    """One member: it does what it is told, and tells what it says."""
    torch.set_num_threads(1)
    told = MemberConfig(
        member=number, node="", address=ADDRESS, job=job, task=Points, checkpoints=folder
    )
    one = Member(told)
    while True:
        for event in one.poll(_POLL_S):
            wire.send(event)
        while wire.poll():
            meeting = wire.recv()
            if meeting is None:
                life = one._worker  # noqa: SLF001 - nobody else has to look into a member
                assert life is not None  # noqa: S101 - it has trained
                state = life._replica.model.state_dict()  # noqa: SLF001 - as above
                wire.send({name: tensor.numpy() for name, tensor in state.items()})
                return
            one.form(meeting)


@dataclass
class Fleet:
    """The processes, and what they have said.

    Args:
        job: What they train.
        folder: For checkpoints, of which none is made.
        count: Of members.
    """

    job: Job
    folder: str
    count: int
    done: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    steps: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start them: copies of a process that has loaded torch."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "raycloud.worker.member"])
        self._head = Rendezvous(ADDRESS)
        self.wires, self.processes = [], []
        for number in range(self.count):
            here, there = context.Pipe()
            process = context.Process(
                target=be_member, args=(number, self.job, self.folder, there), daemon=True
            )
            process.start()
            self.wires.append(here)
            self.processes.append(process)

    def form(self, generation: int, members: Sequence[int], shares: Sequence[int]) -> None:
        """Let these meet."""
        told = Form(generation=generation, members=tuple(members), shares=tuple(shares), step=0)
        for rank, member in enumerate(members):
            self.wires[member].send(Meeting.of(told, rank, self._head.place))

    def until(self, what: str, members: Sequence[int]) -> None:
        """Wait until all of these are in this set, or have come to this step."""
        end_s = time.monotonic() + _LIMIT_S
        while not all(member in getattr(self, what) for member in members):
            self.hear(members)
            if time.monotonic() > end_s:
                raise SystemExit(f"not all have come to be {what}: {getattr(self, what)}")

    def come_to(self, step: int, member: int) -> None:
        """Wait until this member has reported this step."""
        while self.steps.get(member, 0) < step:
            self.hear([member])

    def hear(self, members: Sequence[int]) -> None:
        """Take in what these have said."""
        by_wire = {self.wires[member]: member for member in members}
        ready: list[Any] = wait([*by_wire], timeout=1.0)
        for wire in ready:
            member = by_wire[wire]
            match wire.recv():
                case MemberReady():
                    self.ready.add(member)
                case StepsCommitted() as report:
                    self.steps[member] = report.last_step
                case ExchangeBroken():
                    self.broken.add(member)
                case MemberDone():
                    self.done.add(member)
                case MemberFailed() as failed:
                    raise SystemExit(f"member {member} failed: {failed.message}")
                case _:
                    pass

    def parameters(self, members: Sequence[int]) -> list[dict[str, Any]]:
        """Of each of these, which ends with that."""
        found = []
        for member in members:
            self.wires[member].send(None)
            while not isinstance(said := self.wires[member].recv(), dict):
                pass
            found.append(said)
            self.processes[member].join()
        self._head.close()
        return found


def plain(job: Job) -> dict[str, Tensor]:
    """What one process computes, written without raycloud's training code."""
    torch.default_generator.manual_seed(stream_seed(job.seed, 3))
    task = Points()
    model, samples = task.model(), task.data(None).train
    optimizer = task.optimizer(model)
    order = Order(samples=SAMPLES, seed=job.seed)
    cut = Steps(samples=SAMPLES, global_batch=job.global_batch, micro_batch=job.micro_batch)
    at = Position()
    for step in range(job.steps or 0):
        span = cut.span(step, at)
        first, last = span.micro_batches[0], span.micro_batches[-1]
        ids = order.ids(first.epoch, first.start, last.stop)
        rows = [samples[int(i)] for i in ids]  # type: ignore[index]
        task.loss(model, task.batch(rows, None)).backward()
        optimizer.step()
        optimizer.zero_grad()
        at = cut.after(span)
    return dict(model.state_dict())


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare and print; 1 where they differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    if asked.members < 2 or asked.steps < 3:
        parser.error("give at least two members and three steps: one is killed on the way")
    count, before = asked.members, load()
    job = Job(
        task=Points,
        steps=asked.steps,
        global_batch=MICRO_BATCH * count,
        micro_batch=MICRO_BATCH,
        checkpoint={"every_steps": 10**6},  # type: ignore[arg-type]
    )
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        fleet = Fleet(job, folder, count)
        every = [*range(count)]
        fleet.until("ready", every)
        ready_s = time.monotonic() - began_s
        fleet.form(0, every, [1] * count)
        fleet.come_to(asked.steps // 3, 0)
        lost = count // 2
        killed_s = time.monotonic()
        os.kill(fleet.processes[lost].pid or 0, signal.SIGKILL)
        left = [member for member in every if member != lost]
        fleet.until("broken", [left[lost % len(left)]])
        fleet.form(1, left, [2, *([1] * (len(left) - 1))])
        fleet.until("done", left)
        ended_s = time.monotonic()
        found = fleet.parameters(left)
    reference = plain(job)
    digests = {
        hashlib.sha256(b"".join(a.tobytes() for a in one.values())).hexdigest() for one in found
    }
    off = max(float(abs(found[0][n] - t.numpy()).max()) for n, t in reference.items())
    told = {
        "format": 1,
        "machine": describe(os.sched_getaffinity(0)),
        "load_before": before,
        "members": count,
        "steps": asked.steps,
        "ready_s": round(ready_s, 1),
        "killed_to_end_s": round(ended_s - killed_s, 1),
        "whole_s": round(ended_s - began_s, 1),
        "replicas_alike": len(digests) == 1,
        "off_one_process": off,
        "kept": len(digests) == 1 and off <= EXACT,
    }
    text = json.dumps(told, indent=1) + "\n"
    sys.stdout.write(text)
    if asked.json is not None:
        asked.json.write_text(text)
    return 0 if told["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
