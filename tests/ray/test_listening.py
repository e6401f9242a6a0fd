"""What the security page says of listening sockets and tokens, held against a real embedded run."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycloud.events import StepsCommitted
from raycloud.spec import dump_job
from tests.live import (
    RAYCLOUD,
    ROOT,
    asked,
    command,
    ended,
    events,
    of_kind,
    processes_below,
    wait_for,
)

END_S = 90.0
SETTLE_S = 20.0  # until all that Ray starts has come up
START_S = 240.0  # the machine may be busy with others
# What a process is, by its command line; the first that fits.
KINDS = (
    ("gcs_server", "GCS"),
    ("raylet/raylet", "raylet"),
    ("runtime_env", "agent"),
    ("dashboard/agent", "agent"),
    ("dashboard/dashboard", "dashboard"),
    ("monitor.py", "monitor"),
    ("ray::DashboardAgent", "agent"),
    ("ray::RuntimeEnvAgent", "agent"),
    ("ray::", "worker"),
    ("default_worker", "worker"),
    ("raycloud train", "driver"),
)
UNASKED = ("log_monitor.py", "monitor.py", "dashboard.py")  # nobody asks these of Ray's here

pytestmark = [pytest.mark.timeout(500), pytest.mark.alone]


@pytest.mark.full(only="what listens on which address")
def test_what_listens_is_what_the_page_says(ray_tmpdir: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump_job(asked("Steady", [5, 3], steps=100_000)))
    run_dir = tmp_path / "run"
    arguments = (RAYCLOUD, "train", tmp_path / "job.yaml", "--run-dir", run_dir, "--plain")
    with command(tmp_path / "command", *arguments) as one:
        expected, early, late = set(told()), set[tuple[str, str]](), set[tuple[str, str]]()

        def trains() -> bool:  # some listen only until their peer has come
            early.update(listening(ray_tmpdir))
            return one.ended() or bool(of_kind(StepsCommitted, events(run_dir)))

        def all_seen() -> bool:  # some come up late
            late.update(listening(ray_tmpdir))
            return one.ended() or early | late >= expected

        wait_for("training", trains, seconds=START_S)
        with contextlib.suppress(AssertionError):  # what is missing is shown below
            wait_for("what the page says", all_seen, seconds=SETTLE_S)
        commands = " ".join(processes_below(ray_tmpdir).values())
        assert "raylet" in commands
        assert not [name for name in UNASKED if name in commands]
        one.interrupt()
        assert one.code() == 130, one.err
    assert ended(processes_below(ray_tmpdir), END_S) == {}
    assert early | late == expected


def told() -> Iterator[tuple[str, str]]:
    """The rows of the page's table: a process, and where it listens."""
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("<!-- listening -->")[2].partition("<!-- /listening -->")[0]
    yield from re.findall(
        r"^\| ([^|]+?) \| (every address|the node's address|loopback) \|", table, re.M
    )


def listening(folder: Path) -> Iterator[tuple[str, str]]:
    """The TCP sockets on which the processes of the Ray below a folder accept connections."""
    addresses = dict(sockets())
    for pid, line in processes_below(folder).items():
        kind = next((kind for part, kind in KINDS if part in line), line[-200:])
        for inode in inodes(pid):
            if inode in addresses:
                yield kind, addresses[inode]


def inodes(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            name = str(descriptor.readlink())
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            yield name[8:-1]


def sockets() -> Iterator[tuple[str, str]]:
    """Each listening socket of this machine: its inode, and where it listens."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                yield fields[9], where(fields[1].partition(":")[0])


def where(text: str) -> str:
    """The kernel writes addresses as 32-bit words in its own order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(family, raw))
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_unspecified:
        return "every address"
    return "loopback" if address.is_loopback else "the node's address"
