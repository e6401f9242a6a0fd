"""The groups of this machine (cgroups, version 1 or 2): their CPU quota and CPU seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.groups import END_S, Group, QuotaError, check_cores
from benchmarks.testbed.shell import LateError, wait_for

PERIOD_S = 0.01  # with the usual 0.1 s a throttled process stalls long enough to be measured
_V1 = ("cpu", "cpuacct", "freezer")
_MICROSECONDS = 1_000_000
# A group weighs as much as one process beside it, however many it holds, so that all the nodes of a
# bed together would get as much as one other busy process of this machine. What a quota grants must
# also be got: once there are quotas, what stands above them weighs 100 times as much.
_SHARES = 102_400
_WEIGHT = 10_000


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
        wait_for("", made, limit_s=END_S)
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
