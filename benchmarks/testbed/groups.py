"""A group of processes (a cgroup), whatever its version: freezing, ending, who is in it."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
from pathlib import Path

from benchmarks.testbed.shell import wait_for

LEAST_CORES = 0.1  # the kernel grants no quota below 1 ms, here of each period
_FREEZE_S = 20.0
END_S = 30.0


class QuotaError(Exception):
    """A CPU quota that cannot be; or groups that cannot be made here, with the remedy."""


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

        wait_for(f"group {self.name} is empty", empty, limit_s=END_S)

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

        wait_for(f"group {self.name} is removed", gone, limit_s=END_S)

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
