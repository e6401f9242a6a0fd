"""`raycloud cache ls` and `rm`: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.cli.cache import cache_text
from raycloud.clock import SystemClock, VirtualClock
from raycloud.data.cache import BlockCache, DataSet


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlockCache:
    """Two data sets and a block of none; one was last used an hour ago, the other 40 days."""
    cache = BlockCache(tmp_path / "c")
    monkeypatch.setenv("RAYCLOUD_CACHE", str(tmp_path / "c"))
    now_s = SystemClock().unix_s()
    for name, used_s, split in (("abc123", 3700, "train"), ("def456", 86400 * 40, "held_out")):
        clock = VirtualClock(now_s - used_s)
        key = f"{name}0"
        one = DataSet(id=name * 2, task="Cifar", split=split, source="/d/cifar", keys=(key,))
        use = cache.use(one, clock, "run a")
        stored(cache, key, 8482)
        cache.complete(replace(one, rows=1000))
        use.close()
    stored(cache, "zz9", 442)
    return cache


def stored(cache: BlockCache, key: str, size: int) -> None:
    path = cache.path_of(key)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))


def call(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["cache", *args])


def test_ls(cache: BlockCache) -> None:
    result = call("ls")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"{cache.root}: 2 data sets, 17.4 kB\n"
        "\n"
        "  id            task   split     source    rows    size  blocks  used\n"
        "  abc123abc123  Cifar  train     /d/cifar  1000  8.5 kB       1  1 h ago\n"
        "  def456def456  Cifar  held_out  /d/cifar  1000  8.5 kB       1  5 w ago\n"
        "\n"
        "1 block (442 B) belongs to no data set: `raycloud cache rm --all` removes it, too\n"
    )


def test_ls_of_nothing(tmp_path: Path) -> None:
    result = call("ls", "--dir", str(tmp_path / "none"))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'none'}: nothing is cached\n")
    assert not (tmp_path / "none").exists()


def test_ls_shows_what_is_in_use_and_unfinished(cache: BlockCache) -> None:
    one = DataSet(id="99" * 6, task="Gpt\x1b[2J", split="train", source="/d", keys=("aa1",))
    use = cache.use(one, SystemClock(), "run gpt-1")
    lines = cache_text(cache.ls(), SystemClock().unix_s()).splitlines()
    assert lines[3] == (
        "  999999999999  Gpt?[2J  train     /d        unfinished     0 B       0  "
        f"in use by run gpt-1 (process {os.getpid()})"
    )
    use.close()


def test_ls_as_json(cache: BlockCache) -> None:
    record = json.loads(call("ls", "--json").stdout)
    assert (record["format"], record["root"]) == (1, str(cache.root))
    assert record["loose_blocks"] == 1
    first = record["data_sets"][0]
    used_s = first.pop("used_unix_s")
    assert 3600 < SystemClock().unix_s() - used_s < 3900
    assert first == {
        "id": "abc123abc123",
        "task": "Cifar",
        "split": "train",
        "source": "/d/cifar",
        "rows": 1000,
        "bad_rows": 0,
        "complete": True,
        "blocks": 1,
        "bytes": 8482,
        "users": [],
    }


def test_rm_of_one(cache: BlockCache) -> None:
    result = call("rm", "abc")
    assert result.exit_code == 0, result.output
    assert result.stdout == "removed 1 data set: 1 block, 8.5 kB\n"
    assert [held.data_set.id for held in cache.ls().sets] == ["def456def456"]


def test_rm_of_what_is_old(cache: BlockCache) -> None:
    assert call("rm", "--older-than", "30d").stdout == "removed 1 data set: 1 block, 8.5 kB\n"
    assert call("rm", "--older-than", "30d").stdout == "removed 0 data sets: 0 blocks, 0 B\n"
    assert [held.data_set.id for held in cache.ls().sets] == ["abc123abc123"]


def test_rm_of_all(cache: BlockCache) -> None:
    assert call("rm", "--all").stdout == "removed 2 data sets: 3 blocks, 17.4 kB\n"
    assert call("ls").stdout == f"{cache.root}: nothing is cached\n"


def test_rm_leaves_what_is_in_use(cache: BlockCache) -> None:
    one = cache.find("abc123abc123")
    assert one is not None
    use = cache.use(one, SystemClock(), "run gpt-1")
    kept = f"kept abc123abc123, in use by run gpt-1 (process {os.getpid()})\n"
    result = call("rm", "abc", "def")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: removed 1 data set: 1 block, 8.5 kB\n{kept}"
        "\nhint: wait for the run to end, or stop it\n"
    )
    result = call("rm", "--all")
    assert (result.exit_code, result.stdout.splitlines(keepends=True)[1]) == (0, kept)
    assert cache.has("abc1230")
    use.close()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give IDs, --all or --older-than AGE"),
        (("abc", "--all"), "give IDs, --all or --older-than AGE"),
        (("--all", "--older-than", "3d"), "give IDs, --all or --older-than AGE"),
        (("--older-than", "3"), "is not an age"),
        (("--older-than", "-3d"), "is not an age"),
        (("nope",), "no data set"),
    ],
)
def test_what_rm_refuses(cache: BlockCache, args: tuple[str, ...], said: str) -> None:
    result = call("rm", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(cache.ls().sets) == 2


def test_a_cache_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    result = call("rm", "--all", "--dir", str(tmp_path / "c" / "d"))
    assert result.exit_code == 0
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "lock").mkdir()
    result = call("ls", "--dir", str(tmp_path / "e"))
    assert result.exit_code == 3
    assert result.stderr.startswith(
        f"error: cannot read the cache {tmp_path / 'e'}: Is a directory"
    )
