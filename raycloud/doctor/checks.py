"""Checks of machines and of a cluster: facts in, findings out, and the table of all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from raycloud.doctor.facts import ClusterFacts, Facts, Gpus
from raycloud.doctor.findings import Check, Finding, Kind, Level, well

SOCKET_BYTES = 107  # sun_path of a Unix socket, less its final zero
# What Ray puts below its temporary folder; the process id has at most seven digits (pid_max).
SESSION = "/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
TEMP_FREE_BYTES = 10**9
TEMP_FREE_PART = 0.05  # Ray writes no objects to a file system that is fuller
SHM_BYTES = 10**9
MEMORY_FREE_PART = 0.05  # Ray kills workers on a machine that has less
CLOCK_S = 1.0
ROUND_TRIP_S = 0.05
SLOW_PART = 0.1  # of the rate of the fastest link

CHECKS: list[Check] = []  # in the order in which they stand here
_Look = Callable[[Facts], Iterator[Finding]]
_note = partial(Kind, Level.NOTE)
_change = partial(Kind, Level.CHANGE)
_unwell = partial(Kind, Level.UNWELL)


def _check(name: str, asks: str, *kinds: Kind) -> Callable[[_Look], _Look]:
    def add(look: _Look) -> _Look:
        CHECKS.append(Check(name=name, asks=asks, kinds=kinds, look=look))
        return look

    return add


MISSING = _change(
    "library-missing",
    "A library that raycloud needs is not installed there.",
    "Install the same raycloud there, in the Python that Ray runs with: `pip install` it, and what "
    "it needs comes along.",
)
UNSUITED = _change(
    "version-unsuited",
    "The installed version is not one that raycloud was built and tested for.",
    "Install a version in the range that is named: `pip install 'NAME RANGE'`.",
)
DIFFERS = _change(
    "version-differs",
    "A node has another version than this machine; results or messages may not agree.",
    "Install the same versions on every node: one image, or one file of constraints.",
)


@_check(
    "versions",
    "Do raycloud, Ray, torch and Python fit each other, and are they the same on all nodes?",
    MISSING,
    UNSUITED,
    DIFFERS,
)
def _versions(facts: Facts) -> Iterator[Finding]:
    here = facts.machine.versions
    yield from _versions_of(facts.machine.name, here, facts.required, here)
    for node in facts.cluster.nodes if facts.cluster else ():
        yield from _versions_of(node.name, node.versions, {}, here)


def _versions_of(
    where: str,
    found: Mapping[str, str | None],
    required: Mapping[str, str],
    here: Mapping[str, str | None],
) -> Iterator[Finding]:
    fine = list[str]()
    for name, version in found.items():
        asked, own = required.get(name, ""), here.get(name)
        if version is None:
            yield MISSING.at(where, name)
        elif not satisfies(version, asked):
            yield UNSUITED.at(where, f"{name} {version}; asked for: {asked}")
        elif own is not None and _compared(name, version) != _compared(name, own):
            yield DIFFERS.at(where, f"{name} {version}; on this machine: {own}")
        else:
            fine.append(f"{name} {version}")
    if fine:
        yield well("versions", where, ", ".join(fine))


def satisfies(version: str, asked: str) -> bool:
    """Whether a version lies in a range of `>=` and `<`; what follows its numbers is left out.

    >>> satisfies("2.60.1", ">=2.60,<2.61"), satisfies("2.61.0rc1", ">=2.60,<2.61")
    (True, False)
    >>> satisfies("2.13.0+cpu", ">=2.13"), satisfies("3.10", ">=3.11"), satisfies("1", "")
    (True, False, True)
    """
    have = _numbers(version)
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", asked):
        if (have >= _numbers(bound)) != (sign == ">="):
            return False
    return True


def _compared(name: str, version: str) -> object:
    """What has to agree: of Python 3.11, of the rest all but the build, which follows a `+`."""
    return _numbers(version)[:2] if name == "python" else version.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


MODE_UNKNOWN = _change(
    "auth-mode-unknown",
    "RAY_AUTH_MODE has a value that Ray does not know.",
    "Set RAY_AUTH_MODE=token, on every machine of the cluster and where you submit from.",
)
AUTH_OFF = _change(
    "auth-off",
    "Ray started from here asks for no token: who reaches its ports runs code as you.",
    "Unset RAY_AUTH_MODE or set it to `token`; `ray get-auth-token --generate` makes a token for "
    "`ray start`.",
)
TOKEN_MISSING = _change(
    "token-missing",
    "RAY_AUTH_MODE=token, and there is no token that this user can read.",
    "Copy the cluster's token to ~/.ray/auth_token (chmod 600), or name its file in "
    "RAY_AUTH_TOKEN_PATH; for a new cluster: `ray get-auth-token --generate`.",
)
CLUSTER_OPEN = _change(
    "cluster-open",
    "The cluster asks for no token: who reaches its ports runs code on every node.",
    "`ray get-auth-token --generate` on the head, copy the file to each node, and start Ray anew "
    "with RAY_AUTH_MODE=token. Until then keep its ports behind a firewall.",
)


@_check(
    "auth",
    "Does Ray ask for a token, here and in the cluster, and is there one?",
    MODE_UNKNOWN,
    AUTH_OFF,
    TOKEN_MISSING,
    CLUSTER_OPEN,
)
def _auth(facts: Facts) -> Iterator[Finding]:
    mode, where = facts.settings.auth_mode, "RAY_AUTH_MODE"
    if mode is None:
        text = "not set: Ray started by a run uses a token; `ray start` does if there is one"
        yield well("auth", where, text)
    elif mode == "disabled":
        yield AUTH_OFF.at(where, mode)
    elif mode != "token":
        yield MODE_UNKNOWN.at(where, repr(mode))
    elif not facts.token:
        yield TOKEN_MISSING.at(where, f"no file {facts.settings.token_path}")
    else:
        yield well("auth", where, mode)
    if cluster := _reached(facts):
        where = f"cluster {cluster.address}"
        if cluster.auth_mode == "disabled":
            yield CLUSTER_OPEN.at(where, "RAY_AUTH_MODE is not `token` there")
        else:
            yield well("auth", where, cluster.auth_mode or "cannot be seen from here")


TEMP_LONG = _change(
    "temp-too-long",
    "Ray's sockets would have paths longer than Linux allows (107 bytes): it cannot start.",
    "Set RAY_TMPDIR to a short path, e.g. /tmp/ray-me.",
)
TEMP_CLOSED = _change(
    "temp-not-writable",
    "Ray cannot write where its sessions are to be kept.",
    "Set RAY_TMPDIR to a folder that you can write.",
)
TEMP_FULL = _unwell(
    "temp-full",
    "The disk of Ray's sessions is nearly full: Ray then stores nothing there, and fails.",
    "Remove old sessions (below RAY_TMPDIR, /tmp/ray by default) and other files, or set "
    "RAY_TMPDIR to a larger disk.",
)


@_check(
    "temp",
    "Can Ray keep its sessions: is the path short, writable, and is there room?",
    TEMP_LONG,
    TEMP_CLOSED,
    TEMP_FULL,
)
def _temp(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        disk = machine.temp
        used = len(disk.path.rstrip("/").encode()) + len(SESSION)
        if used > SOCKET_BYTES:
            yield TEMP_LONG.at(machine.name, f"{disk.path} ({used} bytes with a socket's name)")
        if not disk.writable:
            yield TEMP_CLOSED.at(machine.name, disk.path)
        elif disk.free_bytes < max(TEMP_FREE_BYTES, TEMP_FREE_PART * disk.total_bytes):
            yield TEMP_FULL.at(machine.name, f"{disk.path}: {_size(disk.free_bytes)} free")
        elif used <= SOCKET_BYTES:
            value = f"{disk.path}: {_size(disk.free_bytes)} of {_size(disk.total_bytes)} free"
            yield well("temp", machine.name, value)


SHM_SMALL = _change(
    "shm-small",
    "Shared memory is too small for Ray's objects, which then go through a disk.",
    "In a container: `docker run --shm-size=8g`, or an emptyDir with `medium: Memory` at /dev/shm "
    "in Kubernetes. Else: `mount -o remount,size=8g /dev/shm`.",
)


@_check("shm", "Is shared memory (/dev/shm) large enough?", SHM_SMALL)
def _shm(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        value = f"{machine.shm.path}: {_size(machine.shm.total_bytes)}"
        small = machine.shm.total_bytes < SHM_BYTES
        yield SHM_SMALL.at(machine.name, value) if small else well("shm", machine.name, value)


MEMORY_FULL = _unwell(
    "memory-full",
    "Nearly all memory is in use: Ray kills workers on such a machine.",
    "End what uses it (`ps aux --sort=-rss`), or take the node out of the cluster.",
)


@_check("memory", "Is memory left?", MEMORY_FULL)
def _memory(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        total, free = machine.memory_bytes, machine.memory_free_bytes
        value = f"{_size(free)} of {_size(total)} free"
        full = free < MEMORY_FREE_PART * total
        yield MEMORY_FULL.at(machine.name, value) if full else well("memory", machine.name, value)


GPU_ABSENT = _unwell(
    "gpu-absent",
    "Ray hands out more GPUs than torch sees there: members placed on them fail.",
    "Look at `nvidia-smi` there. If the GPU is gone, restart the machine; if there is none, start "
    "the node without `--num-gpus`; if torch is a CPU build, install a CUDA one.",
)
GPU_UNUSED = _change(
    "gpu-unused",
    "The machine has GPUs that torch cannot use.",
    "Install a CUDA build of torch that fits the driver (`nvidia-smi` names its version); look "
    "whether CUDA_VISIBLE_DEVICES hides them.",
)


@_check("gpus", "Do the driver, torch and Ray see the same GPUs?", GPU_ABSENT, GPU_UNUSED)
def _gpus(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        gpus, value = machine.gpus, _gpus_text(machine.gpus)
        if gpus.torch is not None and (gpus.ray or 0) > gpus.torch:
            yield GPU_ABSENT.at(machine.name, value)
        elif gpus.torch is not None and gpus.driver > gpus.torch:
            yield GPU_UNUSED.at(machine.name, value)
        else:
            yield well("gpus", machine.name, value)


def _gpus_text(gpus: Gpus) -> str:
    if not (gpus.driver or gpus.torch or gpus.ray):
        return "none"
    parts = [f"driver {gpus.driver}"]
    if gpus.torch is not None:
        parts.append(f"torch {gpus.torch}")
    if gpus.ray is not None:
        parts.append(f"Ray {gpus.ray:g}")
    names = f" ({', '.join(dict.fromkeys(gpus.names))})" if gpus.names else ""
    return ", ".join(parts) + names


AWAY = _unwell(
    "cluster-away",
    "No Ray cluster answers at the address.",
    "Look at `ray status` on the head; is the port that of `ray start --head` (6379), and open "
    "from here? Call the doctor on a node of the cluster: other machines cannot join it.",
)
REFUSED = _change(
    "cluster-refused",
    "The cluster does not take our token.",
    "Set RAY_AUTH_MODE=token, and copy the head's token (`ray get-auth-token` there) to "
    "~/.ray/auth_token here, chmod 600.",
)
SILENT = _unwell(
    "node-silent",
    "A living node did not do what it was asked.",
    "Look at its logs (below RAY_TMPDIR, /tmp/ray by default, session_latest/logs), and whether "
    "raycloud is installed there in the version of this machine.",
)


@_check("nodes", "Is the cluster reached, and do its nodes answer?", AWAY, REFUSED, SILENT)
def _nodes(facts: Facts) -> Iterator[Finding]:
    cluster = facts.cluster
    if cluster is None:
        return
    where = f"cluster {cluster.address}"
    if cluster.failure:
        yield (REFUSED if cluster.refused else AWAY).at(where, cluster.failure)
        return
    for node in cluster.nodes:
        if node.silence:
            yield SILENT.at(node.name, node.silence)
    answered = sum(not node.silence for node in cluster.nodes)
    yield well("nodes", where, f"{answered} of {len(cluster.nodes)} nodes answer")


CLOCK_APART = _unwell(
    "clock-apart",
    "A node's clock differs from this machine's: logs do not line up, and signed requests to "
    "stores are refused.",
    "Keep all clocks by NTP: `timedatectl set-ntp true`, or chrony with the provider's time "
    "server. This machine's clock may be the wrong one.",
)


@_check("clocks", "Do the nodes' clocks agree with this machine's?", CLOCK_APART)
def _clocks(facts: Facts) -> Iterator[Finding]:
    cluster = _reached(facts)
    for node in cluster.nodes if cluster else ():
        if node.silence:
            continue
        side = "ahead" if node.ahead_s >= 0 else "behind"
        value = f"{abs(node.ahead_s):.3f} s {side}, within {node.unsure_s:.3f} s"
        apart = abs(node.ahead_s) - node.unsure_s > CLOCK_S
        yield CLOCK_APART.at(node.name, value) if apart else well("clocks", node.name, value)


LINK_BLOCKED = _unwell(
    "link-blocked",
    "One node cannot connect to another on a free port: members could not exchange gradients.",
    "Open all TCP ports between the nodes of the cluster, in a private network; give `ray start "
    "--node-ip-address` an address that the others reach.",
)
LINK_FAR = _note(
    "link-far",
    "A round trip between two nodes takes long: each exchange waits for several of them.",
    "Keep the workers of a job in one zone (`resources.worker.labels`), or write "
    "`sync.topology: tree`.",
)
LINK_SLOW = _note(
    "link-slow",
    "A link is ten times slower than the fastest one: a ring goes at the pace of its slowest link.",
    "Keep the workers of a job on nodes with links of one kind (`resources.worker.labels`).",
)


@_check(
    "links",
    "Do nodes reach each other on any port, and with `--links`: how fast?",
    LINK_BLOCKED,
    LINK_FAR,
    LINK_SLOW,
)
def _links(facts: Facts) -> Iterator[Finding]:
    cluster = _reached(facts)
    links = cluster.links if cluster else ()
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=0.0)
    for link in links:
        where, rate = f"{link.source} to {link.target}", link.bytes_per_s
        if link.failure:
            yield LINK_BLOCKED.at(where, link.failure)
            continue
        value = f"{1000 * link.round_trip_s:.2f} ms"
        value += "" if rate is None else f", {rate / 1e6:.0f} MB/s"
        bad = list[Finding]()
        if link.round_trip_s > ROUND_TRIP_S:
            bad.append(LINK_FAR.at(where, value))
        if rate is not None and rate < SLOW_PART * fastest:
            bad.append(LINK_SLOW.at(where, value))
        yield from bad or [well("links", where, value)]


def _reached(facts: Facts) -> ClusterFacts | None:
    return facts.cluster if facts.cluster and not facts.cluster.failure else None


def _size(size_bytes: float) -> str:
    """Bytes in decimal units.

    >>> _size(64_000_000), _size(2.5e9)
    ('64 MB', '2.5 GB')
    """
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"  # noqa: PLR2004


def examine(facts: Facts) -> tuple[Finding, ...]:
    """What the checks say of the facts: the worst first, otherwise in the order of the table."""
    found = [finding for check in CHECKS for finding in check.look(facts)]
    return tuple(sorted(found, key=lambda finding: -finding.level.value))
