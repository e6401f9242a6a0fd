"""CPU seconds of all processes, from trees that look like the kernel's groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.racing.meters import used_s
from benchmarks.testbed.quota import Mounts

pytestmark = pytest.mark.unit


def group(folder: Path, microseconds: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "cpu.stat").write_text(f"usage_usec {microseconds}\nuser_usec 1\nsystem_usec 2\n")


def test_version_1_counts_in_the_topmost_group(tmp_path: Path) -> None:
    (tmp_path / "cpuacct.usage").write_text("63571822317278\n")
    folders = {"cpu": tmp_path / "none", "cpuacct": tmp_path}
    assert used_s(Mounts(version=1, folders=folders)) == {"": pytest.approx(63571.822317278)}


def test_version_2_counts_in_those_below_it(tmp_path: Path) -> None:
    mounts = Mounts(version=2, folders={"": tmp_path})
    group(tmp_path, 9_000_000)  # by clock ticks
    group(tmp_path / "system.slice", 1_500_000)
    group(tmp_path / "raycloud-testbed", 250_000)
    (tmp_path / "empty").mkdir()
    assert used_s(mounts) == {"system.slice": 1.5, "raycloud-testbed": 0.25}


def test_a_container_counts_in_its_own(tmp_path: Path) -> None:
    group(tmp_path, 9_000_000)
    (tmp_path / "cgroup.type").write_text("domain\n")
    group(tmp_path / "below", 1_500_000)
    assert used_s(Mounts(version=2, folders={"": tmp_path})) == {"": 9.0}
