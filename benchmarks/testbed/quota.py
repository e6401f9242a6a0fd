"""Groups of processes (cgroups, version 1 and 2): CPU quota, freezing, ending, CPU seconds."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.shell import LateError, wait_for

PERIOD_S = 0.01  # with the usual 0.1 s a throttled process stalls long enough to be measured
LEAST_CORES = 0.1  # the kernel grants no quota below 1 ms, here of each period
_V1 = ("cpu", "cpuacct", "freezer")
_FREEZE_S = 20.0
_END_S = 30.0
_MICROSECONDS = 1_000_000
# A group weighs as much as one process beside it, however many it holds, so that all the nodes of a
# bed together would get as much as one other busy process of this machine. What a quota grants must
# also be got: once there are quotas, what stands above them weighs 100 times as much.
_SHARES = 102_400
_WEIGHT = 10_000


class QuotaError(Exception):
    """A CPU quota that cannot be; or groups that cannot be made here, with the remedy."""


@dataclass(frozen=True, kw_only=True)
class Mounts:
    """Where the cgroups of this machine are.

    Attributes:
        version: 1 or 2.
        folders: Mount points, by controller (version 1); under "" (version 2).
    """

    version: int
    folders: Mapping[str, Path]


def find(mounts: str | None = None) -> Mounts:
    """Look up the cgroups. Version 1 if `cpu` is there, since it cannot be in both.

    Args:
        mounts: The text of /proc/mounts; None reads it.

    Raises:
        QuotaError: There are none with CPU quotas.
    """
    text = Path("/proc/mounts").read_text() if mounts is None else mounts
    old: dict[str, Path] = {}
    new: list[Path] = []
    for line in text.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup":
            old |= {c: Path(place) for c in options.split(",") if c in _V1}
        elif kind == "cgroup2":
            new.append(Path(place))
    if "cpu" in old:
        if lacking := sorted(set(_V1) - old.keys()):
            raise QuotaError(f"cgroups v1 without {', '.join(lacking)}: mount them beside `cpu`")
        return Mounts(version=1, folders=old)
    for folder in new:
        if "cpu" in (folder / "cgroup.controllers").read_text().split():
            return Mounts(version=2, folders={"": folder})
    raise QuotaError("no cgroups with a `cpu` controller; run with the host's cgroups mounted")


def check_cores(cores: float | None) -> None:
    """Check a CPU quota.

    Raises:
        QuotaError: It is below what the kernel can grant.
    """
    if cores is not None and not cores >= LEAST_CORES:
        raise QuotaError(f"cores: {cores} is not possible; use at least {LEAST_CORES}, or none")


class Group(abc.ABC):
    """One group; made by `make`, gone with `remove`. What its processes start is in it too."""

    def __init__(self, name: str, folders: tuple[Path, ...]) -> None:
        """Name it; nothing is made.

        Args:
            name: Path below each mount point.
            folders: Its folder in each hierarchy.
        """
        self.name = name
        self.folders = folders

    @abc.abstractmethod
    def make(self) -> None:
        """Make it, and the groups above it, where it is not there yet.

        Raises:
            QuotaError: The kernel refuses.
        """

    @abc.abstractmethod
    def limit(self, cores: float | None) -> None:
        """Set the CPU quota of all its processes together.

        Args:
            cores: In cores; None lifts it.

        Raises:
            QuotaError: It cannot be.
        """

    @abc.abstractmethod
    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far, ended ones too."""

    @abc.abstractmethod
    def _ask_frozen(self, *, frozen: bool) -> None: ...

    @abc.abstractmethod
    def _frozen(self) -> bool: ...

    @property
    def exists(self) -> bool:
        """Whether it has been made, in any hierarchy."""
        return any(folder.is_dir() for folder in self.folders)

    def join(self, pid: int) -> None:
        """Move a process into it."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def members(self) -> tuple[int, ...]:
        """Living processes in it, by id; none once it is gone."""
        found: set[int] = set()
        for folder in self.folders:
            # Besides FileNotFoundError: reading a folder that was removed meanwhile is ENODEV.
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        return tuple(sorted(found))

    def freeze(self) -> None:
        """Stop all its processes where they are; returns once they stand.

        Raises:
            LateError: They do not.
        """
        self._ask_frozen(frozen=True)
        wait_for(f"group {self.name} is frozen", self._frozen, limit_s=_FREEZE_S)

    def thaw(self) -> None:
        """Let its processes go on."""
        self._ask_frozen(frozen=False)
        wait_for(f"group {self.name} is thawed", lambda: not self._frozen(), limit_s=_FREEZE_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def strike(self) -> None:
        """Send SIGKILL to all its processes, and let them die; does not wait."""
        with contextlib.suppress(FileNotFoundError):  # nobody is in what is gone
            # Whoever stands still cannot start another meanwhile, nor run again before it dies.
            self._ask_frozen(frozen=True)
            self.signal(signal.SIGKILL)
            self.limit(None)
            self._ask_frozen(frozen=False)

    def kill(self) -> None:
        """End all its processes by SIGKILL; returns once none is left.

        Raises:
            LateError: One is still there.
        """

        def empty() -> bool:
            if self.members():
                self.strike()
            return not self.members()

        wait_for(f"group {self.name} is empty", empty, limit_s=_END_S)

    def remove(self) -> None:
        """Remove it, without processes and groups below; nothing happens where it is gone.

        Raises:
            LateError: The kernel still holds something in it.
        """

        def gone() -> bool:
            for folder in self.folders:
                with contextlib.suppress(OSError):  # busy until the last one has really ended
                    folder.rmdir()
            return not self.exists

        wait_for(f"group {self.name} is removed", gone, limit_s=_END_S)

    def below(self) -> tuple[str, ...]:
        """Names of the groups right below it."""
        names = {
            child.name
            for folder in self.folders
            if folder.is_dir()
            for child in folder.iterdir()
            if child.is_dir()
        }
        return tuple(f"{self.name}/{name}" for name in sorted(names))


class GroupV1(Group):
    """A group of cgroups version 1: one folder in each controller's hierarchy."""

    def __init__(self, name: str, roots: Mapping[str, Path]) -> None:
        """Name it.

        Args:
            name: Path below each root.
            roots: Mount points of cpu, cpuacct and freezer.
        """
        # `cpu` and `cpuacct` are one mount on some machines.
        super().__init__(name, tuple(dict.fromkeys(roots[c] / name for c in _V1)))
        self._cpu, self._account, self._freezer = (roots[c] / name for c in _V1)

    def make(self) -> None:
        """See `Group`."""
        _make_folders(self.folders)

    def limit(self, cores: float | None) -> None:
        """See `Group`."""
        check_cores(cores)
        quota = -1 if cores is None else round(cores * PERIOD_S * _MICROSECONDS)
        (self._cpu / "cpu.cfs_period_us").write_text(str(round(PERIOD_S * _MICROSECONDS)))
        (self._cpu / "cpu.cfs_quota_us").write_text(str(quota))
        if cores is not None:
            for above in _above(self._cpu, self.name):
                (above / "cpu.shares").write_text(str(_SHARES))

    def cpu_s(self) -> float:
        """See `Group`."""
        return int((self._account / "cpuacct.usage").read_text()) / 1e9

    def _ask_frozen(self, *, frozen: bool) -> None:
        (self._freezer / "freezer.state").write_text("FROZEN" if frozen else "THAWED")

    def _frozen(self) -> bool:
        return (self._freezer / "freezer.state").read_text().strip() == "FROZEN"


