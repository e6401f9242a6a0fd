"""Supervision: `train --restarts N` starts the driver as a process, and again where it fails.

It also runs on the head for a submitted job. A signal to this process is passed on: it asks the
driver to write a checkpoint and end, and then the driver is not started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from raycloud.cli.shell import MACHINE, STOPPED, say

if TYPE_CHECKING:
    from raycloud.clock import Clock

RestartsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=1000,
        metavar="N",
        help="Start the driver again, up to N times, when a machine failed (exit code 3) or it was "
        "killed; it goes on from the last checkpoint.",
    ),
]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LIVED_S = 300.0  # a driver that lived so long did not fail at once: the pause starts over
_MAIN = "import sys; sys.argv[0] = 'raycloud'; from raycloud.cli import main; main()"
_PR_SET_PDEATHSIG = 1
_ARGUMENTS = "raycloud.arguments"


class Resuming(StrEnum):
    """The words after `--resume`: those of `raycloud.spec.Resume`, which would load pydantic."""

    MUST = "must"
    ALLOW = "allow"
    NEVER = "never"


class ResumingCommand(TyperCommand):
    """A command where `--resume` without one of its words means `--resume must`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every command, once `--resume` has its word."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, worded(args))


def without_try(ctx: typer.Context) -> str:
    """The command as it was typed, but for `--try` and secrets."""
    return _command(ctx, [arg for arg in ctx.meta[_ARGUMENTS] if arg != "--try"])


def resumed(ctx: typer.Context, how: str) -> str:
    """The command as it was typed, without secrets, but going on with its run: `--resume how`."""
    return _command(ctx, [*_without(ctx, ["--resume"]), "--resume", how])


def _command(ctx: typer.Context, words: list[str]) -> str:
    from raycloud.spec.secrets import kept_word  # loads pydantic

    return f"raycloud {ctx.info_name} {shlex.join(map(kept_word, words))}"


def worded(args: Sequence[str]) -> list[str]:
    """The arguments, with `must` behind a `--resume` that stands alone.

    >>> worded(["--resume", "--run-dir", "d"]), worded(["--resume", "allow", "job.yaml"])
    (['--resume=must', '--run-dir', 'd'], ['--resume', 'allow', 'job.yaml'])
    >>> worded(["--resume", "job.yaml"]), worded(["--", "--resume"])
    (['--resume=must', 'job.yaml'], ['--', '--resume'])
    """
    told, words = list(args), set(Resuming)
    for at, arg in enumerate(args):
        if arg == "--":
            break
        if arg == "--resume" and not words.intersection(args[at + 1 : at + 2]):
            told[at] = "--resume=must"
    return told


def _without(ctx: typer.Context, options: Sequence[str]) -> list[str]:
    """What was typed behind the command's name, but for these options and their values."""
    kept: list[str] = []
    rest = iter(worded(ctx.meta[_ARGUMENTS]))
    for word in rest:
        if word == "--":
            kept += [word, *rest]
        elif word in options:
            next(rest, None)
        elif word.partition("=")[0] not in options:
            kept.append(word)
    return kept


def pause_s(failures: int) -> float:
    """Seconds before a driver is started again, after so many in a row that failed at once.

    >>> [pause_s(n) for n in (1, 2, 3, 7, 99)]
    [1.0, 2.0, 4.0, 60.0, 60.0]
    """
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16), _LONGEST_PAUSE_S)


def final_code(code: int, *, asked: bool, left: int) -> int | None:
    """The exit code of the whole, after a driver ended; None: it is to be started again.

    Args:
        code: Its exit code; -n if signal n killed it.
        asked: Whether it was asked to end.
        left: How many restarts are left.

    >>> final_code(-9, asked=False, left=1), final_code(2, asked=False, left=1)
    (None, 2)
    """
    if code >= 0 and code != MACHINE:
        return code
    if asked:
        return STOPPED if code < 0 else code
    return None if left else MACHINE


def supervise(commands: Callable[[int], Sequence[str]], *, restarts: int, clock: Clock) -> int:
    """Run a command until it ends well, or may not be started again; returns the exit code.

    Args:
        commands: The command of the n-th start, from 0.
        restarts: How many times it may be started again.
        clock: Where seconds come from.
    """
    start = failures = 0
    with _signals() as signals:
        while True:
            began_s = clock.monotonic_s()
            code = _run(commands(start), signals)
            failures = failures + 1 if clock.monotonic_s() - began_s < _LIVED_S else 1
            final = final_code(code, asked=signals.came, left=restarts - start)
            if final is not None:
                if restarts and final == MACHINE and not signals.came:
                    say(f"the driver {_how(code)}; all {restarts} restarts are used up")
                return final
            start += 1
            again = f"restart {start} of {restarts} in {pause_s(failures):g} s"
            say(f"the driver {_how(code)}; {again}, from the last checkpoint")
            if signals.wait(None, pause_s(failures)):
                return STOPPED


def supervised(
    context: typer.Context, name: str, run_dir: Path | None, *, restarts: int, clock: Clock
) -> int:
    """Run `train` as it was typed, under supervision; returns the exit code.

    Args:
        context: Of the command.
        name: The job's.
        run_dir: Where the run is kept; None: a new place, unless it shall go on with a run, which
            the driver then refuses.
        restarts: How many times it may be started again.
        clock: Where seconds come from.
    """
    resume = Resuming(context.params["resume"])
    if run_dir is None and resume is Resuming.NEVER:
        from raycloud.spec import choose

        run_dir = choose(None, name, resume=False).path
    command = [sys.executable, "-P", "-c", _MAIN, str(context.info_name)]
    command += [] if run_dir is None else ["--run-dir", str(run_dir)]
    words = _without(context, ["--restarts", "--resume", "--run-dir"])

    def commands(start: int) -> list[str]:
        # Where a failed driver has left no checkpoint, `allow` sets its files aside and begins.
        return [*command, f"--resume={Resuming.ALLOW if start else resume}", *words]

    return supervise(commands, restarts=restarts, clock=clock)


class _Signals:
    """The signals that came, as bytes in a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.came = False

    def wait(self, process: int | None, timeout_s: float | None = None) -> bool:
        """Wait for a signal, the end of a process (by its pidfd) or the time; a signal is True."""
        watched = [self._descriptor] + ([process] if process is not None else [])
        ready = select.select(watched, [], [], timeout_s)[0]
        if self._descriptor not in ready:
            return False
        os.read(self._descriptor, 1024)
        self.came = True
        return True


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """Catch what asks this process to end, while it lasts."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.ExitStack() as undone:
        undone.callback(os.close, reading)
        undone.callback(os.close, writing)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            undone.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        woken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        undone.callback(signal.set_wakeup_fd, woken)
        yield _Signals(reading)


def _run(command: Sequence[str], signals: _Signals) -> int:
    """Run a command to its end; returns its exit code, or -n where signal n killed it.

    It stays in this process's group, so that what a terminal or Ray sends to the group reaches
    both. Whatever comes here is passed on as SIGTERM, which asks only once: the second Ctrl-C,
    which ends at once, is the terminal's to send.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def tied() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # if this process is killed, the driver ends, too

    # Safe: this process has one thread, and the function was looked up before the fork.
    process = subprocess.Popen(command, preexec_fn=tied)  # noqa: PLW1509
    descriptor = os.pidfd_open(process.pid)
    try:
        while process.poll() is None:
            if signals.wait(descriptor):
                process.send_signal(signal.SIGTERM)
    finally:
        os.close(descriptor)
    return process.returncode


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
