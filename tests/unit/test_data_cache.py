"""The cache on disk: what it keeps, shares and gives up, and what it says where it cannot."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from raycloud.clock import VirtualClock
from raycloud.data import block
from raycloud.data.cache import BlockCache, DamagedBlock
from raycloud.data.index import BadRow
from raycloud.errors import DataError, MachineError, SpecError
from raycloud.spec import Job
from tests.caches import ROWS, block_bytes, data_set, ids, keep, keys, other_process


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache")


def test_a_block_is_kept(cache: BlockCache) -> None:
    assert not cache.has("aa1")
    made = cache.add("aa1", [ROWS], {"bad_rows": 0})
    assert cache.path_of("aa1") == cache.root / "blocks" / "aa" / "aa1.arrow"
    assert (made.key, made.rows, made.bytes) == ("aa1", 1000, block_bytes(cache))
    assert cache.has("aa1")
    assert cache.open("aa1").equals(ROWS)
    assert pickle.loads(pickle.dumps(cache)).open("aa1").equals(ROWS)


def test_a_damaged_block_is_removed(cache: BlockCache) -> None:
    assert cache.open_whole("aa1") is None
    cache.add("aa1", [ROWS])
    path = cache.path_of("aa1")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedBlock):
        cache.open("aa1")
    assert cache.open_whole("aa1") is None
    assert not cache.has("aa1")


def test_a_copy_of_another_node(cache: BlockCache, tmp_path: Path) -> None:
    made = cache.add("aa1", [ROWS])
    content = cache.path_of("aa1").read_bytes()
    other = BlockCache(tmp_path / "other")
    copied = other.copy_in("aa1", [content[:100], memoryview(content)[100:]])
    assert copied == made
    assert other.open("aa1").equals(ROWS)
    with pytest.raises(DamagedBlock):
        other.copy_in("aa2", [content[:-8]])
    assert keys(other) == ["aa1"]
    assert list(other.root.glob("**/*.draft")) == []


def test_records(cache: BlockCache) -> None:
    bad = (BadRow(file="a.csv", row=3, why="no label"),)
    one = data_set("s1", "aa1", bad_rows=1, bad=bad)
    clock = VirtualClock(10.0)
    use = cache.use(one, clock, "run a")
    assert cache.find("s1") == replace(one, used_unix_s=10.0)
    cache.complete(replace(one, rows=7))
    assert cache.find("s1") == replace(one, rows=7, complete=True, used_unix_s=10.0)
    clock.advance(5.0)
    use.close()
    use.close()
    assert cache.find("s1") == replace(one, rows=7, complete=True, used_unix_s=15.0)
    cache.use(one, clock, "run b").close()  # what is complete stays so
    assert cache.find("s1") == replace(one, rows=7, complete=True, used_unix_s=15.0)
    assert cache.find("s2") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "id": "s1"}'])
def test_a_record_that_cannot_be_read_is_none(cache: BlockCache, text: str) -> None:
    keep(cache, data_set("s1", "aa1"), 10.0)
    (cache.root / "sets" / "s1.json").write_text(text)
    assert cache.find("s1") is None
    assert ids(cache) == []
    assert cache.ls().loose_blocks == 1


def test_records_carry_a_format(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1"), 10.0)
    assert json.loads((cache.root / "sets" / "s1.json").read_text()) == {
        "format": 1,
        "id": "s1",
        "task": "Cifar",
        "split": "train",
        "source": "/data",
        "keys": ["aa1"],
        "parts": [],
        "sizes": [],
        "rows": 1000,
        "bad_rows": 0,
        "bad": [],
        "columns": "",
        "complete": True,
        "used_unix_s": 10.0,
    }


def test_a_full_disk(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device") as caught:
        cache.add("aa1", [ROWS])
    assert str(cache.root) in caught.value.message
    assert "raycloud cache rm" in caught.value.hint
    assert keys(cache) == []
    with pytest.raises(MachineError):
        cache.use(data_set("s1", "aa1"), VirtualClock(), "run a")


def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write to the cache .*file") as caught:
        BlockCache(tmp_path / "file").add("aa1", [ROWS])
    assert "data.cache.path" in caught.value.hint


def test_the_cache_of_a_job(tmp_path: Path) -> None:
    def of(**section: object) -> BlockCache:
        values = {"task": "a.py:A", "steps": 1, "data": {"cache": section}}
        return BlockCache.of(Job(**values).data.cache, tmp_path)  # type: ignore[arg-type]

    assert (of().root, of().disk_bytes) == (tmp_path, None)
    assert (of(path="/fast", disk_bytes=5).root, of(disk_bytes=5).disk_bytes) == (Path("/fast"), 5)
    assert BlockCache(Path("~/x")).root == Path.home() / "x"
    with pytest.raises(SpecError, match=r"data.cache.path = 's3://b/c': is a URL"):
        of(path="s3://b/c")


def test_a_resolved_job_names_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def resolved(path: str | None) -> str | None:
        data = {"cache": {"path": path, "disk_bytes": 5}}
        job = Job(task="a.py:A", steps=1, data=data).resolved()  # type: ignore[arg-type]
        assert job.data.cache.disk_bytes == 5
        return job.data.cache.path

    assert resolved("c") == str(tmp_path / "c")
    assert resolved("~/c") == str(Path.home() / "c")
    assert resolved(None) is None


def test_many_processes_write_the_same_blocks(cache: BlockCache) -> None:
    code = (
        "import sys; from pathlib import Path; import pyarrow as pa\n"
        "from raycloud.clock import VirtualClock\n"
        "from raycloud.data.cache import BlockCache, DataSet\n"
        f"cache = BlockCache(Path({str(cache.root)!r}), 0)\n"
        "for n in range(12):\n"
        "    one = DataSet(id=f's{n % 3}', task='', split='', source='', keys=('aa1', 'aa2'))\n"
        "    use = cache.use(one, VirtualClock(float(n)), 'run')\n"
        "    cache.add('aa1', [pa.table({'x': range(100)})])\n"
        "    cache.evict()\n"
        "    assert cache.open('aa1').num_rows == 100\n"
        "    cache.complete(one); use.close()\n"
        "    cache.evict(keep=['aa1'])\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert list(cache.root.glob("**/*.draft")) == []
    assert cache.open("aa1").num_rows == 100
    assert not any(held.users for held in cache.ls().sets)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (pa.ArrowMemoryError("malloc failed"), "malloc failed"),
    ],
)
def test_a_block_that_cannot_be_opened_stays(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def fail(_: str) -> None:
        raise error

    cache.add("aa1", [ROWS])
    with monkeypatch.context() as patch:
        patch.setattr(pa, "memory_map", fail)
        with pytest.raises(MachineError, match=f"cannot read .*{why}"):
            cache.open_whole("aa1")
    found = cache.open_whole("aa1")
    assert found is not None
    assert found.equals(ROWS)


def test_a_block_stays_where_no_more_files_can_be_open(cache: BlockCache) -> None:
    cache.add("aa1", [ROWS])
    code = (
        "import resource, sys; from pathlib import Path; from raycloud.data.cache import *\n"
        "from raycloud.errors import MachineError\n"
        "cache = BlockCache(Path(sys.argv[1])); cache.open('aa1')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\n"
        "try: cache.open_whole('aa1')\n"
        "except MachineError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(cache.root)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ulimit -n" in told
    assert cache.has("aa1")


def test_ls(cache: BlockCache) -> None:
    assert cache.ls().sets == ()
    assert not cache.root.exists()
    keep(cache, data_set("s1", "aa1", "aa2"), 10.0)
    keep(cache, data_set("s2", "aa2", "bb1", parts=("cc1",)), 30.0)
    keep(cache, data_set("s3", "dd1", "dd2"), 20.0, complete=False)
    cache.path_of("dd2").unlink()
    cache.add("zz9", [ROWS])
    size, listing = block_bytes(cache), cache.ls()
    told = [(held.data_set.id, held.blocks, held.bytes // size) for held in listing.sets]
    assert told == [("s2", 3, 3), ("s3", 1, 1), ("s1", 2, 2)]
    assert (listing.bytes, listing.loose_blocks, listing.loose_bytes) == (6 * size, 1, size)


def test_rm_leaves_what_others_have(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1", "aa2"), 10.0)
    keep(cache, data_set("s2", "aa2", "bb1"), 20.0)
    removal = cache.rm(["s1"])
    assert [one.id for one in removal.removed] == ["s1"]
    assert (removal.blocks, removal.bytes, removal.refused) == (1, cache.ls().bytes // 2, ())
    assert keys(cache) == ["aa2", "bb1"]
    assert ids(cache) == ["s2"]


def test_rm_of_ids(cache: BlockCache) -> None:
    keep(cache, data_set("abc1", "aa1"), 10.0)
    keep(cache, data_set("abd2", "aa2"), 20.0)
    for asked, why in (("x", "no data set"), ("ab", "2 data sets"), ("", "no data set")):
        with pytest.raises(DataError, match=f"{why} in .* begins with '{asked}'"):
            cache.rm([asked])
    assert [one.id for one in cache.rm(["abd"]).removed] == ["abd2"]
    with pytest.raises(DataError):
        BlockCache(cache.root / "none").rm(["abd"])


def test_rm_of_all(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1"), 10.0)
    cache.add("zz9", [ROWS])
    (cache.root / "digests.json").write_text("{}")
    removal = cache.rm()
    assert ([one.id for one in removal.removed], removal.blocks) == (["s1"], 2)
    assert keys(cache) == ids(cache) == []
    assert not (cache.root / "digests.json").exists()
    assert BlockCache(cache.root / "none").rm().removed == ()


def test_rm_of_what_is_old(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1"), 10.0)
    keep(cache, data_set("s2", "aa2"), 20.0)
    cache.add("zz9", [ROWS])
    assert [one.id for one in cache.rm(used_before_unix_s=20.0).removed] == ["s1"]
    assert keys(cache) == ["aa2", "zz9"]


def test_what_is_in_use_stays(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1"), 10.0)
    keep(cache, data_set("s2", "aa1", "aa2"), 20.0)
    with other_process(cache, "s1") as process:
        removal = cache.rm()
        assert [one.id for one in removal.removed] == ["s2"]
        (refused,) = removal.refused
        assert refused.users == (f"run other (process {process.pid})",)
        assert keys(cache) == ["aa1"]
        assert [held.users for held in cache.ls().sets] == [refused.users]
        process.kill()
        process.wait()
        assert cache.ls().sets[0].users == ()
    assert [one.id for one in cache.rm().removed] == ["s1"]
    assert list((cache.root / "uses").iterdir()) == []


def test_several_may_use_it(cache: BlockCache) -> None:
    one, clock = data_set("s1", "aa1"), VirtualClock()
    first, second = (cache.use(one, clock, who) for who in ("run a", "run b"))
    users = {user.partition(" (")[0] for user in cache.ls().sets[0].users}
    assert users == {"run a", "run b"}
    first.close()
    assert cache.ls().sets[0].users == (f"run b (process {os.getpid()})",)
    del second  # forgotten rather than closed
    assert cache.ls().sets[0].users == ()


def test_evict_needs_a_limit_and_an_excess(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1"), 10.0)
    assert cache.evict() == 0
    cache.disk_bytes = block_bytes(cache)
    assert cache.evict() == 0
    assert BlockCache(cache.root / "none", 0).evict() == 0
    assert keys(cache) == ["aa1"]


def test_what_goes_first(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1", "aa2"), 10.0)
    keep(cache, data_set("s2", "bb1", "aa2"), 20.0)
    keep(cache, data_set("s3", "cc1", parts=("cc2", "bb1")), 30.0)
    cache.add("zz9", [ROWS])
    size = block_bytes(cache)
    for blocks, left in (
        (5, ["aa1", "aa2", "bb1", "cc1", "cc2"]),  # what belongs to none
        (4, ["aa1", "aa2", "bb1", "cc1"]),  # what dealt ones were made from, but no other's
        (3, ["aa2", "bb1", "cc1"]),  # the data set unused for longest, without what others have
        (2, ["bb1", "cc1"]),
        (0, []),
    ):
        cache.disk_bytes = blocks * size
        cache.evict()
        assert keys(cache) == left, blocks
    assert ids(cache) == []


def test_a_data_set_goes_as_a_whole(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1", "aa2", "aa3"), 10.0)
    keep(cache, data_set("s2", "bb1"), 20.0)
    size = block_bytes(cache)
    cache.disk_bytes = 3 * size
    assert cache.evict() == 3 * size
    assert keys(cache) == ["bb1"]
    assert ids(cache) == ["s2"]


def test_what_is_in_use_or_kept_is_not_evicted(cache: BlockCache) -> None:
    keep(cache, data_set("s1", "aa1", "aa2"), 10.0)
    keep(cache, data_set("s2", "bb1"), 20.0)
    cache.add("zz9", [ROWS])
    cache.disk_bytes = 0
    with other_process(cache, "s1"):
        cache.evict(keep=["bb1"])
        assert keys(cache) == ["aa1", "aa2", "bb1"]
        assert cache.find("s1") is not None
        # Copies that other nodes have too may go, the first in the order first.
        size = block_bytes(cache)
        cache.disk_bytes = 2 * size
        assert cache.evict(keep=["bb1"], order=["bb1", "aa2", "aa1"]) == size
        assert keys(cache) == ["aa1", "bb1"]


def test_an_unfinished_data_set_keeps_what_it_deals_from(cache: BlockCache) -> None:
    clock = VirtualClock(5.0)
    use = cache.use(data_set("s1", "aa1", parts=("aa2",)), clock, "run a")
    cache.add("aa1", [ROWS])
    cache.add("aa2", [ROWS])
    cache.disk_bytes = 0
    assert cache.evict() == 0
    cache.complete(data_set("s1", "aa1", parts=("aa2",)))
    assert cache.evict() > 0
    assert keys(cache) == ["aa1"]
    use.close()


def test_drafts_of_the_dead_are_removed(cache: BlockCache) -> None:
    cache.add("aa1", [ROWS])
    dead = cache.path_of("aa1").with_name("aa2.arrow.0123.draft")
    dead.write_bytes(b"half")
    cache.disk_bytes = 10**9
    seen = []

    def fill(file: object) -> None:
        cache.evict()
        seen.extend(path.name for path in dead.parent.glob("*.draft"))

    block.publish(cache.path_of("aa3"), fill)
    assert len(seen) == 1  # the living one
    assert seen[0].startswith("aa3.arrow.")
    assert not dead.exists()
