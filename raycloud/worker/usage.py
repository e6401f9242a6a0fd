"""Usage: cores that a member may use, the memory that it takes, how busy its GPU is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.clock import SystemClock

if TYPE_CHECKING:
    import torch

    from raycloud.clock import Clock

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cores_here(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> float:
    """Cores that this process may use: those of its affinity, or fewer by a control group's quota.

    Groups of version 2 have it in `cpu.max`, of version 1 in `cpu.cfs_quota_us`; each group above
    limits those in it, too.

    Args:
        groups: Where groups are mounted.
        own: The file that says in which ones this process is.
    """
    found = [float(len(os.sched_getaffinity(0)))]
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if not controllers:
                found += _quotas(groups, path, _v2)
            elif "cpu" in names:
                found += _quotas(groups / controllers, path, _v1)
                found += _quotas(groups / "cpu", path, _v1)
    return min(found)


def _quotas(mount: Path, path: str, quota: Callable[[Path], float]) -> Iterator[float]:
    """Of a group and those above it, of those that have one and can be read."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        with contextlib.suppress(OSError, ValueError):  # the topmost has none
            yield quota(group)
        group = group.parent


def _v2(group: Path) -> float:
    most, period = (group / "cpu.max").read_text().split()
    return int(most) / int(period)  # ValueError: `max`


def _v1(group: Path) -> float:
    most = int((group / "cpu.cfs_quota_us").read_text())
    if most < 0:
        raise ValueError("no quota")
    return most / int((group / "cpu.cfs_period_us").read_text())


def sustained_s(took_s: float, cpu_s: float, quota: float) -> float:
    """Seconds that something takes which goes on for long, where it took `took_s` once.

    A quota of 0.1 cores is given out as 10 ms in each 100: what takes less is done at full speed,
    and what goes on takes ten times as long.

    >>> sustained_s(0.25, 0.25, 0.5), sustained_s(0.25, 0.25, 2.0), sustained_s(0.25, 0.25, 0.0)
    (0.5, 0.25, 0.25)
    """
    return max(took_s, cpu_s / quota) if quota else took_s


class Usage:
    """What one member takes of its machine.

    Args:
        clock: The member's; where that is virtual nothing is looked at.
        device: On which it computes.
        cpus: That the job gives it.

    Attributes:
        cores: That it may use; 0: nobody knows.
        quota: Cores that its process may keep busy, whatever the job gives it; likewise.
    """

    def __init__(self, clock: Clock, device: torch.device, cpus: float) -> None:
        self._real = isinstance(clock, SystemClock)
        self.quota = cores_here() if self._real else 0.0
        self.cores = min(float(cpus), self.quota)
        self._device = device
        self._busy = _gpu(device) if self._real and device.type == "cuda" else None

    def memory_bytes(self) -> int:
        """Resident bytes of this process; 0: nobody knows."""
        try:
            return int(_STATM.read_text().split()[1]) * _PAGE_BYTES if self._real else 0
        except (OSError, ValueError, IndexError):
            return 0

    def gpu_bytes(self) -> int:
        """The most that torch has reserved on the GPU; 0: there is none."""
        if self._device.type != "cuda":
            return 0
        return int(import_module("torch.cuda").max_memory_reserved(self._device))

    def gpu_busy(self) -> float | None:
        """The part of the last moment in which the GPU has computed; None: nobody knows."""
        return None if self._busy is None else self._busy()


def _gpu(device: torch.device) -> Callable[[], float | None] | None:
    """NVML's word on how busy a GPU is, where its Python binding is installed."""
    try:
        nvml, cuda = import_module("pynvml"), import_module("torch.cuda")
        nvml.nvmlInit()
        uuid = f"GPU-{cuda.get_device_properties(device).uuid}"
        handle: Any = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # noqa: BLE001 - a binding of any version raises its own
        return None

    def busy() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except Exception:  # noqa: BLE001 - as above
            return None

    return busy
