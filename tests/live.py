"""Runs on a real Ray, seen from outside: the command as a process, waiting, and what is left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from raycloud import Run, RunHandle
from raycloud.checkpoint import Manifest, latest, open_store
from raycloud.checkpoint.payload import load_tensors
from raycloud.errors import RunDirectoryError
from raycloud.events import CheckpointPublished, Event, Noticed, StepsCommitted
from raycloud.order import read_ledger
from raycloud.report.log import read_events
from raycloud.spec import Job
from tests.lockstep import NetTask, job, plain_loop

ROOT = Path(__file__).parents[1]
RAYCLOUD = Path(sys.executable).with_name("raycloud")
TASKS = Path(__file__).with_name("live_tasks.py")
WAIT_S = 90.0  # a busy machine takes half a minute from command to first step

Found = TypeVar("Found")


def wait_for(what: str, look: Callable[[], Found | None], *, seconds: float = WAIT_S) -> Found:
    """What `look` finds, asked again and again; fails after `seconds`.

    Most of the time goes to who is waited for: looking through a log or all processes is work, too.
    """
    pause, end = threading.Event(), time.monotonic() + seconds
    while True:
        began_s = time.monotonic()
        found = look()
        if found:
            return found
        now_s = time.monotonic()
        assert now_s < end, f"{what}: not within {seconds:g} s"
        pause.wait(min(0.3, max(0.02, 4.0 * (now_s - began_s))))


def asked(task: str, workers: int | list[int] = 1, **changes: Any) -> Job:
    """The small job of tests/lockstep.py with a task of tests/live_tasks.py.

    Args:
        task: Its class.
        workers: How many, or their shares.
        changes: Further fields.
    """
    number = workers if isinstance(workers, int) else len(workers)
    shares = "auto" if isinstance(workers, int) else workers
    elastic = {"min_workers": number, "max_workers": number, "shares": shares}
    return job(**({"task": f"{TASKS}:{task}", "elastic": elastic} | changes))


@dataclass(frozen=True, slots=True)
class Command:
    """A command that runs in a session of its own, so that a test can signal the whole group."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return (self.folder / "err").read_text()

    def ended(self) -> bool:
        """Whether it has."""
        return self.process.poll() is not None

    def code(self, seconds: float = WAIT_S) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.err}") from None

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextlib.contextmanager
def command(folder: Path, *arguments: object, **variables: str) -> Iterator[Command]:
    """Start a command; it is killed on the way out if it has not ended.

    Args:
        folder: Where it runs; its output goes to `out` and `err` there.
        arguments: What to run.
        variables: Added to its environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"} | variables
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [str(a) for a in arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield Command(process, folder)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def ran(folder: Path, *arguments: object, **variables: str) -> tuple[int, Command]:
    """Run a command to its end: its exit code, and what it printed."""
    with command(folder, *arguments, **variables) as one:
        return one.code(), one


def processes_below(folder: Path) -> dict[int, str]:
    """Processes, by id, that inherited `RAY_TMPDIR=folder` or a place below it, and their children.

    A process that gives itself a title may write over what it inherited, as Ray's agents do: it is
    then known by its parent.
    """
    mark = f"RAY_TMPDIR={folder}".encode()
    lines, parents, found = dict[int, str](), dict[int, int](), set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            stat = (process / "stat").read_text()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        pid = int(process.name)
        lines[pid], parents[pid] = line, int(stat.rpartition(")")[2].split()[1])
        if any(v == mark or v.startswith(mark + b"/") for v in variables):
            found.add(pid)
    found.discard(os.getpid())
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: lines[pid] for pid in found - {os.getpid()}}


def ended(processes: dict[int, str], seconds: float) -> dict[int, str]:
    """Wait for processes to end, kill those that do not; returns what had to be killed."""
    left, end = {}, time.monotonic() + seconds
    for pid, line in processes.items():
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                left[pid] = line
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            left.pop(pid, None)
        finally:
            os.close(descriptor)
    return left


def members_below(folder: Path) -> list[int]:
    """Process ids of the members of the Ray below `folder`."""
    return sorted(
        pid for pid, line in processes_below(folder).items() if line.startswith("ray::MemberActor")
    )


class Moved:
    """Asks for other numbers of servers, each once those before have taken their place."""

    def __init__(self, gate: Path, *wanted: int) -> None:
        self.handle, self.gate, self.wanted = RunHandle(), gate, list(wanted)

    def __call__(self, event: Event) -> None:
        done = isinstance(event, Noticed) and "from now on" in event.what
        first = isinstance(event, StepsCommitted) and len(self.wanted) == 2
        if done and not self.wanted:
            self.gate.touch()
        elif (done or first) and self.wanted:
            self.handle.reshard(self.wanted.pop(0))


def events(run_dir: Path) -> list[Event]:
    """What a run's log holds by now."""
    try:
        return [event for _, event in read_events(run_dir / "events.jsonl")]
    except RunDirectoryError:  # not there yet
        return []


def of_kind(kind: type[Found], among: list[Event]) -> list[Found]:
    """Events of one kind, in order."""
    return [event for event in among if isinstance(event, kind)]


def published(run_dir: Path) -> list[int]:
    """Steps of the checkpoints published so far, in order."""
    return [event.step for event in of_kind(CheckpointPublished, events(run_dir))]


def exact_steps(run_dir: Path) -> int:
    """How many steps the ledger holds; fails unless each of their samples counts exactly once."""
    ledger = read_ledger((run_dir / "ledger").read_text().splitlines(keepends=True))
    audit = ledger.audit()
    assert audit.exact, str(audit)
    return ledger.next_step


def checkpoint(run_dir: Path) -> Manifest:
    """A run's newest checkpoint, with every byte verified."""
    found = latest(open_store(str(run_dir / "checkpoints")))
    assert found.manifest is not None
    assert found.skipped == ()
    return found.manifest


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    """The model in a run's newest checkpoint, by qualified name."""
    tensors = load_tensors(open_store(str(run_dir / "checkpoints")), checkpoint(run_dir))
    return {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}


def apart(run_dir: Path, reference: nn.Module) -> float:
    """The largest difference between a run's newest checkpoint and a model."""
    found, wanted = parameters(run_dir), reference.state_dict()
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - t.double()).abs().max()) for n, t in wanted.items())


def check_result(run: Run | Path, job: Job, task: NetTask, steps: int) -> None:
    """The promise: a run of `steps` steps is the single process, and its ledger is exact."""
    run_dir = run if isinstance(run, Path) else run.directory
    assert exact_steps(run_dir) == steps
    assert apart(run_dir, plain_loop(job, task, steps)) <= 1e-9


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative path."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
