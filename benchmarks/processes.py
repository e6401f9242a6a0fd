"""Runs one command with everything it starts, and leaves nothing of it running. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOKEN = "BENCHMARK_RUN"
_ENDING_S = 10.0
_POLL_S = 0.05
_LOG_CHARACTERS = 4000


class CommandFailedError(Exception):
    """A command ended with an error, or took longer than it may; holds the end of its output."""


def run(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, limit_s: float
) -> float:
    """Run `command` to its end, then end every process that it left.

    Args:
        command: Program and arguments.
        environment: All of its environment.
        log: Where its output goes.
        limit_s: Seconds after which it is ended.

    Returns:
        The monotonic second at which it was started.

    Raises:
        CommandFailedError: It failed, or hit the limit.
    """
    token = f"{_TOKEN}={uuid.uuid4().hex}"
    with log.open("wb") as out:
        began_s = time.monotonic()
        process = subprocess.Popen(
            list(command),
            env={**environment, **dict([token.split("=")])},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            _end_all(process, token)
    if code != 0:
        why = f"took longer than {limit_s:.0f} s" if code is None else f"ended with status {code}"
        tail = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        raise CommandFailedError(f"{' '.join(command)}\n{why}; its last output:\n{tail}")
    return began_s


def _end_all(process: subprocess.Popen[bytes], token: str) -> None:
    """End `process` and what it started: first asked to, after a while made to."""
    patience_until_s = time.monotonic() + _ENDING_S
    asked: set[int] = set()
    while process.poll() is None or _left(process.pid, token):
        left = _left(process.pid, token)
        if process.poll() is None:
            left.add(process.pid)
        if time.monotonic() < patience_until_s:
            _send(left - asked, signal.SIGTERM)
            asked |= left
        else:
            _send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int


def _left(root: int, token: str) -> set[int]:
    """Living processes that `root` started: by its session, the token they inherited, or a parent.

    No sign is enough alone: a daemon leaves the session, an orphan has a new parent, and who sets
    its process title may have overwritten its environment.
    """
    living = list(_living())
    found = {p.pid for p in living if p.session == root or _carries(p.pid, token)}
    grown = True
    while grown:
        children = {p.pid for p in living if p.parent in found | {root}} - found
        found |= children
        grown = bool(children)
    return found - {root, os.getpid()}


def _living() -> Iterator[_Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in parentheses, may hold anything; what follows has a fixed order.
            state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if state != "Z":
            yield _Process(int(entry.name), int(parent), int(session))


def _carries(pid: int, token: str) -> bool:
    try:
        return token.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it ended meanwhile, or is someone else's
