"""Groups on folders that look like cgroups: what is written where, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed.groups import QuotaError
from benchmarks.testbed.quota import GroupV1, GroupV2, Mounts, find, group

pytestmark = pytest.mark.unit

V1 = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""


def v2(root: Path, controllers: str) -> str:
    (root / "cgroup.controllers").write_text(controllers + "\n")
    return f"cgroup2 {root} cgroup2 rw,nosuid 0 0\nproc /proc proc rw 0 0\n"


def test_version_1_is_found_where_cpu_is_mounted() -> None:
    both = Path("/sys/fs/cgroup/cpu,cpuacct")
    found = find(V1)
    assert found.version == 1
    assert found.folders == {
        "cpu": both, "cpuacct": both, "freezer": Path("/sys/fs/cgroup/freezer")
    }  # fmt: skip
    assert len(group("a", found).folders) == 2


def test_version_1_without_a_freezer_says_so() -> None:
    with pytest.raises(QuotaError, match=r"v1 without freezer: mount them beside `cpu`"):
        find("\n".join(line for line in V1.splitlines() if "freezer" not in line))


def test_version_2_is_found_where_it_has_cpu(tmp_path: Path) -> None:
    found = find(v2(tmp_path, "cpuset cpu io memory"))
    assert found == Mounts(version=2, folders={"": tmp_path})
    assert isinstance(group("a", found), GroupV2)


@pytest.mark.parametrize("controllers", ["", "cpuset memory"])
def test_no_cpu_controller_says_so(tmp_path: Path, controllers: str) -> None:
    with pytest.raises(QuotaError, match=r"no cgroups with a `cpu` controller; run with"):
        find(v2(tmp_path, controllers))


def test_version_2_enables_cpu_down_to_the_group(tmp_path: Path) -> None:
    made = GroupV2("top/bed/n1", tmp_path)
    made.make()
    for folder in (tmp_path, tmp_path / "top", tmp_path / "top/bed"):
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu"
    assert [path.name for path in (tmp_path / "top/bed/n1").iterdir()] == []
    made.limit(0.4)
    assert (tmp_path / "top/bed/cpu.weight").read_text() == "10000"
    assert (tmp_path / "top/cpu.weight").read_text() == "10000"
    assert not (tmp_path / "cpu.weight").exists()  # the root's is not ours
    assert GroupV2("top/bed", tmp_path).below() == ("top/bed/n1",)


def test_version_2_says_what_to_do_where_cpu_cannot_be_enabled(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").mkdir()
    (tmp_path / "cgroup.subtree_control").rmdir()
    (tmp_path / "cgroup.subtree_control").symlink_to(tmp_path / "none/such")
    with pytest.raises(QuotaError, match=r"cannot enable `cpu`.*; move the processes"):
        GroupV2("top", tmp_path).make()


@pytest.mark.parametrize(
    ("cores", "text"), [(0.2, "2000 10000"), (2, "20000 10000"), (None, "max 10000")]
)
def test_version_2_writes_the_quota(tmp_path: Path, cores: float | None, text: str) -> None:
    made = GroupV2("a", tmp_path)
    made.make()
    made.limit(cores)
    assert (tmp_path / "a/cpu.max").read_text() == text


def test_version_2_reads_what_the_kernel_says(tmp_path: Path) -> None:
    made = GroupV2("a", tmp_path)
    made.make()
    (tmp_path / "a/cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "a/cgroup.procs").write_text("12\n7\n")
    (tmp_path / "a/cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert made.cpu_s() == 2.5
    assert made.members() == (7, 12)
    made.freeze()
    assert (tmp_path / "a/cgroup.freeze").read_text() == "1"
    (tmp_path / "a/cgroup.events").write_text("populated 1\nfrozen 0\n")
    made.thaw()
    assert (tmp_path / "a/cgroup.freeze").read_text() == "0"


@pytest.mark.parametrize(("cores", "quota"), [(0.2, "2000"), (1.5, "15000"), (None, "-1")])
def test_version_1_writes_the_quota(tmp_path: Path, cores: float | None, quota: str) -> None:
    roots = {name: tmp_path / name for name in ("cpu", "cpuacct", "freezer")}
    made = GroupV1("bed/n1", roots)
    made.make()
    made.limit(cores)
    assert (tmp_path / "cpu/bed/n1/cpu.cfs_quota_us").read_text() == quota
    assert (tmp_path / "cpu/bed/n1/cpu.cfs_period_us").read_text() == "10000"
    heavy = tmp_path / "cpu/bed/cpu.shares"
    assert heavy.exists() == (cores is not None)  # only where there are quotas to be had
    assert not heavy.exists() or heavy.read_text() == "102400"
    assert not (tmp_path / "cpu/cpu.shares").exists()


def test_version_1_joins_every_hierarchy(tmp_path: Path) -> None:
    made = GroupV1("n1", {name: tmp_path / name for name in ("cpu", "cpuacct", "freezer")})
    made.make()
    made.join(12)
    for name in ("cpu", "cpuacct", "freezer"):
        assert (tmp_path / name / "n1/cgroup.procs").read_text() == "12"
    (tmp_path / "cpuacct/n1/cpuacct.usage").write_text("1500000000\n")
    assert made.cpu_s() == 1.5


@pytest.mark.parametrize("cores", [0.0, -1.0, 0.05, float("nan")])
def test_a_quota_below_what_the_kernel_grants_is_refused(tmp_path: Path, cores: float) -> None:
    with pytest.raises(QuotaError, match=r"cores: .* is not possible; use at least 0.1, or none"):
        GroupV2("a", tmp_path).limit(cores)
