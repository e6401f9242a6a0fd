"""How the C library keeps freed memory: a training process asks for the same sizes every step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Parameters of glibc's mallopt(3), by their numbers in malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3

_KEEP_BYTES = 2**30
_GROW_BYTES = 64 * 2**20
_LARGEST_ON_HEAP_BYTES = 32 * 2**20 - 1  # more than that glibc refuses


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, up to 1 GiB, instead of giving it back each step.

    Without it, a backward pass gives back and takes anew thousands of pages a step, each of them
    cleared by the kernel: 1,000 to 3,500 page faults in a step of a 1.9-million-parameter model.

    Returns:
        Whether this C library could be told; another one manages as it likes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = {
        _MMAP_THRESHOLD: _LARGEST_ON_HEAP_BYTES,
        _TRIM_THRESHOLD: _KEEP_BYTES,
        _TOP_PAD: _GROW_BYTES,
    }
    return all(mallopt(number, value) == 1 for number, value in wanted.items())


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


class PassSize:
    """The size of passes of one member.

    Args:
        most: What the job allows and is exact.
        stepwise: It is not the user who has asked for that many.
        holds_twice: Whether there is memory for passes twice as large as the largest so far.
        notice: Tells a person what is done in another way.

    Attributes:
        most: The same; it becomes less where a pass turns out not exact, or not to fit.
    """

    def __init__(
        self,
        most: int,
        *,
        stepwise: bool,
        holds_twice: Callable[[], bool],
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """Nothing is tried: passes are as large as is asked."""
        self.most = most
        self._stepwise, self._holds_twice, self._notice = stepwise, holds_twice, notice
        self._bound = self._proven = most
        self._begun = False
        self._grows = True
        self._refused = 0  # the share for which memory was not at hand

    @property
    def now(self) -> int:
        """Micro-batches of a pass, at most."""
        return min(self.most, self._bound)

    def begin(self, tried: int) -> None:
        """So many have been computed at once: more than that only step by step."""
        if self._stepwise:
            self._proven = max(tried, self._proven if self._begun else 1)
            self._bound, self._begun = self._proven, True

    def resume(self, size: int) -> None:
        """Passes have been this large before the checkpoint: so they are, and round, again."""
        if self._stepwise:
            self._bound = self._proven = size
            self._begun = True

    def committed(self, sizes: Sequence[int]) -> bool:
        """A step is committed of which this member has computed passes of such sizes.

        Returns:
            Passes of the steps to come are larger.
        """
        bound, largest = self._bound, max(sizes, default=0)
        self._proven = max(self._proven, min(largest, self.now))
        if len(sizes) <= 1 or largest < bound or bound >= self.most:
            return False
        if bound < self._proven:  # it was this large before
            self._bound = min(2 * bound, self._proven)
        elif self._may_grow(sum(sizes)):
            self._bound = 2 * bound
        return self._bound > bound

    def _may_grow(self, share: int) -> bool:
        """Whether larger passes than ever may be computed."""
        if not self._grows or share == self._refused:
            return False
        if self._holds_twice():
            return True
        self._refused = share
        what = f"passes stay at {self._bound} micro-batches of {share}: there is no memory for more"
        self._notice(what, {"share": share})
        return False

    def lost(self) -> None:
        """A member was lost, and it may have been for memory: no pass is larger than ever before.

        All have grown alike. Where this one was about to compute, or has just computed, a larger
        pass than in any step that was committed, so was the one that is lost.
        """
        if self._bound > self._proven:
            what = f"a member was lost as passes became larger: they stay at {self._proven}"
            self._notice(what, {"was": self._bound})
            self._bound, self._grows = self._proven, False

    def be_careful(self) -> None:
        """Members are lost that compute this step: each micro-batch alone takes least memory."""
        self._bound = 1


class Memory:
    """What passes take of it, and what is left.

    Args:
        device: Where they are computed.
        reserved_bytes: What this process is to get along with; None: what there is.
        root: Where the system's files lie.
    """

    def __init__(
        self, device: torch.device, reserved_bytes: int | None, root: Path = Path("/")
    ) -> None:
        """No pass was computed: what the process has now is no pass's."""
        self._device, self._reserved_bytes, self._root = device, reserved_bytes, root
        self._before_bytes = self._bytes()[0]

    def holds_twice(self) -> bool:
        """Whether there is memory for passes twice as large as the largest so far.

        A pass twice as large takes at most as much more as the one before has taken in all. Other
        members of a node grow at the same time: of the machine's memory a quarter is this one's.
        """
        _, peak_bytes = self._bytes()
        more_bytes = peak_bytes - self._before_bytes
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            kept_bytes = torch.cuda.memory_reserved(self._device)
            return more_bytes <= free_bytes + kept_bytes - self._bytes()[0]
        return peak_bytes > 0 and more_bytes <= room_bytes(self._reserved_bytes, self._root)

    def _bytes(self) -> tuple[int, int]:
        """Now, and at most so far; (0, 0) where the system does not tell."""
        if self._device.type == "cuda":
            now_bytes = torch.cuda.memory_allocated(self._device)
            return now_bytes, torch.cuda.max_memory_allocated(self._device)
        return process_bytes(self._root)
