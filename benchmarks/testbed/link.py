"""Links between a node and its switch, and between switches: their rate, delay, and cutting them.

What leaves a device is held to a rate by the device's root queue. So a link has two: the one at
its near end for what goes out, the one at its far end for what comes in. A cut in one direction
puts a hole in the place of that queue.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.testbed.shell import SETTINGS, ToolError, inside, ip

if TYPE_CHECKING:
    from benchmarks.testbed.groups import Group
    from benchmarks.testbed.spec import Direction

ROOT = Path(__file__).parents[2]  # where `benchmarks` is imported from
BRIDGE = "br0"
DEVICE = "eth0"
MTU_BYTES = 1500
_TICKS_PER_S = 250
# One frame of offloaded TCP: 64 KiB, and the headers of all its packets.
_FRAME_BYTES = 68 * 1024
_QUEUE_S = 0.05
_LEAST_QUEUE_BYTES = 128 * 1024
_RELAY_S = 30.0
# What Linux does by itself; another default of the machine would be measured along. A namespace
# only gets it where the host's net.ipv4.tcp_allowed_congestion_control names it.
_CONGESTION = {"ipv4/tcp_congestion_control": "cubic"}
CONGESTION_CONTROL = f"{SETTINGS}/ipv4/tcp_congestion_control"  # what it got
_SIDES: Mapping[Direction, frozenset[str]] = {
    "both": frozenset({"in", "out"}),
    "in": frozenset({"in"}),
    "out": frozenset({"out"}),
}


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a link: a device in a namespace."""

    namespace: str
    device: str


def queue(device: str, rate_bits_per_s: float | None, *, cut: bool = False) -> str:
    """The `tc` command that makes a device's root queue.

    Args:
        device: Its name.
        rate_bits_per_s: What it lets through; None: all.
        cut: Let nothing through, whatever the rate.
    """
    start = f"qdisc replace dev {device} root"
    if cut:
        return f"{start} blackhole"
    if rate_bits_per_s is None:
        return f"{start} pfifo limit 1000"
    bytes_per_s = rate_bits_per_s / 8
    burst = max(_FRAME_BYTES, round(bytes_per_s / _TICKS_PER_S))
    waiting = max(_LEAST_QUEUE_BYTES, round(bytes_per_s * _QUEUE_S))
    return f"{start} tbf rate {round(rate_bits_per_s)}bit burst {burst}b limit {waiting}b"


