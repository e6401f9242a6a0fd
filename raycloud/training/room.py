"""How much memory this process may still take: the machine's, its groups', what it has reserved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PART = 4  # of it may be kept: what is kept is one of several things that grow
# Where groups (cgroups) are, and their files: limit, use, and the part of that which files take
# that nobody has asked for lately, so that it can be had. By version.
_NEW = ("memory.max", "memory.current", "inactive_file")
_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NEW_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_OLD_MOUNTS = ("sys/fs/cgroup/memory",)


def room_bytes(reserved_bytes: int | None, root: Path = Path("/")) -> int:
    """How much a member may keep beside its training: a quarter of the memory it could have now.

    Args:
        reserved_bytes: What this process is to get along with; None: what there is.
        root: Where the system's files lie.
    """
    left = [_machine_bytes(root), *_groups_bytes(root)]
    if reserved_bytes is not None:
        left.append(reserved_bytes - process_bytes(root)[0])
    return max(0, min(left)) // _PART


def process_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """What this process has in memory now, and what it has had at most; zeros: it is not told."""
    status = root / "proc/self/status"
    now_kb, most_kb = (_number(status, name) or 0 for name in ("VmRSS", "VmHWM"))
    return 1024 * now_kb, 1024 * most_kb


def _machine_bytes(root: Path) -> int:
    available_kb = _number(root / "proc/meminfo", "MemAvailable")
    if available_kb is not None:
        return available_kb * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4  # where no Linux is


def _groups_bytes(root: Path) -> Iterator[int]:
    """What is left in each group of this process that has a limit, up to the topmost.

    A container may see its own group as the topmost, but be told where it is outside: then the
    topmost that it sees is all that there is to look at.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounts, files = (_OLD_MOUNTS, _OLD) if controllers else (_NEW_MOUNTS, _NEW)
        below = Path(path.lstrip("/"))
        for folder in (below, *below.parents) if ".." not in below.parts else (Path(),):
            for mount in mounts:
                left = _left_bytes(root / mount / folder, *files)
                if left is not None:
                    yield left


def _left_bytes(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """What a group may still take; None where it may take all."""
    limit_bytes, used_bytes = (_number(folder / name) for name in (limit, used))
    if limit_bytes is None or used_bytes is None:
        return None
    return limit_bytes - used_bytes + (_number(folder / "memory.stat", reclaimable) or 0)


def _number(file: Path, name: str = "") -> int | None:
    """The number after a name in a file, or the first of all; None: there is none."""
    for line in _lines(file):
        words = line.replace(":", " ").split()
        if not name or words[:1] == [name]:
            number = words[1 if name else 0]
            return int(number) if number.isdecimal() else None  # `max`: there is no limit
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not there, or the group has ended meanwhile
        return []
