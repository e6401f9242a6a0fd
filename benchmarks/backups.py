"""What backups gain where a worker is slow, and cost where none is: `python -m benchmarks.backups`.

Members on this machine, with equal shares that nobody levels: what a run is like until its shares
follow. After a while one is throttled to a quarter, as by a CPU quota: it is stopped for 7.5 ms of
every 10. With `--waits-s`, on a machine that has much else to do, a micro-batch waits for so long
and does not compute, and the slow one's four times as long. Each repeat runs once without backups
and once with them, in turns. Prints JSON: steps per second in both phases, processor seconds per
step of all members and the micro-batches that counted elsewhere, and the ratios with their 95%
intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.statistics import paired_ratio
from raycloud import Job, Splits, Task
from raycloud.commands import Form
from raycloud.events import MemberFailed, MemberReady, StepsCommitted
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.net.stream import Place
from raycloud.recovery.rendezvous import Meeting
from raycloud.spec import CheckpointSection, ElasticSection
from raycloud.worker.context import MemberConfig
from raycloud.worker.member import Member

_HOST = "127.0.0.1"
_MEET = timedelta(seconds=120)
_RUNS_S, _STOPS_S = 0.0025, 0.0075
_WARM_S = 3.0
_LEAST_STEPS = 3
_ROWS = 128  # of a micro-batch


class Layers(Task):
    """Equal layers; with dropout no two micro-batches are computed in one pass."""

    def __init__(
        self,
        *,
        width: int = 384,
        layers: int = 6,
        dropout: float = 0.1,
        waits_s: float = 0.0,
        slow: str = "",
    ) -> None:
        """Of this width: a layer is its square. Each loss waits, four times as long once `slow`."""
        self.width, self.layers, self.dropout = width, layers, dropout
        self.waits_s, self.slow = waits_s, Path(slow) if slow else None
        self._pause = threading.Event()

    def model(self) -> nn.Module:
        """One after the other."""
        each = ((nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers))
        drop = [nn.Dropout(self.dropout)] if self.dropout else []
        return nn.Sequential(*drop, *(part for parts in each for part in parts))

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - it needs none
        """Numbers."""
        return Splits(train=list(range(2**16)))  # type: ignore[arg-type]

    def batch(self, samples: Sequence[Any], rng: Any) -> Tensor:  # noqa: ARG002
        """The same number in each column."""
        return torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, self.width) / 2**16

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Towards zero."""
        if self.waits_s:
            slow = self.slow is not None and self.slow.exists()
            self._pause.wait(self.waits_s * (4.0 if slow else 1.0))
        loss: Tensor = model(batch).square().mean()
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured."""

    members: int
    share: int
    most: int
    dropout: float
    seconds: float
    waits_s: float


def member(number: int, port: int, asked: Asked, slow: str) -> None:
    """One member; writes a line for each step that it begins, and for what it has committed."""
    width = 16 if asked.waits_s else 384
    settings = {"dropout": asked.dropout, "waits_s": asked.waits_s, "slow": slow, "width": width}
    job = Job(
        task=Layers,
        settings=settings,
        steps=1_000_000,
        global_batch=_ROWS * asked.share * asked.members,
        micro_batch=_ROWS,
        elastic=ElasticSection(max_workers=asked.members, backup_micro_batches=asked.most),
        checkpoint=CheckpointSection(every_steps=1_000_000),
    )
    store = distributed.TCPStore(_HOST, port, is_master=False, timeout=_MEET)
    told = MemberConfig(
        member=number, node="", address=_HOST, job=job, task=Layers, checkpoints=tempfile.mkdtemp()
    )
    one, step = Member(told), -1
    while True:
        for event in one.poll(0.005):
            if isinstance(event, MemberReady):
                store.set(f"ready/{number}", "")
                store.get("form")
                members, shares = tuple(range(asked.members)), (asked.share,) * asked.members
                form = Form(generation=0, members=members, shares=shares, step=0)
                one.form(Meeting.of(form, number, Place(*json.loads(store.get("place")))))
            elif isinstance(event, StepsCommitted):
                steps = event.last_step - event.first_step
                _write("committed", steps, event.micro_batches, event.cpu_s)
            elif isinstance(event, MemberFailed):
                raise SystemExit(event.error)
        if (now := one.step) is not None and now != step:
            step = now
            _write("step", step)


def _write(what: str, *numbers: float) -> None:
    sys.stdout.write(json.dumps([what, time.monotonic(), *numbers]) + "\n")
    sys.stdout.flush()


@contextmanager
def throttled(process: subprocess.Popen[bytes], slow: Path | None) -> Iterator[None]:
    """Let it run for a quarter of the time, or let it wait four times as long."""
    if slow is not None:
        slow.touch()
        yield
        return
    over, pause = threading.Event(), threading.Event()

    def turns() -> None:
        while not over.is_set():
            process.send_signal(signal.SIGSTOP)
            pause.wait(_STOPS_S)
            process.send_signal(signal.SIGCONT)
            pause.wait(_RUNS_S)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(asked: Asked) -> dict[str, float]:
    """Steps per second while all are as fast, and while one is throttled."""
    store = distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_MEET)
    pause = threading.Event()
    with tempfile.TemporaryDirectory() as folder, closing(Rendezvous(_HOST)) as head:
        store.set("place", json.dumps(list(astuple(head.place))))
        logs = [Path(folder) / str(number) for number in range(asked.members)]
        processes = [_started(number, store.port, asked, log) for number, log in enumerate(logs)]
        slow = _slow(logs[-1]) if asked.waits_s else None
        try:
            for number in range(asked.members):
                store.get(f"ready/{number}")
            store.set("form", "")
            pause.wait(_WARM_S)
            began_s = time.monotonic()
            pause.wait(asked.seconds)
            slow_s = time.monotonic()
            with throttled(processes[-1], slow):
                pause.wait(asked.seconds)
            ended_s = time.monotonic()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        told = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    steps = [(at, step) for what, at, step, *_ in told[0] if what == "step"]
    calm = [_committed(lines, began_s + 1.0, slow_s) for lines in told]
    late = _committed(told[-1], slow_s + 2.0, ended_s)
    return {
        "steps_per_s": _rate(steps, began_s, slow_s),
        "cpu_s_per_step": sum(cpu_s for *_, cpu_s in calm),
        "moved_per_step": sum(abs(k - asked.share) for k, _ in calm) / 2,
        "throttled_steps_per_s": _rate(steps, slow_s + 1.0, ended_s),
        "throttled_moved_per_step": asked.share - late[0],
    }


def _committed(lines: list[list[Any]], first_s: float, last_s: float) -> tuple[float, float]:
    """Micro-batches and processor seconds of one member's step, on average."""
    found = [line[2:] for line in lines if line[0] == "committed" and first_s <= line[1] <= last_s]
    steps = sum(n for n, *_ in found)
    return sum(k for _, k, _ in found) / steps, sum(cpu_s for *_, cpu_s in found) / steps


