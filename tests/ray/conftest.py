"""An embedded Ray of its own for each module, and nothing left behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

END_S = 20.0  # how long Ray's processes may take to end after shutdown


@pytest.fixture(scope="module", autouse=True)
def ray_tmpdir() -> Iterator[Path]:
    """The folder in which this module's Ray lives; afterwards Ray is down and the folder is gone.

    The path is short, since Ray puts Unix sockets below it and their paths end at 107 characters.
    Fails the module if a process that was started below it outlives Ray.
    """
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.delenv("RAY_ADDRESS", raising=False)  # never somebody else's cluster
        try:
            yield folder
        finally:
            _shut_down()
            left = _ended(_started_below(folder))
            shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"still running after Ray was shut down: {left}"


def _shut_down() -> None:
    """End the Ray that this process started or joined; one that it joined keeps running."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _started_below(folder: Path) -> dict[int, str]:
    """Processes, by id, that inherited `RAY_TMPDIR=folder`; what a killed driver left included."""
    mark = f"RAY_TMPDIR={folder}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if mark in variables and int(process.name) != os.getpid():
            found[int(process.name)] = command
    return found


def _ended(processes: dict[int, str]) -> dict[int, str]:
    """Wait for processes to end, kill those that do not; returns what had to be killed."""
    left = {}
    for pid, command in processes.items():
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], END_S)[0]:
                left[pid] = command
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return left
