"""Checks of each machine: temporary folder, shared memory, object store, files, memory, GPUs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycloud.doctor.finding import Check, Finding, Kind, Level, well

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts, Gpus, Machine

SOCKET_BYTES = 107  # sun_path of a Unix socket, less its final zero
# What Ray puts below its temporary folder; the process id has at most seven digits (pid_max).
SESSION = "/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
TEMP_FREE_BYTES = 10**9
TEMP_FREE_PART = 0.05  # Ray writes no objects to a file system that is fuller
SHM_BYTES = 10**9
STORE_BYTES = 200 * 10**6
MEMORY_FREE_PART = 0.05  # Ray kills workers on a machine that has less
OPEN_FILES = 4096

TEMP_LONG = Kind(
    name="temp-too-long",
    level=Level.CHANGE,
    what="Ray's sockets would have paths longer than Linux allows (107 bytes): it cannot start.",
    remedy="Set RAY_TMPDIR to a short path, e.g. /tmp/ray-me.",
)
TEMP_CLOSED = Kind(
    name="temp-not-writable",
    level=Level.CHANGE,
    what="Ray cannot write where its sessions are to be kept.",
    remedy="Set RAY_TMPDIR to a folder that you can write.",
)
TEMP_FULL = Kind(
    name="temp-full",
    level=Level.UNWELL,
    what="The disk of Ray's sessions is nearly full: Ray then stores nothing there, and fails.",
    remedy="Remove old sessions (below RAY_TMPDIR, /tmp/ray by default) and other files, or set "
    "RAY_TMPDIR to a larger disk.",
)
SHM_SMALL = Kind(
    name="shm-small",
    level=Level.CHANGE,
    what="Shared memory is too small for Ray's objects, which then go through a disk.",
    remedy="In a container: `docker run --shm-size=8g`, or an emptyDir with `medium: Memory` at "
    "/dev/shm in Kubernetes. Else: `mount -o remount,size=8g /dev/shm`.",
)
STORE_SMALL = Kind(
    name="store-small",
    level=Level.CHANGE,
    what="The node's object store is so small that blocks of data are spilled to disk.",
    remedy="Start the node with `ray start --object-store-memory` of 1000000000 or more, or leave "
    "the option out.",
)
STORE_DISK = Kind(
    name="store-on-disk",
    level=Level.CHANGE,
    what="The node's object store lies on a disk instead of in shared memory.",
    remedy="Make /dev/shm larger than the object store (see shm-small), and start the node anew.",
)
MEMORY_FULL = Kind(
    name="memory-full",
    level=Level.UNWELL,
    what="Nearly all memory is in use: Ray kills workers on such a machine.",
    remedy="End what uses it (`ps aux --sort=-rss`), or take the node out of the cluster.",
)
FILES_FEW = Kind(
    name="open-files-few",
    level=Level.CHANGE,
    what="Ray may open so few files that it fails with many workers or objects.",
    remedy="`ulimit -n 65536` before `ray start`; for good in /etc/security/limits.conf or the "
    "service's LimitNOFILE.",
)
GPU_ABSENT = Kind(
    name="gpu-absent",
    level=Level.UNWELL,
    what="Ray hands out more GPUs than torch sees there: members placed on them fail.",
    remedy="Look at `nvidia-smi` there. If the GPU is gone, restart the machine; if there is none, "
    "start the node without `--num-gpus`; if torch is a CPU build, install a CUDA one.",
)
GPU_UNUSED = Kind(
    name="gpu-unused",
    level=Level.CHANGE,
    what="The machine has GPUs that torch cannot use.",
    remedy="Install a CUDA build of torch that fits the driver (`nvidia-smi` names its version); "
    "look whether CUDA_VISIBLE_DEVICES hides them.",
)
GPU_KEPT = Kind(
    name="gpu-not-offered",
    level=Level.NOTE,
    what="Torch sees more GPUs than Ray hands out there.",
    remedy="Start the node with `ray start --num-gpus N`, unless the others are meant for "
    "something else.",
)
INTERFACE_ABSENT = Kind(
    name="interface-absent",
    level=Level.CHANGE,
    what="NCCL_SOCKET_IFNAME names network interfaces that this machine does not have.",
    remedy="Set it to an interface of `ip link`, or unset it.",
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


def _shm(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        value = f"{machine.shm.path}: {_size(machine.shm.total_bytes)}"
        if machine.shm.total_bytes < SHM_BYTES:
            yield SHM_SMALL.at(machine.name, value)
        else:
            yield well("shm", machine.name, value)


def _store(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        store = machine.store
        if store is None:
            continue
        value = f"{_size(store.size_bytes)} in {store.folder}"
        small = store.size_bytes < STORE_BYTES
        away = store.folder.rstrip("/") != machine.shm.path.rstrip("/")
        if small:
            yield STORE_SMALL.at(machine.name, value)
        if away:
            yield STORE_DISK.at(machine.name, value)
        if not (small or away):
            yield well("store", machine.name, value)


def _memory(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        total, free = machine.memory_bytes, machine.memory_free_bytes
        value = f"{_size(free)} of {_size(total)} free"
        if total and free < MEMORY_FREE_PART * total:
            yield MEMORY_FULL.at(machine.name, value)
        else:
            yield well("memory", machine.name, value)


def _files(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        limit = machine.open_files
        if 0 < limit < OPEN_FILES:
            yield FILES_FEW.at(machine.name, f"{limit}, should be {OPEN_FILES} or more")
        else:
            yield well("open-files", machine.name, str(limit) if limit else "not known")


def _gpus(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        bad = list(_gpu_faults(machine, machine.gpus))
        yield from bad or [well("gpus", machine.name, _gpus_told(machine.gpus))]


def _gpu_faults(machine: Machine, gpus: Gpus) -> Iterator[Finding]:
    value = _gpus_told(gpus)
    seen = gpus.torch
    if seen is not None and (gpus.ray or 0) > seen:
        yield GPU_ABSENT.at(machine.name, value)
    elif seen is not None and gpus.driver > seen:
        yield GPU_UNUSED.at(machine.name, value)
    elif seen is not None and gpus.ray is not None and gpus.ray < seen:
        yield GPU_KEPT.at(machine.name, value)


def _gpus_told(gpus: Gpus) -> str:
    if not (gpus.driver or gpus.torch or gpus.ray):
        return "none"
    parts = [f"driver {gpus.driver}"]
    if gpus.torch is not None:
        parts.append(f"torch {gpus.torch}")
    if gpus.ray is not None:
        parts.append(f"Ray {gpus.ray:g}")
    names = f" ({', '.join(dict.fromkeys(gpus.names))})" if gpus.names else ""
    return ", ".join(parts) + names


def _interfaces(facts: Facts) -> Iterator[Finding]:
    asked = facts.settings.interfaces
    if not asked:
        return
    machine = facts.machine
    if asked.startswith("^") or _named(asked, machine.interfaces):
        yield well("interfaces", "NCCL_SOCKET_IFNAME", asked)
    else:
        there = ", ".join(machine.interfaces)
        yield INTERFACE_ABSENT.at("NCCL_SOCKET_IFNAME", f"{asked}; there are: {there}")


def _named(asked: str, there: tuple[str, ...]) -> bool:
    """Whether one is there; NCCL takes beginnings of names, or whole ones after `=`."""
    exact = asked.startswith("=")
    names = [name.partition(":")[0] for name in asked.removeprefix("=").split(",")]
    patterns = names if exact else [f"{name}*" for name in names]
    return any(fnmatch.fnmatchcase(name, pattern) for name in there for pattern in patterns)


def _size(size_bytes: float) -> str:
    """Bytes in decimal units.

    >>> _size(64_000_000), _size(2.5e9)
    ('64 MB', '2.5 GB')
    """
    big = 10**9
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= big else f"{size_bytes / 1e6:.0f} MB"


CHECKS = (
    Check(
        name="temp",
        asks="Can Ray keep its sessions: is the path short, writable, and is there room?",
        kinds=(TEMP_LONG, TEMP_CLOSED, TEMP_FULL),
        look=_temp,
    ),
    Check(
        name="shm", asks="Is shared memory (/dev/shm) large enough?", kinds=(SHM_SMALL,), look=_shm
    ),
    Check(
        name="store",
        asks="Is each node's object store large enough, and in shared memory?",
        kinds=(STORE_SMALL, STORE_DISK),
        look=_store,
    ),
    Check(name="memory", asks="Is memory left?", kinds=(MEMORY_FULL,), look=_memory),
    Check(name="open-files", asks="May Ray open enough files?", kinds=(FILES_FEW,), look=_files),
    Check(
        name="gpus",
        asks="Do the driver, torch and Ray see the same GPUs?",
        kinds=(GPU_ABSENT, GPU_UNUSED, GPU_KEPT),
        look=_gpus,
    ),
    Check(
        name="interfaces",
        asks="Are there the network interfaces that NCCL is told to use?",
        kinds=(INTERFACE_ABSENT,),
        look=_interfaces,
    ),
)
