"""Real gloo groups that have lost a peer: members in processes of their own."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import distributed as dist

from tests.connections import between, hang, hear_again

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc is of Linux")

NUMBERS = 1000
LIMIT_S = 30.0


class Peer:
    """See `tests.gloo_peer`."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gloo_peer", *map(str, (port, rank, size, NUMBERS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.said()

    def core(self) -> float:
        """What part of a core it takes while nobody asks anything of it."""
        return float(self.ask("cpu 0.3"))


@contextmanager
def peers(size: int) -> Iterator[list[Peer]]:
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    there = [Peer(store.port, rank, size) for rank in range(size)]
    try:
        assert [peer.said() for peer in there] == ["met"] * size
        yield there
    finally:
        for peer in there:
            peer.process.kill()
            peer.process.communicate()


def within(peer: Peer, least: float, most: float) -> bool:
    end_s = time.monotonic() + LIMIT_S
    while not least <= peer.core() <= most:
        if time.monotonic() > end_s:
            return False
    return True


@pytest.mark.timeout(180)
def test_what_comes_for_an_exchange_that_broke_costs_a_core_until_it_hangs_up() -> None:
    """What member 0 sends to member 1 is on its way when member 2 dies: gloo never reads it."""
    with peers(3) as (zero, one, two):
        assert [peer.ask("reduce") for peer in (zero, one, two)] == ["begun"] * 3
        assert [peer.ask("wait 20") for peer in (zero, one, two)] == ["complete"] * 3
        ends = dict(between([zero.process.pid, one.process.pid]))
        one.ask("reduce")
        threading.Event().wait(0.2)  # until member 0 knows that it may send
        hang(one.process.pid, ends[one.process.pid])
        zero.ask("reduce")
        two.process.kill()
        assert one.ask("wait 20") == "broken"
        hear_again(one.process.pid, ends[one.process.pid])
        assert within(one, 0.05, 1.5)
        one.ask("hang_up")
        assert within(one, 0.0, 0.02)
        zero.ask("hang_up")
        assert within(zero, 0.0, 0.02)
