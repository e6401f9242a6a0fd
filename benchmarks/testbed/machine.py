"""One machine of a testbed: its processes, its speed, its link, and what can happen to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from benchmarks.testbed.link import DEVICE, Link
from benchmarks.testbed.process import Process
from benchmarks.testbed.shell import LateError, entering, ip, run, wait_for
from benchmarks.testbed.spec import Direction, NodeSpec, check_rate

if TYPE_CHECKING:
    from benchmarks.testbed.groups import Group

_REAP_S = 30.0
_PATIENCE_S = 5.0
# Reads one line before it becomes the command: by then it is in its group.
_GATE = 'read -r go && exec "$@" </dev/null'


class MachineError(Exception):
    """What was asked of a machine cannot be; names the machine, why, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What went through a machine's device since it was made.

    The kernel hands segments of up to 64 KiB from one device to the next, with one header each:
    bytes are a few percent below those of the same packets on a real wire, packets far below.

    Attributes:
        received_bytes: With Ethernet headers.
        sent_bytes: Likewise; what a limit or a cut dropped is not in it.
        received_packets: As the device saw them.
        sent_packets: Likewise.
    """

    received_bytes: int
    sent_bytes: int
    received_packets: int
    sent_packets: int


class Machine:
    """A node or the head of a living testbed; made by `Testbed`."""

    def __init__(
        self, spec: NodeSpec, address: str, *, namespace: str, group: Group, link: Link
    ) -> None:
        """Take what was made for it.

        Args:
            spec: What it is.
            address: IPv4.
            namespace: Its network namespace.
            group: Its processes'.
            link: To its switch; the near end is its own.
        """
        self.spec = spec
        self.name = spec.name
        self.address = address
        self.namespace = namespace
        self._group = group
        self._link = link
        self._started: list[Process] = []
        self._last: tuple[float, Traffic] | None = None  # once it is gone

    @property
    def alive(self) -> bool:
        """Whether it has neither been killed nor removed."""
        return self._last is None

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
    ) -> Process:
        """Start a command on it, in a session of its own; returns once it is in the group.

        Args:
            command: Program and arguments.
            environment: All of its environment, besides TESTBED_NODE, TESTBED_ADDRESS and
                GLOO_SOCKET_IFNAME, which are added.
            log: Its output is appended here.
            cwd: Its working directory; None: ours.

        Raises:
            MachineError: The machine is gone.
        """
        self._check_alive("start a process")
        gated = ["/bin/sh", "-c", _GATE, "sh", *entering(self.namespace, command)]
        with log.open("ab") as out:
            popen = subprocess.Popen(
                gated,
                env={**environment, **environment_of(self.name, self.address)},
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(popen, log)
        try:
            # Before it enters the namespace: from inside, /sys may show other groups.
            self._group.join(process.pid)
            process.let_go()
        except BaseException:
            popen.kill()
            popen.wait()
            raise
        self._started = [one for one in self._started if one.poll() is None]
        self._started.append(process)
        return process

    def processes(self) -> tuple[int, ...]:
        """Ids of its living processes: what was started on it, and what those started."""
        return self._group.members()

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes.

        Args:
            pid: One of `processes()`.
            number: The signal.

        Raises:
            MachineError: It has no such process.
        """
        if pid not in self.processes():
            raise MachineError(f"{self.name}: pid {pid} is not one of its own; see processes()")
        with contextlib.suppress(ProcessLookupError):  # ended just now
            os.kill(pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to all its processes, as a spot notice does; nothing else."""
        self._group.signal(signal.SIGTERM)

    def throttle(self, cores: float | None) -> None:
        """Set the CPU quota of all its processes together, from now on.

        Args:
            cores: In cores; None lifts it.

        Raises:
            QuotaError: It cannot be.
            MachineError: The machine is gone.
        """
        self._check_alive("throttle")
        self._group.limit(cores)

    def rate(
        self,
        *,
        egress_bits_per_s: float | EllipsisType | None = ...,
        ingress_bits_per_s: float | EllipsisType | None = ...,
    ) -> None:
        """Set the rate of its link from now on; what is left out stays.

        Args:
            egress_bits_per_s: What it may send; None: no limit.
            ingress_bits_per_s: What it may receive; None: no limit.

        Raises:
            SpecError: A rate cannot be.
            MachineError: The machine is gone.
        """
        self._check_alive("set the rate")
        rates: dict[str, float | None] = {}
        if not isinstance(egress_bits_per_s, EllipsisType):
            check_rate("egress_bits_per_s", egress_bits_per_s)
            rates["out"] = egress_bits_per_s
        if not isinstance(ingress_bits_per_s, EllipsisType):
            check_rate("ingress_bits_per_s", ingress_bits_per_s)
            rates["in"] = ingress_bits_per_s
        self._link.limit(rates)

    def freeze(self) -> None:
        """Stop its processes where they are; its kernel still answers for them.

        Raises:
            LateError: They do not stop.
            MachineError: The machine is gone.
        """
        self._check_alive("freeze")
        self._group.freeze()

    def thaw(self) -> None:
        """Let its processes go on; nothing happens where they do."""
        self._check_alive("thaw")
        self._group.thaw()

    def cut(self, direction: Direction = "both") -> None:
        """Let nothing through its link until it is mended.

        Args:
            direction: "out": what it sends; "in": what it would receive.
        """
        self._check_alive("cut")
        self._link.cut(direction)

    def mend(self) -> None:
        """Let everything through its link again, at its rates."""
        self._check_alive("mend")
        self._link.mend()

    def kill(self) -> None:
        """End it as if its power went: nobody hears a word, all its processes are gone.

        Raises:
            MachineError: It is gone already.
        """
        self._check_alive("kill")
        self._link.cut("both")  # first: else its kernel would say goodbye for its processes
        self._group.kill()
        self.reap()
        self._last = self.cpu_s(), self.traffic()
        self._link.take_away()
        ip([f"netns del {self.namespace}"])
        self._group.remove()

    def remove(self) -> None:
        """End its processes, by SIGTERM and those that stay by SIGKILL, and take it away.

        Raises:
            MachineError: It is gone already.
        """
        self._check_alive("remove")
        self.terminate()
        with contextlib.suppress(LateError):
            wait_for(self.name, lambda: not self.processes(), limit_s=_PATIENCE_S)
        self.kill()

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far, ended ones too; final once it is gone."""
        return self._group.cpu_s() if self._last is None else self._last[0]

    def traffic(self) -> Traffic:
        """What went through its device since it was made; final once it is gone."""
        if self._last is not None:
            return self._last[1]
        found = counted(self.namespace, DEVICE)
        return Traffic(
            received_bytes=found["rx"]["bytes"],
            sent_bytes=found["tx"]["bytes"],
            received_packets=found["rx"]["packets"],
            sent_packets=found["tx"]["packets"],
        )

    def reap(self) -> None:
        """Take note of the end of what was started here, once it has been killed."""
        for process in self._started:
            process.wait(_REAP_S)

    def _check_alive(self, what: str) -> None:
        if not self.alive:
            raise MachineError(f"{self.name}: cannot {what}, the machine is gone; add it again")


def environment_of(name: str, address: str) -> dict[str, str]:
    """What a process on a machine finds in its environment besides its own.

    Args:
        name: The machine's.
        address: Its IPv4.
    """
    return {"TESTBED_NODE": name, "TESTBED_ADDRESS": address, "GLOO_SOCKET_IFNAME": DEVICE}


def counted(namespace: str, device: str) -> Any:
    """The kernel's counts of a device: `rx` and `tx`, each with `bytes` and `packets`."""
    asking = ["ip", "-json", "-statistics", "link", "show", "dev", device]
    return json.loads(run(entering(namespace, asking)))[0]["stats64"]
