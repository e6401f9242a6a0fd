"""Starting programs on a bed and reading what they say; what is left of a bed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import testbed
from benchmarks.testbed import ground
from tests.live import wait_for

PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT_S = 20.0


def said(log: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a log, whole ones."""
    with contextlib.suppress(FileNotFoundError):
        *whole, _ = log.read_text().split("\n")
        return [json.loads(line) for line in whole if line.startswith("{")]
    return []


def start(machine: testbed.Machine, folder: Path, *command: object) -> testbed.Process:
    """Start one of the programs, with a log of its own."""
    log = folder / f"{machine.name}-{'-'.join(map(str, command))}-{time.monotonic_ns()}.log"
    words = [sys.executable, "-I", str(PROGRAMS), *map(str, command)]
    return machine.start(words, environment={"PYTHONUNBUFFERED": "1"}, log=log)


def first(process: testbed.Process, name: str) -> Any:
    """The first value that a program says under a name, once it does."""

    def look() -> list[Any]:
        return [line[name] for line in said(process.log) if name in line]

    return wait_for(f"{name} in {process.log}", look, seconds=LIMIT_S)[0]


def listening(machine: testbed.Machine, folder: Path, *command: object) -> testbed.Process:
    """Start a program that listens; returns once it does."""
    process = start(machine, folder, *command)
    first(process, "listening")
    return process


def let_pass(seconds: float) -> float:
    """Let time pass in which something is measured; the seconds that it took."""
    began_s = time.monotonic()
    threading.Event().wait(seconds)
    return time.monotonic() - began_s


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    return ground.start_ticks(pid) is not None


def remains(bed_id: str, pids: Iterator[int] | list[int] = ()) -> list[str]:
    """Whatever is left of a bed."""
    places = [Path("/run/netns"), Path("/run/raycloud-testbed"), Path("/sys/fs/cgroup")]
    found = [
        str(Path(folder, name))
        for place in places
        for folder, folders, files in os.walk(place)  # of which another bed may vanish meanwhile
        for name in (*folders, *files)
        if name.startswith(bed_id)
    ]
    return found + [f"process {pid}" for pid in pids if runs(pid)]
