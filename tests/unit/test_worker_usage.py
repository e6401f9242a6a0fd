"""Usage: cores by affinity and quotas; memory and GPU only where somebody can look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from raycloud.clock import SystemClock, VirtualClock
from raycloud.worker.usage import Usage, cores_here

CPU = torch.device("cpu")
ALL = float(len(os.sched_getaffinity(0)))


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_the_least_quota_of_the_groups_above_counts(tmp_path: Path, own: Path) -> None:
    mount = group(tmp_path / "mount")
    group(mount / "a", cpu__max="40000 100000\n")
    group(mount / "a/b", cpu__max="max 100000\n")
    own.write_text("0::/a/b\n")
    assert cores_here(mount, own) == 0.4
    group(mount / "a/b", cpu__max="10000 100000\n")
    assert cores_here(mount, own) == 0.1


def test_groups_of_version_1_have_theirs(tmp_path: Path, own: Path) -> None:
    mount = tmp_path / "mount"
    group(mount / "cpu,cpuacct/a", cpu__cfs_quota_us="20000\n", cpu__cfs_period_us="100000\n")
    group(mount / "cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    own.write_text("4:memory:/a\n3:cpu,cpuacct:/a\n")
    assert cores_here(mount, own) == 0.2


@pytest.mark.parametrize("text", ["", "0::/\n", "3:cpu:/gone\n", "0::/../..\n"])
def test_without_a_quota_the_affinity_counts(text: str, tmp_path: Path, own: Path) -> None:
    own.write_text(text)
    assert cores_here(group(tmp_path / "mount"), own) == ALL
    assert cores_here(tmp_path / "mount", tmp_path / "nowhere") == ALL


def test_what_a_process_takes_is_seen_where_time_is_real() -> None:
    real, virtual = Usage(SystemClock(), CPU, 1), Usage(VirtualClock(), CPU, 1)
    assert 0.0 < real.cores <= 1.0
    assert 10 << 20 < real.memory_bytes() < 1 << 40
    assert (virtual.cores, virtual.memory_bytes()) == (0.0, 0)
    assert (real.gpu_busy(), virtual.gpu_busy(), real.gpu_bytes()) == (None, None, 0)
