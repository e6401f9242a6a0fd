"""What a testbed stands on: whether it can be here, what beds there are, and removing them.

Everything of a bed carries its id, and its state file is there before anything else of it. So who
knows the ids can remove all that a bed left, and nothing that is not of a bed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed import quota
from benchmarks.testbed.groups import QuotaError
from benchmarks.testbed.shell import NAMESPACES, ToolError, ip, run

STATES = Path("/run/raycloud-testbed")
GROUPS = "raycloud-testbed"
_FORMAT = 1
_TOOLS = ("ip", "tc", "nsenter", "unshare")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_TRIES = 100
# Makes one of each in a namespace that is gone when it ends.
_TRIAL = """set -e
ip link add br0 type bridge stp_state 0 forward_delay 0
ip link add eth0 type veth peer name eth1
tc qdisc add dev eth0 root tbf rate 20mbit burst 68kb limit 256kb
tc qdisc add dev eth1 root blackhole
"""


class MissingError(Exception):
    """There can be no testbed here; says what is missing and the remedy."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A bed's state file.

    Attributes:
        bed_id: Such as rt1a2b.
        owner_pid: The process that holds the bed.
        owner_start_ticks: When that process started, in the kernel's ticks since boot: another one
            may get its id later.
    """

    bed_id: str
    owner_pid: int
    owner_start_ticks: int

    @property
    def owner_lives(self) -> bool:
        """Whether the owner still runs."""
        return start_ticks(self.owner_pid) == self.owner_start_ticks


def missing() -> str:
    """Why there can be no testbed here, with the remedy; empty where there can be one."""
    if sys.platform != "linux":
        return "a testbed is made of Linux's namespaces; run it on Linux"
    if os.geteuid() != 0:
        return "a testbed makes network namespaces, which takes root; run it as root"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"a testbed needs {', '.join(lacking)}; install iproute2 and util-linux"
    bits = _effective_capabilities()
    if lacking := [name for name, bit in _CAPABILITIES.items() if not bits >> bit & 1]:
        return f"a testbed needs {' and '.join(lacking)}; run the container with --privileged"
    try:
        mounts = quota.find()
    except (QuotaError, OSError) as error:
        return f"a testbed limits CPU by cgroups: {error}"
    for folder in mounts.folders.values():
        if not os.access(folder, os.W_OK):
            return f"a testbed makes groups in {folder}; mount it writable"
    return _trial()


@functools.cache
def _trial() -> str:
    try:
        run(["unshare", "--net", "sh"], given=_TRIAL)
    except ToolError as error:
        return (
            "a testbed needs bridges, veth, tbf and blackhole queues; use a kernel with them "
            f"({str(error).splitlines()[-1]})"
        )
    return ""


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def start_ticks(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None where it has ended."""
    try:
        # The name, in parentheses, may hold anything; what follows has a fixed order.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def claim() -> State:
    """Write the state file of a new bed whose owner is this process.

    Returns:
        It, with an id that no other bed has.

    Raises:
        MissingError: The folder cannot be written, or it is full.
    """
    own = start_ticks(os.getpid())
    assert own is not None  # noqa: S101 - this process runs
    try:
        for _ in range(_TRIES):
            state = State(
                bed_id=f"rt{secrets.token_hex(2)}", owner_pid=os.getpid(), owner_start_ticks=own
            )
            if _publish(state):
                return state
    except OSError as error:
        raise MissingError(f"a testbed notes itself in {STATES}: {error}; make it writable") from (
            error
        )
    raise MissingError(f"no free id in {STATES}; remove old beds with `clean`")


def _publish(state: State) -> bool:
    """Write a state file whole or not at all; False where the id is taken."""
    content = {
        "format": _FORMAT,
        "owner_pid": state.owner_pid,
        "owner_start_ticks": state.owner_start_ticks,
    }
    STATES.mkdir(mode=0o755, exist_ok=True)
    draft = os.open(STATES, os.O_TMPFILE | os.O_WRONLY, 0o644)  # without a name: none is left over
    try:
        os.write(draft, json.dumps(content).encode())
        os.fsync(draft)
        # Only with a folder's descriptor does Python ask the kernel to follow the source.
        os.link(f"/proc/self/fd/{draft}", _file(state.bed_id), src_dir_fd=draft)
    except FileExistsError:
        return False
    finally:
        os.close(draft)
    return True


def _file(bed_id: str) -> Path:
    return STATES / f"{bed_id}.json"


def log_file(bed_id: str) -> Path:
    """Where a bed's own processes (relays, reaper) write what goes wrong."""
    return STATES / f"{bed_id}.log"


def group_name(bed_id: str, name: str = "") -> str:
    """The name of a bed's group, or of one of its nodes'."""
    return f"{GROUPS}/{bed_id}/{name}" if name else f"{GROUPS}/{bed_id}"


def namespace_name(bed_id: str, name: str) -> str:
    """The name of the network namespace of a node, or of a zone's switch (`sw-a`)."""
    return f"{bed_id}-{name}"


def states() -> tuple[State, ...]:
    """All beds there are, living or left over, by id."""
    found = []
    for file in sorted(STATES.glob("rt*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found.append(_read(file))
    return tuple(found)


def _read(file: Path) -> State:
    content = json.loads(file.read_text())
    if content.get("format") != _FORMAT:
        raise MissingError(
            f"{file}: format {content.get('format')!r} is not {_FORMAT}; end that bed with the "
            "version that made it"
        )
    return State(
        bed_id=file.stem,
        owner_pid=content["owner_pid"],
        owner_start_ticks=content["owner_start_ticks"],
    )


def nodes(bed_id: str) -> tuple[str, ...]:
    """Names of a bed's living nodes, the head too."""
    names = [path.name.removeprefix(f"{bed_id}-") for path in NAMESPACES.glob(f"{bed_id}-*")]
    return tuple(sorted(name for name in names if "-" not in name))


def sweep() -> tuple[str, ...]:
    """Remove all that is left of beds whose owner has ended; living ones are not touched.

    Returns:
        Ids of the beds removed.
    """
    left = [state.bed_id for state in states() if not state.owner_lives]
    for bed_id in left:
        remove(bed_id)
    return tuple(left)


def remove(bed_id: str) -> None:
    """Remove all of a bed: its processes, groups, namespaces, and at last its state file.

    Safe to call from several processes at once; nothing happens where the bed is gone.

    Raises:
        LateError: A process or a group stays.
        ToolError: A namespace stays.
    """
    with _alone(bed_id) as there:
        if not there:
            return
        mounts = quota.find()
        whole = quota.group(group_name(bed_id), mounts)
        parts = [quota.group(name, mounts) for name in whole.below()]
        for part in parts:  # all at once, then one after the other
            part.strike()
        for part in parts:
            part.kill()
        ip([f"netns del {path.name}" for path in sorted(NAMESPACES.glob(f"{bed_id}-*"))])
        for part in parts:
            part.remove()
        whole.remove()
        for folder in quota.group(GROUPS, mounts).folders:
            with contextlib.suppress(OSError):  # other beds are in it
                folder.rmdir()
        log_file(bed_id).unlink(missing_ok=True)
        _file(bed_id).unlink()


@contextlib.contextmanager
def _alone(bed_id: str) -> Iterator[bool]:
    """Hold a bed's state file against others that would remove the bed; False where it is gone."""
    try:
        held = os.open(_file(bed_id), os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield _file(bed_id).exists()
    finally:
        os.close(held)
