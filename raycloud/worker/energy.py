"""Energy that a member takes, by the meters of its machine: RAPL of processors, NVML of a GPU.

RAPL counts the joules of whole processors (Intel, "Software Developer's Manual", volume 3, 15.10;
Linux's `powercap` shows it as files that often only root may read). Of these a member has its part
of the processor seconds that the machine was busy. NVML counts those of a whole GPU, which is the
member's own. What cannot be read nobody is asked, and who reads the run's log estimates it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from raycloud.clock import SystemClock

if TYPE_CHECKING:
    import torch

    from raycloud.clock import Clock

_ZONES = Path("/sys/class/powercap")
_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal
_MICRO, _MILLI = 1e-6, 1e-3


class Meter(Protocol):
    """Counts the energy of a member."""

    def joules(self, cpu_s: float) -> float:
        """Since the last call, in which the member has used so many processor seconds."""
        ...


class Rapl:
    """Of the machine's processors, the part of a member.

    Args:
        zones: The folders of whole processors; see `rapl_zones`.
        stat: The file of the machine's processor seconds.

    Raises:
        OSError: A counter cannot be read.
        ValueError: It is none.
    """

    def __init__(self, zones: Sequence[Path], stat: Path = _STAT) -> None:
        self._zones, self._stat = tuple(zones), stat
        self._ranges = [_count(zone / "max_energy_range_uj") for zone in zones]
        self._counts, self._busy_s = self._read()

    def _read(self) -> tuple[list[int], float]:
        fields = self._stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        ticks = sum(int(fields[at]) for at in _BUSY)
        counts = [_count(zone / "energy_uj") for zone in self._zones]
        return counts, ticks / os.sysconf("SC_CLK_TCK")

    def joules(self, cpu_s: float) -> float:
        """See `Meter.joules`; 0 where a counter has gone."""
        try:
            counts, busy_s = self._read()
        except (OSError, ValueError, IndexError):
            return 0.0
        pairs = zip(self._counts, counts, self._ranges, strict=True)
        taken_j = _MICRO * sum((now - before) % (most + 1) for before, now, most in pairs)
        whole_s = max(busy_s - self._busy_s, cpu_s)
        self._counts, self._busy_s = counts, busy_s
        return taken_j * cpu_s / whole_s if whole_s > 0.0 else 0.0


class Counter:
    """A counter of millijoules that is the member's alone, as NVML has it of a GPU."""

    def __init__(self, millijoules: Callable[[], int]) -> None:
        self._millijoules, self._before = millijoules, millijoules()

    def joules(self, cpu_s: float) -> float:  # noqa: ARG002 - a GPU is not shared
        """See `Meter.joules`; 0 where the counter has gone."""
        try:
            now = self._millijoules()
        except Exception:  # noqa: BLE001 - a binding of any version raises its own
            return 0.0
        before, self._before = self._before, now
        return _MILLI * max(0, now - before)


class Meters:
    """Several, added up.

    Attributes:
        gpu_only: None of them counts what processors take.
    """

    def __init__(self, meters: Sequence[Meter], *, gpu_only: bool = False) -> None:
        self._meters, self.gpu_only = tuple(meters), gpu_only

    def joules(self, cpu_s: float) -> float:
        """See `Meter.joules`."""
        return sum(meter.joules(cpu_s) for meter in self._meters)


def rapl_zones(folder: Path = _ZONES) -> list[Path]:
    """The folders of whole processors: parts of them, `intel-rapl:0:1`, are counted there too."""
    return sorted(path for path in folder.glob("intel-rapl:*") if path.name.count(":") == 1)


def meter_of(clock: Clock, device: torch.device) -> Meters | None:
    """What counts the energy of a member here; None: nothing can be read, or time is virtual."""
    if not isinstance(clock, SystemClock):
        return None
    found: list[Meter] = []
    if zones := rapl_zones():
        with contextlib.suppress(OSError, ValueError, IndexError):  # only root may read them
            found.append(Rapl(zones))
    gpu_only = not found
    if device.type == "cuda" and (millijoules := _gpu(device)) is not None:
        found.append(Counter(millijoules))
    return Meters(found, gpu_only=gpu_only) if found else None


def _gpu(device: torch.device) -> Callable[[], int] | None:
    """NVML's counter of a GPU, where its Python binding is installed; the driver may lack it."""
    try:
        nvml, cuda = import_module("pynvml"), import_module("torch.cuda")
        nvml.nvmlInit()
        uuid = f"GPU-{cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

        def millijoules() -> int:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))

        millijoules()
    except Exception:  # noqa: BLE001 - a binding of any version raises its own
        return None
    return millijoules


def _count(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
