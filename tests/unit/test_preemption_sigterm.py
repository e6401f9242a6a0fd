"""SIGTERM: a notice first, then, or at the deadline, the end that there was before."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raycloud.preemption import on_sigterm
from tests.live import ROOT

PROGRAM = """
import os, signal, sys, threading
from raycloud.preemption import on_sigterm

{before}

def tell(leaving):
    print("told", leaving.deadline_s, leaving.node, flush=True)

on_sigterm(tell, {deadline_s})
{after}
print("ready", flush=True)
while True:  # in short waits: a signal just before a long one would be seen after it
    threading.Event().wait(0.02)
"""

RAYS = """
def rays(number, frame):
    print("before", number, flush=True)
    raise SystemExit(7)
signal.signal(signal.SIGTERM, rays)
"""

FORKED = """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"x")
    for _ in range(3000):  # in short waits, as below
        threading.Event().wait(0.02)
    os._exit(9)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def running(
    before: str = "", after: str = "", deadline_s: float = 60.0
) -> Iterator[subprocess.Popen[str]]:
    program = PROGRAM.format(before=before, after=after, deadline_s=deadline_s)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_the_first_is_a_notice_and_the_second_ends_the_process() -> None:
    with running(RAYS) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "told 60.0 False"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert line(process) == f"before {signal.SIGTERM:d}"
        assert process.wait(30) == 7


@pytest.mark.parametrize(("before", "code"), [("", -signal.SIGTERM), (RAYS, 7)])
def test_the_deadline_ends_it_as_before(before: str, code: int) -> None:
    with running(before, deadline_s=0.2) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "told 0.2 False"
        assert process.wait(30) == code


def test_a_process_that_ignored_it_goes_on() -> None:
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with running(ignored) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process).startswith("told")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_a_child_that_was_forked_ends_with_the_first() -> None:
    with running(after=FORKED) as process:
        assert line(process) == f"child {-signal.SIGTERM:d}"
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process).startswith("told")  # the parent is told of its own


def test_only_the_main_thread_may_ask() -> None:
    refused: list[ValueError] = []

    def ask() -> None:
        with pytest.raises(ValueError, match="main thread") as caught:
            on_sigterm(lambda _: None)
        refused.append(caught.value)

    before = threading.active_count()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert threading.active_count() == before
