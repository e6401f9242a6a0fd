"""Facts about one machine: the one the command runs on, and each node of a cluster."""

from __future__ import annotations

import contextlib
import os
import re
from importlib import metadata
from pathlib import Path
from platform import python_version

from raycloud.bounded import expanded
from raycloud.doctor.facts import Disk, Facts, Gpus, Machine, Settings

LIBRARIES = ("raycloud", "ray", "torch")
SHM = Path("/dev/shm")
PROC = Path("/proc")


def facts_here(settings: Settings, *, gpus: Gpus | None = None) -> Facts:
    """What this machine, without a cluster, says; `gpus`: what torch sees, where it was asked."""
    return Facts(
        settings=settings,
        machine=machine_here("this machine", temp=settings.temp, gpus=gpus),
        required=requirements(),
        token=settings.token_variable or os.access(expanded(settings.token_path), os.R_OK),
    )


def machine_here(name: str, *, temp: Path, gpus: Gpus | None = None) -> Machine:
    """This machine: `name` is what findings call it, `temp` where Ray keeps its sessions."""
    try:
        text = (PROC / "meminfo").read_text(encoding="ascii")
    except OSError:
        text = ""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return Machine(
        name=name,
        versions=versions(),
        temp=disk(temp),
        shm=disk(SHM),
        memory_bytes=int(sizes.get("MemTotal", 0)) * 1024,
        memory_free_bytes=int(sizes.get("MemAvailable", 0)) * 1024,
        gpus=gpus or Gpus(driver=gpu_devices()),
    )


def node_here(
    name: str, *, raylet: int, gpus: Gpus, proc: Path = PROC
) -> tuple[Machine, Settings | None]:
    """The node whose raylet is the process `raylet`, and the settings that it was started with.

    The settings are None where this user may not see them.
    """
    line, settings = "", None
    with contextlib.suppress(OSError):
        line = (proc / str(raylet) / "cmdline").read_bytes().decode(errors="replace")
        entries = (proc / str(raylet) / "environ").read_bytes().decode(errors="replace").split("\0")
        settings = Settings.from_mapping(
            {name: value for name, _, value in (entry.partition("=") for entry in entries)}
        )
    session = re.search(r"\0--temp[-_]dir=([^\0]*)", line)
    temp = Path(session.group(1)).parent if session else Settings().temp
    return machine_here(name, temp=temp, gpus=gpus), settings


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
