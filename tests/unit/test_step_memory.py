"""How much a member may keep: of the machine, of its groups, and of what it has reserved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from raycloud.step.device import room_bytes

MB = 2**20
NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
NONE = 9223372036854771712  # what version 1 says where there is no limit


def tree(root: Path, groups: str, files: Mapping[str, object]) -> Path:
    """A machine with 4,000 MB to be had, and a process in it that takes 100 MB."""
    told = {
        "proc/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {4000 * 1024} kB\n",
        "proc/self/status": f"Name:\tx\nVmRSS:\t  {100 * 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in told.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def new(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{NEW}{folder}/memory.max": limit,
        f"{NEW}{folder}/memory.current": used,
        f"{NEW}{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


def old(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{OLD}{folder}/memory.limit_in_bytes": limit,
        f"{OLD}{folder}/memory.usage_in_bytes": used,
        f"{OLD}{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_file {inactive}",
    }


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/", {}, 4000 * MB),
        ("0::/a", new("/a", "max", 50 * MB), 4000 * MB),
        ("0::/a", new("/a", 1000 * MB, 300 * MB, inactive=100 * MB), 800 * MB),
        ("0::/a/b", new("/a", 500 * MB, 300 * MB) | new("/a/b", "max", 1), 200 * MB),
        ("0::/pod/9", new("", 600 * MB, 200 * MB), 400 * MB),  # told by its name outside
        ("0::/../other", new("", 600 * MB, 200 * MB), 400 * MB),
        ("0::/a", new("/a", 200 * MB, 300 * MB), 0),
        ("9:cpu,cpuacct:/a\n4:memory:/a\n0::/", old("/a", 900 * MB, 100 * MB), 800 * MB),
        ("4:memory:/a", old("/a", NONE, 100 * MB) | old("", NONE, 1), 4000 * MB),
        ("4:memory:/a/b", old("", 700 * MB, 100 * MB, inactive=50 * MB), 650 * MB),
        ("4:cpu:/a\n0::/u", new("/unified/u", 400 * MB, 100 * MB), 300 * MB),
    ],
)
def test_the_narrowest_limit_counts(
    groups: str, files: dict[str, object], left: int, tmp_path: Path
) -> None:
    assert room_bytes(None, tree(tmp_path, groups, files)) == left // 4


def test_what_is_reserved_is_a_limit_too(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a", new("/a", 1000 * MB, 300 * MB))
    assert room_bytes(500 * MB, root) == 100 * MB
    assert room_bytes(50 * MB, root) == 0
    assert room_bytes(5000 * MB, root) == 175 * MB


def test_where_nothing_is_told_a_part_of_the_machine_counts(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert room_bytes(None, tmp_path) == whole // 16


def test_this_machine() -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < room_bytes(None) <= whole // 4
    assert room_bytes(1) == 0


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of this machine with a limit of 300 MB, below this process's own."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = dict(line.split(":", 2)[1:] for line in lines)
    limit, mount = ("memory.limit_in_bytes", OLD) if "memory" in own else ("memory.max", NEW)
    path = own.get("memory", own.get("", "/"))
    made = Path("/", mount, path.lstrip("/"), f"raycloud-{os.getpid()}")
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    try:
        (made / limit).write_text(f"{1200 * MB}\n")
    except OSError as error:
        pytest.skip(f"no limit can be set: {error}")
    else:
        yield made
    finally:
        made.rmdir()


def test_a_group_of_this_machine(group: Path) -> None:
    program = "from raycloud.step.device import room_bytes; print(room_bytes(None))"
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["/bin/sh", "-c", enter, "sh", sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 200 * MB < int(found.stdout) <= 300 * MB