def _rate(steps: list[tuple[float, int]], first_s: float, last_s: float) -> float:
    """Whole steps begun in between, per second."""
    found = [one for one in steps if first_s <= one[0] <= last_s]
    if len(found) < _LEAST_STEPS:
        raise SystemExit(
            f"only {len(found)} steps in {last_s - first_s:.1f} s: give more --seconds"
        )
    (first, a), (last, b) = found[0], found[-1]
    return (b - a) / (last - first)


def _started(number: int, port: int, asked: Asked, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.backups", "--member", str(number)]
    for name, value in vars(asked).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if number == asked.members - 1:
        command += ["--slow", str(_slow(log))]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def _slow(log: Path) -> Path:
    return log.with_suffix(".slow")


def main() -> None:
    """Measure, or be one of those that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--waits-s", type=float, default=0.0)
    parser.add_argument("--slow", default="")
    parser.add_argument("--member", type=int)
    parser.add_argument("--port", type=int)
    told = parser.parse_args()
    asked = Asked(**{name: getattr(told, name) for name in Asked.__dataclass_fields__})
    if told.member is not None:
        member(told.member, told.port, asked, told.slow)
        return
    without: list[dict[str, float]] = []
    backed: list[dict[str, float]] = []
    for repeat in range(told.repeats):
        pairs = [(without, 0), (backed, asked.most)]
        for found, most in pairs if repeat % 2 else reversed(pairs):
            found.append(measure(Asked(**{**vars(asked), "most": most})))
    ratios = {
        what: vars(paired_ratio([one[what] for one in backed], [one[what] for one in without]))
        for what in ("steps_per_s", "cpu_s_per_step", "throttled_steps_per_s")
    }
    shown = {"asked": vars(asked), "without": without, "backed": backed, "ratios": ratios}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