class Relay:
    """The process that carries a link's frames with a delay; outside every quota."""

    def __init__(self, ends: Sequence[End], delay_s: float, *, group: Group, log: Path) -> None:
        """Start it.

        Args:
            ends: The two devices that it makes.
            delay_s: One way.
            group: Joined before anything else.
            log: Where its errors are appended.
        """
        named = [part for end in ends for part in ("--end", f"{end.namespace}:{end.device}")]
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.testbed.relay",
                    *named,
                    "--delay-s",
                    f"{delay_s}",
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,  # it ends when this closes
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        group.join(self._process.pid)

    def wait_ready(self) -> None:
        """Wait until both devices exist.

        Raises:
            ToolError: They do not.
        """
        out = self._process.stdout
        assert out is not None  # noqa: S101 - it is a pipe
        if select.select([out], [], [], _RELAY_S)[0] and out.readline().strip() == b"ready":
            return
        said = self._log.read_text(errors="replace")[-2000:]
        self.end()
        raise ToolError(f"the relay of a delayed link did not start:\n{said}")

    def end(self) -> None:
        """End it; its devices go with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Link:
    """One link; `lay` makes it, after that its two namespaces bring their ends up."""

    def __init__(
        self, near: End, far: End, *, delay_s: float, rates: Mapping[str, float | None]
    ) -> None:
        """Describe it; nothing is made.

        Args:
            near: The end at the node, or at the first switch.
            far: The end at the switch.
            delay_s: One way, in each direction.
            rates: Bits per second by "out" and "in", as seen from near; None: no limit.
        """
        self.near = near
        self.far = far
        self.delay_s = delay_s
        self.relay: Relay | None = None
        self._rates = dict(rates)
        self._cut: frozenset[str] = frozenset()

    def limit(self, rates: Mapping[str, float | None]) -> None:
        """Set rates from now on; those of a cut direction count once it is mended.

        Args:
            rates: Bits per second by "out" and "in"; None: no limit. One left out stays.
        """
        self._rates |= rates
        self._set(frozenset(rates) - self._cut)

    def cut(self, direction: Direction) -> None:
        """Let nothing through; what is cut already stays so."""
        added = _SIDES[direction] - self._cut
        self._cut |= added
        self._set(added)

    def mend(self) -> None:
        """Let everything through again, at the rates."""
        mended, self._cut = self._cut, frozenset()
        self._set(mended)

    def take_away(self) -> None:
        """Remove both devices."""
        if self.relay is not None:
            self.relay.end()
        else:
            inside(self.far.namespace, ip=[f"link del {self.far.device}"])

    def _set(self, sides: frozenset[str]) -> None:
        for side in sorted(sides):
            end = self.near if side == "out" else self.far
            line = queue(end.device, self._rates[side], cut=side in self._cut)
            inside(end.namespace, tc=[line])

    def queues(self, side: Literal["out", "in"]) -> list[str]:
        """The `tc` commands of a direction, for who brings its end up; none without a limit."""
        end = self.near if side == "out" else self.far
        rate = self._rates[side]
        return [] if rate is None else [queue(end.device, rate)]


def lay(links: Sequence[Link], *, group: Group, log: Path) -> None:
    """Make the devices of links, down and without addresses.

    Args:
        links: Their namespaces exist.
        group: For the relays of delayed ones.
        log: For the relays' errors.

    Raises:
        ToolError: The system refuses, or a relay does not start.
    """
    for link in links:
        if link.delay_s > 0:  # all of them start at the same time
            link.relay = Relay([link.near, link.far], link.delay_s, group=group, log=log)
    ip(
        [
            f"link add name {link.near.device} netns {link.near.namespace} type veth "
            f"peer name {link.far.device} netns {link.far.namespace}"
            for link in links
            if link.relay is None
        ]
    )
    for link in links:
        if link.relay is not None:
            link.relay.wait_ready()


def make_switch(namespace: str) -> None:
    """Make the switch of a zone in its namespace: ports forward at once, and nothing is learnt."""
    inside(
        namespace,
        settings={"ipv6/conf/default/disable_ipv6": "1"},
        ip=[
            "link set lo up",
            f"link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {BRIDGE} up",
        ],
    )


def plug(namespace: str, ports: Mapping[str, Sequence[str]]) -> None:
    """Join devices to a switch and bring them up.

    Args:
        namespace: The switch's.
        ports: `tc` commands, by device.
    """
    inside(
        namespace,
        settings={f"ipv6/conf/{port}/disable_ipv6": "1" for port in ports},
        ip=[f"link set {port} mtu {MTU_BYTES} master {BRIDGE} up" for port in ports],
        tc=[line for lines in ports.values() for line in lines],
    )


def bring_up(link: Link, address: str) -> None:
    """Bring a node's end of its link up.

    Args:
        link: Its near end is the node's.
        address: IPv4.
    """
    device = link.near.device
    # Who comes back under its address is found at once: same hardware address, and it says so.
    hardware = "02:77:" + ":".join(f"{int(part):02x}" for part in address.split("."))
    inside(
        link.near.namespace,
        settings={
            **_CONGESTION,
            f"ipv6/conf/{device}/disable_ipv6": "1",
            f"ipv4/conf/{device}/arp_notify": "1",
        },
        ip=[
            "link set lo up",
            f"link set {device} address {hardware} mtu {MTU_BYTES}",
            f"addr add {address}/24 dev {device}",
            f"link set {device} up",
        ],
        tc=link.queues("out"),
    )
