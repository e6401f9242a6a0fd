"""What Linux says in `/proc`: Ray's processes, the sockets that listen, limits."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from raycloud.doctor.facts import Health, Listener

PROC = Path("/proc")
_LISTENS = "0A"  # TCP_LISTEN, include/net/tcp_states.h
_V4_DIGITS = 8
_KINDS = (  # in a command line, and what people call it
    ("/gcs_server ", "gcs_server"),
    ("/raylet ", "raylet"),
    ("/dashboard/dashboard.py ", "dashboard"),
    ("/dashboard/agent.py ", "dashboard agent"),
    ("/runtime_env/agent/main.py ", "runtime env agent"),
    ("ray.util.client.server ", "Ray client server"),
    ("/autoscaler/_private/monitor.py ", "autoscaler"),
    ("/_private/log_monitor.py ", "log monitor"),
    ("ray::RuntimeEnvAgent", "runtime env agent"),
    ("ray::DashboardAgent", "dashboard agent"),
    ("ray::", "worker"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A process that belongs to Ray.

    Attributes:
        pid: Process id.
        parent: That of its parent.
        kind: Which part of Ray it is.
        line: Its command line.
    """

    pid: int
    parent: int
    kind: str
    line: str

    def option(self, name: str) -> str:
        """An option of the command line; empty where it is not there. `_` and `-` are alike."""
        pattern = re.escape(name).replace("_", "[-_]")
        found = re.search(rf"(?:^| )--{pattern}=(\S*)", self.line)
        return found.group(1) if found else ""


def programs(proc: Path = PROC) -> list[Program]:
    """Ray's processes on this machine, as far as this user may see them."""
    found = []
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            kind = next((kind for mark, kind in _KINDS if mark in line[:512]), "")
            if kind:
                stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                found.append(
                    Program(pid=int(folder.name), parent=int(stat[1]), kind=kind, line=line)
                )
    return sorted(found, key=lambda program: program.pid)


def of_node(everything: Iterable[Program], raylet: int) -> list[Program]:
    """The processes of one node: its raylet's, and the head's where it is the head.

    Args:
        everything: All of Ray's processes on the machine; there may be several nodes.
        raylet: Process id of the node's raylet.
    """
    known = list(everything)
    own = next((program for program in known if program.pid == raylet), None)
    if own is None:
        return []
    session, gcs = own.option("session_name"), own.option("gcs_address")
    others = {p.pid for p in known if p.kind == "raylet" and p.pid != raylet}
    head = "--head" in own.line.split()  # then the head's own programs are its, too
    return [
        program
        for program in known
        if raylet in {program.pid, program.parent}
        or (
            head
            and not others & {program.pid, program.parent}
            and any(mark and mark in program.line for mark in (session, gcs))
        )
    ]


def listeners(owners: Iterable[Program], proc: Path = PROC) -> tuple[Listener, ...]:
    """All sockets that listen on this machine; those of `owners` by the name of their program."""
    inodes = {inode: program.kind for program in owners for inode in _sockets(program.pid, proc)}
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS:
                digits, _, port = fields[1].partition(":")
                found.append(
                    Listener(
                        program=inodes.get(fields[9], ""),
                        address=address_of(digits),
                        port=int(port, 16),
                    )
                )
    return tuple(sorted(found, key=lambda one: (one.program, one.port, one.address)))


def address_of(digits: str) -> str:
    """An address of `/proc/net/tcp`: 32-bit words, each in the order of the machine's bytes.

    >>> address_of("0100007F"), address_of("0" * 32)
    ('127.0.0.1', '::')
    """
    words = bytes.fromhex(digits)
    turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    if len(digits) == _V4_DIGITS:
        return str(IPv4Address(turned))
    address = IPv6Address(turned)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def environment_of(pid: int, proc: Path = PROC) -> Mapping[str, str] | None:
    """The environment a process was started with; None where this user may not see it."""
    try:
        entries = (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def open_files(pid: int | None = None, proc: Path = PROC) -> int:
    """How many files a process may have open (the soft limit); 0 where it cannot be seen."""
    try:
        text = (proc / ("self" if pid is None else str(pid)) / "limits").read_text()
    except OSError:
        return 0
    found = re.search(r"^Max open files\s+(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


def health_of(head: Program, variables: Mapping[str, str]) -> Health:
    """What the head's gcs_server goes by: what it was configured with, else its environment.

    Args:
        head: The gcs_server; `--config_list` is base64 of a JSON object.
        variables: The environment it was started with.

    >>> head = Program(pid=1, parent=0, kind="gcs_server", line="/gcs_server --port=1 ")
    >>> health_of(head, {"RAY_health_check_timeout_ms": "1000"}).frozen_s
    20.0
    """
    configured: dict[str, object] = {}
    with contextlib.suppress(ValueError):
        read = json.loads(base64.b64decode(head.option("config_list") or "e30="))
        configured = read if isinstance(read, dict) else {}
    default = Health()

    def number(name: str, otherwise: int) -> int:
        written = configured.get(name, variables.get(f"RAY_{name}", ""))
        return int(str(written)) if re.fullmatch(r"\d+", str(written)) else otherwise

    return Health(
        period_ms=number("health_check_period_ms", default.period_ms),
        timeout_ms=number("health_check_timeout_ms", default.timeout_ms),
        threshold=number("health_check_failure_threshold", default.threshold),
    )


def _sockets(pid: int, proc: Path) -> list[str]:
    """Inodes of the sockets that a process has open."""
    found = []
    with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
        for descriptor in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.append(target[8:-1])
    return found
