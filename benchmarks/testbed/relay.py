"""A wire with a delay: carries frames between two network namespaces and holds each for a while.

    python -m benchmarks.testbed.relay --end rt1a2b-n1:eth0 --end rt1a2b-sw-a:n1 --delay-s 0.04

Makes a TAP device in each of the two namespaces, prints `ready`, and carries what leaves the one
into the other, in order, until SIGTERM or until its standard input closes; the devices end with it.
Whoever starts it keeps a pipe to its standard input, and brings the devices up.

A kernel without `netem` cannot delay, so a process does. Frames come with a virtio_net_hdr (10
bytes: what is left to segment and to sum), which is passed on as it is: TCP hands over up to 64 KiB
at once that nobody ever cuts up, so that one read and one write carry what a wire needs 45 frames
for.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6, _TSO_ECN = 1, 2, 4, 8
_DEVICE_CHARACTERS = 15  # of an interface's name, by the kernel

_FRAME_BYTES = 10 + 14 + 65535 + 8  # header of virtio, of Ethernet, an IP packet, two VLAN tags
_FRAMES_AT_ONCE = 64  # of one direction, before the other has its turn
_SPARE_BYTES = 16 * 2**20
_WORST_LATENESS_S = 60.0  # no wait is longer, so that none is too long for `select`
_PRIORITY = -10  # a relay that waits for a CPU is a longer delay


class RelayError(Exception):
    """The relay cannot be made here; says what is wrong and what to do."""


class _Ended(BaseException):
    """Asked to end by a signal: goes past everything that catches errors."""


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of the wire.

    Attributes:
        namespace: A name below `/run/netns`, or the path of a namespace's file.
        device: Name of the TAP to make there.
    """

    namespace: str
    device: str

    @classmethod
    def read(cls, text: str) -> End:
        """An end given as `NAMESPACE:DEVICE`.

        Raises:
            RelayError: It is not one.
        """
        namespace, _, device = text.rpartition(":")
        if not namespace or not 0 < len(device) <= _DEVICE_CHARACTERS:
            raise RelayError(
                f"--end {text!r}: not NAMESPACE:DEVICE with a device name of at most "
                f"{_DEVICE_CHARACTERS} characters; write for example rt1a2b-n1:eth0"
            )
        return cls(namespace=namespace, device=device)

    def open(self) -> int:
        """Make the TAP: the file whose reads are its frames, and which ends it when closed.

        Raises:
            RelayError: There is no such namespace, or no TAP can be made in it.
        """
        path = Path("/run/netns") / self.namespace  # an absolute path stays what it is
        try:
            with _inside(path):
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", self.device.encode(), flags))
            fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUM | _TSO4 | _TSO6 | _TSO_ECN)
        except OSError as error:
            raise RelayError(
                f"--end {self.namespace}:{self.device}: {error.strerror.lower()}"
                f"{f' ({error.filename})' if error.filename else ''}; it takes root, /dev/net/tun "
                f"(`modprobe tun`) and a namespace without a device of this name"
            ) from error
        return tap


@contextlib.contextmanager
def _inside(namespace: Path) -> Iterator[None]:
    """Be in a network namespace for a block. Python 3.11 has no `os.setns`."""
    library = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(namespace, os.O_RDONLY)
        try:
            _enter(library, there)
            try:
                yield
            finally:
                _enter(library, home)
        finally:
            os.close(there)
    finally:
        os.close(home)


def _enter(library: ctypes.CDLL, namespace: int) -> None:
    if library.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


