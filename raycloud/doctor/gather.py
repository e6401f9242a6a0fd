"""One machine, asked about itself: the one the command runs on, and each node of a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING

from raycloud.bounded import expanded
from raycloud.doctor import proc
from raycloud.doctor.facts import Disk, Facts, Gpus, Machine, Store
from raycloud.doctor.settings import Settings, TokenFile

if TYPE_CHECKING:
    from raycloud.doctor.proc import Program

LIBRARIES = ("raycloud", "ray", "torch")
SHM = Path("/dev/shm")


def facts_here(settings: Settings, *, gpus: Gpus | None = None, shm: Path = SHM) -> Facts:
    """What this machine, without a cluster, says.

    Args:
        settings: What the environment says.
        gpus: What torch sees, where it was asked.
        shm: Where shared memory is.
    """
    machine = machine_here(
        "this machine", temp=settings.temp, owners=proc.programs(), gpus=gpus, shm=shm
    )
    return Facts(
        settings=settings,
        machine=replace(machine, token=token_file(settings.token_path)),
        required=requirements(),
        missing_files=tuple(
            name
            for name, path in settings.tls_files.items()
            if settings.tls and not (path and os.access(path, os.R_OK))
        ),
    )


def machine_here(
    name: str,
    *,
    temp: Path,
    owners: Iterable[Program],
    gpus: Gpus | None = None,
    shm: Path = SHM,
    limited: int | None = None,
) -> Machine:
    """This machine.

    Args:
        name: What findings call it.
        temp: Where Ray keeps its sessions.
        owners: Ray's processes whose listening sockets are to be known.
        gpus: What torch and Ray say of GPUs.
        shm: Where shared memory is.
        limited: The process whose limits count; None for this one.
    """
    total, free = _memory()
    return Machine(
        name=name,
        host=socket.gethostname(),
        versions=versions(),
        temp=disk(temp),
        shm=disk(shm),
        memory_bytes=total,
        memory_free_bytes=free,
        open_files=proc.open_files(limited),
        interfaces=tuple(interface for _, interface in socket.if_nameindex()),
        gpus=gpus or Gpus(driver=gpu_devices()),
        listeners=proc.listeners(owners),
    )


def node_here(name: str, *, raylet: int, gpus: Gpus) -> tuple[Machine, Settings | None]:
    """The node whose raylet is the process `raylet`, and the settings that it was started with."""
    owners = proc.of_node(proc.programs(), raylet)
    own = next((program for program in owners if program.pid == raylet), None)
    variables = proc.environment_of(raylet)
    temp = own.option("temp_dir") if own else ""
    machine = machine_here(
        name,
        temp=Path(temp).parent if temp else Settings().temp,
        owners=owners,
        gpus=gpus,
        limited=raylet,
    )
    settings = Settings.from_mapping(variables) if variables is not None else None
    if settings:
        machine = replace(machine, token=token_file(settings.token_path))
    if own and (size := own.option("object_store_memory")).isdigit():
        store = Store(size_bytes=int(size), folder=own.option("plasma_directory"))
        machine = replace(machine, store=store)
    return machine, settings


def versions() -> dict[str, str | None]:
    """What is installed, by name; nothing is imported."""
    found: dict[str, str | None] = {"python": python_version()}
    for library in LIBRARIES:
        found[library] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def requirements() -> dict[str, str]:
    """What raycloud asks of Python, Ray and torch; empty where it is not installed."""
    try:
        described = metadata.metadata("raycloud")
    except metadata.PackageNotFoundError:
        return {}
    asked = {"python": str(described.json.get("requires_python", ""))}
    for line in described.get_all("Requires-Dist") or []:
        found = re.fullmatch(r"(ray|torch)(?:\[[^\]]*\])?\s*\(?([<>=!~,.\d\s*]*)\)?", line)
        if found:
            asked[found.group(1)] = found.group(2).replace(" ", "")
    return asked


def token_file(path: Path) -> TokenFile | None:
    """The file as it lies there; None without one. What stands in it is not read."""
    path = expanded(path)
    try:
        found, folder = path.stat(), path.parent.stat()
    except OSError:
        return None
    return TokenFile(
        path=str(path),
        mode=stat.S_IMODE(found.st_mode),
        ours=found.st_uid in {os.getuid(), 0},
        empty=found.st_size == 0,
        folder_mode=stat.S_IMODE(folder.st_mode),
    )


def disk(path: Path) -> Disk:
    """A folder; where it is not there yet, the nearest one above it."""
    there = expanded(path).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        found = os.statvfs(there)
    except OSError:
        return Disk(path=str(path), total_bytes=0, free_bytes=0, writable=False)
    return Disk(
        path=str(path),
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
    )


def gpu_devices() -> int:
    """How many GPUs the NVIDIA driver shows."""
    return sum(
        bool(re.fullmatch(r"nvidia\d+", device.name)) for device in Path("/dev").glob("nvidia*")
    )


def _memory() -> tuple[int, int]:
    """Bytes in all, and bytes that programs could still get; 0 where Linux does not say."""
    try:
        text = (proc.PROC / "meminfo").read_text(encoding="ascii")
    except OSError:
        return 0, 0
    sizes: Mapping[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return int(sizes.get("MemTotal", 0)) * 1024, int(sizes.get("MemAvailable", 0)) * 1024
