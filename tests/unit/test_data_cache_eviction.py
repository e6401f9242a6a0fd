"""What a cache holds, what it gives up first, and what it never gives up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycloud.clock import VirtualClock
from raycloud.data import block
from raycloud.data.cache import BlockCache
from raycloud.errors import DataError
from tests.caches import ROWS, block_bytes, data_set, ids, keep, keys, other_process


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache")


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