class Lane:
    """Frames on their way from one device to the other, each with the moment it arrives."""

    def __init__(self, source: int, sink: int, *, delay_s: float, most_bytes: int) -> None:
        """An empty lane.

        Args:
            source: File of the TAP that frames leave by; does not block.
            sink: File of the one they arrive at.
            delay_s: How long each is held.
            most_bytes: Held at once; what comes beyond that is dropped, as a full queue does.
        """
        self.source = source
        self.dropped_frames = 0
        self._sink = sink
        self._delay_s = delay_s
        self._most_bytes = most_bytes
        self._held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0

    @property
    def next_s(self) -> float | None:
        """The monotonic second at which the next frame arrives; None while there is none."""
        return self._held[0][0] if self._held else None

    def take(self) -> None:
        """Take the frames that have left, up to a fair share.

        Raises:
            OSError: The device is gone.
        """
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = os.read(self.source, _FRAME_BYTES)
            except BlockingIOError:
                return
            if self._held_bytes + len(frame) > self._most_bytes:
                self.dropped_frames += 1
                continue
            self._held.append((time.monotonic() + self._delay_s, frame))
            self._held_bytes += len(frame)

    def deliver(self) -> None:
        """Hand over the frames whose time has come."""
        held, now_s = self._held, time.monotonic()
        while held and held[0][0] <= now_s:
            _, frame = held.popleft()
            self._held_bytes -= len(frame)
            try:
                os.write(self._sink, frame)
            except OSError as error:
                # A device that is down takes nothing, and no frame is worth the wire.
                if error.errno not in {errno.EIO, errno.ENOBUFS, errno.EAGAIN, errno.EINVAL}:
                    raise
                self.dropped_frames += 1


def carry(lanes: Sequence[Lane], *, until: int) -> None:
    """Carry frames until the file `until` ends.

    Raises:
        OSError: A device is gone.
    """
    watched = [until, *(one.source for one in lanes)]
    while True:
        due = [one.next_s for one in lanes if one.next_s is not None]
        wait_s = min(due, default=_WORST_LATENESS_S + time.monotonic()) - time.monotonic()
        readable, _, _ = select.select(watched, (), (), min(max(wait_s, 0.0), _WORST_LATENESS_S))
        for one in lanes:
            if one.source in readable:
                one.take()
            one.deliver()
        if until in readable and not os.read(until, 4096):
            return


def relay(ends: Sequence[End], *, delay_s: float, rate_bits_per_s: float) -> None:
    """Make the two devices, say `ready`, and carry until standard input ends.

    Args:
        ends: Two.
        delay_s: One way.
        rate_bits_per_s: What the wire is expected to carry: a lane holds at most this times
            the delay, and 16 MiB.

    Raises:
        RelayError: A device cannot be made.
        OSError: A device was taken away.
    """
    most_bytes = int(rate_bits_per_s * delay_s / 8) + _SPARE_BYTES
    with contextlib.ExitStack() as stack:
        taps = []
        for end in ends:
            taps.append(end.open())
            stack.callback(os.close, taps[-1])
        print("ready", flush=True)
        pairs = (taps, taps[::-1])
        carry(
            [Lane(a, b, delay_s=delay_s, most_bytes=most_bytes) for a, b in pairs],
            until=sys.stdin.fileno(),
        )


def _arguments(words: Sequence[str] | None) -> tuple[list[End], float, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed.relay", description=__doc__)
    parser.add_argument("--end", action="append", required=True, metavar="NAMESPACE:DEVICE")
    parser.add_argument("--delay-s", type=float, required=True, help="one way")
    parser.add_argument(
        "--rate-bits-per-s", type=float, default=1e9, help="how much it may hold (default: 1e9)"
    )
    given = parser.parse_args(words)
    ends = [End.read(text) for text in given.end]
    if len(ends) != 2:
        raise RelayError(f"--end: given {len(ends)} times; a wire has two ends")
    if not 0 <= given.delay_s <= 10:
        raise RelayError(f"--delay-s {given.delay_s:g}: not from 0 to 10 seconds; give seconds")
    if not 0 < given.rate_bits_per_s <= 1e11:
        raise RelayError(f"--rate-bits-per-s {given.rate_bits_per_s:g}: not from 1 to 1e11")
    return ends, given.delay_s, given.rate_bits_per_s


def _end(_number: int, _frame: object) -> NoReturn:
    raise _Ended


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        ends, delay_s, rate_bits_per_s = _arguments(words)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        relay(ends, delay_s=delay_s, rate_bits_per_s=rate_bits_per_s)
    except _Ended:
        pass
    except RelayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: a device was taken away: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