class GroupV2(Group):
    """A group of cgroups version 2: one folder."""

    def __init__(self, name: str, root: Path, *, limits: bool = True) -> None:
        """Name it.

        Args:
            name: Path below the root.
            root: The mount point.
            limits: Whether the kernel's `cpu` controller is here, so that quotas can be set.
        """
        super().__init__(name, (root / name,))
        self._folder = root / name
        self._root = root
        self._limits = limits

    def make(self) -> None:
        """See `Group`."""
        _make_folders(self.folders)
        if not self._limits:
            return
        for folder in (self._root, *_above(self._folder, self.name)):
            _enable_cpu(folder)

    def limit(self, cores: float | None) -> None:
        """See `Group`."""
        check_cores(cores)
        if not self._limits:
            return
        period = round(PERIOD_S * _MICROSECONDS)
        quota = "max" if cores is None else str(round(cores * PERIOD_S * _MICROSECONDS))
        (self._folder / "cpu.max").write_text(f"{quota} {period}")
        if cores is not None:
            for above in _above(self._folder, self.name):
                (above / "cpu.weight").write_text(str(_WEIGHT))

    def cpu_s(self) -> float:
        """See `Group`."""
        return int(_table(self._folder / "cpu.stat")["usage_usec"]) / _MICROSECONDS

    def _ask_frozen(self, *, frozen: bool) -> None:
        (self._folder / "cgroup.freeze").write_text(str(int(frozen)))

    def _frozen(self) -> bool:
        return _table(self._folder / "cgroup.events")["frozen"] == "1"


def group(name: str, mounts: Mounts | None = None) -> Group:
    """The group of a name on this machine, made or not.

    Args:
        name: Path below each mount point.
        mounts: Where the cgroups are; None finds them.
    """
    mounts = mounts or find()
    if mounts.version == 1:
        return GroupV1(name, mounts.folders)
    return GroupV2(name, mounts.folders[""])


def _above(folder: Path, name: str) -> list[Path]:
    """The folders of the groups above one, from the top down, without the mount point."""
    return list(folder.parents)[: len(Path(name).parts) - 1][::-1]


def _table(file: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in file.read_text().splitlines())


def _make_folders(folders: tuple[Path, ...]) -> None:
    """Make them with those above, though another bed's end may remove an empty one meanwhile."""

    def made() -> bool:
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                folder.mkdir(parents=True, exist_ok=True)
        return all(folder.is_dir() for folder in folders)

    try:
        wait_for("", made, limit_s=_END_S)
    except (LateError, OSError) as error:
        raise QuotaError(
            f"cannot make {folders[0]} ({error}); run with the host's cgroups writable"
        ) from error


def _enable_cpu(folder: Path) -> None:
    control = folder / "cgroup.subtree_control"
    if control.exists() and "cpu" in control.read_text().split():
        return
    try:
        control.write_text("+cpu")
    except OSError as error:
        raise QuotaError(
            f"{control}: cannot enable `cpu` ({error.strerror}); move the processes in {folder} "
            "to a group below it, or run outside the container"
        ) from error
