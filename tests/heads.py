"""A head as someone starts one: with a dashboard, a token, its metrics, and a price on its node."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raycloud.errors import MachineError
from raycloud.on_ray.jobs_api import JobsApi
from tests.live import Command, command, ended, processes_below, wait_for

RAY = Path(sys.executable).with_name("ray")
PATH = f"{RAY.parent}:{os.environ['PATH']}"  # where a head finds `raycloud`
TOKEN = {"RAY_AUTH_MODE": "token"}
PRICE = 3600.0  # an hour: one a second
SECRET = "canaryHead3e71"  # in its environment, as SERVICE_KEY
START_S = 200.0  # a head and a run, on a machine that does much else
END_S = 90.0  # see ray/conftest.py
TRIES = 3
PATIENCE = {
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{START_S:g}",
    "RAY_agent_register_timeout_ms": f"{START_S * 1000:.0f}",
    "RAY_worker_register_timeout_seconds": f"{START_S:.0f}",
    "RAY_metrics_report_interval_ms": "500",
}


@dataclass(frozen=True, slots=True)
class Head:
    """A head that someone has started.

    Attributes:
        joined: What others join it by, `host:port`.
        jobs: Where its Jobs API answers.
        metrics: The port on which its numbers are.
        home: The home directory of what runs there.
        folder: Its `RAY_TMPDIR`.
    """

    joined: str
    jobs: str
    metrics: int
    home: Path
    folder: Path

    def run_dir(self, submission: str) -> Path:
        """Where the run of a submission is kept."""
        return self.home / "raycloud/runs" / submission


@contextmanager
def started(folder: Path, at: Path) -> Iterator[Head]:
    """A head, until the block is left; then nothing of it runs any more.

    Args:
        folder: Its `RAY_TMPDIR`: short, for Unix sockets lie below it.
        at: For its home directory and what it prints.
    """
    home, ports = at / "home", free_ports(2)
    home.mkdir()
    words = (
        RAY, "start", "--head", "--block", "--num-cpus=4", "--port=0",
        f"--dashboard-port={ports[0]}", "--dashboard-agent-listen-port=0",
        f"--metrics-export-port={ports[1]}", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1", f"--labels=raycloud.io/price-per-hour={PRICE:g}",
    )  # fmt: skip
    variables = TOKEN | PATIENCE | {"HOME": str(home), "PATH": PATH, "RAY_TMPDIR": str(folder)}
    variables["SERVICE_KEY"] = SECRET
    with ExitStack() as stack:
        for number in range(TRIES):  # Ray gives up after 30 s, which a busy machine may take
            one = stack.enter_context(command(at / str(number), *words, **variables))
            wait_for("the head", partial(_told, one), seconds=START_S)
            if joined := _address(one):
                break
        assert joined is not None, one.err
        head = Head(
            joined=joined,
            jobs=f"http://127.0.0.1:{ports[0]}",
            metrics=ports[1],
            home=home,
            folder=folder,
        )
        wait_for("the Jobs API", lambda: one.ended() or _answers(head), seconds=START_S)
        assert not one.ended(), one.err
        yield head
        one.process.send_signal(signal.SIGTERM)
        one.code()
    assert ended(processes_below(folder), END_S) == {}


def free_ports(number: int) -> list[int]:
    """Ports that nobody has now, below those that Ray gives to its own processes."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [one.getsockname()[1] for one in sockets]


def _told(head: Command) -> bool:
    return head.ended() or _address(head) is not None


def _address(head: Command) -> str | None:
    """What it tells others to join it by."""
    found = re.search(r"--address='([\d.]+:\d+)'", head.out)
    return found[1] if found else None


def _answers(head: Head) -> bool:
    try:
        JobsApi.at(head.jobs).runs()
    except MachineError:
        return False
    return True
